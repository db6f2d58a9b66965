"""One package per domain; import the domain itself: `from adapters.bandits import SoftmaxPolicy`."""

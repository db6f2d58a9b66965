"""Reproducible environments, although they draw from Python's and NumPy's global random numbers."""

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

LOCK = threading.Lock()


class Seeded:
    """Gives an environment global random numbers of its own, so that equal seeds give equal conversations.

    Many games draw from `random` or `numpy.random`, which all threads share. While this environment is made, reset and stepped,
    the shared generators have its own state, and other such environments wait. A slow environment would hold them up.

    Example:
        Games of GEM::

            policy = AgentPolicy(model, lambda state: Seeded(gem.make, state))
    """

    def __init__(self, make: Callable[..., Any], *args: Any, **options: Any) -> None:
        self._states = (random.getstate(), np.random.get_state())  # noqa: NPY002
        self.environment = self._call(make, *args, **options)
        """The environment."""

    @property
    def unwrapped(self) -> Any:
        """The environment inside all wrappers."""
        return getattr(self.environment, "unwrapped", self.environment)

    def reset(self, *, seed: int | None = None, **options: Any) -> Any:
        """Reset the environment with this seed, which all its random numbers follow."""
        if seed is not None:
            self._states = (random.Random(seed).getstate(), np.random.RandomState(seed).get_state())
        return self._call(self.environment.reset, seed=seed, **options)

    def step(self, action: Any) -> Any:
        """Step the environment."""
        return self._call(self.environment.step, action)

    def __getattr__(self, name: str) -> Any:
        if name == "environment":  # not yet set, while it is copied
            raise AttributeError(name)
        return getattr(self.environment, name)

    def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with LOCK:
            shared = (random.getstate(), np.random.get_state())  # noqa: NPY002
            _set(self._states)
            try:
                return function(*args, **options)
            finally:
                self._states = (random.getstate(), np.random.get_state())  # noqa: NPY002
                _set(shared)


def _set(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002

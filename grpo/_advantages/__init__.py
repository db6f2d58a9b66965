"""Internal modules for advantages: statistics of groups, rarer baselines and scales, advantages per step, running moments."""

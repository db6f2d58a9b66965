"""Private parts of the advantages: statistics of groups, rarer baselines and scales, advantages per step, running moments."""

"""Behind the advantages: statistics of groups, further baselines and scales, advantages per step, running moments."""

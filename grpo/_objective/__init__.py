"""Private parts of the loss: `Steps`, ratios, step weights, sampler corrections, selections of steps, metrics."""

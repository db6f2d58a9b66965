"""Internal modules for the loss: `Steps`, ratios, step weights, sampler corrections, selections of steps, metrics."""

"""Behind the loss: what surrogates read, step weights, sampler corrections, selections of steps, metrics."""

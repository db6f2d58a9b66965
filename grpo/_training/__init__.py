"""Internal modules for training: the rows of an update, the optimizer step, coefficients, reports, saved state."""

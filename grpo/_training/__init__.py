"""Private parts of the trainer: the rows of an update, the optimizer step, coefficients, reports, saved state."""

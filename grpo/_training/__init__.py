"""Behind the trainer: the rows of an update, the optimizer step, coefficients and reference, reports, saved state."""

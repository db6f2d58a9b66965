"""Behind the trainer: which rows an update reads, the optimizer step, what moves between iterations, reports, resuming."""

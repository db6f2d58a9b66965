"""Internal modules for collecting rows: scoring, checks on a policy, reward calls, row indices, batches, dynamic sampling."""

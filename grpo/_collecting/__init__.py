"""Private parts of the collector: scoring, checks on a policy, reward calls, index arithmetic, batches, dynamic sampling."""

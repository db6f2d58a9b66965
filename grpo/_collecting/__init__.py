"""Behind the collector: scoring, the checks on a policy, reward calls, index arithmetic, parts of batches, dynamic sampling."""

"""The patience of a run with a reward model: retries, a circuit breaker, and calls for parts of the rows."""

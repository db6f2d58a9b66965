"""A run of many iterations: signals, safe points, iterations ahead, saved state."""

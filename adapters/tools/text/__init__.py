"""What texts say: their vectors, and the values that a request contains."""

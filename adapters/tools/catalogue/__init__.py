"""Tools, their catalogue, and calls of them."""

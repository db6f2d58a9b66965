"""The policy that chooses tools, and its text encoders."""

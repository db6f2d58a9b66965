"""The policy that chooses tools."""

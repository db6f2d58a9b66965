"""Weights that are divided among the ranks: which modules are divided, how they are gathered, and tensors that are parts."""

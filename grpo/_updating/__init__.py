"""The updates of an iteration: advantages to optimizer steps."""

"""Calls of reward models: made within limits, and checked."""

"""Calls of functions in processes that can be killed."""

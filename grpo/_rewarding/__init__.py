"""Calls of reward models: made within limits, repeated or left out if they fail, and checked."""

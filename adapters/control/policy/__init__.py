"""The episode policy and its parts: observations, networks, action distributions, and rollouts."""

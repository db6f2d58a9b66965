"""Rewards of episodes, settings per environment, whole training runs, evaluation, plots, and videos."""

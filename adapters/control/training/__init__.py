"""What surrounds training: rewards of episodes, settings per environment, whole runs, evaluation, plots, and videos."""

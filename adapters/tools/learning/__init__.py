"""Tasks, rewards, recorded samples and evaluation."""

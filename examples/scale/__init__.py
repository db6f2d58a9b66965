"""One training script for one process, several ranks on CPUs, and several GPUs."""

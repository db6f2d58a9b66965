"""One file each, read from top to bottom, run as `python -m examples.NAME`."""

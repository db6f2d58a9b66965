"""Each example is one file to read from top to bottom. Run it with `python -m examples.NAME`."""

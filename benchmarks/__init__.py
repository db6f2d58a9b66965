"""Side-by-side measurements, run as `python -m benchmarks.NAME`."""

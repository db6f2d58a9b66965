"""A run's report: one HTML page from a run's folder, which opens without a network.

trainer.train(states, num_iterations=100, sinks=[RunFolder("run")])
write_report("run")  # run/report.html
"""

from .page import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]

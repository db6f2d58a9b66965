"""What a run leaves behind: sinks for trackers and for a folder of files, a report, and plots.

- `RunFolder` writes settings, metrics and samples into a folder. `write_report` makes one HTML page of it.
- `TensorBoardSink`, `WandbSink`, `MLflowSink` and `TrackioSink` write a run to a tracker.
- `OptunaPruning` is a callback that prunes the trials of a study.
- `plot_history` plots the metrics of any run.

The trackers need their packages (`pip install ".[tracking]"`). A sink imports its package when it opens a
run: importing this package, or making a sink on a rank that never logs, imports none of them. A run that is resumed from a
checkpoint continues under its own id, which each sink keeps in a file in its folder.

Example:
    Keep a run in a folder and in TensorBoard (`tensorboard --logdir runs`), and make its report::

        from adapters.tracking import RunFolder, TensorBoardSink, write_report

        with RunFolder("runs/first") as files, TensorBoardSink("runs/first", log_every=10) as board:
            trainer.train(states, num_iterations=1_000, sinks=[files, board], checkpoint_dir="runs/first/checkpoints")
        write_report("runs/first")  # runs/first/report.html
"""

from .mlflow_sink import MLflowSink
from .optuna_pruning import OptunaPruning
from .plots import plot_history
from .report import write_comparison, write_report
from .run_folder import RunFolder
from .tensorboard_sink import TensorBoardSink
from .trackio_sink import TrackioSink
from .wandb_sink import WandbSink

__all__ = [
    "MLflowSink", "OptunaPruning", "RunFolder", "TensorBoardSink", "TrackioSink", "WandbSink", "plot_history",
    "write_comparison", "write_report",
]  # fmt: skip

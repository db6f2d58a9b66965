"""Sinks that write a run to TensorBoard, Weights & Biases, MLflow or trackio, and a callback that prunes Optuna's trials.

Requires the trackers' packages (`pip install "model-agnostic-grpo[tracking]"`). A sink imports its package when it opens a run, so
importing this package, or making a sink on a rank that never logs, imports none of them.

Example:
    Write the metrics and samples of every tenth iteration to TensorBoard, and look at them with `tensorboard --logdir runs`::

        from adapters.tracking import TensorBoardSink

        with TensorBoardSink("runs/first", log_every=10) as sink:
            trainer.train(states, num_iterations=1_000, sinks=[sink], checkpoint_dir="runs/first/checkpoints", resume="auto")

A run that is resumed from a checkpoint continues under its own id, which each sink keeps in a file in its folder.
"""

from .mlflow_sink import MLflowSink
from .optuna_pruning import OptunaPruning
from .tensorboard_sink import TensorBoardSink
from .trackio_sink import TrackioSink
from .wandb_sink import WandbSink

__all__ = ["MLflowSink", "OptunaPruning", "TensorBoardSink", "TrackioSink", "WandbSink"]

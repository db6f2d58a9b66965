"""A process that trains with all trackers at once, and may be killed.

python -m tests.support.tracked_process train FOLDER NUM_ITERATIONS [KILL_AT]
python -m tests.support.tracked_process ranks FOLDER
"""

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adapters.tracking import MLflowSink, TensorBoardSink, TrackioSink, WandbSink
from adapters.tracking.tracker_sink import TrackerSink
from grpo.distributed import Replicated
from tests.support.killed_runs import in_a_child
from tests.support.runs_on_ranks import NUM_RANKS
from tests.support.tracked_runs import train

TRACKERS = ["mlflow", "tensorboard", "trackio", "wandb"]


def sinks(folder: Path) -> list[TrackerSink]:
    mlflow = MLflowSink(folder / "run", tracking_uri=f"sqlite:///{folder}/mlflow.db", write_every=0)
    return [mlflow, TensorBoardSink(folder / "run"), TrackioSink(folder / "run"), WandbSink(folder / "run")]


class KillAt:
    """A callback that kills the process. Before, it waits for the second in which trackers write what they were told."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_iteration(self, trainer: Any, metrics: Any) -> None:
        if trainer.iteration == self.iteration:
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)


def one_run(folder: Path, num_iterations: int, kill_at: int = -1) -> None:
    opened = sinks(folder)
    trained = train(opened, num_iterations, folder / "checkpoints", callbacks=[KillAt(kill_at)], progress=False)
    for sink in opened:
        sink.close()
    (folder / "history.json").write_text(json.dumps(trained.history))


def one_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "rendezvous"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    opened = sinks(folder)
    train(opened, 3, engine=Replicated(timeout=120.0), progress=False)  # opening all trackers takes seconds
    for sink in opened:
        sink.close()
    imported = [name for name in TRACKERS if name in sys.modules]
    (folder / f"rank{rank}.json").write_text(json.dumps(imported))


def main(kind: str, folder: Path, *numbers: str) -> None:
    warnings.filterwarnings("error")
    warnings.filterwarnings("ignore", message="The ``noload`` loader strategy")
    os.chdir(folder)
    if kind == "train":
        one_run(folder, *map(int, numbers))
        return
    children = [in_a_child(lambda _, rank=rank: one_rank(rank, folder))[0] for rank in range(NUM_RANKS)]  # type: ignore[misc]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * NUM_RANKS


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve(), *sys.argv[3:])

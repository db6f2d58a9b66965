"""A small run of a bandit with sinks, its crash and its resume, and readers of what trackers wrote."""

import importlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adapters.bandits import SoftmaxPolicy
from grpo import GRPOConfig, GRPOTrainer, Samples

STATES = np.arange(2)
OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables under which no tracker uses the network."""


def rewards(states: Any, actions: Any) -> torch.Tensor:
    return (torch.as_tensor(actions) == torch.as_tensor(states)).float()


def trainer(engine: Any = None, seed: int = 0) -> GRPOTrainer:
    torch.manual_seed(seed)
    config = GRPOConfig(group_size=4, learning_rate=0.1, seed=seed)
    return GRPOTrainer(config=config, policy=SoftmaxPolicy(3, num_states=2), reward_model=rewards, engine=engine)


def train(sinks: Sequence[Any], num_iterations: int, folder: Path | None = None, **options: Any) -> GRPOTrainer:
    """Train, with a checkpoint in every third iteration. Continue from the newest one in `folder`."""
    trained = trainer(options.pop("engine", None))
    saved = {} if folder is None else {"checkpoint_dir": folder, "checkpoint_every": 3, "resume": "auto"}
    trained.train(STATES, num_iterations=num_iterations, sinks=sinks, **saved, **options)
    return trained


def crash_after(iteration: int, checkpoints: Path) -> None:
    """Leave only the checkpoints that a process killed after `iteration` leaves: those of every third iteration."""
    for folder in checkpoints.glob("iteration-*"):
        number = int(folder.name.removeprefix("iteration-"))
        if number % 3 or number > iteration:
            shutil.rmtree(folder)


def resumed_run(make: Callable[[], Any], folder: Path) -> tuple[GRPOTrainer, GRPOTrainer]:
    """Train for 5 iterations, crash, and go on from iteration 3 to 8, each time with a sink of its own."""
    options: dict[str, Any] = {"eval_states": STATES, "eval_every": 2}
    with make() as sink:
        started = train([sink], 5, folder / "checkpoints", **options)
    crash_after(5, folder / "checkpoints")
    with make() as sink:
        return started, train([sink], 8, folder / "checkpoints", **options)


def samples(kind: Any = "train", *, offset: float = 0.0) -> Samples:
    """Four rows: two states with two actions each."""
    is_train = kind == "train"
    return Samples(
        kind=kind,
        states=["1 + 1 = ?", "1 + 1 = ?", "a | b\nc", "a | b\nc"],
        actions=["2", "three", "_x_\ud800", "<y>"],
        group_ids=torch.tensor([0, 0, 1, 1]),
        rewards=torch.tensor([1.0, 0.0, float("nan"), 0.5]) + offset,
        reward_components={"style": torch.tensor([0.5, 0.25, 0.125, 0.0])},
        advantages=torch.tensor([0.5, -0.5, 0.0, 0.25]) if is_train else None,
        num_steps=torch.tensor([1, 5, 3, 3]),
    )


class Dot:
    """Something that can be shown as a picture: a PNG file of 1 x 1 pixels."""

    link = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="

    def small_picture(self) -> str:
        """The file as a link."""
        return self.link


def pictured_samples() -> Samples:
    """The rows of `samples`, with the same picture in both states."""
    rows = samples()
    return replace(rows, states=[{"prompt": state, "image": Dot()} for state in rows.states])


FIRST_ROW = {"state": "1 + 1 = ?", "action": "2", "reward": 1.0, "reward/style": 0.5, "advantage": 0.5, "steps": 1.0}
"""The first row of the table of `samples()`."""


class WandbFiles:
    """What W&B wrote offline into a folder: one file per start of the run, read with wandb's own messages.

    wandb has no public reader, and its own process writes the files, until `wandb.teardown` has waited for it. The files are
    LevelDB logs: blocks of 32 KiB with records, each of which is one message or a part of it (checksum, 4 bytes; length, 2;
    kind, 1).
    """

    def __init__(self, folder: Path) -> None:
        importlib.import_module("wandb").teardown()
        self.paths = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
        self.messages = [[*self._messages(path.read_bytes())] for path in self.paths]

    @staticmethod
    def _messages(data: bytes) -> Iterator[Any]:
        record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
        position, parts = 7, b""  # after the file's header
        while position + 7 <= len(data):
            left = 32_768 - position % 32_768
            if left < 7:
                position += left
                continue
            length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
            parts += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):  # a whole message, or its last part
                yield record.FromString(parts)
                parts = b""

    def history(self) -> list[list[dict[str, Any]]]:
        """Per file, the rows of the history, with their step as `_step`."""
        return [
            [
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in message.history.item}
                for message in messages
                if message.WhichOneof("record_type") == "history"
            ]
            for messages in self.messages
        ]

    def runs(self) -> list[Any]:
        """Per file, the description of the run: id, name, project, config."""
        return [
            next(message.run for message in messages if message.WhichOneof("record_type") == "run")
            for messages in self.messages
        ]

    def config(self) -> dict[str, Any]:
        """The run's config, as its last update left it."""
        values: dict[str, Any] = {}
        for messages in self.messages:
            for message in messages:
                kind = message.WhichOneof("record_type")
                source = message.run.config if kind == "run" else message.config if kind == "config" else None
                for item in source.update if source is not None else ():
                    values[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        return values

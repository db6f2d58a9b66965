"""Runs that are stopped at a chosen call, by a signal or by an exception, and continued by another trainer."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from grpo import GRPOTrainer, TrainingInterrupted
from tests.support.policies import digest

PHASES = ("reward", "score", "loss", "step", "callback")
"""The calls of a run at which it can be stopped: the reward model, the scoring of rows, the loss, an optimizer step, a
callback."""


class Stop(Exception):
    """Stops a run like a fault of the user's code."""


def by_exception() -> None:
    raise Stop


def by_signal(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


class StoppingCallback:
    """Calls a function before each iteration is recorded."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def on_iteration(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        self.function()


class Calls:
    """Counts the calls of one phase of a trainer, and stops the run at one of them.

    Args:
        trainer: The trainer whose calls are counted.
        phase: One of `PHASES`.
        stop: Stops the run.
        at: The number of the call, from 1. None: count only.
    """

    def __init__(self, trainer: GRPOTrainer, phase: str, stop: Callable[[], None], at: int | None) -> None:
        self.count, self._stop, self._at = 0, stop, at
        self.callbacks = [StoppingCallback(self.before)] if phase == "callback" else []
        match phase:
            case "reward":
                self._wrap(trainer.collector, "ask_for_rewards")
                if trainer.config.iterations_ahead > 0:  # asks for rewards with calls of its own
                    self._wrap(trainer.collector, "rewards_of")
            case "score":
                self._wrap(trainer.collector, "scorer")
            case "loss":
                self._wrap(trainer, "objective")
            case "step":
                self._wrap(trainer.optimizer_step, "apply")

    def before(self) -> None:
        self.count += 1
        if self.count == self._at:
            self._stop()

    def _wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)
        calls = self

        class Wrapped:
            """Calls the function after counting, and shows the function's attributes."""

            def __call__(self, *arguments: Any, **named: Any) -> Any:
                calls.before()
                return inner(*arguments, **named)

            def __getattr__(self, attribute: str) -> Any:
                return getattr(inner, attribute)

            def __setattr__(self, attribute: str, value: Any) -> None:
                setattr(inner, attribute, value)

        setattr(owner, name, Wrapped())


Build = Callable[[int], tuple[GRPOTrainer, Any, dict[str, Any]]]
"""Makes a trainer whose weights and generators start from a seed, its states, and options of `train`."""


def end_of(trainer: GRPOTrainer) -> str:
    """A digest of everything that a run leaves, but times, settings, and which rewards of later iterations are there."""
    state = trainer.state_dict()
    del state["config"]
    ahead, replay = state["parts"]["ahead"], state["parts"]["replay"]
    ahead["pending"] = [{**pending["rows"], "metrics": None} for pending in ahead["pending"]]
    for rows in replay["rows"]:
        rows["batch"]["metrics"] = without_times(rows["batch"]["metrics"])
    return digest(state)


def without_times(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def assert_same_metrics(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert without_times(one) == pytest.approx(without_times(other), rel=0, abs=0, nan_ok=True)


class Unbroken:
    """A run that nothing stops: what it ends with, its metrics, and how often each phase was called."""

    def __init__(self, build: Build, num_iterations: int) -> None:
        self.build, self.num_iterations = build, num_iterations
        trainer, states, options = build(1)
        calls = {phase: Calls(trainer, phase, by_exception, None) for phase in PHASES}
        self.metrics = trainer.train(
            states, num_iterations=num_iterations, callbacks=calls["callback"].callbacks, **options
        )
        self.end = end_of(trainer)
        self.counts = {phase: one.count for phase, one in calls.items()}

    def assert_same_after_a_stop(
        self, folder: Path, phase: str, at: int, stop: Callable[[], None], **options: Any
    ) -> GRPOTrainer:
        """Stop a run of the same kind, continue it in another trainer, and compare the ends. Returns the stopped trainer."""
        trainer, states, others = self.build(1)
        options = {
            "num_iterations": self.num_iterations,
            "checkpoint_dir": folder,
            "resume": "auto",
            **others,
            **options,
        }
        calls = Calls(trainer, phase, stop, at)
        with stopped():
            trainer.train(states, callbacks=calls.callbacks, **options)
        if stop is by_signal:  # what was begun is given up in memory, too
            loaded, _, _ = self.build(2)
            loaded.load_checkpoint(folder)
            assert end_of(loaded) == end_of(trainer)
        # an error in the first collection leaves nothing that would be worth a checkpoint: the run starts again
        starts_again = stop is by_exception and not any(folder.glob("iteration-*"))
        assert not starts_again or trainer.iteration == 0
        resumed, states, _ = self.build(1 if starts_again else 2)
        rest = resumed.train(states, **options)
        assert end_of(resumed) == self.end
        assert_same_metrics(rest, self.metrics[self.num_iterations - len(rest) :])
        return trainer

    def assert_same_after_stops_everywhere(self, folder: Path, phase: str, stop: Callable[[], None]) -> int:
        """Stop each process at its second call of a phase, until the run is done. Returns the number of stops."""
        metrics: list[dict[str, float]] = []
        for number in count():
            trainer, states, options = self.build(1 + number)
            calls = Calls(trainer, phase, stop, at=2)
            try:
                trainer.train(
                    states,
                    num_iterations=self.num_iterations,
                    checkpoint_dir=folder,
                    resume="auto",
                    callbacks=calls.callbacks,
                    **options,
                )
            except (Stop, TrainingInterrupted):
                metrics += trainer.history
                continue
            break
        assert end_of(trainer) == self.end
        assert_same_metrics([*metrics, *trainer.history], self.metrics)
        return number


@contextmanager
def stopped() -> Iterator[None]:
    """Inside the block, a run is stopped by `Stop` or by a signal."""
    try:
        yield
    except (Stop, TrainingInterrupted):
        return
    raise AssertionError("the run was not stopped")

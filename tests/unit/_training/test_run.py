"""A run of many iterations: when it evaluates, what sinks are given, and which checkpoint is the best."""

import math
from pathlib import Path
from typing import Any

import pytest

from grpo import CheckpointError, ConfigError
from grpo.checkpoint import best_checkpoint
from tests.support.policies import TablePolicy
from tests.support.trainers import by_hand


def test_train_reports_evaluations_to_history_and_sinks() -> None:
    class Sink:
        def __init__(self) -> None:
            self.seen: list[tuple[int, bool]] = []

        def log(self, metrics: Any, iteration: int) -> None:
            self.seen.append((iteration, "eval/avg_reward" in metrics))

        def close(self) -> None:
            raise AssertionError("whoever opened the sink closes it")

    sink = Sink()
    policy = TablePolicy()
    trainer, _ = by_hand(policy=policy, rewards=lambda states, actions: [float(a) for a in actions])
    history = trainer.train(["a", "b"], num_iterations=5, eval_states=["a"], eval_every=2, sinks=[sink], progress=False)
    assert sink.seen == [(1, False), (2, True), (3, False), (4, True), (5, True)]
    assert ["eval/avg_reward_std" in metrics for metrics in history] == [False, True, False, True, True]


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", ["num_iterations", "eval_every", "checkpoint_every", "keep_last"])
def test_counts_below_one_are_refused(name: str, value: int, tmp_path: Path) -> None:
    trainer, policy = by_hand()
    arguments: dict[str, Any] = {"num_iterations": 1, name: value}
    with pytest.raises(ConfigError, match=rf"{name} must be >= 1; got {value}"):
        trainer.train(["a", "b"], eval_states=["a"], checkpoint_dir=tmp_path, progress=False, **arguments)
    with pytest.raises(ConfigError, match=rf"num_actions_per_state must be >= 1; got {value}"):
        trainer.evaluate(["a", "b"], num_actions_per_state=value)
    assert policy.calls["generate"] == 0


@pytest.mark.parametrize("keep_last", [1, 9])
@pytest.mark.parametrize(
    ("scores", "best", "written"),
    [
        ([1.0, math.nan, 0.5, 0.75], 1, [1, 4]),
        ([math.nan, 1.0, 0.5, 0.75], 2, [2, 4]),
        ([0.5, math.nan, 1.0, math.nan], 3, [1, 3, 4]),
        ([math.nan, -1.0, math.nan, -2.0], 2, [2, 4]),
    ],
)
def test_an_evaluation_that_is_nan_is_never_the_best(
    scores: list[float],
    best: int,
    written: list[int],
    keep_last: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four evaluations: an iteration is written when it is better than all before, and the last one always."""
    trainer, _ = by_hand()
    evaluations = iter(scores)
    monkeypatch.setattr(trainer, "evaluate", lambda states: {"eval/avg_reward": next(evaluations)})
    trainer.train(
        ["a", "b"],
        num_iterations=4,
        eval_states=["a"],
        eval_every=1,
        checkpoint_dir=tmp_path,
        checkpoint_every=9,
        keep_last=keep_last,
        progress=False,
    )
    kept = sorted({best, 4}) if keep_last == 1 else written
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"iteration-{number:08d}" for number in kept]
    assert best_checkpoint(tmp_path).name == f"iteration-{best:08d}"


def test_where_every_evaluation_is_nan_no_checkpoint_is_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = by_hand()
    monkeypatch.setattr(trainer, "evaluate", lambda states: {"eval/avg_reward": math.nan})
    trainer.train(["a", "b"], num_iterations=2, eval_states=["a"], checkpoint_dir=tmp_path, progress=False)
    with pytest.raises(CheckpointError, match="No checkpoint with a score"):
        best_checkpoint(tmp_path)

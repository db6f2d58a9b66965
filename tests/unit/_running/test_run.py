"""A run of many iterations: when it evaluates, what sinks are given, and which checkpoint is the best."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import (
    ActionScores,
    CheckpointError,
    ConfigError,
    GRPOConfig,
    GRPOTrainer,
    SampledActions,
    WeightedRewards,
)
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


def test_counts_below_1_are_refused_by_train(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for name, value in product(["num_iterations", "eval_every", "checkpoint_every", "keep_last"], [0, -1]):
        with subtests.test(name=name, value=value):
            trainer, policy = by_hand()
            arguments: dict[str, Any] = {"num_iterations": 1, name: value}
            with pytest.raises(ConfigError, match=rf"{name} must be >= 1; got {value}"):
                trainer.train(["a", "b"], eval_states=["a"], checkpoint_dir=tmp_path, progress=False, **arguments)
            with pytest.raises(ConfigError, match=rf"num_actions_per_state must be >= 1; got {value}"):
                trainer.evaluate(["a", "b"], num_actions_per_state=value)
            assert policy.calls["generate"] == 0


def test_an_evaluation_that_is_nan_is_never_the_best(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """Four evaluations: an iteration is written when it is better than all before, and the last one always."""
    for scores, best, written, keep_last in [
        ([1.0, math.nan, 0.5, 0.75], 1, [1, 4], 1),
        ([math.nan, 1.0, 0.5, 0.75], 2, [2, 4], 9),
        ([0.5, math.nan, 1.0, math.nan], 3, [3, 4], 1),  # iteration 1 was written, and has left
        ([0.5, math.nan, 1.0, math.nan], 3, [1, 3, 4], 9),
        ([math.nan, -1.0, math.nan, -2.0], 2, [2, 4], 9),
    ]:
        with subtests.test(scores=scores, keep_last=keep_last):
            folder = tmp_path / f"{scores} {keep_last}"
            trainer, _ = by_hand()
            reports = iter([{"eval/avg_reward": score} for score in scores])
            trainer.evaluate = lambda states, reports=reports: next(reports)  # type: ignore[method-assign, misc]
            trainer.train(
                ["a", "b"],
                num_iterations=4,
                eval_states=["a"],
                eval_every=1,
                checkpoint_dir=folder,
                checkpoint_every=9,
                keep_last=keep_last,
                progress=False,
            )
            assert sorted(path.name for path in folder.iterdir()) == [f"iteration-{number:08d}" for number in written]
            assert best_checkpoint(folder).name == f"iteration-{best:08d}"


def test_if_every_evaluation_is_nan_no_checkpoint_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = by_hand()
    monkeypatch.setattr(trainer, "evaluate", lambda states: {"eval/avg_reward": math.nan})
    trainer.train(["a", "b"], num_iterations=2, eval_states=["a"], checkpoint_dir=tmp_path, progress=False)
    with pytest.raises(CheckpointError, match="No checkpoint with a score"):
        best_checkpoint(tmp_path)


def test_a_progress_bar_is_shown_if_requested(capsys: pytest.CaptureFixture[str]) -> None:
    for shows, expected in [(False, False), (True, True)]:
        by_hand(config={"num_epochs_per_update": 2})[0].train(["a", "b"], num_iterations=2, progress=shows)
        shown = capsys.readouterr().err
        assert ("GRPO" in shown) == expected
        assert ("2/2" in shown) == expected


def test_an_evaluation_reports_the_parts_of_the_reward_and_the_number_of_steps() -> None:
    """Actions 0 1 | 1 1: `right` is 0 1 1 1; `long` applies to the second state only, and gives 4 and 6; two steps a row."""

    class TwoSteps(TablePolicy):
        def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
            actions = self.generate_actions(states, num_actions_per_state)
            mask = torch.tensor([[True, True], [True, False], [True, False], [True, False]])
            return SampledActions(actions=actions, mask=mask)

        def score_actions(self, states: Any, actions: Any) -> ActionScores:
            log_probs = self.get_log_probabilities(states, actions).unsqueeze(1).expand(-1, 2)
            return ActionScores(log_probs=log_probs, mask=torch.ones(len(actions), 2, dtype=torch.bool))

    long = iter([math.nan, math.nan, 4.0, 6.0])
    rewards = WeightedRewards(
        {
            "right": lambda states, actions: [float(action) for action in actions],
            "long": lambda states, actions: [next(long) for _ in actions],
        },
        weights={"right": 1.0, "long": 0.5},
    )
    policy = TwoSteps(script=[[0, 1], [1, 1]])
    trainer = GRPOTrainer(config=GRPOConfig(group_size=2), policy=policy, reward_model=rewards)
    assert trainer.evaluate(["a", "b"]) == {
        "eval/avg_reward": pytest.approx((0 + 1 + 3 + 4) / 4),
        "eval/avg_reward_std": pytest.approx(math.sqrt((4 + 1 + 1 + 4) / 4)),
        "eval/right/mean": 0.75,
        "eval/long/mean": 5.0,
        "eval/steps_mean": 1.25,
    }

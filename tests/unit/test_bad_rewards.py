"""What bad rewards do to an iteration: errors change nothing, and recoveries show in the metrics.

The rules themselves are tested in `_rewarding/test_calls.py`.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import AdvantageEstimator, ExperienceBatch, RewardError, SampledActions, WeightedRewards
from grpo.checks import check_reward_model
from grpo.config import AdvantageConfig, RewardConfig
from tests.support.policies import ExactSampling, TablePolicy, weights_of
from tests.support.trainers import by_hand, state_of, trainer_of


def raising(states: Any, actions: Any) -> Any:
    raise TimeoutError("the judge is away")


@pytest.mark.parametrize("reward", [raising, lambda s, a: [math.nan] * len(a), lambda s, a: torch.zeros(len(a), 1)])
def test_an_iteration_with_failing_rewards_changes_nothing(reward: Any) -> None:
    trainer = trainer_of(TablePolicy(), reward)
    before = state_of(trainer)
    with pytest.raises(RewardError):
        trainer.step(["a", "b"])
    assert state_of(trainer) == before


@pytest.mark.parametrize(("row", "bad"), [(0, math.nan), (3, math.inf), (6, -math.inf)])
def test_a_dropped_row_does_not_count_in_its_groups_statistics(row: int, bad: float) -> None:
    """Rewards 1, 2, 4, 8 in both groups: without one, the mean is that of the other three."""
    values = [1.0, 2.0, 4.0, 8.0] * 2
    rewards = torch.tensor([bad if n == row else value for n, value in enumerate(values)])
    trainer = trainer_of(TablePolicy(), lambda s, a: rewards, reward=RewardConfig(non_finite="drop"))
    batch = trainer.collect(["a", "b"])
    kept = [n for n in range(8) if n != row]
    means = {g: sum(values[n] for n in kept if n // 4 == g) / sum(n // 4 == g for n in kept) for g in (0, 1)}
    assert trainer.advantages(batch).tolist() == pytest.approx([values[n] - means[n // 4] for n in kept], rel=1e-6)
    metrics = trainer.update(batch)
    assert (metrics["rows/dropped"], metrics["rewards/zeroed"]) == (1.0, 0.0)
    assert metrics["group_stats/avg_group_size"] == 3.5


@pytest.mark.parametrize("where", ["scores", "advantages"])
def test_the_counts_of_an_iteration_that_fails_later_are_reported_by_the_next(where: Any) -> None:
    """The iteration has asked for rewards, dropped a row, and then fails: when it scores, and when it computes advantages."""
    fails = iter([True, False])

    def broken(whole: Any) -> Any:
        def once(*args: Any, **options: Any) -> Any:
            if next(fails, False):
                raise ValueError("only the first time")
            return whole(*args, **options)

        return once

    own = broken(AdvantageEstimator(AdvantageConfig())) if where == "advantages" else None
    config = {"group_size": 4, "reward": RewardConfig(non_finite="drop")}
    trainer, _ = by_hand(policy=TablePolicy(), rewards=[3.0, math.nan, 7.0, 10.0], config=config, advantages=own)
    if where == "scores":
        trainer.collector.complete = broken(trainer.collector.complete)
    with pytest.raises(ValueError, match="only the first time"):
        trainer.step(["a"])
    assert [trainer.step(["a"])["rows/dropped"] for _ in range(2)] == [2.0, 1.0]


def test_zeroed_rewards_count_as_0_in_advantages() -> None:
    """Rewards 3, 0, 7, 10: mean 5."""
    zero = RewardConfig(non_finite="zero")
    trainer = trainer_of(TablePolicy(), lambda s, a: [3.0, math.nan, 7.0, 10.0], reward=zero)
    batch = trainer.collect(["a"])
    assert trainer.advantages(batch).tolist() == [-2, -5, 2, 5]
    assert trainer.update(batch)["rewards/zeroed"] == 1.0


def test_a_part_that_does_not_apply_to_a_row_is_left_out_of_its_statistics() -> None:
    """x = (-, 1, 2, 3): mean 2, std 1; rewards (1, 2, 3, 4). A part that applies to no row has no mean."""
    parts = {"x": lambda s, a: [math.nan, 1.0, 2.0, 3.0], "y": lambda s, a: [1.0] * 4, "z": lambda s, a: [math.nan] * 4}
    metrics = trainer_of(TablePolicy(), WeightedRewards(parts)).step(["a"])
    assert (metrics["rewards/x/mean"], metrics["rewards/x/std"]) == (2.0, 1.0)
    assert not any(math.isnan(value) for value in metrics.values())
    assert "rewards/z/mean" not in metrics
    assert [metrics[f"rewards/{name}/applies"] for name in "xyz"] == [0.75, 1.0, 0.0]
    assert metrics["rewards/mean"] == 2.5
    report = check_reward_model(WeightedRewards(parts), ["a"] * 4, [0, 1, 2, 3])
    assert report["components"].status == "passed", str(report)


def test_rewards_outside_the_policys_steps_are_never_read() -> None:
    """NaN outside the mask, as an environment that pads its rewards may give it."""

    def padded(mask: Tensor) -> Tensor:
        return torch.where(mask, torch.arange(float(mask.numel())).view(mask.shape), math.nan)

    policy = ExactSampling()
    masks: list[Tensor] = []
    sample = policy.sample_actions

    def remembered(*arguments: Any) -> SampledActions:
        masks.append((sampled := sample(*arguments)).mask)
        return sampled

    policy.sample_actions = remembered  # type: ignore[method-assign]
    trainer = trainer_of(policy, lambda s, a: padded(masks[-1]))
    mask = torch.tensor([[True, True, False], [True, False, False]])
    elsewhere = ExperienceBatch.from_rows([0, 0], [(1, 0), (0,)], padded(mask), [0, 0], mask=mask)
    for batch in (trainer.collect([0, 1]), elsewhere):
        assert all(math.isfinite(value) for value in trainer.update(batch).values())
        assert torch.isfinite(weights_of(policy)).all()


def test_groups_of_one_row_learn_nothing_and_this_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(TablePolicy(), group_size=1)
    before = state_of(trainer)
    metrics = trainer.step(["a", "b"])
    assert "every group has one row" in caplog.text
    assert state_of(trainer) == before
    assert metrics["train/skipped_updates"] == 1.0
    assert metrics["group_stats/avg_group_size"] == 1.0
    assert metrics["group_stats/zero_variance_fraction"] == 1.0

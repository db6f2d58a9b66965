"""Advantages against `GRPOTrainer._generate_and_score_completions` of TRL, called without a model (see `trl_code`)."""

import random

import pytest
import torch
from torch import Tensor

from grpo import group_relative_advantages
from grpo.advantage_estimator import Scale, decoupled_advantages
from tests.support import trl_code
from tests.support.peer_cases import assert_equal, draws
from tests.support.trl_code import TRLSettings

TRL_STD_EPS = 1e-4
"""What TRL adds to every standard deviation."""

SCALES: tuple[Scale, ...] = ("group", "batch", "none")


def random_rewards(choose: random.Random, generator: torch.Generator, count: int, num_functions: int) -> Tensor:
    """Numbers, or few levels so that groups without differences occur, exactly or in all but one row."""
    rewards = torch.randn(count, num_functions, generator=generator, dtype=torch.float64)
    kind = choose.choice(["numbers", "levels", "binary", "rare"])
    if kind == "levels":
        return rewards.mul(2).round().div(4)
    if kind == "binary":
        return (rewards > 0).double()
    if kind == "rare":
        return (rewards > 1.5).double()
    return rewards * choose.choice([1e-3, 1.0, 1e4])


def random_weights(choose: random.Random, num_functions: int) -> Tensor:
    """Numbers whose products and sums with few levels are exact: TRL divides what rounding leaves of 0 by 1e-4."""
    return torch.tensor([choose.choice([0.25, 1.0, 2.0, -0.5]) for _ in range(num_functions)], dtype=torch.float64)


def their_advantages(rewards: Tensor, weights: Tensor, settings: TRLSettings) -> Tensor:
    step = torch.zeros(len(rewards), 1, dtype=torch.float64)
    rollouts = trl_code.Rollouts(
        mask=torch.ones(len(rewards), 1, dtype=torch.bool),
        old_log_probs=None,
        ref_log_probs=step,
        behaviour_log_probs=None,
        rewards=rewards,
        reward_weights=weights,
    )
    return trl_code.advantages_and_ratios(rollouts, settings)["advantages"]


def assert_same(formula: str, ours: Tensor, theirs: Tensor, case: str) -> None:
    """Advantages are of order 1, or of the order of the rewards: differences below 1e-12 of the largest are rounding."""
    scale = float(theirs.abs().max().clamp(min=1.0))
    assert_equal(formula, ours, theirs, case, rtol=1e-9, atol=1e-12 * scale)


def test_advantages_of_the_weighted_sum_equal_trls(subtests: pytest.Subtests) -> None:
    """One reward function or several. A row that all of them declined is dropped by us, and given 0 by TRL."""
    for scale in SCALES:
        with subtests.test(scale=scale):
            for seed, choose, generator in draws(10, 150):
                group_size, num_groups, num_functions = choose.randint(2, 8), choose.randint(1, 5), choose.randint(1, 3)
                count = group_size * num_groups
                rewards = random_rewards(choose, generator, count, num_functions)
                weights = random_weights(choose, num_functions)
                scored = torch.rand(count, generator=generator) >= choose.choice([0.0, 0.0, 0.3])
                if scored.sum() < 2:
                    continue
                group_ids = torch.arange(num_groups).repeat_interleave(group_size)
                settings = TRLSettings(num_generations=group_size, scale_rewards=scale)
                theirs = their_advantages(rewards.masked_fill(~scored.unsqueeze(1), torch.nan), weights, settings)
                ours = group_relative_advantages(
                    (rewards * weights).sum(1)[scored], group_ids[scored], scale=scale, std_eps=TRL_STD_EPS
                )
                case = f"seed {seed}, {settings}, weights {weights.tolist()}"
                assert_same(f"advantages of the weighted sum, scale {scale}", ours, theirs[scored], case)
                declined = theirs[~scored]
                assert_equal(
                    "advantages of rows without a reward", torch.zeros_like(declined), declined, case, atol=0.0
                )


def test_advantages_normalised_per_reward_equal_trls() -> None:
    """GDPO: each reward over its group, the weighted sum over the batch; `scale_rewards` has no say."""
    for seed, choose, generator in draws(11, 150):
        group_size, num_groups, num_functions = choose.randint(2, 8), choose.randint(1, 5), choose.randint(1, 3)
        rewards = random_rewards(choose, generator, group_size * num_groups, num_functions)
        weights = random_weights(choose, num_functions)
        settings = TRLSettings(num_generations=group_size, multi_objective_aggregation="normalize_then_sum")
        theirs = their_advantages(rewards, weights, settings)
        names = [f"reward_{k}" for k in range(num_functions)]
        ours = decoupled_advantages(
            dict(zip(names, rewards.unbind(1), strict=True)),
            dict(zip(names, weights.tolist(), strict=True)),
            torch.arange(num_groups).repeat_interleave(group_size),
            std_eps=TRL_STD_EPS,
        )
        assert_same("GDPO's advantages", ours, theirs, f"seed {seed}, {settings}, weights {weights.tolist()}")

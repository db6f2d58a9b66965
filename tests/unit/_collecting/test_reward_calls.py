"""Calls of a reward model whose rewards are per step. What else can go wrong stands in `test_bad_rewards.py`."""

import math

import torch

from grpo import RewardConfig, WeightedRewards
from grpo._collecting.reward_calls import RewardCalls


def test_parts_per_step_are_zeroed_only_in_rows_that_have_no_reward() -> None:
    """x is NaN at one step of row 0: that step counts as 0, and the other rows and steps keep their rewards."""
    parts = {
        "x": lambda states, actions: torch.tensor([[math.nan, 1.0, 2.0], [3.0, 4.0, 5.0]]),
        "y": lambda states, actions: torch.ones(2, 3),
    }
    calls = RewardCalls(WeightedRewards(parts), RewardConfig(non_finite="zero"))
    found = calls(["a", "b"], ["c", "d"], torch.ones(2, 3, dtype=torch.bool))
    assert found.values.tolist() == [[0.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert found.components["x"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert found.components["y"].tolist() == [[1.0] * 3] * 2
    assert found.metrics["rewards/zeroed"] == 1.0
    assert found.kept is None

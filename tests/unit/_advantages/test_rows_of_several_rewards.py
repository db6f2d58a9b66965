"""Several rewards that are each standardised (GDPO)."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo._advantages.rows import decoupled_advantages
from tests.support.objective_inputs import double


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


def test_decoupled_advantages_equal_numpys(subtests):
    for std_eps, std_ddof in itertools.product([0.0, 0.1], [0, 1]):
        with subtests.test(std_eps=std_eps, std_ddof=std_ddof):
            random = np.random.default_rng(2)
            group_ids = np.array([3, 0, 3, 1, 1, 0, 3, 1])
            parts = {"a": random.normal(size=8), "b": 100 * random.normal(size=8), "c": random.uniform(size=8)}
            weights = {"a": 0.5, "c": 3.0}  # b weighs 1
            total = np.zeros(8)
            for name, rewards in parts.items():
                for group in (0, 1, 3):
                    rows = group_ids == group
                    deviations = rewards[rows] - rewards[rows].mean()
                    total[rows] += weights.get(name, 1.0) * deviations / (rewards[rows].std(ddof=std_ddof) + std_eps)
            expected = (total - total.mean()) / (total.std(ddof=std_ddof) + std_eps)
            advantages = decoupled_advantages(
                {name: torch.from_numpy(rewards) for name, rewards in parts.items()},
                weights,
                torch.from_numpy(group_ids),
                std_ddof=std_ddof,
                std_eps=std_eps,
            )
            np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-12)


def test_a_group_is_dead_only_if_every_reward_is_constant_in_it():
    # group 0: differs in b only; group 1: in neither; group 2: alone
    advantages = decoupled_advantages(
        {"a": torch.tensor([0.3, 0.3, 0.3, 0.3, 5.0]), "b": torch.tensor([0.0, 1.0, 0.9, 0.9, 2.0])},
        {},
        ids(0, 0, 1, 1, 2),
    )
    assert advantages[2:].tolist() == [0, 0, 0]
    # -h, h, 0, 0, 0: squares 2 h^2 = 1 over 4: std 1/2
    assert advantages[:2].tolist() == pytest.approx([-math.sqrt(2), math.sqrt(2)], rel=1e-6)
    assert advantages.dtype == torch.float32


def test_a_group_dead_in_every_reward_gets_exactly_0_despite_rounding():
    # live groups add up to 0 only up to rounding, which whitening would hand to the dead ones
    group_ids = torch.arange(40).repeat_interleave(8)
    is_dead = group_ids % 4 == 0
    parts = {name: torch.where(is_dead, 0.3, torch.rand(320)) for name in ("a", "b", "c")}
    advantages = decoupled_advantages(parts, {"a": 0.3, "b": 1.7}, group_ids)
    assert (advantages[is_dead] == 0).all()
    assert advantages.std().item() == pytest.approx(1, rel=1e-5)


def test_rewards_that_cancel_give_advantages_of_exactly_0():
    # a and b are opposites: the sum is 0 up to rounding, which must not be amplified
    a = torch.tensor([0.1, 0.7, 0.4, 0.9, 0.3, 0.2])
    advantages = decoupled_advantages({"a": a, "b": 1 - a}, {}, ids(0, 0, 0, 1, 1, 1))
    assert advantages.tolist() == [0] * 6


def test_decoupled_advantages_leave_out_rewards_that_are_nan():
    # a of rows 0 and 1 alone: (1, 3) - 2 over sqrt(2) = -+ 1/sqrt(2).   b: (0, 0, 0, 4) - 1 over 2 = (-1/2, -1/2, -1/2, 3/2)
    # c applies to none.   S = (-.707 - .5, .707 - .5, -.5, 1.5), mean 0, std S with ddof 1
    nan = math.nan
    parts = {"a": double([1, 3, nan, nan]), "b": double([0, 0, 0, 4]), "c": double([nan] * 4)}
    total = np.array([-(0.5**0.5) - 0.5, 0.5**0.5 - 0.5, -0.5, 1.5])
    expected = total / math.sqrt((total**2).sum() / 3)
    torch.testing.assert_close(decoupled_advantages(parts, {}, ids(0, 0, 0, 0)), torch.from_numpy(expected))

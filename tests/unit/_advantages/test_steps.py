"""One advantage per step: process supervision, groups of equal states, and a critic.

Returns to go and their baselines are tested in test_advantage_estimator.py.
"""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from grpo import ConfigError, group_relative_advantages
from grpo._advantages.steps import (
    discounted_returns,
    generalized_advantages,
    process_supervised_advantages,
    require_step_rewards,
    state_group_advantages,
    step_rewards,
)
from grpo.types import CONTINUES
from tests.support.objective_inputs import double

NAN = math.nan

BY_MEAN = partial(group_relative_advantages, baseline="group_mean", scale="none")
BY_STD = partial(group_relative_advantages, baseline="group_mean", scale="group")


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


def mask_of(*rows: str) -> Tensor:
    """`"x.x"` is a row of three steps whose second step is masked."""
    return torch.tensor([[step == "x" for step in row] for row in rows])


def assert_rows(found: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=1e-13, atol=1e-14)


def test_discounted_returns_count_masked_rewards_as_0_and_masked_steps_as_time():
    # 1;  1 + .9;  1 + .9 * 1.9
    assert_rows(discounted_returns(double([[1, 1, 1]]), mask_of("xxx"), 0.9), [[2.71, 1.9, 1.0]])
    # row 0: 4; 2 + .5 * 4 = 4; 1 + .5 * 4 = 3.     row 1 ends after two: 6; 2 + .5 * 6 = 5
    rewards, mask = double([[1, 2, 4], [2, 6, NAN]]), mask_of("xxx", "xx.")
    assert discounted_returns(rewards, mask, 0.5)[mask].tolist() == [3, 4, 4, 5, 6]
    # 4;  0 + .5 * 4;  1 + .5 * 2
    assert_rows(discounted_returns(double([[1, NAN, 4]]), mask_of("x.x"), 0.5), [[2.0, 2.0, 4.0]])


# Process supervision

# group 0: steps 1 0 | 1: mean 2/3: 1/3 -2/3 | 1/3.   group 1: steps 2 | 4 6: mean 4: -2 | 0 2
STEP_REWARDS = double([[1, 0], [1, NAN], [2, NAN], [4, 6]])
STEP_MASK = mask_of("xx", "x.", "x.", "xx")


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [
        (1.0, [[-1 / 3, -2 / 3], [1 / 3, 0], [-2, 0], [2, 2]]),
        (0.5, [[1 / 3 - 1 / 3, -2 / 3], [1 / 3, 0], [-2, 0], [1, 2]]),
    ],
)
def test_process_supervised_advantages_equal_hand_worked_values(gamma, expected):
    found = process_supervised_advantages(STEP_REWARDS, STEP_MASK, ids(0, 0, 1, 1), BY_MEAN, gamma=gamma)
    assert_rows(found, expected)


def test_process_supervised_advantages_are_divided_by_the_group_std():
    # group 0: squares 1/9 + 4/9 + 1/9 over 2: 1/3;   group 1: 4 + 0 + 4 over 2: 4
    found = process_supervised_advantages(STEP_REWARDS, STEP_MASK, ids(0, 0, 1, 1), BY_STD, gamma=1.0)
    root = math.sqrt(3)
    assert_rows(found, [[-root / 3, -2 * root / 3], [root / 3, 0], [-1, 0], [1, 1]])


@pytest.mark.parametrize("baseline", ["group_mean", "group_median", "leave_one_out", "none"])
def test_process_supervision_gives_a_lone_row_only_an_absolute_advantage(baseline):
    """The steps of the row differ, but its group has no other row. Only an absolute baseline gives it an advantage."""
    relative, settings = partial(group_relative_advantages, baseline=baseline), {"gamma": 1.0, "baseline": baseline}
    found = process_supervised_advantages(double([[1, 3]]), mask_of("xx"), ids(0), relative, **settings)
    assert_rows(found, [[4, 3]] if baseline == "none" else [[0, 0]])


def test_process_supervision_ignores_a_masked_step_and_counts_its_time():
    # steps 1, 4 | 1: mean 2: -1, 2 | -1;  to go over two columns: -1 + .25 * 2
    rewards, mask = double([[1, NAN, 4], [1, 0, 0]]), mask_of("x.x", "x..")
    found = process_supervised_advantages(rewards, mask, ids(7, 7), BY_MEAN, gamma=0.5)
    assert_rows(found, [[-0.5, 0, 2], [-1, 0, 0]])


@pytest.mark.parametrize(
    ("scale", "baseline"),
    list(itertools.product(["none", "group", "batch", "whiten"], ["group_mean", "group_median", "leave_one_out"])),
)
def test_process_supervision_gives_exactly_0_where_all_steps_have_the_same_reward(scale, baseline):
    """CartPole: rows of 1, 17 and 200 steps, each worth .3 in float32."""
    mask = torch.arange(200) < torch.tensor([[1], [17], [200]])
    rewards = torch.full((3, 200), 0.3)
    relative = partial(group_relative_advantages, baseline=baseline, scale=scale)
    found = process_supervised_advantages(rewards, mask, ids(0, 0, 0), relative, gamma=0.99, baseline=baseline)
    assert (found == 0).all()


# Groups of equal states (GiGPO)

# gamma 1/2. Returns to go: row 0: 1 + 1, 2;  row 1: 0 + 2.5, 5;  row 2: 4, 0;  row 3: 2 + 1, 2.
#   rows, sums 3 5 | 4 4:  -1 1 | 0 0
#   states: group 0, key 7: 2, 2.5 -> -.25, .25; keys 8 and 9: alone, 0.
#           group 1, key 7: 4, 0 and row 3's second 2 -> 2, -2, 0; key 8: alone, 0.
PLACED_REWARDS = double([[1, 2], [0, 5], [4, 0], [2, 2]])
KEYS = torch.tensor([[7, 8], [7, 9], [7, 7], [8, 7]])
FULL = mask_of("xx", "xx", "xx", "xx")


@pytest.mark.parametrize(
    ("weight", "expected"),
    [(2.0, [[-1 - 0.5, -1], [1 + 0.5, 1], [4, -4], [0, 0]]), (0.0, [[-1, -1], [1, 1], [0, 0], [0, 0]])],
)
def test_state_group_advantages_equal_hand_worked_values(weight, expected):
    found = state_group_advantages(PLACED_REWARDS, FULL, ids(0, 0, 1, 1), KEYS, BY_MEAN, gamma=0.5, weight=weight)
    assert_rows(found, expected)


def test_state_group_advantages_are_divided_by_the_std_of_each_group():
    # rows: 3, 5: std sqrt 2 -> -h h, h = 1/sqrt 2;  4, 4: 0.   states: 2, 2.5 -> -h h;  4, 0, 2: std 2 -> 1 -1 0
    found = state_group_advantages(PLACED_REWARDS, FULL, ids(0, 0, 1, 1), KEYS, BY_STD, gamma=0.5, weight=2.0)
    h = math.sqrt(0.5)
    assert_rows(found, [[-3 * h, -h], [3 * h, h], [2, -2], [0, 0]])


def test_masked_states_belong_to_no_group():
    # row 1's second step is a hole: its return from the first is 0 + 0 + .25 * 5, row 0's 1 + .5 * 2 = 2
    mask, rewards = mask_of("xx.", "x.x"), double([[1, 2, NAN], [0, NAN, 5]])
    keys = torch.tensor([[7, 7, 7], [8, 7, 7]])
    # sums 3, 5;  key 7: row 0: 2, 2; row 1: 5; mean 3: -1 -1 2;  key 8: alone
    found = state_group_advantages(rewards, mask, ids(0, 0), keys, BY_MEAN, gamma=0.5, weight=1.0)
    assert_rows(found, [[-2, -2, 0], [1, 0, 3]])


def test_a_decision_of_several_steps_counts_once():
    # the second decision of row 0 begins at its second step and has a hole, that of row 1 at its third; row 2 continues nothing
    mask = mask_of("xx.x", "xxx.", "xx..")
    rewards, c = double([[1, 2, NAN, 3], [0, 0, 8, NAN], [1, 4, NAN, NAN]]), CONTINUES
    keys = torch.tensor([[-1, 8, 8, c], [-1, c, 8, 0], [c, -1, 0, 0]])
    # sums 6, 8, 5: mean 19/3;  key -1: to go 6, 8, 4: mean 6: 0 2 -2;  key 8: 5, 8: -1.5 1.5
    found = state_group_advantages(rewards, mask, ids(0, 0, 0), keys, BY_MEAN, gamma=1.0, weight=1.0)
    a, b, c = -1 / 3, 5 / 3, -4 / 3
    assert_rows(found, [[a, a - 1.5, 0, a - 1.5], [b + 2, b + 2, b + 1.5, 0], [c, c - 2, 0, 0]])


def test_keys_of_any_size_are_distinguished():
    keys = torch.tensor([[2**62, -(2**62)], [2**62, -(2**62)]])
    # to go 3 2 | 7 4; sums 3, 7: -2 2;  columns: -2 2, -1 1
    rewards, mask = double([[1, 2], [3, 4]]), mask_of("xx", "xx")
    found = state_group_advantages(rewards, mask, ids(0, 0), keys, BY_MEAN, gamma=1.0, weight=1.0)
    assert_rows(found, [[-4, -3], [4, 3]])


# A critic (GAE)

REWARDS, VALUES = double([[1, 2, 4]]), double([[2, 1, 3]])


def gae(rewards=REWARDS, values=VALUES, mask=None, final_values=None, *, gamma=0.5, gae_lambda=0.5) -> Tensor:
    mask = torch.ones(rewards.shape, dtype=torch.bool) if mask is None else mask
    return generalized_advantages(rewards, values, mask, final_values, gamma=gamma, gae_lambda=gae_lambda)


def test_gae_of_terminated_and_truncated_rows_equals_hand_worked_values_in_float64():
    # delta: 4 - 3 = 1;  2 + .5 * 3 - 1 = 2.5;  1 + .5 * 1 - 2 = -.5
    # A: 1;  2.5 + .25 * 1 = 2.75;  -.5 + .25 * 2.75 = .1875
    assert gae().tolist() == [[0.1875, 2.75, 1.0]]
    assert gae(final_values=double([0])).tolist() == [[0.1875, 2.75, 1.0]]
    # 8 is still to come: delta: 4 + .5 * 8 - 3 = 5;  A: 5;  2.5 + .25 * 5 = 3.75;  -.5 + .25 * 3.75 = .4375
    assert gae(final_values=double([8])).tolist() == [[0.4375, 3.75, 5.0]]
    found = gae(REWARDS.float(), VALUES.float(), final_values=torch.tensor([8.0]))
    assert (found.dtype, found.tolist()) == (torch.float64, [[0.4375, 3.75, 5.0]])


def random_rows(seed: int = 0, holes: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, values, mask and final values of rows of 6, 4, 1 and 0 steps."""
    random = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(4, 6, generator=random, dtype=torch.float64) for _ in range(2))
    mask = mask_of("x.xx.x", ".x.xx.", "....x.", "......") if holes else mask_of("xxxxxx", "xxxx..", "x.....", "......")
    return rewards, values, mask, torch.randn(4, generator=random, dtype=torch.float64)


def by_definition(rewards, values, mask, final_values, gamma, gae_lambda) -> Tensor:
    """Row by row over the valid steps alone: eq. 16, with gamma to the number of columns until the next one."""
    result = torch.zeros_like(rewards)
    for n in range(len(rewards)):
        places = mask[n].nonzero().squeeze(1).tolist()
        advantage, next_value, next_place = 0.0, final_values[n].item(), None
        for t in reversed(places):
            discount = gamma if next_place is None else gamma ** (next_place - t)
            delta = rewards[n, t].item() + discount * next_value - values[n, t].item()
            advantage = delta + (0.0 if next_place is None else discount * gae_lambda * advantage)
            result[n, t] = advantage
            next_value, next_place = values[n, t].item(), t
    return result


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.97, 0.9), (0.9, 0.0), (0.8, 1.0), (1.0, 0.95), (0.0, 0.5)])
def test_gae_equals_its_definition(holes, gamma, gae_lambda):
    rewards, values, mask, final_values = random_rows(1, holes)
    expected = by_definition(rewards, values, mask, final_values, gamma, gae_lambda)
    found = gae(rewards, values, mask, final_values, gamma=gamma, gae_lambda=gae_lambda)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_padding_changes_no_gae_and_is_never_read():
    rewards, values, mask, final_values = random_rows(3)
    expected = gae(rewards, values, mask, final_values, gamma=0.9)
    wide_mask = torch.cat([mask, torch.zeros(4, 3, dtype=torch.bool)], dim=1)
    wide = [torch.cat([t.masked_fill(~mask, NAN), torch.full((4, 3), NAN).double()], dim=1) for t in (rewards, values)]
    found = gae(*wide, wide_mask, final_values, gamma=0.9)
    assert torch.equal(found[:, :6], expected)
    assert (found[:, 6:] == 0).all()


def test_gae_counts_a_masked_step_as_time_in_float64_and_never_reads_it():
    # gamma 1/2, lambda 1/2, steps in columns 0 and 3. A3 = 4 - 3 = 1;  delta0 = 1 + 3/8 - 2 = -5/8;  A0 = -5/8 + 1/16
    found = gae(double([[1, NAN, NAN, 4]]), double([[2, NAN, NAN, 3]]), mask_of("x..x"))
    assert found.tolist() == [[-0.5625, 0, 0, 1]]
    # a reward of 1 two columns on: .9^2
    found = gae(double([[0, NAN, 1]]), double([[0, NAN, 0]]), mask_of("x.x"), gamma=0.9, gae_lambda=1.0)
    assert found[0, 0].item() == pytest.approx(0.81, rel=1e-14)


def test_the_reward_of_a_row_is_placed_on_its_last_valid_step_and_rewards_per_step_stay():
    mask = mask_of("xxx", "xx.", "x.x", ".x.", "...")
    placed = step_rewards(double([1, 2, 3, 4, 5]), mask)
    assert placed.tolist() == [[0, 0, 1], [0, 2, 0], [0, 0, 3], [0, 4, 0], [0, 0, 0]]
    assert (placed.dtype, step_rewards(torch.ones(1), mask_of("x")).dtype) == (torch.float64, torch.float32)
    assert step_rewards(PLACED_REWARDS, FULL) is PLACED_REWARDS


def test_credit_to_steps_needs_rewards_per_step_and_a_baseline_that_compares_steps():
    require_step_rewards(PLACED_REWARDS, "return_to_go", "group_mean")
    with pytest.raises(ConfigError, match=r"^advantage\.credit='gae' needs rewards per step, \[N, T\]"):
        require_step_rewards(double([1, 2]), "gae", "group_mean")
    for baseline in ("max_at_k", "length_weighted"):
        with pytest.raises(ConfigError, match=rf"^advantage\.baseline='{baseline}' compares whole rows"):
            require_step_rewards(PLACED_REWARDS, "return_to_go", baseline)

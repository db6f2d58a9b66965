"""Advantages against numbers worked by hand."""

import itertools
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from grpo import AdvantageConfig, AdvantageEstimator, ExperienceBatch, group_relative_advantages, group_relative_returns
from grpo.advantage_estimator import Baseline, Scale, group_statistics
from tests.support.objective_inputs import double

RELATIVE = ["group_mean", "group_median", "leave_one_out"]
BASELINES = [*RELATIVE, "global_mean", "none"]
SCALES = ["none", "group", "batch"]


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


def batch_of(rewards: Tensor, group_ids: Tensor, mask: Tensor | None = None) -> ExperienceBatch:
    shape = rewards.shape if rewards.dim() == 2 else (len(rewards), 1)
    mask = torch.ones(shape, dtype=torch.bool) if mask is None else mask
    rows = list(range(len(rewards)))
    return ExperienceBatch(states=rows, actions=rows, group_ids=group_ids, rewards=rewards, mask=mask)


# Three groups, ragged, interleaved, unsorted, one id negative, one group of one:
#   group  5: rows 0, 2, 5     rewards 1, 4, 10      mean 5, median 4
#   group -3: rows 1, 4, 6, 7  rewards 2, 6, 4, 12   mean 6, median (4 + 6)/2 = 5
#   group  9: row 3            reward  7
GROUP_IDS = [5, -3, 5, 9, -3, 5, -3, -3]
REWARDS = [1.0, 2.0, 4.0, 7.0, 6.0, 10.0, 4.0, 12.0]
NEEDS = {"length_weighted": {"lengths": torch.tensor([1, 1, 2, 3, 1, 1, 1, 2])}, "max_at_k": {"k": 2}}
CENTRED = {
    "group_mean": [-4, -4, -1, 0, 0, 5, -2, 6],
    "group_median": [-3, -3, 0, 0, 1, 6, -1, 7],
    # others' means: 1 -> 7, 4 -> 5.5, 10 -> 2.5;   2 -> 22/3, 6 -> 6, 4 -> 20/3, 12 -> 4;   7 has no others
    "leave_one_out": [-6, -16 / 3, -1.5, 0, 0, 7.5, -8 / 3, 8],
    # (1 + 2 4 + 10)/4 = 4.75;   (2 + 6 + 4 + 2 12)/5 = 7.2
    "length_weighted": [-3.75, -5.2, -0.75, 0, -1.2, 5.25, -3.2, 4.8],
    # what a row adds to pairs, times n / C(n, 2).   4: 3; 10: 9 + 6; times 1.   4: 2; 6: 4 + 2; 12: 10 + 8 + 6; times 4/6
    "max_at_k": [0, 0, 3, 0, 4, 15, 4 / 3, 16],
    # mean of all: 46/8 = 5.75
    "global_mean": [-4.75, -3.75, -1.75, 1.25, 0.25, 4.25, -1.75, 6.25],
    "none": REWARDS,
}
# squared distances from the group's mean: 16 + 1 + 25 = 42 over 3;   16 + 0 + 4 + 36 = 56 over 4
# squared distances from 5.75, all rows:   22.5625 + 14.0625 + 3.0625 + 1.5625 + 0.0625 + 18.0625 + 3.0625 + 39.0625 = 101.5
VARIANCES = {
    ("group", 0): {5: 42 / 3, -3: 56 / 4},
    ("group", 1): {5: 42 / 2, -3: 56 / 3},
    ("batch", 0): dict.fromkeys([5, -3, 9], 101.5 / 8),
    ("batch", 1): dict.fromkeys([5, -3, 9], 101.5 / 7),
}


@pytest.mark.parametrize("baseline", get_args(Baseline))
def test_every_baseline_is_exact_on_ragged_interleaved_groups(baseline):
    assert baseline in CENTRED, "work the baseline out by hand in CENTRED"
    needs = NEEDS.get(baseline, {})
    advantages = group_relative_advantages(double(REWARDS), ids(*GROUP_IDS), baseline=baseline, **needs)
    assert advantages.tolist() == pytest.approx(CENTRED[baseline], abs=1e-14)


@pytest.mark.parametrize(
    ("std_eps", "scale_and_ddof", "baseline"), [*itertools.product([0.0, 0.5], VARIANCES, BASELINES)]
)
def test_every_baseline_is_exact_under_every_scale(std_eps, scale_and_ddof, baseline):
    scale, ddof = scale_and_ddof
    variances = VARIANCES[scale_and_ddof]
    # a group of one has no standard deviation of its own: 0
    expected = [
        centred / (math.sqrt(variances[group]) + std_eps) if group in variances else 0
        for centred, group in zip(CENTRED[baseline], GROUP_IDS, strict=True)
    ]
    advantages = group_relative_advantages(
        double(REWARDS), ids(*GROUP_IDS), baseline=baseline, scale=scale, std_ddof=ddof, std_eps=std_eps
    )
    assert advantages.tolist() == pytest.approx(expected, rel=1e-13, abs=1e-14)


# Group 0: 0 1 1 1, mean 3/4, variance 3/16.   Group 1: 0 1/2, mean 1/4, variance 1/16.   Centred: -3/4 1/4 1/4 1/4, -1/4 1/4
# batch: mean 7/12, squares 3.25: 3.25/6 - 49/144 = 29/144.   whiten: mean 0, squares (9 + 3 + 2)/16, over 6: 7/48
# beta: means have mean 1/2, variance 1/16: c = 4 - 1 = 3, a = b = 3/2: Beta(3/2, 3/2), sqrt(m (1 - m)) 8/pi = 2 sqrt 3/pi
SCALED_BY = {
    "none": (1, 1),
    "group": (math.sqrt(3) / 4, 1 / 4),
    "batch": (math.sqrt(29) / 12, math.sqrt(29) / 12),
    "whiten": (math.sqrt(7 / 48), math.sqrt(7 / 48)),
    "beta": (2 * math.sqrt(3) / math.pi, 2 * math.sqrt(3) / math.pi),
    "mean": (3 / 4, 1 / 4),
}


@pytest.mark.parametrize("scale", get_args(Scale))
def test_every_scale_is_exact(scale):
    assert scale in SCALED_BY, "work the scale out by hand in SCALED_BY"
    first, second = SCALED_BY[scale]
    rewards, group_ids = double([0, 1, 1, 1, 0, 0.5]), ids(0, 0, 0, 0, 1, 1)
    advantages = group_relative_advantages(rewards, group_ids, scale=scale, std_ddof=0)
    expected = [-0.75 / first, *[0.25 / first] * 3, -0.25 / second, 0.25 / second]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-13)


DIFFER_BY_ROUNDING = {
    "float64 sum": double([0.1 + 0.2, 0.3]),
    "float64 product": double([0.1 * 3, 0.3, 0.3]),
    "float32 neighbours": torch.nextafter(torch.tensor([0.9, 0.9, 0.9]), torch.tensor([0.9, 1.0, 0.0])),
    "float32 sum": torch.tensor([0.1, 0.7]) + torch.tensor([0.7, 0.1]),
}


@pytest.mark.parametrize(
    ("case", "scale", "baseline"), [*itertools.product(DIFFER_BY_ROUNDING, ["none", "group"], RELATIVE)]
)
def test_groups_that_differ_by_rounding_only_give_exactly_zero(case, scale, baseline):
    rewards = DIFFER_BY_ROUNDING[case]
    group_ids = torch.zeros(len(rewards), dtype=torch.int64)
    assert (group_relative_advantages(rewards, group_ids, baseline=baseline, scale=scale) == 0).all()


def test_small_differences_also_between_large_rewards_are_kept():
    # 0.3 and 0.3 + 1e-5 in float32: standardised with n, any two different values are -1 and 1
    advantages = group_relative_advantages(torch.tensor([0.3, 0.30001]), ids(0, 0), scale="group", std_ddof=0)
    assert advantages.tolist() == pytest.approx([-1, 1], abs=1e-5)
    # 1e8 + {0, 1, 2, 3}: deviations -1.5, -.5, .5, 1.5; variance (2.25 + .25) 2 / 3 = 5/3
    rewards = double([1e8, 1e8 + 1, 1e8 + 2, 1e8 + 3])
    assert group_relative_advantages(rewards, ids(0, 0, 0, 0)).tolist() == [-1.5, -0.5, 0.5, 1.5]
    for scale in ("group", "batch"):
        advantages = group_relative_advantages(rewards, ids(0, 0, 0, 0), scale=scale)
        assert advantages.tolist() == pytest.approx([d / math.sqrt(5 / 3) for d in (-1.5, -0.5, 0.5, 1.5)], rel=1e-12)
    # the float32 neighbours of 1e8 are 8 apart; mean 1e8 + 12
    advantages = group_relative_advantages(torch.tensor([1e8, 1e8 + 8, 1e8 + 16, 1e8 + 24]), ids(0, 0, 0, 0))
    assert advantages.tolist() == [-12, -4, 4, 12]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("scale", "baseline"), [*itertools.product(SCALES, BASELINES)])
def test_huge_rewards_have_the_advantages_of_small_ones(dtype, scale, baseline):
    """Whose squares float32 cannot hold: those of a thirtieth power of ten less, in its units, or the same if divided."""
    small = double([1, -2, 3, 0, 1, 0.1])
    huge, group_ids = torch.tensor([1e30, -2e30, 3e30, 0, 1e30, 1e29], dtype=dtype), ids(0, 0, 0, 1, 1, 1)
    found, expected = (
        group_relative_advantages(rewards, group_ids, baseline=baseline, scale=scale) for rewards in (huge, small)
    )
    unit = 1e30 if scale == "none" else 1
    assert found.tolist() == pytest.approx([a * unit for a in expected.tolist()], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantages_have_the_dtype_of_the_rewards_which_stay_unchanged(dtype):
    rewards = torch.tensor([1.0, 3.0], dtype=dtype)
    assert group_relative_advantages(rewards, ids(0, 0), scale="batch").dtype == dtype
    assert rewards.tolist() == [1.0, 3.0]


def test_group_ids_may_be_far_apart():
    # hashes: from each to the next, and from the last to the first, the difference overflows upwards or is positive
    group_ids = ids(0, 6 * 10**18, -6 * 10**18, 0, 6 * 10**18, -6 * 10**18)
    assert group_relative_advantages(double([1, 5, 20, 3, 9, 30]), group_ids).tolist() == [-1, -2, -5, 1, 2, 5]


# Returns to go, gamma 1:  row 0: 3, 2, 1    row 1: 2, 0 (ended)    row 2: 4, 4, 1
# column means: (3 + 2 + 4)/3 = 3,  (2 + 0 + 4)/3 = 2,  (1 + 1)/2 = 1: row 1 is left out of the last, not counted as 0
STEP_REWARDS = [[1.0, 1.0, 1.0], [2.0, 0.0, math.nan], [0.0, 3.0, 1.0]]
STEP_MASK = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
STEP_ADVANTAGES = double([[0, 0, 0], [-1, -2, 0], [1, 2, 0]])
# all valid returns 3 2 1 2 0 4 4 1: sum 17, squares 51, so the squared distances are 51 - 17^2/8 = 14.875
STEP_BATCH_VARIANCE = {0: 14.875 / 8, 1: 14.875 / 7}


RELATIVE_RETURNS = {
    "compared with the members active at that step": (STEP_REWARDS, STEP_MASK, [4, 4, 4], {}, STEP_ADVANTAGES),
    # column 0: 3, 2, 4 with divisor 2: std 1.  column 1: 2, 0, 4: std 2.  column 2: 1, 1: constant
    "divided by the std of their group's column": (
        STEP_REWARDS, STEP_MASK, [4, 4, 4], {"scale": "group"}, [[0, 0, 0], [-1, -1, 0], [1, 1, 0]],
    ),
    **{f"divided by the std of all valid steps, ddof {ddof}": (
        STEP_REWARDS, STEP_MASK, [4, 4, 4], {"scale": "batch", "std_ddof": ddof}, STEP_ADVANTAGES / math.sqrt(variance),
    ) for ddof, variance in STEP_BATCH_VARIANCE.items()},
    # returns 6, 5 | 3 | 14, 7; column 0 of group 0: mean 4.5; row 0 is alone in the last column, and group 1 is one row
    "0 for a step that is alone in its group": (
        [[1, 5], [3, math.nan], [7, 7]], torch.tensor([[True, True], [True, False], [True, True]]), [0, 0, 1], {},
        [[1.5, 0], [-1.5, 0], [0, 0]],
    ),
    # gamma .5: row 0: 1 + .5 * 2 = 2, 2;   row 1: 3 + .5 * 4 = 5, 4;   column means 3.5, 3
    "discounted": ([[1, 2], [3, 4]], torch.ones(2, 2, dtype=torch.bool), [1, 1], {"gamma": 0.5}, [[-1.5, -1], [1.5, 1]]),
    # row 0: 1 + 0 + 4 = 5, masked, 4;   row 1: 1 + 1 + 1 = 3, 2, 1
    "passed on by a masked step": ([[1, 9, 4], [1, 1, 1]], torch.tensor([[True, False, True], [True, True, True]]), [0, 0], {},
                                   [[1, 0, 1.5], [-1, 0, -1.5]]),
}  # fmt: skip


@pytest.mark.parametrize("case", RELATIVE_RETURNS)
def test_relative_returns_equal_hand_worked_values(case):
    rewards, mask, group_ids, settings, expected = RELATIVE_RETURNS[case]
    advantages = group_relative_returns(double(rewards), mask, ids(*group_ids), **{"scale": "none", **settings})
    torch.testing.assert_close(advantages, torch.as_tensor(expected).double(), rtol=1e-15, atol=0)


@pytest.mark.parametrize(("scale", "baseline"), [*itertools.product(SCALES, BASELINES)])
def test_a_batch_without_a_valid_step_has_no_advantages(scale, baseline):
    config = AdvantageConfig(baseline=baseline, scale=scale)
    batch = batch_of(double([[1, 2], [3, 4]]), ids(0, 0), torch.zeros(2, 2, dtype=torch.bool))
    assert AdvantageEstimator(config)(batch).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("gamma", "scale"), [*itertools.product([0.9, 1.0], SCALES)])
def test_rewards_under_the_mask_are_never_used(poison, gamma, scale):
    rewards = double([[1, 2, 0.5], [3, 0, 0], [2, 2, 0], [0, 0, 0]])
    mask = torch.tensor([[True, True, True], [True, False, False], [True, True, False], [False, False, False]])
    clean, poisoned = (
        group_relative_returns(given, mask, ids(0, 0, 1, 0), gamma=gamma, scale=scale)
        for given in (rewards, rewards.masked_fill(~mask, poison))
    )
    assert torch.equal(poisoned, clean)
    assert (clean[~mask] == 0).all()


@pytest.mark.parametrize(
    "group_ids",
    [
        ids(0, 0, 2**62, 2**62),
        *(ids(64, 64, 1, 1).to(dtype) for dtype in (torch.int8, torch.int16, torch.int32)),
        ids(-(2**63), -(2**63), 0, 0),
    ],
)
def test_relative_returns_keep_groups_of_any_id_separate(group_ids):
    # returns 4, 3, 2, 1 times 1, 3 | 5, 9; group means 2 and 7 times 4, 3, 2, 1
    rewards = double([[1] * 4, [3] * 4, [5] * 4, [9] * 4])
    advantages = group_relative_returns(rewards, torch.ones(4, 4, dtype=torch.bool), group_ids, scale="none")
    assert advantages.tolist() == [[-4, -3, -2, -1], [4, 3, 2, 1], [-8, -6, -4, -2], [8, 6, 4, 2]]


def test_rows_whose_steps_add_up_to_the_same_return_give_exactly_zero():
    # the same float32 rewards in four orders: equal returns but for rounding
    estimator = AdvantageEstimator(AdvantageConfig(credit="row", scale="group"))
    for seed in range(5):
        steps = torch.rand(500, generator=torch.Generator().manual_seed(seed))
        rewards = torch.stack([steps, steps.flip(0), steps.sort().values, steps.roll(100)])
        assert estimator(batch_of(rewards, ids(0, 0, 0, 0))).tolist() == [0, 0, 0, 0]


def test_the_estimator_uses_baseline_scale_ddof_and_eps_of_its_config():
    settings = {"baseline": "leave_one_out", "scale": "group", "std_ddof": 0, "std_eps": 0.5}
    advantages = AdvantageEstimator(AdvantageConfig(**settings))(batch_of(double(REWARDS), ids(*GROUP_IDS)))
    assert torch.equal(advantages, group_relative_advantages(double(REWARDS), ids(*GROUP_IDS), **settings))


def test_the_running_mean_excludes_the_current_batch():
    estimator = AdvantageEstimator(AdvantageConfig(baseline="global_mean"))
    # nothing seen yet: the batch's own mean, 2.  Then the mean of 1, 3 is 2.  Then that of 1, 3, 4, 6 is 3.5.
    assert estimator(batch_of(double([1, 3]), ids(0, 0))).tolist() == [-1, 1]
    assert estimator(batch_of(double([4, 6]), ids(0, 0))).tolist() == [2, 4]
    assert estimator(batch_of(double([0]), ids(0))).tolist() == [-3.5]
    estimator = AdvantageEstimator(AdvantageConfig(baseline="global_mean"))
    estimator(batch_of(double(STEP_REWARDS), ids(0, 0, 0), STEP_MASK))
    # eight valid returns, sum 17: mean 2.125
    assert estimator(batch_of(double([[1, 2]]), ids(0))).tolist() == [[3 - 2.125, 2 - 2.125]]


def test_group_statistics_count_groups_without_differences():
    # groups: [.3, .3] constant, [1, 2] not, [5] alone; 5 rows in 3 groups
    statistics = group_statistics(torch.tensor([0.3, 1.0, 0.3, 2.0, 5.0]), ids(1, -1, 1, -1, 8))
    counts = [statistics[f"group_stats/{name}"] for name in ("num_groups", "avg_group_size", "zero_variance_fraction")]
    assert len(statistics) == 3
    assert counts == pytest.approx([3, 5 / 3, 2 / 3])

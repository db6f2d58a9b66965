"""Advantages against numbers worked by hand, and against exact fractions."""

import itertools
import math
from fractions import Fraction
from statistics import median
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo import (
    AdvantageConfig,
    AdvantageEstimator,
    ExperienceBatch,
    group_relative_advantages,
    group_relative_returns,
)
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


def test_every_baseline_is_exact_on_ragged_interleaved_groups(subtests):
    assert set(CENTRED) == {*get_args(Baseline)}, "work a baseline out by hand in CENTRED"
    for baseline in CENTRED:
        with subtests.test(baseline=baseline):
            needs = NEEDS.get(baseline, {})
            advantages = group_relative_advantages(double(REWARDS), ids(*GROUP_IDS), baseline=baseline, **needs)
            assert advantages.tolist() == pytest.approx(CENTRED[baseline], abs=1e-14)


def test_every_baseline_is_exact_under_every_scale(subtests):
    for std_eps, scale_and_ddof, baseline in itertools.product([0.0, 0.5], VARIANCES, BASELINES):
        with subtests.test(std_eps=std_eps, scale_and_ddof=scale_and_ddof, baseline=baseline):
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


def test_every_scale_is_exact(subtests):
    assert set(SCALED_BY) == {*get_args(Scale)}, "work a scale out by hand in SCALED_BY"
    for scale, (first, second) in SCALED_BY.items():
        with subtests.test(scale=scale):
            rewards, group_ids = double([0, 1, 1, 1, 0, 0.5]), ids(0, 0, 0, 0, 1, 1)
            advantages = group_relative_advantages(rewards, group_ids, scale=scale, std_ddof=0)
            expected = [-0.75 / first, *[0.25 / first] * 3, -0.25 / second, 0.25 / second]
            assert advantages.tolist() == pytest.approx(expected, rel=1e-13)


def test_global_mean_uses_the_running_mean_if_there_is_one():
    advantages = group_relative_advantages(double(REWARDS), ids(*GROUP_IDS), baseline="global_mean", running_mean=3.0)
    assert advantages.tolist() == [-2, -1, 1, 4, 3, 7, 1, 9]


def exact_advantages(
    rewards: list[float], group_ids: list[int], baseline: str, scale: str, ddof: int, running_mean: float | None
) -> list[float]:
    """A = (R - b) / s row by row, in fractions up to the square root."""
    values = [Fraction(r) for r in rewards]
    batch_mean = sum(values) / len(values)

    def standard_deviation(over: list[Fraction]) -> float:
        mean = sum(over) / len(over)
        return math.sqrt(sum((v - mean) ** 2 for v in over) / max(len(over) - ddof, 1))

    result = []
    for n, value in enumerate(values):
        group = [v for v, g in zip(values, group_ids, strict=True) if g == group_ids[n]]
        others = [v for m, v in enumerate(values) if group_ids[m] == group_ids[n] and m != n]
        b = {
            "group_mean": sum(group) / len(group),
            "group_median": median(group),
            "leave_one_out": sum(others) / len(others) if others else value,
            "global_mean": batch_mean if running_mean is None else Fraction(running_mean),
            "none": 0,
        }[baseline]
        s = {"none": 1.0, "group": standard_deviation(group), "batch": standard_deviation(values)}[scale]
        result.append(float(value - b) / s if s else 0.0)
    return result


@settings(max_examples=50)
@given(
    rows=st.lists(st.tuples(st.integers(-40, 40), st.integers(-2, 2)), min_size=1, max_size=12),
    baseline=st.sampled_from(BASELINES),
    scale=st.sampled_from(SCALES),
    ddof=st.sampled_from([0, 1]),
    running_mean=st.none() | st.integers(-3, 3).map(float),
)
def test_advantages_agree_with_exact_fractions(rows, baseline, scale, ddof, running_mean):
    rewards, group_ids = [r / 8 for r, _ in rows], [g for _, g in rows]
    advantages = group_relative_advantages(
        double(rewards), ids(*group_ids), baseline=baseline, scale=scale, std_ddof=ddof, running_mean=running_mean
    )
    expected = exact_advantages(rewards, group_ids, baseline, scale, ddof, running_mean)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_groups_that_differ_by_rounding_only_give_exactly_zero(subtests):
    cases = {
        "float64 sum": double([0.1 + 0.2, 0.3]),
        "float64 product": double([0.1 * 3, 0.3, 0.3]),
        "float32 neighbours": torch.nextafter(torch.tensor([0.9, 0.9, 0.9]), torch.tensor([0.9, 1.0, 0.0])),
        "float32 sum": torch.tensor([0.1, 0.7]) + torch.tensor([0.7, 0.1]),
    }
    for (case, rewards), scale, baseline in itertools.product(cases.items(), ["none", "group"], RELATIVE):
        with subtests.test(case=case, scale=scale, baseline=baseline):
            group_ids = torch.zeros(len(rewards), dtype=torch.int64)
            advantages = group_relative_advantages(rewards, group_ids, baseline=baseline, scale=scale)
            assert (advantages == 0).all()


def test_a_small_difference_is_not_treated_as_rounding():
    # 0.3 and 0.3 + 1e-5 in float32: standardised with n, any two different values are -1 and 1
    advantages = group_relative_advantages(torch.tensor([0.3, 0.30001]), ids(0, 0), scale="group", std_ddof=0)
    assert advantages.tolist() == pytest.approx([-1, 1], abs=1e-5)


def test_small_differences_between_large_rewards_are_kept():
    # 1e8 + {0, 1, 2, 3}: deviations -1.5, -.5, .5, 1.5; variance (2.25 + .25) 2 / 3 = 5/3
    rewards = double([1e8, 1e8 + 1, 1e8 + 2, 1e8 + 3])
    assert group_relative_advantages(rewards, ids(0, 0, 0, 0)).tolist() == [-1.5, -0.5, 0.5, 1.5]
    expected = [d / math.sqrt(5 / 3) for d in (-1.5, -0.5, 0.5, 1.5)]
    for scale in ("group", "batch"):
        advantages = group_relative_advantages(rewards, ids(0, 0, 0, 0), scale=scale)
        assert advantages.tolist() == pytest.approx(expected, rel=1e-12)


def test_differences_between_large_float32_rewards_are_exact():
    # the float32 neighbours of 1e8 are 8 apart; mean 1e8 + 12
    advantages = group_relative_advantages(torch.tensor([1e8, 1e8 + 8, 1e8 + 16, 1e8 + 24]), ids(0, 0, 0, 0))
    assert advantages.tolist() == [-12, -4, 4, 12]


def test_huge_rewards_agree_with_exact_fractions(subtests):
    for dtype, scale, baseline in itertools.product([torch.float32, torch.float64], SCALES, BASELINES):
        with subtests.test(dtype=dtype, scale=scale, baseline=baseline):
            rewards = torch.tensor([1e30, -2e30, 3e30, 0.5, 1e30, 1e29], dtype=dtype)
            group_ids = [0, 0, 0, 1, 1, 1]
            advantages = group_relative_advantages(rewards, ids(*group_ids), baseline=baseline, scale=scale)
            expected = exact_advantages(rewards.tolist(), group_ids, baseline, scale, 1, None)
            assert advantages.tolist() == pytest.approx(expected, rel=1e-6 if dtype is torch.float32 else 1e-12)


def test_advantages_have_the_dtype_of_the_rewards_which_stay_unchanged(subtests):
    for dtype in [torch.float32, torch.float64]:
        with subtests.test(dtype=dtype):
            rewards = torch.tensor([1.0, 3.0], dtype=dtype)
            assert group_relative_advantages(rewards, ids(0, 0), scale="batch").dtype == dtype
            assert rewards.tolist() == [1.0, 3.0]


def test_group_ids_may_be_of_any_integer_type(subtests):
    for dtype in [torch.int8, torch.int16, torch.int32, torch.int64]:
        with subtests.test(dtype=dtype):
            # groups 3 and 1, interleaved, the larger number first: means 2 and 7
            advantages = group_relative_advantages(double([1, 5, 3, 9]), ids(3, 1, 3, 1).to(dtype))
            assert advantages.tolist() == [-1, -2, 1, 2]


def test_group_ids_may_be_far_apart():
    # hashes: from each to the next, and from the last to the first, the difference overflows upwards or is positive
    first, second, third = 0, 6 * 10**18, -6 * 10**18
    group_ids = ids(first, second, third, first, second, third)
    advantages = group_relative_advantages(double([1, 5, 20, 3, 9, 30]), group_ids)
    assert advantages.tolist() == [-1, -2, -5, 1, 2, 5]


# Returns to go, gamma 1:  row 0: 3, 2, 1    row 1: 2, 0 (ended)    row 2: 4, 4, 1
# column means: (3 + 2 + 4)/3 = 3,  (2 + 0 + 4)/3 = 2,  (1 + 1)/2 = 1: row 1 is left out of the last, not counted as 0
STEP_REWARDS = [[1.0, 1.0, 1.0], [2.0, 0.0, math.nan], [0.0, 3.0, 1.0]]
STEP_MASK = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
STEP_ADVANTAGES = [[0, 0, 0], [-1, -2, 0], [1, 2, 0]]
# all valid returns 3 2 1 2 0 4 4 1: sum 17, squares 51, so the squared distances are 51 - 17^2/8 = 14.875
STEP_BATCH_VARIANCE = {0: 14.875 / 8, 1: 14.875 / 7}


def test_returns_are_compared_with_the_members_active_at_that_step():
    advantages = group_relative_returns(double(STEP_REWARDS), STEP_MASK, ids(4, 4, 4), scale="none")
    assert advantages.tolist() == STEP_ADVANTAGES


def test_relative_returns_can_be_divided_by_the_std_of_all_valid_steps(subtests):
    for ddof in [0, 1]:
        with subtests.test(ddof=ddof):
            advantages = group_relative_returns(
                double(STEP_REWARDS), STEP_MASK, ids(4, 4, 4), scale="batch", std_ddof=ddof
            )
            std = math.sqrt(STEP_BATCH_VARIANCE[ddof])
            for row, expected in zip(advantages.tolist(), STEP_ADVANTAGES, strict=True):
                assert row == pytest.approx([a / std for a in expected])


def test_relative_returns_can_be_divided_by_the_std_of_their_groups_column():
    # column 0: 3, 2, 4 with divisor 2: std 1.  column 1: 2, 0, 4: std 2.  column 2: 1, 1: constant
    advantages = group_relative_returns(double(STEP_REWARDS), STEP_MASK, ids(4, 4, 4), scale="group")
    assert advantages.tolist() == [[0, 0, 0], [-1, -1, 0], [1, 1, 0]]


def test_a_step_that_is_alone_in_its_group_gets_zero():
    # group 0 keeps row 0 alone in the last column; group 1 is one row
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    rewards = double([[1, 5], [3, math.nan], [7, 7]])
    # returns 6, 5 | 3 | 14, 7; column 0 of group 0: mean 4.5
    advantages = group_relative_returns(rewards, mask, ids(0, 0, 1), scale="none")
    assert advantages.tolist() == [[1.5, 0], [-1.5, 0], [0, 0]]


def test_relative_returns_with_a_discount_equal_hand_worked_values():
    # gamma .5: row 0: 1 + .5 * 2 = 2, 2;   row 1: 3 + .5 * 4 = 5, 4;   column means 3.5, 3
    advantages = group_relative_returns(
        double([[1, 2], [3, 4]]), torch.ones(2, 2, dtype=torch.bool), ids(1, 1), gamma=0.5, scale="none"
    )
    assert advantages.tolist() == [[-1.5, -1], [1.5, 1]]


def test_a_masked_step_passes_later_returns_on():
    # row 0: 1 + 0 + 4 = 5, masked, 4;   row 1: 1 + 1 + 1 = 3, 2, 1
    mask = torch.tensor([[True, False, True], [True, True, True]])
    advantages = group_relative_returns(double([[1, 9, 4], [1, 1, 1]]), mask, ids(0, 0), scale="none")
    assert advantages.tolist() == [[1, 0, 1.5], [-1, 0, -1.5]]


def test_a_batch_without_a_valid_step_has_no_advantages(subtests):
    for scale, baseline in itertools.product(SCALES, BASELINES):
        with subtests.test(scale=scale, baseline=baseline):
            config = AdvantageConfig(baseline=baseline, scale=scale)
            batch = batch_of(double([[1, 2], [3, 4]]), ids(0, 0), torch.zeros(2, 2, dtype=torch.bool))
            assert AdvantageEstimator(config)(batch).tolist() == [[0, 0], [0, 0]]


def test_rewards_under_the_mask_are_never_used(subtests):
    for poison, gamma, scale in itertools.product([math.nan, math.inf, -math.inf], [0.9, 1.0], SCALES):
        with subtests.test(poison=poison, gamma=gamma, scale=scale):
            rewards = double([[1, 2, 0.5], [3, 0, 0], [2, 2, 0], [0, 0, 0]])
            mask = torch.tensor([[True, True, True], [True, False, False], [True, True, False], [False, False, False]])
            poisoned = rewards.masked_fill(~mask, poison)
            expected = group_relative_returns(rewards, mask, ids(0, 0, 1, 0), gamma=gamma, scale=scale)
            assert torch.equal(
                group_relative_returns(poisoned, mask, ids(0, 0, 1, 0), gamma=gamma, scale=scale), expected
            )
            assert (expected[~mask] == 0).all()


def test_relative_returns_keep_groups_of_any_id_separate(subtests):
    for group_ids in [ids(0, 0, 2**62, 2**62), ids(0, 0, 64, 64).to(torch.int8), ids(-(2**63), -(2**63), 0, 0)]:
        with subtests.test(group_ids=group_ids):
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
    config = AdvantageConfig(baseline="leave_one_out", scale="group", std_ddof=0, std_eps=0.5)
    advantages = AdvantageEstimator(config)(batch_of(double(REWARDS), ids(*GROUP_IDS)))
    expected = [
        0 if group == 9 else centred / (math.sqrt(14) + 0.5)  # both variances are 14: see VARIANCES
        for centred, group in zip(CENTRED["leave_one_out"], GROUP_IDS, strict=True)
    ]
    assert advantages.tolist() == pytest.approx(expected)


def test_the_running_mean_excludes_the_current_batch():
    estimator = AdvantageEstimator(AdvantageConfig(baseline="global_mean"))
    # nothing seen yet: the batch's own mean, 2.  Then the mean of 1, 3 is 2.  Then that of 1, 3, 4, 6 is 3.5.
    assert estimator(batch_of(double([1, 3]), ids(0, 0))).tolist() == [-1, 1]
    assert estimator(batch_of(double([4, 6]), ids(0, 0))).tolist() == [2, 4]
    assert estimator(batch_of(double([0]), ids(0))).tolist() == [-3.5]


def test_the_running_mean_of_rewards_per_step_is_over_valid_returns():
    estimator = AdvantageEstimator(AdvantageConfig(baseline="global_mean"))
    estimator(batch_of(double(STEP_REWARDS), ids(0, 0, 0), STEP_MASK))
    # eight valid returns, sum 17: mean 2.125
    assert estimator(batch_of(double([[1, 2]]), ids(0))).tolist() == [[3 - 2.125, 2 - 2.125]]


def test_other_baselines_do_not_depend_on_earlier_batches(subtests):
    for baseline in [*RELATIVE, "none"]:
        with subtests.test(baseline=baseline):
            used, fresh = (AdvantageEstimator(AdvantageConfig(baseline=baseline)) for _ in range(2))
            used(batch_of(double([100, 300]), ids(0, 0)))
            batch = batch_of(double(REWARDS), ids(*GROUP_IDS))
            assert torch.equal(used(batch), fresh(batch))


def test_group_statistics_count_groups_without_differences():
    # groups: [.3, .3] constant, [1, 2] not, [5] alone; 5 rows in 3 groups
    statistics = group_statistics(torch.tensor([0.3, 1.0, 0.3, 2.0, 5.0]), ids(1, -1, 1, -1, 8))
    assert statistics == {
        "group_stats/num_groups": 3.0,
        "group_stats/avg_group_size": pytest.approx(5 / 3),
        "group_stats/zero_variance_fraction": pytest.approx(2 / 3),
    }

"""Advantages of rows and steps: baselines and scales, several rewards, dead groups, process supervision, states, a critic."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from grpo import ConfigError, RewardError, group_relative_advantages
from grpo._advantages.groups import Groups, batch_std, has_advantage, live_rows, mean_and_std
from grpo._advantages.reward_moments import RewardMoments
from grpo._advantages.rows import MAX_BETA_WEIGHT, decoupled_advantages
from grpo._advantages.steps import (
    discounted_returns,
    generalized_advantages,
    process_supervised_advantages,
    state_group_advantages,
    step_rewards,
)
from grpo.types import CONTINUES
from tests.support.objective_inputs import double

OWN_BASELINES = ["group_mean", "group_median", "leave_one_out", "length_weighted", "max_at_k"]
SCALES = ["none", "group", "batch", "whiten", "beta", "mean"]


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


def what_a_baseline_needs(baseline: str, num_rows: int) -> dict:
    return {"max_at_k": {"k": 2}, "length_weighted": {"lengths": torch.arange(num_rows) % 5 + 1}}.get(baseline, {})


def test_rows_without_steps_weigh_0_and_a_group_of_them_uses_the_plain_mean():
    # group 0: only the second counts: b = 4.   group 1: no lengths at all: b = mean = 2
    advantages = group_relative_advantages(
        double([1, 4, 1, 3]), ids(0, 0, 1, 1), baseline="length_weighted", lengths=torch.tensor([0, 1, 0, 0])
    )
    assert advantages.tolist() == [-3, 0, -1, 1]


@pytest.mark.parametrize(("baseline", "needs"), [("length_weighted", "lengths"), ("max_at_k", "k")])
def test_a_baseline_without_what_it_needs_is_an_error(baseline, needs):
    with pytest.raises(ConfigError, match=rf"baseline='{baseline}' needs {needs}; got None"):
        group_relative_advantages(double([1, 2]), ids(0, 0), baseline=baseline)


def max_at_k_by_subsets(rewards: list[float], k: int) -> list[float]:
    """n / C(n, k) sum over subsets of k rows that contain i of (max with i - max without i)."""
    n = len(rewards)
    k = min(k, n)
    subsets = [set(subset) for subset in itertools.combinations(range(n), k)]
    return [
        n / len(subsets) * sum(max(rewards[j] for j in s) - max(rewards[j] for j in s - {i}) for s in subsets if i in s)
        for i in range(n)
    ]


@pytest.mark.parametrize("k", [2, 3, 5, 7, 12])
def test_max_at_k_advantages_equal_an_enumeration_of_all_subsets(k):
    random = np.random.default_rng(k)
    group_ids = np.repeat(range(4), [2, 3, 7, 8])  # a group smaller than k is taken with k = n
    for rewards in (random.normal(size=20), random.integers(0, 3, 20) * 1.0, random.integers(0, 2, 20) * 1.0):
        order = random.permutation(20)
        rewards, ids_in_order = rewards[order], group_ids[order]
        advantages = group_relative_advantages(
            torch.from_numpy(rewards), torch.from_numpy(ids_in_order), baseline="max_at_k", k=k
        )
        expected = np.empty(20)
        for group in range(4):
            rows = ids_in_order == group
            expected[rows] = max_at_k_by_subsets(rewards[rows].tolist(), k)
        np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("k", [2, 512, 1000])
def test_max_at_k_of_a_large_group_is_finite(k):
    # one right answer among 1,024: it is in k/n of all subsets and adds 1 in each: n * k/n = k
    rewards = torch.zeros(1024)
    rewards[17] = 1.0
    advantages = group_relative_advantages(rewards, torch.zeros(1024, dtype=torch.int64), baseline="max_at_k", k=k)
    assert (advantages[17].item(), (advantages != 0).sum()) == (pytest.approx(k, rel=1e-6), 1)


def enumerated(num_actions: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Every sample of `num_rows` actions, each a group of its own: actions and group ids, row after row."""
    samples = torch.tensor(list(itertools.product(range(num_actions), repeat=num_rows)))
    return samples, torch.arange(len(samples)).repeat_interleave(num_rows)


def expected_estimate(log_probs: Tensor, samples: Tensor, advantages: Tensor, theta: Tensor) -> Tensor:
    """E over all samples of mean_i A_i grad log pi(a_i)."""
    of_rows = log_probs[samples]
    estimate = (of_rows.detach().sum(1).exp() * (advantages.view_as(samples) * of_rows).mean(1)).sum()
    return torch.autograd.grad(estimate, theta, retain_graph=True)[0]


def test_whitened_advantages_equal_hand_worked_values_and_dead_groups_count_in_the_batch_statistics():
    # centred on medians 0 and 3:  0 0 3 | -2 2: mean .6; deviations -.6 -.6 2.4 -2.6 1.4, squares sum to 15.2, over 4: 3.8
    rewards, group_ids = double([0, 0, 3, 1, 5]), ids(0, 0, 0, 1, 1)
    advantages = group_relative_advantages(rewards, group_ids, baseline="group_median", scale="whiten")
    assert advantages.tolist() == pytest.approx([d / math.sqrt(3.8) for d in (-0.6, -0.6, 2.4, -2.6, 1.4)], rel=1e-14)
    # centred on means: 0 0 | -1 1; squares 2 over 4 - 1: 2/3
    advantages = group_relative_advantages(double([5, 5, 0, 2]), ids(0, 0, 1, 1), scale="whiten")
    assert advantages.tolist() == pytest.approx([0, 0, -math.sqrt(1.5), math.sqrt(1.5)], rel=1e-14)
    assert advantages[:2].tolist() == [0, 0]


def test_eps_is_added_to_the_standard_deviation_or_the_mean_that_divides():
    # deviations -1, 1: std with n - 1 sqrt 2;  (1 - .5)/(.5 + .5)
    whitened = group_relative_advantages(double([0, 2]), ids(0, 0), scale="whiten", std_eps=0.5)
    assert whitened.tolist() == pytest.approx([-1 / (math.sqrt(2) + 0.5), 1 / (math.sqrt(2) + 0.5)])
    by_mean = group_relative_advantages(double([1, 0]), ids(0, 0), scale="mean", std_eps=0.5)
    assert by_mean.tolist() == pytest.approx([0.5, -0.5])


def test_advantages_divided_by_the_mean_equal_hand_worked_values():
    # means 1/2, 1/4, 0 (all wrong), 1 (all right), -2
    rewards = double([1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, -1, -3])
    advantages = group_relative_advantages(rewards, ids(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4), scale="mean")
    assert advantages.tolist() == pytest.approx([1, -1, -1, 1, 3, -1, -1, -1, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("num_rows", [2, 3, 5])
def test_division_by_the_mean_climbs_the_truncated_log_likelihood(num_rows):
    """A right and two wrong actions, p the probability of the right one, all 3^n groups.

    With n rows the expected estimate is the gradient of -sum over k < n of (1 - p)^k / k, which is log p cut off after n - 1
    terms (arXiv:2602.02710): d/dp = 1 + (1 - p) + ... + (1 - p)^(n - 2).
    """
    theta = double([-0.5, 0.4, 0.1]).requires_grad_()
    log_probs = theta.log_softmax(0)
    samples, group_ids = enumerated(3, num_rows)
    advantages = group_relative_advantages(double([1, 0, 0])[samples].flatten(), group_ids, scale="mean")
    p = log_probs[0].exp()
    (expected,) = torch.autograd.grad(-sum((1 - p) ** k / k for k in range(1, num_rows)), theta, retain_graph=True)
    found = expected_estimate(log_probs, samples, advantages, theta)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def weights_by_scipy(means: np.ndarray, ddof: int) -> np.ndarray:
    """1 / f(p; 1 + a/3, 1 + b/3), Beta(a, b) having the mean and variance of the groups' means."""
    mean, variance = means.mean(), means.var(ddof=ddof)
    common = mean * (1 - mean) / variance - 1
    alpha, beta = max(1 + common * mean / 3, 1), max(1 + common * (1 - mean) / 3, 1)
    with np.errstate(divide="ignore"):
        return np.minimum(1 / scipy.stats.beta.pdf(means, alpha, beta), MAX_BETA_WEIGHT)


@pytest.mark.parametrize("std_ddof", [0, 1])
@pytest.mark.parametrize(
    "groups",
    [
        [[1, 0, 0, 1], [1, 0, 0, 0], [1, 1, 1, 0]],
        [[1, 0, 0, 1], [0, 0], [1, 1, 1], [1, 0, 0]],  # two dead groups, which count in the fit
        [[0.2, 0.4, 0.9], [0.0, 0.05], [0.7, 0.8, 0.6, 0.5], [1.0, 0.0]],
    ],
)
def test_beta_weighted_advantages_equal_scipys_fit(groups, std_ddof):
    rewards, group_ids = double(list(itertools.chain(*groups))), np.repeat(range(len(groups)), list(map(len, groups)))
    advantages = group_relative_advantages(rewards, torch.from_numpy(group_ids), scale="beta", std_ddof=std_ddof)
    means = np.array([np.mean(group) for group in groups])
    weights = weights_by_scipy(means, std_ddof)
    expected = [w * (r - m) for group, m, w in zip(groups, means, weights, strict=True) for r in group]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize(("low", "high"), [(-1.1e-6, 1), (0, 1 + 1.1e-6)])
def test_rewards_that_rounding_moved_out_of_0_to_1_and_no_others_are_accepted_under_beta(low, high):
    def advantages(low, high):
        return group_relative_advantages(double([low, 0.5, high, 0.5, high, high]), ids(0, 0, 1, 1, 2, 2), scale="beta")

    torch.testing.assert_close(advantages(-1e-6, 1 + 1e-6), advantages(0, 1), rtol=1e-5, atol=0)
    with pytest.raises(RewardError, match=r"rewards in \[0, 1\]"):
        advantages(low, high)


@pytest.mark.parametrize(
    ("rewards", "group_ids", "expected"),
    [
        ([1, 0, 0, 1], [3, 3, 3, 3], [0.5, -0.5, -0.5, 0.5]),  # a single group
        ([1, 0, 0.75, 0.25], [0, 0, 1, 1], [0.5, -0.5, 0.25, -0.25]),  # equal means
        # means .01, .99, variance with n - 1 .4802 > m (1 - m) = .25: alpha = beta = 1, a flat density
        ([0, 0.02, 0.98, 1], [0, 0, 1, 1], [-0.01, 0.01, -0.01, 0.01]),
    ],
)
def test_group_means_that_no_beta_fits_are_not_weighted(rewards, group_ids, expected):
    advantages = group_relative_advantages(double(rewards), ids(*group_ids), scale="beta")
    assert advantages.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_weight_of_a_group_far_from_the_others_is_bounded():
    # thirty groups of mean 1/2 and one of mean .001: so thin a density that its inverse would pass a million
    rewards = double([[0.0, 1.0]] * 30 + [[0.0, 0.002]])
    assert weights_by_scipy(rewards.mean(1).numpy(), 1)[-1] == MAX_BETA_WEIGHT
    advantages = group_relative_advantages(rewards.flatten(), torch.arange(31).repeat_interleave(2), scale="beta")
    assert advantages[-2:].tolist() == pytest.approx([-0.001 * MAX_BETA_WEIGHT, 0.001 * MAX_BETA_WEIGHT])


@pytest.mark.parametrize(("scale", "baseline", "reward"), list(itertools.product(SCALES, OWN_BASELINES, [0.3, 0.9])))
def test_dead_groups_of_any_size_get_exactly_0(scale, baseline, reward):
    """float32 rewards: dead groups of 1 to 1,024 rows, the last of which differs by rounding, and one live group."""
    sizes = torch.tensor([1, 2, 3, 7, 64, 1000, 1024, 3, 4])
    rewards = torch.cat([torch.full((int(sizes.sum()) - 4,), reward), torch.tensor([0.1, 0.8, 0.4, 0.0])])
    rewards[-6] = rewards[-6].nextafter(torch.tensor(1.0))
    group_ids, order = torch.arange(9).repeat_interleave(sizes), torch.randperm(len(rewards))
    needs = what_a_baseline_needs(baseline, len(rewards))
    advantages = group_relative_advantages(rewards[order], group_ids[order], baseline=baseline, scale=scale, **needs)
    is_alive = group_ids[order] == 8
    assert (advantages[~is_alive] == 0).all()
    assert (advantages[is_alive] != 0).any()
    assert advantages.isfinite().all()
    for size in (1, 2, 1024):  # a dead group that is the whole batch
        dead, needs = torch.full((size,), 0.9), what_a_baseline_needs(baseline, size)
        alone = group_relative_advantages(
            dead, torch.zeros(size, dtype=torch.int64), baseline=baseline, scale=scale, **needs
        )
        assert (alone == 0).all()


@pytest.mark.parametrize(
    ("baseline", "scale", "size", "reward"),
    list(itertools.product(["none", "global_mean"], ["group", "batch", "whiten"], [2, 7, 1024], [0.3, 0.9])),
)
def test_equal_rewards_have_no_spread_under_any_baseline(baseline, scale, size, reward):
    """Also where one of them differs in its last digit."""
    rewards, group_ids = torch.full((size,), reward), torch.arange(size) % 2
    for last in (rewards[-1], rewards[-1].nextafter(torch.tensor(1.0))):
        rewards[-1] = last
        advantages = group_relative_advantages(rewards, group_ids, baseline=baseline, scale=scale, running_mean=0.25)
        assert (advantages == 0).all()


def test_under_an_absolute_baseline_a_dead_group_keeps_its_advantage():
    rewards, group_ids = double([1, 1, 0, 2]), ids(0, 0, 1, 1)
    assert group_relative_advantages(rewards, group_ids, baseline="none").tolist() == [1, 1, 0, 2]
    by_mean = group_relative_advantages(rewards, group_ids, baseline="global_mean", running_mean=0.5)
    assert by_mean.tolist() == [0.5, 0.5, -0.5, 1.5]


@pytest.mark.parametrize(("std_eps", "std_ddof"), list(itertools.product([0.0, 0.1], [0, 1])))
def test_decoupled_advantages_equal_numpys(std_eps, std_ddof):
    random, group_ids = np.random.default_rng(2), np.array([3, 0, 3, 1, 1, 0, 3, 1])
    parts = {"a": random.normal(size=8), "b": 100 * random.normal(size=8), "c": random.uniform(size=8)}
    weights = {"a": 0.5, "c": 3.0}  # b weighs 1
    total = np.zeros(8)
    for name, rewards in parts.items():
        for group in (0, 1, 3):
            rows = group_ids == group
            deviations = rewards[rows] - rewards[rows].mean()
            total[rows] += weights.get(name, 1.0) * deviations / (rewards[rows].std(ddof=std_ddof) + std_eps)
    expected = (total - total.mean()) / (total.std(ddof=std_ddof) + std_eps)
    tensors = {name: torch.from_numpy(rewards) for name, rewards in parts.items()}
    settings = {"std_ddof": std_ddof, "std_eps": std_eps}
    advantages = decoupled_advantages(tensors, weights, torch.from_numpy(group_ids), **settings)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-12)


def test_a_group_is_dead_only_if_every_reward_is_constant_in_it():
    # group 0: differs in b only; group 1: in neither; group 2: alone
    parts = {"a": torch.tensor([0.3, 0.3, 0.3, 0.3, 5.0]), "b": torch.tensor([0.0, 1.0, 0.9, 0.9, 2.0])}
    advantages = decoupled_advantages(parts, {}, ids(0, 0, 1, 1, 2))
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
    assert decoupled_advantages({"a": a, "b": 1 - a}, {}, ids(0, 0, 0, 1, 1, 1)).tolist() == [0] * 6


def test_decoupled_advantages_leave_out_rewards_that_are_nan():
    # a of rows 0 and 1 alone: (1, 3) - 2 over sqrt(2) = -+ 1/sqrt(2).   b: (0, 0, 0, 4) - 1 over 2 = (-1/2, -1/2, -1/2, 3/2)
    # c applies to none.   S = (-.707 - .5, .707 - .5, -.5, 1.5), mean 0, std S with ddof 1
    nan = math.nan
    parts = {"a": double([1, 3, nan, nan]), "b": double([0, 0, 0, 4]), "c": double([nan] * 4)}
    total = np.array([-(0.5**0.5) - 0.5, 0.5**0.5 - 0.5, -0.5, 1.5])
    expected = total / math.sqrt((total**2).sum() / 3)
    torch.testing.assert_close(decoupled_advantages(parts, {}, ids(0, 0, 0, 0)), torch.from_numpy(expected))


# Groups of rows and their statistics, and which rows there is something to learn from


INTERLEAVED = ids(4, -1, 4, 7, -1, 4)
"""In group order: rows 1 4 | 0 2 5 | 3."""


@pytest.mark.parametrize(
    ("values", "ddof", "expected"),
    [([3, 1, 2], 1, (2, 1)), ([3, 1], 0, (2, 1)), ([5], 1, (5, 0)), ([1e200, 3e200], 0, (2e200, 1e200))],
)
def test_mean_and_std_equal_hand_worked_values(values, ddof, expected):
    assert mean_and_std(np.array(values, dtype=float), ddof) == pytest.approx(expected, rel=1e-15, abs=0)


def test_a_standard_deviation_over_equal_values_is_infinite():
    assert batch_std(np.array([1.0, 1.0]), 1, 0.0) == math.inf
    assert batch_std(np.array([1.0, 1.5]), 1, 0.5) == math.inf
    # deviations -1/4, 1/4: squares 1/8 over 1
    assert batch_std(np.array([1.0, 1.5]), 1, 0.4) == pytest.approx(math.sqrt(1 / 8), rel=1e-15)


@pytest.mark.parametrize("sizes", [(1e200, 1e-9), (1e-300, 1e300), (1.0, 0.0)])
def test_groups_of_very_different_sizes_keep_their_own_standard_deviations(sizes):
    values = np.array([0.0, 2 * sizes[0], 0.0, 2 * sizes[1]])
    expected = [size or math.inf for size in sizes]
    assert Groups.of(ids(0, 0, 1, 1)).stds(values, 0, 0.0).tolist() == pytest.approx(expected, rel=1e-15, abs=0)


def test_rows_are_live_where_rewards_of_their_group_differ_beyond_rounding_at_any_step():
    # group 1: .3 and its neighbour, a rounding error; group 0: 1, 2; group 5: alone
    rewards = torch.tensor([0.3, 1.0, 0.3, 2.0, 7.0, 1.0])
    rewards[2] = rewards[2].nextafter(torch.tensor(1.0))
    assert live_rows(rewards, ids(1, 0, 1, 0, 5, 0)).tolist() == [False, True, False, True, False, True]
    rewards = double([[1, 0], [1, 2], [1, 0], [3, 3]])
    assert live_rows(rewards, ids(0, 1, 0, 1)).tolist() == [False, True, False, True]


def test_a_row_has_an_advantage_where_any_step_has_one_and_makes_its_group_live():
    assert has_advantage(double([0, -2, 0.5])).tolist() == [False, True, True]
    assert has_advantage(double([[0, 0], [0, -1], [2, 0]])).tolist() == [False, True, True]
    assert has_advantage(torch.zeros(2, 0)).tolist() == [False, False]
    groups = Groups.of(INTERLEAVED)
    assert groups.num_live_rows(double([0, 0, 1, 0, 0, 0])) == 3
    assert groups.num_live_rows(double([[0, 0], [0, 0], [0, 0], [0, 1], [1, 0], [0, 0]])) == 3
    assert groups.num_live_rows(torch.zeros(6)) == 0


def moments_of(*batches: torch.Tensor) -> RewardMoments:
    moments = RewardMoments()
    for rewards in batches:
        moments.add(rewards)
    return moments


def test_without_any_reward_the_mean_is_none_and_the_std_is_0():
    assert moments_of().mean is None
    assert moments_of(torch.zeros(0)).mean is None
    assert moments_of().std == 0


@pytest.mark.parametrize("sizes", [[30], [1, 29], [10, 1, 19], [15, 15]])
def test_batches_of_any_size_give_the_moments_of_all_rewards(sizes):
    rewards = 100 + torch.randn(30, dtype=torch.float64)
    moments = moments_of(*rewards.split(sizes))
    assert moments.mean == pytest.approx(rewards.mean().item(), rel=1e-14)
    assert moments.std == pytest.approx(rewards.std(correction=0).item(), rel=1e-11)


@pytest.mark.parametrize("value", [0.3, 0.9, -0.7])
def test_equal_rewards_have_no_standard_deviation(value):
    same = torch.full((7,), value)
    near = same.nextafter(torch.tensor(1.0))
    assert moments_of(same, same[:3], near).std == 0


NAN = math.nan

BY_MEAN = partial(group_relative_advantages, baseline="group_mean", scale="none")
BY_STD = partial(group_relative_advantages, baseline="group_mean", scale="group")


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

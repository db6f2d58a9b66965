"""One advantage per row: the special baselines and scales, several rewards, and the groups that give exactly 0.

Means, medians, leave-one-out and standard deviations are tested in test_advantage_estimator.py.
"""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from grpo import ConfigError, RewardError, group_relative_advantages
from grpo._advantages.rows import MAX_BETA_WEIGHT
from tests.support.objective_inputs import double

OWN_BASELINES = ["group_mean", "group_median", "leave_one_out", "length_weighted", "max_at_k"]
SCALES = ["none", "group", "batch", "whiten", "beta", "mean"]


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


def what_a_baseline_needs(baseline: str, num_rows: int) -> dict:
    if baseline == "max_at_k":
        return {"k": 2}
    return {"lengths": torch.arange(num_rows) % 5 + 1} if baseline == "length_weighted" else {}


# length_weighted


def test_rows_without_steps_weigh_0_and_a_group_of_them_uses_the_plain_mean():
    # group 0: only the second counts: b = 4.   group 1: no lengths at all: b = mean = 2
    advantages = group_relative_advantages(
        double([1, 4, 1, 3]), ids(0, 0, 1, 1), baseline="length_weighted", lengths=torch.tensor([0, 1, 0, 0])
    )
    assert advantages.tolist() == [-3, 0, -1, 1]


def test_a_baseline_without_what_it_needs_is_an_error(subtests):
    for baseline, needs in [("length_weighted", "lengths"), ("max_at_k", "k")]:
        with (
            subtests.test(baseline=baseline, needs=needs),
            pytest.raises(ConfigError, match=rf"baseline='{baseline}' needs {needs}; got None"),
        ):
            group_relative_advantages(double([1, 2]), ids(0, 0), baseline=baseline)


# max_at_k


def max_at_k_by_subsets(rewards: list[float], k: int) -> list[float]:
    """n / C(n, k) sum over subsets of k rows that contain i of (max with i - max without i)."""
    n = len(rewards)
    k = min(k, n)
    subsets = [set(subset) for subset in itertools.combinations(range(n), k)]
    return [
        n / len(subsets) * sum(max(rewards[j] for j in s) - max(rewards[j] for j in s - {i}) for s in subsets if i in s)
        for i in range(n)
    ]


def test_max_at_k_advantages_equal_an_enumeration_of_all_subsets(subtests):
    for k in [2, 3, 5, 7, 12]:
        with subtests.test(k=k):
            random = np.random.default_rng(k)
            sizes = [2, 3, 7, 8]  # a group smaller than k is taken with k = n
            group_ids = np.concatenate([[group] * size for group, size in enumerate(sizes)])
            for rewards in (
                random.normal(size=20),
                random.integers(0, 3, size=20).astype(float),
                random.integers(0, 2, 20) * 1.0,
            ):
                order = random.permutation(20)
                advantages = group_relative_advantages(
                    torch.from_numpy(rewards[order]), torch.from_numpy(group_ids[order]), baseline="max_at_k", k=k
                ).numpy()
                expected = np.empty(20)
                for group in range(len(sizes)):
                    rows = np.flatnonzero(group_ids[order] == group)
                    expected[rows] = max_at_k_by_subsets(rewards[order][rows].tolist(), k)
                np.testing.assert_allclose(advantages, expected, rtol=1e-12, atol=1e-14)


def test_max_at_k_of_a_large_group_is_finite(subtests):
    for k in [2, 512, 1000]:
        with subtests.test(k=k):
            # one right answer among 1,024: it is in k/n of all subsets and adds 1 in each: n * k/n = k
            rewards = torch.zeros(1024)
            rewards[17] = 1.0
            advantages = group_relative_advantages(
                rewards, torch.zeros(1024, dtype=torch.int64), baseline="max_at_k", k=k
            )
            assert advantages[17].item() == pytest.approx(k, rel=1e-6)
            assert (advantages != 0).sum() == 1


def enumerated(num_actions: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Every sample of `num_rows` actions, each a group of its own: actions and group ids, row after row."""
    samples = torch.tensor(list(itertools.product(range(num_actions), repeat=num_rows)))
    return samples, torch.arange(len(samples)).repeat_interleave(num_rows)


def expected_estimate(log_probs: Tensor, samples: Tensor, advantages: Tensor, theta: Tensor) -> Tensor:
    """E over all samples of mean_i A_i grad log pi(a_i)."""
    of_rows = log_probs[samples]
    probability = of_rows.detach().sum(1).exp()
    estimate = (probability * (advantages.view_as(samples) * of_rows).mean(1)).sum()
    return torch.autograd.grad(estimate, theta, retain_graph=True)[0]


def test_max_at_k_is_an_unbiased_gradient_of_the_expected_best_of_k(subtests):
    """All 3^4 groups of four rows of a policy over three actions."""
    for reward_of_action, k in itertools.product([[0.0, 1.0, 3.0], [2.0, 0.5, 0.5], [0.0, 1.0, 0.0]], [2, 3]):
        with subtests.test(reward_of_action=reward_of_action, k=k):
            theta = double([0.3, -0.8, 0.5]).requires_grad_()
            log_probs, rewards = theta.log_softmax(0), double(reward_of_action)
            samples, group_ids = enumerated(3, 4)
            advantages = group_relative_advantages(rewards[samples].flatten(), group_ids, baseline="max_at_k", k=k)
            attempts = torch.tensor(list(itertools.product(range(3), repeat=k)))
            best = (log_probs[attempts].sum(1).exp() * rewards[attempts].amax(1)).sum()  # E[max of k], exactly
            (expected,) = torch.autograd.grad(best, theta, retain_graph=True)
            found = expected_estimate(log_probs, samples, advantages, theta)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
            assert expected.abs().max() > 0.05


# whiten


def test_whitened_advantages_equal_hand_worked_values():
    # centred on medians 0 and 3:  0 0 3 | -2 2: mean .6; deviations -.6 -.6 2.4 -2.6 1.4, squares sum to 15.2, over 4: 3.8
    rewards, group_ids = double([0, 0, 3, 1, 5]), ids(0, 0, 0, 1, 1)
    advantages = group_relative_advantages(rewards, group_ids, baseline="group_median", scale="whiten")
    assert advantages.tolist() == pytest.approx([d / math.sqrt(3.8) for d in (-0.6, -0.6, 2.4, -2.6, 1.4)], rel=1e-14)


def test_a_dead_group_counts_in_the_batch_statistics_and_gets_exactly_0():
    # centred on means: 0 0 | -1 1; squares 2 over 4 - 1: 2/3
    advantages = group_relative_advantages(double([5, 5, 0, 2]), ids(0, 0, 1, 1), scale="whiten")
    assert advantages.tolist() == pytest.approx([0, 0, -math.sqrt(1.5), math.sqrt(1.5)], rel=1e-14)
    assert advantages[:2].tolist() == [0, 0]


def test_whiten_adds_eps_to_the_standard_deviation():
    # deviations -1, 1: std with n - 1 sqrt 2
    advantages = group_relative_advantages(double([0, 2]), ids(0, 0), scale="whiten", std_eps=0.5)
    assert advantages.tolist() == pytest.approx([-1 / (math.sqrt(2) + 0.5), 1 / (math.sqrt(2) + 0.5)])


# mean (MaxRL)


def test_advantages_divided_by_the_mean_equal_hand_worked_values():
    # means 1/2, 1/4, 0 (all wrong), 1 (all right), -2
    advantages = group_relative_advantages(
        double([1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, -1, -3]),
        ids(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4),
        scale="mean",
    )
    assert advantages.tolist() == pytest.approx([1, -1, -1, 1, 3, -1, -1, -1, 0, 0, 0, 0, 0, 0])


def test_eps_is_added_to_the_mean_that_divides():
    # (1 - .5)/(.5 + .5)
    advantages = group_relative_advantages(double([1, 0]), ids(0, 0), scale="mean", std_eps=0.5)
    assert advantages.tolist() == pytest.approx([0.5, -0.5])


def test_division_by_the_mean_climbs_the_truncated_log_likelihood(subtests):
    """A right and two wrong actions, p the probability of the right one, all 3^n groups.

    With n rows the expected estimate is the gradient of -sum over k < n of (1 - p)^k / k, which is log p cut off after n - 1
    terms (arXiv:2602.02710): d/dp = 1 + (1 - p) + ... + (1 - p)^(n - 2).
    """
    for num_rows in [2, 3, 5]:
        with subtests.test(num_rows=num_rows):
            theta = double([-0.5, 0.4, 0.1]).requires_grad_()
            log_probs = theta.log_softmax(0)
            samples, group_ids = enumerated(3, num_rows)
            advantages = group_relative_advantages(double([1, 0, 0])[samples].flatten(), group_ids, scale="mean")
            p = log_probs[0].exp()
            truncated = -sum((1 - p) ** k / k for k in range(1, num_rows))
            (expected,) = torch.autograd.grad(truncated, theta, retain_graph=True)
            found = expected_estimate(log_probs, samples, advantages, theta)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


# beta (BNPO)


def weights_by_scipy(means: np.ndarray, ddof: int) -> np.ndarray:
    """1 / f(p; 1 + a/3, 1 + b/3), Beta(a, b) having the mean and variance of the groups' means."""
    mean, variance = means.mean(), means.var(ddof=ddof)
    common = mean * (1 - mean) / variance - 1
    alpha, beta = max(1 + common * mean / 3, 1), max(1 + common * (1 - mean) / 3, 1)
    with np.errstate(divide="ignore"):
        return np.minimum(1 / scipy.stats.beta.pdf(means, alpha, beta), MAX_BETA_WEIGHT)


def test_beta_weighted_advantages_equal_scipys_fit(subtests):
    batches = [
        [[1, 0, 0, 1], [1, 0, 0, 0], [1, 1, 1, 0]],
        [[1, 0, 0, 1], [0, 0], [1, 1, 1], [1, 0, 0]],  # two dead groups, which count in the fit
        [[0.2, 0.4, 0.9], [0.0, 0.05], [0.7, 0.8, 0.6, 0.5], [1.0, 0.0]],
    ]
    for std_ddof, groups in itertools.product([0, 1], batches):
        with subtests.test(groups=groups, std_ddof=std_ddof):
            rewards = double([r for group in groups for r in group])
            group_ids = ids(*(g for g, group in enumerate(groups) for _ in group))
            advantages = group_relative_advantages(rewards, group_ids, scale="beta", std_ddof=std_ddof)
            means = np.array([np.mean(group) for group in groups])
            weights = weights_by_scipy(means, std_ddof)
            expected = [w * (r - m) for group, m, w in zip(groups, means, weights, strict=True) for r in group]
            assert advantages.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_rewards_that_rounding_moved_out_of_0_to_1_are_accepted_under_beta(subtests):
    for low, high, is_accepted in [(-1e-6, 1 + 1e-6, True), (-1.1e-6, 1, False), (0, 1 + 1.1e-6, False)]:
        with subtests.test(low=low, high=high):
            rewards = double([low, 0.5, high, 0.5, high, high])
            if not is_accepted:
                with pytest.raises(RewardError, match=r"rewards in \[0, 1\]"):
                    group_relative_advantages(rewards, ids(0, 0, 1, 1, 2, 2), scale="beta")
                continue
            found = group_relative_advantages(rewards, ids(0, 0, 1, 1, 2, 2), scale="beta")
            exact = group_relative_advantages(double([0, 0.5, 1, 0.5, 1, 1]), ids(0, 0, 1, 1, 2, 2), scale="beta")
            torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)


def test_a_single_group_is_not_weighted_by_a_beta():
    advantages = group_relative_advantages(double([1, 0, 0, 1]), ids(3, 3, 3, 3), scale="beta")
    assert advantages.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_group_means_with_more_variance_than_any_beta_are_not_weighted():
    # means .01, .99, variance with n - 1 .4802 > m (1 - m) = .25: alpha = beta = 1, a flat density
    advantages = group_relative_advantages(double([0, 0.02, 0.98, 1]), ids(0, 0, 1, 1), scale="beta")
    assert advantages.tolist() == pytest.approx([-0.01, 0.01, -0.01, 0.01], rel=1e-12)


def test_groups_of_equal_means_are_not_weighted():
    advantages = group_relative_advantages(double([1, 0, 0.75, 0.25]), ids(0, 0, 1, 1), scale="beta")
    assert advantages.tolist() == [0.5, -0.5, 0.25, -0.25]


def test_a_batch_of_dead_groups_is_zero_under_beta(subtests):
    for rewards in [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1], [0.3, 0.3, 0.9, 0.9]]:
        with subtests.test(rewards=rewards):
            advantages = group_relative_advantages(
                torch.tensor(rewards, dtype=torch.float32), ids(0, 0, 1, 1), scale="beta"
            )
            assert advantages.tolist() == [0, 0, 0, 0]


def test_the_weight_of_a_group_far_from_the_others_is_bounded():
    # thirty groups of mean 1/2 and one of mean .001: so thin a density that its inverse would pass a million
    groups = [[0.0, 1.0]] * 30 + [[0.0, 0.002]]
    means = np.array([np.mean(group) for group in groups])
    assert weights_by_scipy(means, 1)[-1] == MAX_BETA_WEIGHT
    advantages = group_relative_advantages(
        double([r for group in groups for r in group]), torch.arange(31).repeat_interleave(2), scale="beta"
    )
    assert advantages[-2:].tolist() == pytest.approx([-0.001 * MAX_BETA_WEIGHT, 0.001 * MAX_BETA_WEIGHT])


# Groups without differences


def test_dead_groups_of_any_size_get_exactly_0(subtests):
    """float32 rewards: dead groups of 1 to 1,024 rows, a group that differs by rounding, and one live group."""
    for scale, baseline, reward in itertools.product(SCALES, OWN_BASELINES, [0.3, 0.9]):
        with subtests.test(scale=scale, baseline=baseline, reward=reward):
            sizes = [1, 2, 3, 7, 64, 1000, 1024]
            almost = torch.tensor([reward, reward, reward])
            almost[1] = almost[1].nextafter(torch.tensor(1.0))
            alive = torch.tensor([0.1, 0.8, 0.4, 0.0])
            rewards = torch.cat([*(torch.full((size,), reward) for size in sizes), almost, alive])
            sizes = [*sizes, 3, 4]
            group_ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
            order = torch.randperm(len(rewards))
            needs = what_a_baseline_needs(baseline, len(rewards))
            advantages = group_relative_advantages(
                rewards[order], group_ids[order], baseline=baseline, scale=scale, **needs
            )
            is_alive = group_ids[order] == len(sizes) - 1
            assert (advantages[~is_alive] == 0).all()
            assert (advantages[is_alive] != 0).any()
            assert advantages.isfinite().all()


def test_a_batch_of_one_dead_group_is_exactly_zero(subtests):
    for scale, baseline in itertools.product(SCALES, OWN_BASELINES):
        with subtests.test(scale=scale, baseline=baseline):
            for size in (1, 2, 1024):
                rewards, group_ids = torch.full((size,), 0.9), torch.zeros(size, dtype=torch.int64)
                needs = what_a_baseline_needs(baseline, size)
                advantages = group_relative_advantages(rewards, group_ids, baseline=baseline, scale=scale, **needs)
                assert (advantages == 0).all()


def test_equal_rewards_have_no_spread_under_any_baseline(subtests):
    """Also where one of them differs in its last digit."""
    for baseline, scale, size, reward in itertools.product(
        ["none", "global_mean"], ["group", "batch", "whiten"], [2, 7, 1024], [0.3, 0.9]
    ):
        with subtests.test(baseline=baseline, scale=scale, size=size, reward=reward):
            rewards, group_ids = torch.full((size,), reward), torch.arange(size) % 2
            for last in (rewards[-1], rewards[-1].nextafter(torch.tensor(1.0))):
                rewards[-1] = last
                advantages = group_relative_advantages(
                    rewards, group_ids, baseline=baseline, scale=scale, running_mean=0.25
                )
                assert (advantages == 0).all()


def test_under_an_absolute_baseline_a_dead_group_keeps_its_advantage():
    rewards, group_ids = double([1, 1, 0, 2]), ids(0, 0, 1, 1)
    assert group_relative_advantages(rewards, group_ids, baseline="none").tolist() == [1, 1, 0, 2]
    by_mean = group_relative_advantages(rewards, group_ids, baseline="global_mean", running_mean=0.5)
    assert by_mean.tolist() == [0.5, 0.5, -0.5, 1.5]


# Ragged groups

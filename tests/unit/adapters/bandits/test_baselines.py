"""Baselines: indices and updates by hand, posteriors in closed form; and their regrets on the abrupt testbed."""

from math import e, exp, log, sqrt

import numpy as np
import pytest

from adapters.bandits import (
    EXP3S,
    UCB1,
    DiscountedUCB,
    GradientBandit,
    SlidingWindowUCB,
    ThompsonSampling,
    Uniform,
    abrupt_testbed,
    play,
)
from adapters.bandits.baselines import sample_rows
from adapters.bandits.upper_confidence import random_argmax
from grpo.errors import RewardError

HORIZON = 10_000


def feed(baseline, arms: list[int], rewards: list[float]) -> None:
    """One run's pulls, one after the other."""
    for arm, reward in zip(arms, rewards, strict=True):
        baseline.update(np.array([arm]), np.array([float(reward)]))


def test_sample_rows_draws_from_the_probabilities_of_each_row() -> None:
    rng = np.random.default_rng(0)
    drawn = sample_rows(np.tile([[0.2, 0.0, 0.8]], (20_000, 1)), rng)
    counts = np.bincount(drawn, minlength=3)
    assert counts[1] == 0
    assert abs(counts[0] - 4_000) < 4 * sqrt(20_000 * 0.16)
    assert sample_rows(np.array([[0.0, 1.0], [1.0, 0.0]]), rng).tolist() == [1, 0]


def test_thompson_sampling_draws_from_the_posterior() -> None:
    rng = np.random.default_rng(0)
    baseline = ThompsonSampling(20_000, 2)
    baseline.counts[:] = [3, 0]
    baseline.sums[:] = [2, 0]
    # P(U > X) for X ~ Beta(3, 2), U uniform is 1 - E X = 2/5
    assert abs(baseline.select(rng).mean() - 0.4) < 4 * sqrt(0.24 / 20_000)
    normal = ThompsonSampling(20_000, 2, likelihood="gaussian")
    normal.counts[:] = [3, 0]
    normal.sums[:] = [4, 0]
    # X ~ N(4/4, 1/4), Z ~ N(0, 1): P(Z > X) = Phi(-1 / sqrt(1.25)) = Phi(-.8944) = .18555
    assert abs(normal.select(rng).mean() - 0.18555) < 4 * sqrt(0.15 / 20_000)


def test_discounted_thompson_forgets_every_arm() -> None:
    baseline = ThompsonSampling(1, 2, discount=0.5)
    feed(baseline, [0, 0, 1], [1.0, 0.25, 1.0])
    # arm 0: counts 1, 1.5, .75; sums 1, .75, .375; arm 1: 1 and 1
    np.testing.assert_allclose(baseline.counts, [[0.75, 1.0]])
    np.testing.assert_allclose(baseline.sums, [[0.375, 1.0]])
    with pytest.raises(RewardError, match=r"requires rewards in \[0, 1\]; got 1.5 to 1.5"):
        feed(baseline, [0], [1.5])
    feed(ThompsonSampling(1, 2, likelihood="gaussian"), [0], [-7.0])


def test_an_exp3s_update_equals_hand_worked_probabilities() -> None:
    baseline = EXP3S(1, 2, horizon=100, num_changes=0, exploration=0.2, sharing=0.1, reward_low=-1.0, reward_high=1.0)
    np.testing.assert_allclose(baseline.probabilities(), [[0.5, 0.5]])
    feed(baseline, [1], [0.5])
    # (.5 + 1) / 2 = .75 rescaled; divided by p = .5: 1.5; exp(.2 * 1.5 / 2) = exp(.15); sharing e * .1 / 2 of sum 1
    weights = np.array([0.5 + e * 0.05, 0.5 * exp(0.15) + e * 0.05])
    expected = 0.8 * weights / weights.sum() + 0.1
    np.testing.assert_allclose(baseline.probabilities(), [expected])
    clipped = EXP3S(1, 2, horizon=100, num_changes=0)
    feed(clipped, [1], [-3.0])
    np.testing.assert_allclose(clipped.probabilities(), [[0.5, 0.5]])


def test_exp3s_defaults_to_the_published_tuning() -> None:
    # K = 3, T = 10^4, S = 3: sqrt(3 (3 log(30,000) + e) / ((e - 1) 10^4)); log(30,000) = 10.309: sqrt(100.935 / 17183)
    baseline = EXP3S(1, 3, horizon=HORIZON, num_changes=2)
    assert baseline.exploration == pytest.approx(sqrt(3 * (3 * log(30_000) + e) / ((e - 1) * 10_000)))
    assert baseline.exploration == pytest.approx(0.07664, abs=1e-5)
    assert baseline.sharing == 1e-4
    assert EXP3S(1, 3, horizon=1, num_changes=9).exploration == 1.0


def test_gradient_bandit_updates_equal_hand_worked_preferences() -> None:
    baseline = GradientBandit(1, 2, step_size=0.5, logit_decay=0.1)
    feed(baseline, [0], [2.0])  # the first reward is its own baseline: nothing moves
    np.testing.assert_array_equal(baseline.preferences, [[0.0, 0.0]])
    feed(baseline, [1], [4.0])  # .5 * (4 - 2) * (1 - .5) = .5 up, .5 * 2 * .5 down; average (2 + 4) / 2
    np.testing.assert_allclose(baseline.preferences, [[-0.5, 0.5]])
    np.testing.assert_allclose(baseline.baseline, [3.0])
    feed(baseline, [1], [3.0])  # as expected: the preferences only decay
    np.testing.assert_allclose(baseline.preferences, [[-0.45, 0.45]])
    np.testing.assert_allclose(baseline.probabilities(), [[1 / (1 + exp(0.9)), 1 / (1 + exp(-0.9))]])
    following = GradientBandit(1, 2, baseline_step_size=0.25)
    feed(following, [0, 0], [2.0, 4.0])
    np.testing.assert_allclose(following.baseline, [2.5])


REFERENCE = {
    "uniform": (lambda: Uniform(20, 3), 1468),
    "UCB1": (lambda: UCB1(20, 3), 661),
    "discounted UCB": (lambda: DiscountedUCB(20, 3, horizon=HORIZON), 592),
    "sliding-window UCB": (lambda: SlidingWindowUCB(20, 3, horizon=HORIZON), 284),
    "EXP3.S": (lambda: EXP3S(20, 3, horizon=HORIZON, num_changes=2), 452),
    "Thompson": (lambda: ThompsonSampling(20, 3), 765),
    "discounted Thompson": (lambda: ThompsonSampling(20, 3, discount=0.99), 416),
}


@pytest.mark.slow
def test_regrets_on_the_abrupt_testbed_equal_the_reference_values(subtests: pytest.Subtests) -> None:
    for name in REFERENCE:
        with subtests.test(name):
            build, expected = REFERENCE[name]
            regret = play(build(), abrupt_testbed(num_runs=20, seed=2), HORIZON, seed=2).regrets.sum(axis=1)
            standard_error = regret.std(ddof=1) / sqrt(20)
            assert abs(regret.mean() - expected) < 0.06 * expected + 2 * standard_error


@pytest.mark.slow
def test_a_gradient_bandit_that_forgets_finds_the_change() -> None:
    regrets = []
    for logit_decay in (0.0, 0.001):
        baseline = GradientBandit(20, 3, baseline_step_size=0.05, logit_decay=logit_decay)
        regrets.append(play(baseline, abrupt_testbed(num_runs=20, seed=2), HORIZON, seed=2).regrets.sum(axis=1).mean())
    assert regrets[0] > 750  # the change costs .4 * 2,000 = 800 when it is never found
    assert regrets[1] < 450


# --- upper confidence bounds


def test_random_argmax_breaks_ties_evenly() -> None:
    rng = np.random.default_rng(0)
    chosen = random_argmax(np.tile([1.0, 3.0, 3.0, 2.0, 3.0], (9_000, 1)), rng)
    counts = np.bincount(chosen, minlength=5)
    assert counts[0] == counts[3] == 0
    assert np.abs(counts[[1, 2, 4]] - 3_000).max() < 4 * sqrt(9_000 * 2 / 9)
    infinite = random_argmax(np.array([[0.0, np.inf, np.inf]]), rng)
    assert infinite[0] in (1, 2)


def test_ucb_pulls_every_arm_first() -> None:
    rng = np.random.default_rng(0)
    builds = (UCB1(1, 4), DiscountedUCB(1, 4, horizon=100), SlidingWindowUCB(1, 4, horizon=100))
    for baseline in builds:
        pulled = []
        for _ in range(4):
            arms = baseline.select(rng)
            baseline.update(arms, np.zeros(1))
            pulled.append(int(arms[0]))
        assert sorted(pulled) == [0, 1, 2, 3]


def test_indices_weigh_mean_against_bonus() -> None:
    # arm 0: mean .75 over 8; arm 1: mean .5 over 2; t = 10
    # bonuses sqrt(x log 10 / n): x = .5 gives .379 and .759, 1.129 < 1.259; x = .1 gives .170 and .339, .920 > .839
    # doubled by a reward range of 2: .339 and .679: 1.089 < 1.179
    # x = .06 gives .131 and .263, .881 > .763; doubled by discounted UCB: .263 and .526, 1.013 < 1.026
    for baseline, best in (
        (UCB1(1, 2, exploration=0.5), 1),
        (UCB1(1, 2, exploration=0.1), 0),
        (UCB1(1, 2, exploration=0.1, reward_range=2.0), 1),
        (UCB1(1, 2, exploration=0.06), 0),
        (DiscountedUCB(1, 2, horizon=100, discount=1.0, exploration=0.06), 1),  # remembers everything
    ):
        feed(baseline, [0] * 8 + [1] * 2, [1] * 6 + [0] * 2 + [1, 0])
        assert baseline.select(np.random.default_rng(0)).tolist() == [best]


def test_discounted_ucb_counts_equal_hand_worked_values() -> None:
    baseline = DiscountedUCB(1, 2, horizon=100, discount=0.5)
    feed(baseline, [0, 1, 0], [1.0, 1.0, 0.0])
    # counts: arm 0: .25 + 1, arm 1: .5; sums: .25, .5; total 1.75
    np.testing.assert_allclose(baseline.counts, [[1.25, 0.5]])
    np.testing.assert_allclose(baseline.sums, [[0.25, 0.5]])
    assert baseline.total_count == 1.75
    assert baseline.select(np.random.default_rng(0)).tolist() == [1]
    assert DiscountedUCB(1, 2, horizon=HORIZON).discount == 1 - 1 / 400


def test_sliding_window_equals_a_recount_of_its_last_pulls() -> None:
    rng = np.random.default_rng(0)
    baseline = SlidingWindowUCB(5, 3, horizon=100, window=7)
    arms, rewards = rng.integers(3, size=(40, 5)), rng.integers(2, size=(40, 5)).astype(float)
    for pull in range(40):
        baseline.update(arms[pull], rewards[pull])
        recent, paid = arms[max(0, pull - 6) : pull + 1], rewards[max(0, pull - 6) : pull + 1]
        for arm in range(3):
            np.testing.assert_array_equal(baseline.counts[:, arm], (recent == arm).sum(axis=0))
            np.testing.assert_array_equal(baseline.sums[:, arm], (paid * (recent == arm)).sum(axis=0))
    assert SlidingWindowUCB(1, 3, horizon=HORIZON).window == 1_214  # 4 sqrt(10^4 * 9.2103) = 1213.96, rounded up

"""The UCB family: indices by hand, and the window against a recount."""

from math import sqrt

import numpy as np
import pytest

from adapters.bandits import UCB1, DiscountedUCB, SlidingWindowUCB
from adapters.bandits.upper_confidence import random_argmax
from grpo.errors import ConfigError

HORIZON = 10_000


def feed(baseline, arms: list[int], rewards: list[float]) -> None:
    """One run's pulls, one after the other."""
    for arm, reward in zip(arms, rewards, strict=True):
        baseline.update(np.array([arm]), np.array([float(reward)]))


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
    builds = (
        UCB1(1, 4),
        DiscountedUCB(1, 4, horizon=100),
        SlidingWindowUCB(1, 4, horizon=100),
    )
    for baseline in builds:
        pulled = []
        for _ in range(4):
            arms = baseline.select(rng)
            baseline.update(arms, np.zeros(1))
            pulled.append(int(arms[0]))
        assert sorted(pulled) == [0, 1, 2, 3]


def test_ucb1_weighs_mean_against_bonus() -> None:
    # arm 0: mean .75 over 8; arm 1: mean .5 over 2; t = 10
    # bonuses sqrt(x log 10 / n): x = .5 gives .379 and .759, 1.129 < 1.259; x = .1 gives .170 and .339, .920 > .839
    for exploration, best in ((0.5, 1), (0.1, 0)):
        baseline = UCB1(1, 2, exploration=exploration)
        feed(baseline, [0] * 8 + [1] * 2, [1] * 6 + [0] * 2 + [1, 0])
        assert baseline.select(np.random.default_rng(0)).tolist() == [best]
    wide = UCB1(1, 2, exploration=0.1, reward_range=2.0)  # bonuses doubled: .339 and .679: 1.089 < 1.179
    feed(wide, [0] * 8 + [1] * 2, [1] * 6 + [0] * 2 + [1, 0])
    assert wide.select(np.random.default_rng(0)).tolist() == [1]


def test_discounted_ucb_counts_equal_hand_worked_values() -> None:
    baseline = DiscountedUCB(1, 2, horizon=100, discount=0.5)
    feed(baseline, [0, 1, 0], [1.0, 1.0, 0.0])
    # counts: arm 0: .25 + 1, arm 1: .5; sums: .25, .5; total 1.75
    np.testing.assert_allclose(baseline.counts, [[1.25, 0.5]])
    np.testing.assert_allclose(baseline.sums, [[0.25, 0.5]])
    assert baseline.total_count == 1.75
    assert baseline.select(np.random.default_rng(0)).tolist() == [1]
    assert DiscountedUCB(1, 2, horizon=HORIZON).discount == 1 - 1 / 400


def test_discounted_ucb_has_twice_the_bonus_of_ucb1() -> None:
    # discount 1 remembers everything. arm 0: mean .75 over 8, arm 1: .5 over 2, t = 10, exploration .06:
    # bonuses .131, .263 -> .881 > .763 for UCB1; doubled .263, .526 -> 1.013 < 1.026
    for baseline, best in (
        (UCB1(1, 2, exploration=0.06), 0),
        (DiscountedUCB(1, 2, horizon=100, discount=1.0, exploration=0.06), 1),
    ):
        feed(baseline, [0] * 8 + [1] * 2, [1] * 6 + [0] * 2 + [1, 0])
        assert baseline.select(np.random.default_rng(0)).tolist() == [best]


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


def test_invalid_settings_are_refused(subtests: pytest.Subtests) -> None:
    for place, build in enumerate(
        (
            lambda: UCB1(1, 2, reward_range=0),
            lambda: UCB1(1, 2, exploration=-1),
            lambda: DiscountedUCB(1, 2, horizon=10, discount=0.0),
            lambda: SlidingWindowUCB(1, 2, horizon=10, window=0),
        )
    ):
        with subtests.test(place=place), pytest.raises(ConfigError):
            build()

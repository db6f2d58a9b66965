"""Testbeds: hand-worked regimes, a row-by-row brute force, noise statistics, exact resume."""

import numpy as np
import pytest

from adapters.bandits import Testbed, abrupt_testbed, dynamic_regimes, dynamic_testbed, random_walk_testbed
from grpo.errors import ConfigError, RewardError


def test_dynamic_regimes_equal_hand_worked_regimes() -> None:
    # (step // 20) % 4 over 100 steps is 0, 1, 2, 3, 0; step 100 starts over with 0, step 120 is step 20: regime 1.
    regimes = dynamic_regimes(140)
    np.testing.assert_array_equal(regimes, np.repeat([0, 1, 2, 3, 0, 0, 1], 20))


def test_dynamic_testbed_moves_one_step_per_32_pulls_and_starts_over_after_100_steps() -> None:
    testbed = dynamic_testbed()
    rewards = testbed.pull(np.zeros(100 * 32 + 21 * 32, dtype=int), np.full(121 * 32, 3)).reshape(121, 32)
    # arm 3 pays .4, .8, .4, .2, .4 in the five blocks of 20 steps, then again .4 from step 100, .8 from step 120.
    expected = np.concatenate([np.repeat([0.4, 0.8, 0.4, 0.2, 0.4, 0.4], 20), [0.8]])
    np.testing.assert_array_equal(rewards, expected[:, None] * np.ones(32))
    # regret: only in regime 3, where arm 0 pays .7: 20 steps * 32 pulls * (.7 - .2) = 320
    np.testing.assert_allclose(testbed.regrets, [320.0])


def test_abrupt_testbed_changes_where_the_paper_says() -> None:
    means = abrupt_testbed(num_runs=3).means
    assert means.shape == (3, 10_000, 3)
    for step, expected in ((0, 0.4), (2_999, 0.4), (3_000, 0.9), (4_999, 0.9), (5_000, 0.4), (9_999, 0.4)):
        np.testing.assert_array_equal(means[:, step], np.tile([0.5, 0.3, expected], (3, 1)))


def test_random_walk_steps_are_independent_normals_of_std_001() -> None:
    testbed = random_walk_testbed(num_runs=4, num_steps=2_000, seed=5)
    np.testing.assert_array_equal(testbed.means[:, 0], np.zeros((4, 10)))
    steps = np.diff(testbed.means, axis=1)
    # 4 * 1999 * 10 = 79,960 steps: the standard error of their mean is .01 / 283, of their std .01 / 400
    assert abs(steps.mean()) < 4 * 0.01 / 283
    assert abs(steps.std() - 0.01) < 4 * 0.01 / 400
    correlation = np.corrcoef(steps.transpose(0, 2, 1).reshape(40, -1))
    off_diagonal = correlation[~np.eye(40, dtype=bool)]
    assert np.abs(off_diagonal).max() < 5 / np.sqrt(1_999)  # every arm of every run has a walk of its own


def test_one_call_of_many_pulls_equals_pulling_row_by_row(subtests: pytest.Subtests) -> None:
    for noise in ("deterministic", "bernoulli", "gaussian"):
        with subtests.test(noise):
            rng = np.random.default_rng(0)
            means = rng.random((4, 30, 3))
            runs, arms = rng.integers(4, size=100), rng.integers(3, size=100)
            build = {"noise": noise, "pulls_per_step": 3, "cyclic": True, "seed": 7}
            together, one_by_one = Testbed(means, **build), Testbed(means, **build)
            rewards = together.pull(runs, arms)
            singly = np.concatenate([one_by_one.pull([run], [arm]) for run, arm in zip(runs, arms, strict=True)])
            np.testing.assert_array_equal(rewards, singly)
            np.testing.assert_array_equal(together.pulls, np.bincount(runs, minlength=4))

            clocks, regrets, expected = np.zeros(4, dtype=int), np.zeros(4), []
            for run, arm in zip(runs, arms, strict=True):
                now = means[run, clocks[run] // 3 % 30]
                expected.append(now[arm])
                regrets[run] += now.max() - now[arm]
                clocks[run] += 1
            np.testing.assert_allclose(together.regrets, regrets)
            np.testing.assert_allclose(one_by_one.regrets, regrets)
            if noise == "deterministic":
                np.testing.assert_array_equal(rewards, expected)


def test_noise_has_the_right_mean_and_variance() -> None:
    num_pulls = 40_000
    coin = Testbed(np.array([[[0.3]]]), noise="bernoulli", cyclic=True, seed=1)
    flips = coin.pull(np.zeros(num_pulls, dtype=int), np.zeros(num_pulls, dtype=int))
    assert set(np.unique(flips)) == {0.0, 1.0}
    assert abs(flips.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / num_pulls)
    normal = Testbed(np.array([[[-2.0]]]), noise="gaussian", cyclic=True, seed=1)
    draws = normal.pull(np.zeros(num_pulls, dtype=int), np.zeros(num_pulls, dtype=int))
    assert abs(draws.mean() + 2) < 4 / np.sqrt(num_pulls)
    assert abs(draws.var() - 1) < 4 * np.sqrt(2 / num_pulls)


def test_means_now_follow_each_runs_clock_without_advancing_it() -> None:
    testbed = Testbed(np.array([[[0.0, 1.0], [2.0, 3.0]]]), noise="gaussian", num_runs=2, seed=0)
    testbed.pull([1], [0])
    before = testbed.state_dict()
    np.testing.assert_array_equal(testbed.means_now(), [[0, 1], [2, 3]])
    np.testing.assert_array_equal(testbed.means_now([1, 0, 1]), [[2, 3], [0, 1], [2, 3]])
    after = testbed.state_dict()
    np.testing.assert_array_equal(before["pulls"], after["pulls"])
    assert before["generator"] == after["generator"]


def test_resume_gives_bitwise_equal_pulls(subtests: pytest.Subtests) -> None:
    for build in (abrupt_testbed, random_walk_testbed, dynamic_testbed):
        with subtests.test(build.__name__):
            testbed = build(num_runs=3, seed=11)
            rng = np.random.default_rng(1)
            rows = [(rng.integers(3, size=50), rng.integers(3, size=50)) for _ in range(4)]
            for runs, arms in rows[:2]:
                testbed.pull(runs, arms)
            state = testbed.state_dict()
            expected = [testbed.pull(runs, arms) for runs, arms in rows[2:]]
            other = build(num_runs=3, seed=99)  # another walk, other noise: all of it must come from the state
            other.load_state_dict(state)
            for (runs, arms), rewards in zip(rows[2:], expected, strict=True):
                np.testing.assert_array_equal(other.pull(runs, arms), rewards)
            np.testing.assert_array_equal(other.regrets, testbed.regrets)
            np.testing.assert_array_equal(other.pulls, testbed.pulls)


def test_reset_repeats_the_runs_and_a_seed_makes_new_ones() -> None:
    testbed = random_walk_testbed(num_runs=2, num_steps=50, seed=3)
    walk, rewards = testbed.means.copy(), testbed.pull([0, 1, 1], [0, 1, 2])
    testbed.reset()
    np.testing.assert_array_equal(testbed.pulls, [0, 0])
    np.testing.assert_array_equal(testbed.means, walk)
    np.testing.assert_array_equal(testbed.pull([0, 1, 1], [0, 1, 2]), rewards)
    testbed.reset(4)
    assert not np.array_equal(testbed.means, walk)
    np.testing.assert_array_equal(testbed.means, random_walk_testbed(num_runs=2, num_steps=50, seed=4).means)


def test_a_pull_past_the_end_is_refused_and_changes_nothing() -> None:
    testbed = Testbed(np.array([[[0.5], [0.6]]]), num_runs=2, pulls_per_step=2)
    testbed.pull([1, 1, 1], [0, 0, 0])
    state = testbed.state_dict()
    with pytest.raises(RewardError, match=r"a run has 4 pulls \(2 steps of 2\); run 1 would come to 5"):
        testbed.pull([0, 1, 1], [0, 0, 0])
    np.testing.assert_array_equal(testbed.pulls, [0, 3])
    assert testbed.state_dict()["generator"] == state["generator"]
    testbed.pull([1], [0])
    np.testing.assert_array_equal(testbed.means_now([1]), [[0.6]])  # over, but the last means can be looked at


def test_rows_that_do_not_exist_are_refused(subtests: pytest.Subtests) -> None:
    for runs, arms, message in (
        ([0, 1], [0], "runs and arms must have the same length; got 2 runs and 1 arms"),
        ([0], [3], "arms must lie in 0..2; got 3 to 3"),
        ([-1], [0], "runs must lie in 0..1; got -1 to -1"),
        ([0], [0.5], "arms must be integers"),
        ([[0]], [[0]], "runs must be integers"),
    ):
        with subtests.test(message), pytest.raises(RewardError, match=message):
            abrupt_testbed(num_runs=2).pull(runs, arms)


def test_invalid_arguments_are_refused(subtests: pytest.Subtests) -> None:
    for means, kwargs, message in (
        (np.zeros((2, 3)), {}, r"means must be finite numbers \[R, T, K\]; got shape \[2, 3\]"),
        (np.full((1, 1, 1), np.nan), {}, "means must be finite"),
        (np.full((1, 1, 1), 1.5), {}, r"means are probabilities in \[0, 1\]; got 1.5 to 1.5"),
        (np.zeros((2, 1, 1)), {"num_runs": 3}, "num_runs must be 2 as in means"),
        (np.zeros((1, 1, 1)), {"num_runs": 0}, "num_runs"),
        (np.zeros((1, 1, 1)), {"pulls_per_step": 0}, "pulls_per_step must be an integer >= 1; got int 0"),
        (np.zeros((1, 1, 1)), {"noise": "poisson"}, "noise must be"),
    ):
        with subtests.test(message):
            with pytest.raises(ConfigError, match=message):
                Testbed(means, **kwargs)
            with pytest.raises(ConfigError, match="must be an integer >= 1; got int 0"):
                random_walk_testbed(num_runs=0)


def test_a_state_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="the state must have 2 runs; it has 3"):
        abrupt_testbed(num_runs=2).load_state_dict(abrupt_testbed(num_runs=3).state_dict())

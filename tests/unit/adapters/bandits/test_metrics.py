"""Metrics by hand."""

import numpy as np
import pytest

from adapters.bandits import (
    Oracle,
    best_arm_probability,
    cumulative_regret,
    dynamic_regimes,
    dynamic_testbed,
    mean_by_regime,
    play,
    pull_fractions,
    segment_starts,
    structured_reward,
    time_to_reach,
)
from grpo.errors import ConfigError


def test_structured_reward_leaves_uniform_regimes_out() -> None:
    # steps of regimes 1 and 3 pay .8, .2 and .5: mean .5
    assert structured_reward([9, 0.8, 0.2, 9, 0.5], [0, 1, 1, 2, 3]) == pytest.approx(0.5)
    np.testing.assert_allclose(structured_reward([[1, 2], [3, 5]], [1, 3]), [1.5, 4.0])
    with pytest.raises(ConfigError, match="at least one step must be in the regimes"):
        structured_reward([1.0], [0])


def test_structured_rewards_of_chance_and_oracle_equal_hand_worked_values() -> None:
    testbed = dynamic_testbed(pulls_per_step=1)
    regimes = dynamic_regimes()
    # chance: the mean of the arms, (.1 + .2 + 0 + .8 + .3) / 5 = .28 and (.7 + .1 + .3 + .2 + 0) / 5 = .26 -> .27
    assert structured_reward(testbed.means[0].mean(axis=-1), regimes) == pytest.approx(0.27)
    # oracle: .8 and .7 -> .75
    assert structured_reward(play(Oracle(testbed), testbed, 100).rewards, regimes) == pytest.approx([0.75])


def test_best_arm_probability_counts_all_best_arms() -> None:
    means = [[0.1, 0.9, 0.5], [0.4, 0.4, 0.0], [0.2, 0.2, 0.2]]
    probabilities = [[0.2, 0.7, 0.1], [0.3, 0.5, 0.2], [0.3, 0.5, 0.2]]
    np.testing.assert_allclose(best_arm_probability(probabilities, means), [0.7, 0.8, 1.0])


def test_pull_fractions_are_the_share_of_each_arm_per_step() -> None:
    fractions = pull_fractions([[0, 2, 1, 1], [2, 2, 0, 2]], num_arms=3, pulls_per_step=2)
    np.testing.assert_array_equal(fractions, [[[0.5, 0, 0.5], [0, 1, 0]], [[0, 0, 1], [0.5, 0, 0.5]]])
    with pytest.raises(ConfigError, match="must be a multiple of pulls_per_step=2; got 3"):
        pull_fractions([0, 1, 2], num_arms=3, pulls_per_step=2)


def test_mean_by_regime_averages_the_steps_of_each_regime() -> None:
    means = mean_by_regime([[1, 2, 3, 4], [0, 0, 8, 4]], [0, 2, 2, 0])
    assert set(means) == {0, 2}
    np.testing.assert_allclose(means[0], [2.5, 2.0])
    np.testing.assert_allclose(means[2], [2.5, 4.0])


def test_time_to_reach_restarts_at_every_change_of_regime() -> None:
    regimes = np.array([0, 0, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(segment_starts(regimes), [0, 3, 5])
    #         segment 0: at its step 2 | segment 1: at once | segment 2: never, so its length
    values = [0.1, 0.2, 0.5, 0.9, 0.1, 0.4, 0.4]
    np.testing.assert_array_equal(time_to_reach(values, regimes), [2, 0, 2])
    np.testing.assert_array_equal(time_to_reach([values, [1.0] * 7], regimes, threshold=0.4), [[2, 0, 0], [0, 0, 0]])


def test_cumulative_regret_sums_the_losses_against_the_best_arm() -> None:
    means = [[0.5, 0.3], [0.5, 0.9], [0.5, 0.9]]
    # lost: .5 - .3 = .2, then 0, then .9 - .5 = .4
    np.testing.assert_allclose(cumulative_regret(means, [1, 1, 0]), [0.2, 0.2, 0.6])
    np.testing.assert_allclose(cumulative_regret(means, [[1, 1, 0], [0, 0, 0]]), [[0.2, 0.2, 0.6], [0, 0.4, 0.8]])

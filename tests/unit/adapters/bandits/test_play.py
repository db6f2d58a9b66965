"""Playing: the record against the testbed's own books, chance and the oracle."""

import numpy as np
import pytest

from adapters.bandits import (
    Oracle,
    Uniform,
    abrupt_testbed,
    cumulative_regret,
    dynamic_testbed,
    play,
    random_walk_testbed,
)


def test_play_records_arms_rewards_and_regrets_and_repeats_by_seed() -> None:
    testbed = abrupt_testbed(num_runs=3)
    testbed.pull(np.repeat([0, 1, 2], 2_990), np.zeros(3 * 2_990, dtype=int))  # ten pulls before the change
    earlier = testbed.regrets.copy()
    record = play(Uniform(3, 3), testbed, 20, seed=4)
    np.testing.assert_allclose(record.regrets.sum(axis=1), testbed.regrets - earlier)
    means = testbed.means[:, 2_990:3_010]
    np.testing.assert_allclose(record.regrets.cumsum(axis=1), cumulative_regret(means, record.arms))
    assert set(np.unique(record.rewards)) <= {0.0, 1.0}
    again = abrupt_testbed(num_runs=3, seed=1)
    np.testing.assert_array_equal(
        play(Uniform(3, 3), again, 20, seed=4).arms, play(Uniform(3, 3), again, 20, seed=4).arms
    )


@pytest.mark.parametrize("testbed", [dynamic_testbed(num_runs=2), random_walk_testbed(num_runs=2, num_steps=3_200)])
def test_the_oracle_has_no_regret(testbed) -> None:
    assert play(Oracle(testbed), testbed, 3_200).regrets.max() == 0.0

"""avg@k and pass@k: by hand, against all subsets of attempts, and through both measurements."""

import itertools
import math

import numpy as np
import pytest
import torch

from grpo import ConfigError, RewardConfig
from grpo.evaluation import paired_interval, pass_at_k
from grpo.evaluation.attempts import bootstrap_intervals, numbers_of_attempts
from tests.support.comparisons import AFTER, BEFORE, compared, measured, paying, scripted

NAN = math.nan


def test_pass_at_k_is_the_share_of_subsets_with_a_pass() -> None:
    """All C(6, k) subsets of six attempts with 0 to 6 passes."""
    rewards = torch.tril(torch.ones(7, 6, dtype=torch.float64), diagonal=-1)
    for k in range(1, 7):
        subsets = list(itertools.combinations(range(6), k))
        expected = [sum(any(row[i] for i in subset) for subset in subsets) / len(subsets) for row in rewards.tolist()]
        assert pass_at_k(rewards, k, 1.0).tolist() == pytest.approx(expected)


def test_attempts_without_a_reward_do_not_count() -> None:
    """One pass of two known attempts: pass@1 is 1/2, and pass@2 is 1. No pass of three: 0."""
    rewards = torch.tensor([[1.0, NAN, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert pass_at_k(rewards, 1, 1.0).tolist() == [0.5, 0.0]
    assert pass_at_k(rewards, 2, 1.0).tolist() == [1.0, 0.0]
    with pytest.raises(ConfigError, match=r"pass@3 needs 3 attempts at each state; a state has 2"):
        pass_at_k(rewards, 3, 1.0)
    with pytest.raises(ConfigError, match=r"pass_at_k: k must be >= 1"):
        pass_at_k(rewards, 0, 1.0)
    assert numbers_of_attempts(rewards) == [1, 2]


def test_the_numbers_of_attempts_double_up_to_all() -> None:
    found = [numbers_of_attempts(torch.zeros(2, size).double()) for size in (1, 2, 3, 8, 12)]
    assert found == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_intervals_of_several_columns_draw_the_same_states() -> None:
    columns = np.random.default_rng(0).normal(size=(50, 3))
    found = bootstrap_intervals(columns, confidence=0.9, seed=4)
    assert found == [pytest.approx(paired_interval(column, confidence=0.9, seed=4)) for column in columns.T]
    assert bootstrap_intervals(columns[:1], confidence=0.9, seed=4) == [None] * 3


def test_a_measurement_has_both_with_intervals() -> None:
    """Means .25, 1 and .5. Of three states, the lowest is drawn three times in 1 of 27 resamples, more than 2.5 %."""
    found = measured(scripted(BEFORE), num_actions_per_state=4)
    average, two = found.average(), found.pass_at(2)
    assert (average.value, average.interval) == (pytest.approx(7 / 12), (0.25, 1.0))
    assert (two.value, two.interval) == (pytest.approx(7 / 9), pytest.approx((0.5, 1.0)))
    narrow = found.average(confidence=0.5).interval
    assert narrow is not None
    assert narrow[1] - narrow[0] < 0.5
    with pytest.raises(ConfigError, match=r"pass@5 needs 5 attempts"):
        found.pass_at(5)
    with pytest.raises(ConfigError, match=r"confidence must be > 0 and < 1; got 1"):
        found.average(confidence=1)


def test_what_passes_must_be_said_unless_all_rewards_are_0_or_1() -> None:
    found = measured(scripted(BEFORE), reward_model=paying(0.2, 0.8), num_actions_per_state=4)
    with pytest.raises(ConfigError, match=r"pass_reward must say from which reward on an attempt passes"):
        found.pass_at(1)
    assert found.pass_at(1, pass_reward=0.8).value == pytest.approx(7 / 12)
    assert found.pass_at(1, pass_reward=0.81).value == 0.0
    assert found.pass_at(1, pass_reward=-1).value == 1.0


def test_a_comparison_has_both_policies_and_their_difference() -> None:
    report = compared(BEFORE, AFTER)
    assert report.pass_reward == 1.0
    assert [at.k for at in report.pass_at_k] == [1, 2, 4]
    two = report.pass_at_k[1]
    assert (two.before, two.after, two.difference) == pytest.approx((7 / 9, 8 / 9, 1 / 9))
    assert two.difference_interval == pytest.approx((-1 / 6, 1 / 2))
    assert report.avg_at_k.k == 4
    assert report.avg_at_k.difference_interval == report.confidence_interval
    assert compared(BEFORE, AFTER, confidence=0.5).avg_at_k.before_interval == pytest.approx(
        measured(scripted(BEFORE), num_actions_per_state=4).average(confidence=0.5).interval
    )


def test_rewards_on_a_scale_have_no_pass_unless_it_is_given() -> None:
    without = compared(BEFORE, AFTER, paying(0.5, 1.0))
    assert (without.pass_at_k, without.pass_reward) == ((), None)
    given = compared(BEFORE, AFTER, paying(0.5, 1.0), pass_reward=0.9)
    assert [at.before for at in given.pass_at_k] == [at.before for at in compared(BEFORE, AFTER).pass_at_k]
    assert given.pass_reward == 0.9


def test_dropped_rows_lower_the_largest_k() -> None:
    """One of four actions of the first state has no reward, so three are left."""

    def reward(states: list[str], actions: list[int]) -> list[float]:
        return [NAN if row == 2 else float(action) for row, action in enumerate(actions)]

    report = compared(BEFORE, AFTER, reward, reward=RewardConfig(non_finite="drop"))
    assert [at.k for at in report.pass_at_k] == [1, 2, 3]
    assert report.avg_at_k.k == 4

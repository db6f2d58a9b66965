"""Rows to which no part of the reward applies follow a setting of their own, and other rows without a reward do not."""

from typing import Any

import pytest
import torch

from adapters.llm import Completion, CompletionRewards
from grpo import RewardConfig, RewardError, WeightedRewards
from grpo._rewarding.calls import KeptRewards, RewardCalls

NAN, INF = float("nan"), float("inf")
X, Y = [1.0, NAN, NAN, 4.0], [10.0, 20.0, NAN, 40.0]


def asked(x: Any, y: Any, **settings: Any) -> KeptRewards:
    parts = WeightedRewards(
        {"x": lambda states, actions: torch.tensor(x), "y": lambda states, actions: torch.tensor(y)}
    )
    return RewardCalls(parts, RewardConfig(**settings))(["s"] * len(x), ["a"] * len(x))


def test_a_row_without_any_part_is_dropped_or_0_while_bugs_still_stop_the_run() -> None:
    found = asked(X, Y, not_applicable="drop")
    assert found.values.tolist() == [11.0, 20.0, 44.0]
    assert found.kept.tolist() == [True, True, False, True]
    assert found.metrics["rows/dropped"] == 1
    found = asked(X, Y, not_applicable="zero")
    assert found.values.tolist() == [11.0, 20.0, 0.0, 44.0]
    assert found.metrics["rewards/zeroed"] == 1
    assert found.components["y"].tolist() == [10.0, 20.0, 0.0, 40.0]
    for choice in ("drop", "zero"):
        with pytest.raises(RewardError, match=r"must return finite numbers; got \[inf\] at rows \[3\] of 4, from x"):
            asked([*X[:3], INF], Y, not_applicable=choice)


def test_without_a_setting_of_its_own_it_follows_non_finite() -> None:
    assert asked(X, Y, non_finite="zero").values.tolist() == [11.0, 20.0, 0.0, 44.0]
    assert asked(X, Y, non_finite="drop").values.tolist() == [11.0, 20.0, 44.0]
    with pytest.raises(RewardError, match=r"got \[nan\] at rows \[2\] of 4, from x, y.* set reward.not_applicable"):
        asked(X, Y)
    with pytest.raises(RewardError, match=r"'drop' or 'zero'\.$"):  # a bug, and no row without parts
        asked([1.0, 2.0, 3.0, INF], [1.0] * 4)


def test_the_two_settings_are_independent() -> None:
    found = asked([*X[:3], INF], Y, not_applicable="zero", non_finite="drop")
    assert found.values.tolist() == [11.0, 20.0, 0.0]
    found = asked([*X[:3], INF], Y, not_applicable="drop", non_finite="zero")
    assert found.values.tolist() == [11.0, 20.0, 0.0]
    assert found.metrics["rows/dropped"] == found.metrics["rewards/zeroed"] == 1
    with pytest.raises(
        RewardError,
        match=r"no part applies to rows \[2\] of 4, because x, y returned None or NaN there.*not_applicable",
    ):
        asked(X, Y, not_applicable="raise", non_finite="drop")


def test_if_no_part_applies_to_any_row_there_is_nothing_to_learn_from() -> None:
    with pytest.raises(RewardError, match="no row of 2 has a reward"):
        asked([NAN] * 2, [NAN] * 2, not_applicable="drop")
    assert asked([NAN] * 2, [NAN] * 2, not_applicable="zero").values.tolist() == [0.0, 0.0]


def test_a_step_without_any_part_counts_and_a_step_that_is_infinite_does_not() -> None:
    """Rewards per step. Row 1 lacks both parts at one step; in row 2, one part is infinite."""
    x = [[1.0, 1.0], [NAN, 1.0], [INF, 1.0]]
    y = [[1.0, 1.0], [NAN, 1.0], [1.0, 1.0]]
    found = asked(x, y, not_applicable="drop", non_finite="zero")
    assert found.values.tolist() == [[2.0, 2.0], [0.0, 2.0]]
    assert found.metrics["rows/dropped"] == found.metrics["rewards/zeroed"] == 1


def test_nan_of_a_reward_without_parts_is_a_bug() -> None:
    ask = RewardCalls(lambda states, actions: [1.0, NAN], RewardConfig(not_applicable="drop"))
    with pytest.raises(RewardError, match=r"must return finite numbers; got \[nan\]"):
        ask(["s"] * 2, ["a"] * 2)


def test_functions_that_return_none_for_a_row() -> None:
    rewards = CompletionRewards([lambda completions, **columns: [None, 1.0]])
    two = [Completion(token_ids=(1,), text="x", finish_reason="end")] * 2
    found = RewardCalls(rewards, RewardConfig(not_applicable="drop"))(["p", "p"], two)
    assert found.values.tolist() == [1.0]

"""What a reward model can do wrong: the error that names it, or the recovery that is counted."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo import RewardError, Rewards, WeightedRewards
from tests.support.reward_faults import FakeTime, asked, calls_of, counts

NAN, INF = math.nan, math.inf


def giving(*values: float) -> Callable[[Any, Any], list[float]]:
    """A reward that is fixed by the action's number."""

    def fixed(states: Any, actions: Any) -> list[float]:
        return [values[action] for action in actions]

    return fixed


def test_finite_rewards_are_returned_unchanged() -> None:
    found = asked(giving(1, 2, 4, 8))
    assert found.values.tolist() == [1, 2, 4, 8]
    assert (found.components, found.weights, found.kept) == ({}, {}, None)
    assert found.metrics == counts()


def test_a_reward_model_computes_in_evaluation_mode() -> None:
    class Judge(torch.nn.Module):
        def compute_rewards(self, states: Any, actions: Any) -> list[float]:
            return [float(self.training)] * len(actions)

    assert asked(Judge()).values.tolist() == [0, 0, 0, 0]


# NaN and infinity


def test_a_reward_that_is_not_finite_is_an_error_at_every_position(subtests: pytest.Subtests) -> None:
    makes: list[Any] = [list, torch.tensor, np.array, list]
    for bad, row in [(NAN, 0), (INF, 1), (-INF, 2), (NAN, 3)]:
        with subtests.test(bad=bad, row=row):

            def broken(states: Any, actions: Any, bad: float = bad, row: int = row) -> Any:
                return makes[row]([bad if action == row else 1.0 for action in actions])

            message = rf"^broken must return finite numbers; got \[{bad}\] at rows \[{row}\] of 4\. .*'drop' or 'zero'"
            with pytest.raises(RewardError, match=message):
                asked(broken)


def test_the_error_shows_four_rewards_and_names_16_rows() -> None:
    with pytest.raises(RewardError) as refused:
        asked(lambda states, actions: [1.0, *[NAN] * 16], 17)
    assert f"got {[NAN] * 4} at rows {list(range(1, 17))} of 17." in str(refused.value)
    with pytest.raises(RewardError) as refused:
        asked(lambda states, actions: [NAN] * 17, 17)
    assert f"at rows {list(range(16))} ... of 17." in str(refused.value)


def test_errors_number_rows_among_all_rows_even_after_others_raised() -> None:
    """Row 0 raises and leaves; rows 2 and 3 are NaN and keep their numbers."""
    reward = raising_for(0, giving(0, 1, NAN, NAN))
    with pytest.raises(RewardError, match=r"at rows \[2, 3\] of 4"):
        asked(reward, on_failure="drop")


def test_zeroed_rewards_become_0(subtests: pytest.Subtests) -> None:
    for bad in (NAN, INF, -INF):
        with subtests.test(bad=bad):
            found = asked(giving(3, bad, 7, bad), non_finite="zero")
            assert found.values.tolist() == [3, 0, 7, 0]
            assert found.kept is None
            assert found.metrics == counts(zeroed=2)


def test_dropped_rows_lose_their_reward_parts_too(subtests: pytest.Subtests) -> None:
    for bad in (NAN, INF, -INF):
        with subtests.test(bad=bad):
            missing = NAN if bad is NAN else 1
            parts = WeightedRewards({"x": giving(1, bad, 4, 8), "y": giving(1, missing, 1, 1)}, {"x": 1.0, "y": 0.5})
            found = asked(parts, non_finite="drop")
            assert found.values.tolist() == [1.5, 4.5, 8.5]
            assert {name: part.tolist() for name, part in found.components.items()} == {"x": [1, 4, 8], "y": [1] * 3}
            assert found.weights == {"x": 1.0, "y": 0.5}
            assert found.kept.tolist() == [True, False, True, True]
            assert found.metrics == counts(dropped=1)


def test_one_non_finite_step_drops_the_whole_row() -> None:
    steps = torch.tensor([[1.0, NAN], [2.0, 3.0]])
    found = asked(lambda states, actions: steps, 2, non_finite="drop")
    assert found.values.tolist() == [[2, 3]]
    assert found.kept.tolist() == [False, True]


def test_dropping_every_row_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"<lambda>: no row of 8 has a reward"):
        asked(lambda states, actions: [NAN] * len(actions), 8, non_finite="drop")


def test_non_finite_parts_of_zeroed_rows_become_0() -> None:
    parts = {"x": giving(NAN, 1, 2, 3), "y": giving(NAN, INF, -INF, 1)}
    found = asked(WeightedRewards(parts), non_finite="zero")
    assert found.values.tolist() == [0, 0, 0, 4]
    assert found.components["x"].tolist() == [0, 1, 2, 3]
    assert found.components["y"].tolist() == [0, 0, 0, 1]


def test_non_finite_parts_per_step_become_0_only_in_zeroed_rows() -> None:
    """x is infinite at one step of row 0: that step counts as 0, and the other rows and steps keep their rewards."""
    parts = {
        "x": lambda states, actions: torch.tensor([[INF, 1.0, 2.0], [3.0, 4.0, 5.0]]),
        "y": lambda states, actions: torch.ones(2, 3),
    }
    found = asked(WeightedRewards(parts), 2, torch.ones(2, 3, dtype=torch.bool), non_finite="zero")
    assert found.values.tolist() == [[0, 2, 3], [4, 5, 6]]
    assert found.components["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found.components["y"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert found.metrics["rewards/zeroed"] == 1.0
    assert found.kept is None


def test_a_row_without_any_applicable_part_is_refused_or_zeroed_by_itself() -> None:
    """Row 0 has no reward and counts as 0. Part x does not apply to row 1, and stays NaN there."""
    parts = {"x": giving(NAN, NAN, 2, 3), "y": giving(NAN, 1, 1, 1), "z": giving(0, 0, 0, 0)}
    without_z = WeightedRewards({name: parts[name] for name in "xy"})
    with pytest.raises(RewardError, match=r"rows \[0\] of 4, from x, y\. "):
        asked(without_z)
    found = asked(without_z, non_finite="zero")
    assert found.values.tolist() == [0, 1, 3, 4]
    assert found.components["x"].nan_to_num(-1).tolist() == [0, -1, 2, 3]
    assert asked(WeightedRewards(parts)).values.tolist() == [0, 1, 3, 4]


# Shapes


def test_rewards_of_a_wrong_shape_are_refused_under_every_setting(subtests: pytest.Subtests) -> None:
    def wrong(states: Any, actions: Any) -> Tensor:
        return torch.zeros(len(actions), 1)

    for reward in (wrong, WeightedRewards({"one": giving(0, 0, 0, 0), "two": wrong})):
        for settings in ({}, {"num_retries": 3}, {"on_failure": "drop", "non_finite": "zero"}):
            name = "wrong" if reward is wrong else r"WeightedRewards\.compute_rewards\['two'\]|wrong"
            message = rf"({name}) must return one number per row, \[N\] = \[4\].*; got \[4, 1\] float32"
            case = subtests.test(reward=type(reward).__name__, settings=settings)
            with case, pytest.raises(RewardError, match=message):
                asked(reward, **settings)


def test_rewards_per_step_count_only_on_the_policys_steps() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    steps = torch.tensor([[1.0, NAN], [2.0, 3.0]])
    assert asked(lambda states, actions: steps, 2, mask).values.tolist() == [[1, 0], [2, 3]]
    assert asked(lambda states, actions: [1.0, 2.0], 2, mask).values.tolist() == [1, 2]
    assert asked(lambda states, actions: steps[1:].repeat(2, 1), 2).values.tolist() == [[2, 3], [2, 3]]
    with pytest.raises(RewardError, match=r"Rewards per step must be \[2, 2\], .*from <lambda> got \[2, 9\] float32"):
        asked(lambda states, actions: torch.zeros(2, 9), 2, mask)


# Exceptions


class Flaky:
    """Raises on the given calls (from 0), and whenever one of the given actions is among those to be judged."""

    def __init__(self, calls: Any = (), actions: Any = ()) -> None:
        self.bad_calls, self.bad_actions, self.calls = set(calls), set(actions), 0

    def __call__(self, states: Any, actions: Any) -> list[float]:
        self.calls += 1
        if self.calls - 1 in self.bad_calls or self.bad_actions & set(actions):
            raise TimeoutError("the judge is away")
        return [float(action) for action in actions]


def raising_for(row: int, reward: Any) -> Any:
    def raising(states: Any, actions: Any) -> Any:
        if row in actions:
            raise TimeoutError("the judge is away")
        return reward(states, actions)

    return raising


def test_a_reward_that_raises_is_named_with_its_rows_and_the_error_is_chained() -> None:
    class Judge(WeightedRewards):
        def plan_calls(self, states: Any, actions: Any) -> Any:
            raise KeyError("lost")

    message = r"^Judge\.compute_rewards raised KeyError: 'lost' for rows 0 to 7, in 1 call"
    with pytest.raises(RewardError, match=message) as caught:
        asked(Judge({"x": Flaky()}), 8)
    assert isinstance(caught.value.__cause__, KeyError)


def test_retries_are_counted_for_each_call_alone() -> None:
    flaky = Flaky({0, 2, 3})
    calls = calls_of(flaky, num_retries=2)
    assert [calls([0], [0]).metrics["rewards/retries"] for _ in range(3)] == [1.0, 2.0, 0.0]


def test_a_call_is_retried_before_rows_are_dropped() -> None:
    flaky = Flaky({0})
    found = asked(flaky, on_failure="drop", num_retries=1)
    assert (found.kept, found.metrics["rows/dropped"], flaky.calls) == (None, 0.0, 2)


def test_single_row_calls_are_not_retried() -> None:
    """Four calls for all rows, with pauses of 1, 2 and 4 seconds; then one for each of four rows, at once."""
    time, flaky = FakeTime(), Flaky(actions={0, 2})
    found = asked(flaky, time=time, on_failure="drop", num_retries=3, retry_delay=1.0)
    assert time.slept == [1.0, 2.0, 4.0]
    assert flaky.calls == 4 + 4
    assert found.metrics == counts(dropped=2, retries=3, failed_calls=4 + 2)
    assert found.values.tolist() == [1, 3]
    assert found.kept.tolist() == [False, True, False, True]


def test_rows_that_raise_and_rows_that_are_not_finite_are_both_dropped() -> None:
    found = asked(raising_for(0, giving(0, NAN, 2, 3)), on_failure="drop", non_finite="drop")
    assert found.values.tolist() == [2, 3]
    assert found.kept.tolist() == [False, False, True, True]
    assert found.metrics["rows/dropped"] == 2.0


def test_rows_that_raise_lose_their_reward_parts_too() -> None:
    parts = WeightedRewards({"x": Flaky(actions={0}), "y": giving(0, 10, 20, 30)}, {"x": 1, "y": 0.1})
    found = asked(parts, on_failure="drop")
    assert found.values.tolist() == pytest.approx([2.0, 4.0, 6.0])
    assert {name: part.tolist() for name, part in found.components.items()} == {"x": [1, 2, 3], "y": [10, 20, 30]}


# Rewards per step, one row at a time. Rows of 3, 1, 2 and 0 steps; step t of row n has the reward 10 n + t.

RAGGED_MASK = torch.tensor([[True] * 3, [True, False, False], [True, True, False], [False] * 3])
NUM_STEPS = [3, 1, 2, 0]


def one_row(answer: Callable[[int], Any], failing: int | None = None) -> Any:
    """A reward that raises for several rows at once, and for row `failing`."""

    def reward(states: Any, actions: Any) -> Any:
        (row,) = actions
        if row == failing:
            raise TimeoutError("the judge is away")
        return answer(row)

    return reward


def test_rewards_per_step_are_the_same_when_computed_row_by_row(subtests: pytest.Subtests) -> None:
    """A row may give its own steps alone, or be padded as far as the longest row. Padding is not read."""
    whole = [[0.0, 1.0, 2.0], [10.0, 0.0, 0.0], [20.0, 21.0, 0.0], [0.0, 0.0, 0.0]]
    for failing in (None, 0, 1, 3):
        for padding in (0, 1):
            with subtests.test(failing=failing, padding=padding):

                def steps(row: int, padding: int = padding) -> list[list[float]]:
                    count = max(min(NUM_STEPS[row] + padding, 3), 1)
                    return [[10.0 * row + t if t < NUM_STEPS[row] else NAN for t in range(count)]]

                parts = WeightedRewards({"x": one_row(steps, failing)})
                found = asked(parts, 4, RAGGED_MASK, on_failure="drop", non_finite="raise")
                kept = [row for row in range(4) if row != failing]
                assert found.values.tolist() == [whole[row] for row in kept]
                assert found.components["x"].shape == (len(kept), 3)
                assert found.metrics["rows/dropped"] == 4 - len(kept)


def test_without_a_mask_rows_are_padded_to_the_longest() -> None:
    found = asked(one_row(lambda row: [[1.0] * NUM_STEPS[row]]), 3, on_failure="drop")
    assert found.values.tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]


def test_a_row_of_a_wrong_shape_is_dropped(subtests: pytest.Subtests) -> None:
    cases: list[tuple[str, Any, str]] = [
        ("two rows", lambda row: torch.ones(2), r"reward must return one number per row, \[N\] = \[1\].*got \[2\]"),
        ("three axes", lambda row: torch.ones(1, 2, 2), r"reward must return .*got \[1, 2, 2\]"),
        ("words", lambda row: ["one"], r"reward must return .*got a list of 1"),
        ("nothing", lambda row: None, r"reward must return .*got NoneType None"),
        ("one too many", lambda row: torch.ones(1, 4), r"reward must return 3 rewards for a row of 3 .* to 3; got 4"),
        ("one too few", lambda row: torch.ones(1, 2), r"reward must return 3 rewards for a row of 3 .* to 3; got 2"),
    ]
    for case, answer, message in cases:
        with subtests.test(case=case):
            right = lambda row, answer=answer: answer(row) if row == 0 else torch.ones(1, 3)  # noqa: E731
            found = asked(one_row(right), 4, RAGGED_MASK, on_failure="drop")
            assert found.kept.tolist() == [False, True, True, True]
            assert found.metrics == counts(dropped=1, failed_calls=1 + 1)
            with pytest.raises(RewardError, match=message):
                asked(one_row(lambda row, answer=answer: answer(0)), 4, RAGGED_MASK[[0] * 4], on_failure="drop")


def test_rows_that_are_rewarded_unlike_most_rows_are_dropped(subtests: pytest.Subtests) -> None:
    """One reward among rewards per step, rewards per step among single rewards, and a part with another name."""
    steps, single = torch.ones(1, 3), torch.ones(1)
    for odd, other in [(single, steps), (steps, single)]:
        with subtests.test(odd=list(odd.shape)):
            reward = one_row(lambda row, odd=odd, other=other: odd if row == 1 else other)
            found = asked(reward, 4, RAGGED_MASK, on_failure="drop")
            assert found.kept.tolist() == [True, False, True, True]
            assert found.values.dim() == other.dim()
            assert found.metrics == counts(dropped=1, failed_calls=1 + 1)

    def renamed(states: Any, actions: Any) -> Rewards:
        (row,) = actions
        own = torch.tensor([float(row)])
        return Rewards(values=own, components={"odd" if row == 2 else "x": own})

    found = asked(renamed, on_failure="drop")
    assert found.values.tolist() == found.components["x"].tolist() == [0, 1, 3]
    assert found.metrics == counts(dropped=1, failed_calls=1 + 1)


def test_rewards_per_step_of_a_wrong_width_are_a_failed_call() -> None:
    widths = iter([2, 4, 3])
    found = asked(lambda s, a: torch.ones(4, next(widths)), 4, RAGGED_MASK, num_retries=2)
    assert found.values.tolist() == RAGGED_MASK.double().tolist()
    assert found.metrics == counts(retries=2, failed_calls=2)

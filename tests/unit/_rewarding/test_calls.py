"""What a reward model can do wrong: the error that names it, or the recovery that is counted. And the metrics of its own."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo import RewardConfig, RewardError, Rewards, WeightedRewards
from grpo._collecting.costs import Costs
from grpo._retrying.calls import RetriedCalls
from grpo._rewarding.calls import KeptRewards
from grpo.experience_collector import ExperienceCollector
from tests.support.policies import TablePolicy
from tests.support.reward_faults import FakeTime, asked, counts

NAN, INF = math.nan, math.inf


def giving(*values: float) -> Callable[[Any, Any], list[float]]:
    return lambda states, actions: [values[action] for action in actions]


def test_finite_rewards_are_returned_unchanged() -> None:
    found = asked(giving(1, 2, 4, 8))
    assert found.values.tolist() == [1, 2, 4, 8]
    assert (found.components, found.weights, found.kept, found.metrics) == ({}, {}, None, counts())


def test_a_reward_model_computes_in_evaluation_mode() -> None:
    class Judge(torch.nn.Module):
        def compute_rewards(self, states: Any, actions: Any) -> list[float]:
            return [float(self.training)] * len(actions)

    assert asked(Judge()).values.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("bad", "row", "make"), [(NAN, 0, list), (INF, 1, torch.tensor), (-INF, 2, np.array), (NAN, 3, list)]
)
def test_a_reward_that_is_not_finite_is_an_error_at_every_position(bad, row, make):
    def broken(states: Any, actions: Any) -> Any:
        return make([bad if action == row else 1.0 for action in actions])

    message = rf"^broken must return finite numbers; got \[{bad}\] at rows \[{row}\] of 4\. .*'drop' or 'zero'"
    with pytest.raises(RewardError, match=message):
        asked(broken)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0, *[NAN] * 16], f"got {[NAN] * 4} at rows {list(range(1, 17))} of 17."),
        ([NAN] * 17, f"at rows {list(range(16))} ... of 17."),
    ],
)
def test_the_error_shows_four_rewards_and_names_16_rows(values, said):
    with pytest.raises(RewardError, match=re.escape(said)):
        asked(lambda states, actions: values, 17)


def test_errors_number_rows_among_all_rows_even_after_others_raised() -> None:
    """Row 0 raises and leaves; rows 2 and 3 are NaN and keep their numbers."""
    reward = raising_for(0, giving(0, 1, NAN, NAN))
    with pytest.raises(RewardError, match=r"at rows \[2, 3\] of 4"):
        asked(reward, on_failure="drop")


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_zeroed_rewards_become_0(bad):
    found = asked(giving(3, bad, 7, bad), non_finite="zero")
    assert (found.values.tolist(), found.kept, found.metrics) == ([3, 0, 7, 0], None, counts(zeroed=2))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_dropped_rows_lose_their_reward_parts_too(bad):
    missing = NAN if bad is NAN else 1
    parts = WeightedRewards({"x": giving(1, bad, 4, 8), "y": giving(1, missing, 1, 1)}, {"x": 1.0, "y": 0.5})
    found = asked(parts, non_finite="drop")
    assert found.values.tolist() == [1.5, 4.5, 8.5]
    assert {name: part.tolist() for name, part in found.components.items()} == {"x": [1, 4, 8], "y": [1] * 3}
    assert (found.weights, found.kept.tolist()) == ({"x": 1.0, "y": 0.5}, [True, False, True, True])
    assert found.metrics == counts(dropped=1)


def test_one_non_finite_step_drops_the_whole_row_and_dropping_every_row_is_an_error():
    steps = torch.tensor([[1.0, NAN], [2.0, 3.0]])
    found = asked(lambda states, actions: steps, 2, non_finite="drop")
    assert (found.values.tolist(), found.kept.tolist()) == ([[2, 3]], [False, True])
    with pytest.raises(RewardError, match=r"<lambda>: no row of 8 has a reward, .* set reward\.non_finite to 'zero'"):
        asked(lambda states, actions: [NAN] * len(actions), 8, non_finite="drop")


def test_non_finite_parts_of_zeroed_rows_become_0() -> None:
    found = asked(WeightedRewards({"x": giving(NAN, 1, 2, 3), "y": giving(NAN, INF, -INF, 1)}), non_finite="zero")
    assert (found.values.tolist(), found.components["x"].tolist()) == ([0, 0, 0, 4], [0, 1, 2, 3])
    assert found.components["y"].tolist() == [0, 0, 0, 1]


def test_non_finite_parts_per_step_become_0_only_in_zeroed_rows() -> None:
    """x is infinite at one step of row 0: that step counts as 0, and the other rows and steps keep their rewards."""
    x = torch.tensor([[INF, 1.0, 2.0], [3.0, 4.0, 5.0]])
    parts = {"x": lambda states, actions: x, "y": lambda states, actions: torch.ones(2, 3)}
    found = asked(WeightedRewards(parts), 2, torch.ones(2, 3, dtype=torch.bool), non_finite="zero")
    assert (found.values.tolist(), found.components["y"].tolist()) == ([[0, 2, 3], [4, 5, 6]], [[1, 1, 1], [1, 1, 1]])
    assert found.components["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (found.metrics["rewards/zeroed"], found.kept) == (1.0, None)


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


def wrong(states: Any, actions: Any) -> Tensor:
    return torch.zeros(len(actions), 1)


@pytest.mark.parametrize("settings", [{}, {"num_retries": 3}, {"on_failure": "drop", "non_finite": "zero"}])
@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (wrong, "wrong"),
        (WeightedRewards({"one": giving(*[0] * 4), "two": wrong}), r"WeightedRewards\.compute_rewards\['two'\]|wrong"),
    ],
)
def test_rewards_of_a_wrong_shape_are_refused_under_every_setting(reward, name, settings):
    message = rf"({name}) must return one number per row, \[N\] = \[4\].*; got \[4, 1\] float32"
    with pytest.raises(RewardError, match=message):
        asked(reward, **settings)


def test_rewards_per_step_count_only_on_the_policys_steps() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    steps = torch.tensor([[1.0, NAN], [2.0, 3.0]])
    assert asked(lambda states, actions: steps, 2, mask).values.tolist() == [[1, 0], [2, 3]]
    assert asked(lambda states, actions: [1.0, 2.0], 2, mask).values.tolist() == [1, 2]
    assert asked(lambda states, actions: steps[1:].repeat(2, 1), 2).values.tolist() == [[2, 3], [2, 3]]
    with pytest.raises(RewardError, match=r"Rewards per step must be \[2, 2\], .*from <lambda> got \[2, 9\] float32"):
        asked(lambda states, actions: torch.zeros(2, 9), 2, mask)


def test_an_infinite_reward_in_a_row_without_a_step_is_a_missing_reward_and_nan_is_padding() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    fault, padding = (torch.tensor([[1.0, value], [value, 0.0]]) for value in (math.inf, NAN))
    assert asked(lambda states, actions: padding, 2, mask).values.tolist() == [[1, 0], [0, 0]]
    with pytest.raises(RewardError, match=r"must return finite numbers; got \[\[inf, 0\.0\]\] at rows \[1\] of 2"):
        asked(lambda states, actions: fault, 2, mask)
    assert asked(lambda states, actions: fault, 2, mask, non_finite="drop").values.tolist() == [[1, 0]]


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
        asked(Judge({"x": giving()}), 8)
    assert isinstance(caught.value.__cause__, KeyError)


def test_single_row_calls_are_not_retried() -> None:
    """Four calls for all rows, with pauses of 1, 2 and 4 seconds; then one for each of four rows, at once."""
    time, asked_for = FakeTime(), []

    def flaky(states: Any, actions: Any) -> list[float]:
        asked_for.append(len(actions))
        if {0, 2} & {*actions}:
            raise TimeoutError("the judge is away")
        return [float(action) for action in actions]

    found = asked(flaky, time=time, on_failure="drop", num_retries=3, retry_delay=1.0)
    assert (time.slept, asked_for) == ([1.0, 2.0, 4.0], [4] * 4 + [1] * 4)
    assert found.metrics == counts(dropped=2, retries=3, failed_calls=4 + 2)
    assert (found.values.tolist(), found.kept.tolist()) == ([1, 3], [False, True, False, True])


def test_rows_that_raise_and_rows_that_are_not_finite_are_both_dropped() -> None:
    found = asked(raising_for(0, giving(0, NAN, 2, 3)), on_failure="drop", non_finite="drop")
    assert (found.values.tolist(), found.kept.tolist()) == ([2, 3], [False, False, True, True])
    assert found.metrics["rows/dropped"] == 2.0


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


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("failing", [None, 0, 1, 3])
def test_rewards_per_step_are_the_same_when_computed_row_by_row(failing, padding):
    """A row may give its own steps alone, or be padded as far as the longest row. Padding is not read."""
    whole = [[0.0, 1.0, 2.0], [10.0, 0.0, 0.0], [20.0, 21.0, 0.0], [0.0, 0.0, 0.0]]

    def steps(row: int) -> list[list[float]]:
        count = max(min(NUM_STEPS[row] + padding, 3), 1)
        return [[10.0 * row + t if t < NUM_STEPS[row] else NAN for t in range(count)]]

    parts = WeightedRewards({"x": one_row(steps, failing)})
    found = asked(parts, 4, RAGGED_MASK, on_failure="drop", non_finite="raise")
    kept = [row for row in range(4) if row != failing]
    assert found.values.tolist() == [whole[row] for row in kept]
    assert (found.components["x"].shape, found.metrics["rows/dropped"]) == ((len(kept), 3), 4 - len(kept))


def test_without_a_mask_rows_are_padded_to_the_longest() -> None:
    found = asked(one_row(lambda row: [[1.0] * NUM_STEPS[row]]), 3, on_failure="drop")
    assert found.values.tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (torch.ones(2), r"reward must return one number per row, \[N\] = \[1\].*got \[2\]"),
        (torch.ones(1, 2, 2), r"reward must return .*got \[1, 2, 2\]"),
        (["one"], r"reward must return .*got a list of 1"),
        (None, r"reward must return .*got NoneType None"),
        (torch.ones(1, 4), r"reward must return 3 rewards for a row of 3 .* to 3; got 4"),
        (torch.ones(1, 2), r"reward must return 3 rewards for a row of 3 .* to 3; got 2"),
    ],
)
def test_a_row_of_a_wrong_shape_is_dropped(answer, message):
    found = asked(one_row(lambda row: answer if row == 0 else torch.ones(1, 3)), 4, RAGGED_MASK, on_failure="drop")
    assert found.kept.tolist() == [False, True, True, True]
    assert found.metrics == counts(dropped=1, failed_calls=1 + 1)
    with pytest.raises(RewardError, match=message):
        asked(one_row(lambda row: answer), 4, RAGGED_MASK[[0] * 4], on_failure="drop")


@pytest.mark.parametrize(
    ("odd", "other"), [(torch.ones(1), torch.ones(1, 3)), (torch.ones(1, 3), torch.ones(1))], ids=["single", "steps"]
)
def test_rows_that_are_rewarded_unlike_most_rows_are_dropped(odd, other):
    """One reward among rewards per step, and rewards per step among single rewards."""
    found = asked(one_row(lambda row: odd if row == 1 else other), 4, RAGGED_MASK, on_failure="drop")
    assert (found.kept.tolist(), found.values.dim()) == ([True, False, True, True], other.dim())
    assert found.metrics == counts(dropped=1, failed_calls=1 + 1)


def test_rows_with_other_parts_than_most_rows_are_dropped() -> None:
    def renamed(row: int) -> Rewards:
        own = torch.tensor([float(row)])
        return Rewards(values=own, components={"odd" if row == 2 else "x": own})

    found = asked(one_row(renamed), on_failure="drop")
    assert found.values.tolist() == found.components["x"].tolist() == [0, 1, 3]
    assert found.metrics == counts(dropped=1, failed_calls=1 + 1)


def test_rewards_per_step_of_a_wrong_width_are_a_failed_call() -> None:
    widths = iter([2, 4, 3])
    found = asked(lambda s, a: torch.ones(4, next(widths)), 4, RAGGED_MASK, num_retries=2)
    assert found.values.tolist() == RAGGED_MASK.double().tolist()
    assert found.metrics == counts(retries=2, failed_calls=2)


# Rows to which no part of the reward applies follow a setting of their own, and other rows without a reward do not


X, Y = [1.0, NAN, NAN, 4.0], [10.0, 20.0, NAN, 40.0]


def rewarded(x: Any, y: Any, **settings: Any) -> KeptRewards:
    parts = {"x": lambda states, actions: torch.tensor(x), "y": lambda states, actions: torch.tensor(y)}
    return asked(WeightedRewards(parts), len(x), **settings)


def test_a_row_without_any_part_is_dropped_or_0_while_bugs_still_stop_the_run() -> None:
    found = rewarded(X, Y, not_applicable="drop")
    assert (found.values.tolist(), found.kept.tolist()) == ([11.0, 20.0, 44.0], [True, True, False, True])
    assert found.metrics["rows/dropped"] == 1
    found = rewarded(X, Y, not_applicable="zero")
    assert (found.values.tolist(), found.metrics["rewards/zeroed"]) == ([11.0, 20.0, 0.0, 44.0], 1)
    assert found.components["y"].tolist() == [10.0, 20.0, 0.0, 40.0]
    for choice in ("drop", "zero"):
        with pytest.raises(RewardError, match=r"must return finite numbers; got \[inf\] at rows \[3\] of 4, from x"):
            rewarded([*X[:3], INF], Y, not_applicable=choice)


def test_without_a_setting_of_its_own_it_follows_non_finite() -> None:
    assert rewarded(X, Y, non_finite="zero").values.tolist() == [11.0, 20.0, 0.0, 44.0]
    assert rewarded(X, Y, non_finite="drop").values.tolist() == [11.0, 20.0, 44.0]
    with pytest.raises(RewardError, match=r"got \[nan\] at rows \[2\] of 4, from x, y.* set reward.not_applicable"):
        rewarded(X, Y)
    with pytest.raises(RewardError, match=r"'drop' or 'zero'\.$"):  # a bug, and no row without parts
        rewarded([1.0, 2.0, 3.0, INF], [1.0] * 4)


def test_the_two_settings_are_independent() -> None:
    found = rewarded([*X[:3], INF], Y, not_applicable="zero", non_finite="drop")
    assert found.values.tolist() == [11.0, 20.0, 0.0]
    found = rewarded([*X[:3], INF], Y, not_applicable="drop", non_finite="zero")
    assert found.values.tolist() == [11.0, 20.0, 0.0]
    assert found.metrics["rows/dropped"] == found.metrics["rewards/zeroed"] == 1
    message = r"no part applies to rows \[2\] of 4, because x, y returned None or NaN there.*not_applicable"
    with pytest.raises(RewardError, match=message):
        rewarded(X, Y, not_applicable="raise", non_finite="drop")


def test_if_no_part_applies_to_any_row_nothing_is_learned_and_nan_without_parts_is_a_bug():
    with pytest.raises(RewardError, match="no row of 2 has a reward"):
        rewarded([NAN] * 2, [NAN] * 2, not_applicable="drop")
    assert rewarded([NAN] * 2, [NAN] * 2, not_applicable="zero").values.tolist() == [0.0, 0.0]
    with pytest.raises(RewardError, match=r"must return finite numbers; got \[nan\]"):
        asked(giving(1.0, NAN), 2, not_applicable="drop")


def test_a_step_without_any_part_counts_and_a_step_that_is_infinite_does_not() -> None:
    """Rewards per step. Row 1 lacks both parts at one step; in row 2, one part is infinite."""
    x = [[1.0, 1.0], [NAN, 1.0], [INF, 1.0]]
    found = rewarded(x, [[1.0, 1.0], [NAN, 1.0], [1.0, 1.0]], not_applicable="drop", non_finite="zero")
    assert found.values.tolist() == [[2.0, 2.0], [0.0, 2.0]]
    assert found.metrics["rows/dropped"] == found.metrics["rewards/zeroed"] == 1


class Measuring:
    """Each action is a number of seconds. Negative actions fail."""

    def compute_rewards(self, states: Any, actions: Sequence[int]) -> Rewards:
        if min(actions) < 0:
            raise ValueError("negative")
        return Rewards(
            values=torch.tensor(actions).double(),
            metrics={"judge/calls": (0, len(actions)), "judge/seconds": (len(actions), sum(actions))},
        )

    def train(self, *_: Any) -> Any:
        return self

    eval = to = train


def collector(reward_model: Any, *actions: int, **settings: Any) -> ExperienceCollector:
    arguments = {"reward": RewardConfig(**settings), "reward_calls": RetriedCalls, "group_size": len(actions)}
    policy = TablePolicy(["state"], num_actions=7, script=[list(actions)])
    return ExperienceCollector(policy=policy, reward_model=reward_model, **arguments)


def taken(found: ExperienceCollector) -> dict[str, float]:
    agreed = found.costs.agree([found.costs.of_this_rank()])
    return {name: value for name, value in agreed.items() if name.startswith("judge/")}


def test_metrics_are_means_over_all_calls_of_an_iteration_or_totals() -> None:
    """Two calls with 1, 2 and 6 s each: 6 calls of 3 s on average. The next iteration starts anew."""
    found = collector(Measuring(), 1, 2, 6)
    for _ in range(2):
        found.collect(["state"])
    assert (taken(found), taken(found)) == ({"judge/calls": 6, "judge/seconds": 3.0}, {})


def test_metrics_are_joined_over_ranks() -> None:
    """Calls of 1 and 4 s here and of 10 s on the other rank: 5 s on average."""
    found, measured = collector(Measuring(), 1, 4), {"judge/calls": (0, 1), "judge/seconds": (1, 10.0)}
    found.collect(["state"])
    others = Costs(counts={"rows/dropped": 2.0}, measured=measured, num_repeated=0)
    metrics = found.costs.agree([found.costs.of_this_rank(), others])
    assert [metrics[name] for name in ("judge/calls", "judge/seconds", "rows/dropped")] == [3, 5.0, 2.0]


def test_a_call_that_fails_is_not_measured() -> None:
    found = collector(Measuring(), 1, -3, 5, on_failure="drop")
    found.collect(["state"])
    assert taken(found) == {"judge/calls": 2, "judge/seconds": 3.0}

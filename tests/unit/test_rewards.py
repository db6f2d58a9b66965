"""Win rates from preferences: which rows are compared, the arithmetic, groups, failures, and a bandit that learns."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo import ConfigError, RewardConfig, RewardError, measure_policy
from grpo._retrying.calls import RetriedCalls
from grpo.checks import check_reward_model
from grpo.reward_model_base import as_reward_model
from grpo.rewards import PairwiseRewards, WeightedRewards, pairs_within_groups
from tests.support.bad_input_places import Plain
from tests.support.objective_inputs import as_users_run_it
from tests.support.trainers import trainer_of

NAN = float("nan")


def longer(states: Any, first: Any, second: Any) -> list[float]:
    return [0.5 + 0.5 * ((len(a) > len(b)) - (len(a) < len(b))) for a, b in zip(first, second, strict=True)]


def win_rates(compare: Any, actions: Any, group_ids: list[int], **options: Any) -> list[float]:
    rewards = PairwiseRewards(compare, **options).in_groups(torch.tensor(group_ids))
    return rewards.compute_rewards([f"state {group}" for group in group_ids], actions).tolist()


@pytest.mark.parametrize(("compare", "actions", "group_ids", "options", "expected"), [
    # lengths 3, 1, 1: wins 2 of 2; a tie and a loss, 1/4; the same. In the other group, of interleaved rows, 1 and 0
    (longer, ["abc", "x", "a", "xyz", "b"], [7, 2, 7, 2, 7], {}, [1.0, 0.0, 0.25, 1.0, 0.25]),
    # probabilities count for the first action, and their complements for the second: the pairs are (0, 1), (1, 2), (2, 0)
    (lambda *_: [0.9, 0.6, 0.2], "abc", [0] * 3, {}, [(0.9 + 0.8) / 2, (0.1 + 0.6) / 2, (0.4 + 0.2) / 2]),
    # a judge who favours the first action favours nobody
    (lambda states, first, second: [0.8] * len(first), "aaaaa", [0] * 5, {}, [0.5] * 5),
    (lambda states, first, second: [0.8] * len(first), "aaaaaa", [0] * 6, {"num_opponents": 4}, [0.5] * 6),
    # a group of one has no opponent, and is not compared
    (longer, ["a", "bcd", "b"], [0, 1, 1], {}, [0.5, 1.0, 0.0]),
    (lambda states, first, second: pytest.fail("nothing is compared"), ["a"], [0], {}, [0.5]),
])  # fmt: skip
def test_win_rates_equal_hand_worked_means_over_the_opponents_of_the_group(
    compare: Any, actions: Any, group_ids: list[int], options: Any, expected: list[float]
) -> None:
    assert win_rates(compare, [*actions], group_ids, **options) == pytest.approx(expected, rel=1e-12)


def test_the_function_gets_the_rows_of_the_pairs_as_the_policy_made_them() -> None:
    asked: list[Any] = []

    def compare(states: Tensor, first: Tensor, second: Tensor) -> Tensor:
        asked.append((states.tolist(), first.tolist(), second.tolist()))
        return first > second

    rewards = PairwiseRewards(compare).in_groups(torch.tensor([4, 4, 9, 9]))
    found = rewards.compute_rewards(torch.tensor([[0.0], [0.0], [1.0], [1.0]]), torch.tensor([3, 5, 8, 2]))
    assert asked == [([[0.0], [1.0]], [3, 8], [5, 2])]
    assert found.tolist() == [0.0, 1.0, 1.0, 0.0]


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    half=st.none() | st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_every_action_meets_its_opponents_once_and_comes_first_in_half_of_the_pairs(
    sizes: list[int], half: int | None, seed: int
) -> None:
    num_opponents = None if half is None else 2 * half
    ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    first, second, has_opponent = pairs_within_groups(ids, num_opponents)
    pairs = {frozenset(pair) for pair in zip(first.tolist(), second.tolist(), strict=True)}
    assert len(pairs) == len(first)
    assert all(len(pair) == 2 for pair in pairs)
    assert bool((ids[first] == ids[second]).all())
    met = torch.cat([first, second]).bincount(minlength=len(ids)).tolist()
    expected = [min(sizes[group] - 1, num_opponents or 99) for group in ids.tolist()]
    assert met == expected
    assert has_opponent.tolist() == [count > 0 for count in expected]
    as_first = first.bincount(minlength=len(ids)).tolist()
    assert all(abs(2 * count - total) <= total % 2 for count, total in zip(as_first, met, strict=True))


def asked(reward: Any, actions: list[Any], group_ids: list[int], **settings: Any) -> Any:
    """What a run gets of a reward model."""
    calls = RetriedCalls(reward, RewardConfig(**settings))
    return calls(["s"] * len(actions), actions, group_ids=torch.tensor(group_ids))


def test_pairs_without_an_answer_are_left_out_and_rows_without_pairs_have_no_reward() -> None:
    """Of the pairs (0, 1), (1, 2), (2, 0) only the first has an answer; then none."""
    found = asked(PairwiseRewards(lambda *_: [1.0, NAN, NAN]), [*"abc"], [0, 0, 0], non_finite="drop")
    assert found.values.tolist() == [1.0, 0.0]
    assert found.kept.tolist() == [True, True, False]
    with pytest.raises(RewardError, match="no row of 3 has a reward"):
        asked(PairwiseRewards(lambda *_: [NAN] * 3), [*"abc"], [0, 0, 0], non_finite="drop")


@pytest.mark.parametrize(("answer", "message"), [
    ([1.0], r"<lambda> must return one preference per pair, \[P\] = \[3\], from 0 to 1; got a list of 1"),
    ([[1.0]] * 3, r"\[P\] = \[3\], from 0 to 1; got a list of 3"),
    ([1.0, 2.5, -1.0], r"got \[2.5, -1.0\] for the rows \[\(1, 2\), \(2, 0\)\]. Return probabilities, not scores"),
    ("first", r"from 0 to 1; got str 'first'"),
    (torch.zeros(3, dtype=torch.complex64), r"from 0 to 1; got \[3\] complex64"),
])  # fmt: skip
def test_answers_that_are_no_preferences_are_named_errors(answer: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        win_rates(lambda states, first, second: answer, ["a", "b", "c"], [0] * 3)


COMPARE = r"compare must be a function of \(states, first_actions, second_actions\)"
OPPONENTS = "num_opponents must be an even number from 2"


@pytest.mark.parametrize(("make", "message"), [
    *((lambda wrong=wrong: PairwiseRewards(wrong), COMPARE) for wrong in (None, "longer", lambda s, a: [], PairwiseRewards)),
    *((lambda n=n: PairwiseRewards(longer, num_opponents=n), OPPONENTS) for n in (0, 1, 3, -2, 2.0, True)),
    (lambda: PairwiseRewards(longer).compute_rewards(["s"], ["a"]),
     r"PairwiseRewards\(longer\) must know which rows are a group. Call in_groups"),
    (lambda: RetriedCalls(PairwiseRewards(longer), RewardConfig())(["s"], ["a"]),
     "longer compares the actions of a group, so the call needs group_ids"),
])  # fmt: skip
def test_wrong_arguments_and_missing_groups_are_refused(make: Any, message: str) -> None:
    with as_users_run_it(), pytest.raises(ConfigError, match=message):
        make()


def test_a_weighted_sum_passes_the_groups_on_and_reports_the_win_rate() -> None:
    inner, actions = WeightedRewards({"wins": PairwiseRewards(longer)}), ["x", "abc", "ab"]
    parts = {"inner": inner, "x": lambda states, actions: [float("x" in action) for action in actions]}
    both = WeightedRewards(parts, {"inner": 1.0, "x": 10.0})
    assert hasattr(both, "in_groups")
    assert not hasattr(WeightedRewards({"x": parts["x"]}), "in_groups")
    grouped = both.in_groups(torch.tensor([1, 1, 1]))
    assert grouped.compute_rewards(["s"] * 3, actions).tolist() == [10.0, 1.0, 0.5]
    found = asked(both, actions, [1, 1, 1])
    assert found.values.tolist() == [10.0, 1.0, 0.5]
    assert found.components["inner"].tolist() == [0.0, 1.0, 0.5]
    assert both.rewards["inner"] is inner


def test_after_a_failure_groups_are_asked_one_by_one_because_a_row_alone_has_no_win_rate() -> None:
    calls = []

    def compare(states: Any, first: Any, second: Any) -> list[float]:
        calls.append(sorted({*first, *second}))
        if "bad" in calls[-1]:
            raise ValueError("cannot be judged")
        return longer(states, first, second)

    actions = ["a", "bad", "bcd", "abc", "bc", "x"]
    found = asked(PairwiseRewards(compare), actions, [0, 1, 0, 1, 2, 2], on_failure="drop")
    assert calls[0] == sorted(actions)
    assert sorted(calls[1:]) == [["a", "bcd"], ["abc", "bad"], ["bc", "x"]]
    assert found.values.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert found.kept.tolist() == [True, False, True, False, True, True]
    assert found.metrics["rows/dropped"] == 2


def rarity(group_ids: Any = None) -> Any:
    """A judge that has `in_groups` and no other sign that it compares: the share of the group's other rows."""

    def compute_rewards(states: Any, actions: Any) -> list[float]:
        if "bad" in actions:
            raise ValueError("cannot be judged")
        rows = [*zip(group_ids.tolist(), actions, strict=True)]
        return [1 / rows.count(row) for row in rows]

    return SimpleNamespace(in_groups=rarity, compute_rewards=compute_rewards, train=print, eval=print, to=print)


def test_in_groups_alone_is_enough_and_a_sum_has_it_exactly_if_a_part_has_it() -> None:
    """In group 0, two of three actions are equal. After a failure, each group is asked by itself, or each row."""
    ids, actions = [0, 0, 0, 1, 1], ["a", "a", "b", "bad", "a"]
    inner = WeightedRewards({"rarity": rarity()})
    for reward in (rarity(), inner, WeightedRewards({"inner": inner, "zero": lambda s, a: [0.0] * len(a)})):
        found = asked(reward, actions, ids, on_failure="drop")
        assert found.values.tolist() == [0.5, 0.5, 1.0]
        assert found.kept.tolist() == [True, True, True, False, False]
    num_rows: list[int] = []

    def failing(states: Any, actions: Any) -> list[float]:
        num_rows.append(len(actions))
        return [1 / 0 if action == "bad" else 1.0 for action in actions]

    found = asked(WeightedRewards({"x": failing}), actions, ids, on_failure="drop")
    assert (num_rows, found.values.tolist()) == ([5, 1, 1, 1, 1, 1], [1.0] * 4)


def test_deadlines_states_and_async_functions_work_as_for_other_functions() -> None:
    async def awaited(states: Any, first: Any, second: Any) -> list[float]:
        return longer(states, first, second)

    for compare in (awaited, longer):
        assert asked(PairwiseRewards(compare), ["a", "bc"], [0, 0], timeout=60.0).values.tolist() == [0.0, 1.0]

    class Judge:
        count = 0

        def __call__(self, states: Any, first: Any, second: Any) -> list[float]: ...

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    rewards = PairwiseRewards(Judge())
    rewards.load_state_dict({"count": 3})
    assert rewards.state_dict() == {"count": 3}
    with pytest.raises(ConfigError, match=r"Judge in another process.*its state"):
        RetriedCalls(rewards, RewardConfig(timeout=60.0))
    assert rewards.train() is rewards.eval() is rewards.to("cpu") is as_reward_model(rewards)


def test_the_conformance_kit_compares_the_actions_of_equal_states() -> None:
    for states in ([{"q": 1}, {"q": 1}, {"q": 2}, {"q": 2}], torch.tensor([1, 1, 2, 2])):
        report = check_reward_model(PairwiseRewards(longer), states, ["a", "bc", "abc", "b"], strict=True)
        assert "From 0 to 1" in str(report)


def test_trainers_and_measurements_give_the_groups() -> None:
    """The actions of `Plain` are 0, 1, 0, 1: each 1 wins against both 0s, and ties with the other 1."""
    rewards = PairwiseRewards(
        lambda _, first, second: [0.5 + 0.5 * (a - b) for a, b in zip(first, second, strict=True)]
    )
    trainer = trainer_of(Plain(), rewards)
    assert trainer.collect(["s", "t"]).rewards.tolist() == pytest.approx([1 / 6, 5 / 6] * 4)
    assert trainer.evaluate(["s", "t"], num_actions_per_state=2)["eval/avg_reward"] == 0.5
    measured = measure_policy(Plain(), ["s", "t"], rewards, num_actions_per_state=2, progress=False)
    assert measured.rewards.tolist() == [[0.0, 1.0]] * 2

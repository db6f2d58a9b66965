"""Win rates from preferences: which rows are compared, the arithmetic, groups, failures, and a bandit that learns."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adapters.bandits import MLPPolicy
from grpo import (
    ConfigError,
    GRPOConfig,
    GRPOTrainer,
    PairwiseRewards,
    RewardConfig,
    RewardError,
    WeightedRewards,
    measure_policy,
)
from grpo._rewarding.calls import RewardCalls
from grpo.checks import check_reward_model
from grpo.reward_model_base import as_reward_model
from grpo.rewards import call_in_process, pairs_within_groups
from tests.support.bad_input_places import Plain
from tests.support.objective_inputs import as_users_run_it

NAN = float("nan")


def longer(states: Any, first: Any, second: Any) -> list[float]:
    return [0.5 + 0.5 * ((len(a) > len(b)) - (len(a) < len(b))) for a, b in zip(first, second, strict=True)]


def win_rates(compare: Any, actions: Any, group_ids: list[int], **options: Any) -> list[float]:
    rewards = PairwiseRewards(compare, **options).in_groups(torch.tensor(group_ids))
    return rewards.compute_rewards([f"state {group}" for group in group_ids], actions).tolist()


def test_the_win_rate_is_the_mean_over_the_opponents_of_the_group() -> None:
    """Lengths 3, 1, 1: wins 2 of 2; a tie and a loss, 1/4; the same. In the other group, of interleaved rows, 1 and 0."""
    found = win_rates(longer, ["abc", "x", "a", "xyz", "b"], [7, 2, 7, 2, 7])
    assert found == [1.0, 0.0, 0.25, 1.0, 0.25]


def test_probabilities_count_for_the_first_action_and_their_complements_for_the_second() -> None:
    """Three actions: the pairs are (0, 1), (1, 2), (2, 0), of .9, .6 and .2."""
    found = win_rates(lambda states, first, second: torch.tensor([0.9, 0.6, 0.2]), ["a", "b", "c"], [0, 0, 0])
    assert found == pytest.approx([(0.9 + 0.8) / 2, (0.1 + 0.6) / 2, (0.4 + 0.2) / 2])


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


def test_a_judge_who_favours_the_first_action_favours_nobody() -> None:
    assert win_rates(lambda states, first, second: [0.8] * len(first), ["a"] * 5, [0] * 5) == pytest.approx([0.5] * 5)
    few = win_rates(lambda states, first, second: [0.8] * len(first), ["a"] * 6, [0] * 6, num_opponents=4)
    assert few == pytest.approx([0.5] * 6)


def test_a_group_of_one_has_no_opponent_and_is_not_compared() -> None:
    assert win_rates(longer, ["a", "bcd", "b"], [0, 1, 1]) == [0.5, 1.0, 0.0]
    assert win_rates(None.__init__, ["a"], [0]) == [0.5]  # a function that would raise if it were called


def test_pairs_without_an_answer_are_left_out_and_rows_without_pairs_have_no_reward() -> None:
    """Of the pairs (0, 1), (1, 2), (2, 0) only the first has an answer; then none."""

    def judged(answers: list[float]) -> RewardCalls:
        return RewardCalls(PairwiseRewards(lambda states, first, second: answers), RewardConfig(non_finite="drop"))

    found = judged([1.0, NAN, NAN])(["s"] * 3, ["a", "b", "c"], group_ids=torch.zeros(3, dtype=torch.int64))
    assert found.values.tolist() == [1.0, 0.0]
    assert found.kept is not None
    assert found.kept.tolist() == [True, True, False]
    with pytest.raises(RewardError, match="no row of 3 has a reward"):
        judged([NAN] * 3)(["s"] * 3, ["a", "b", "c"], group_ids=torch.zeros(3, dtype=torch.int64))


def test_answers_that_are_no_preferences_are_named_errors(subtests: pytest.Subtests) -> None:
    for answer, message in [
        ([1.0], r"<lambda> must return one preference per pair, \[P\] = \[3\], from 0 to 1; got a list of 1"),
        ([[1.0]] * 3, r"\[P\] = \[3\], from 0 to 1; got a list of 3"),
        ([1.0, 2.5, -1.0], r"got \[2.5, -1.0\] for the rows \[\(1, 2\), \(2, 0\)\]. Return probabilities, not scores"),
        ("first", r"from 0 to 1; got str 'first'"),
        (torch.zeros(3, dtype=torch.complex64), r"from 0 to 1; got \[3\] complex64"),
    ]:
        with subtests.test(answer=answer), pytest.raises(RewardError, match=message):
            win_rates(lambda states, first, second, answer=answer: answer, ["a", "b", "c"], [0] * 3)


def test_wrong_arguments_are_refused(subtests: pytest.Subtests) -> None:
    for compare in (None, "longer", lambda states, actions: [1.0], PairwiseRewards):
        with (
            subtests.test(compare=compare),
            as_users_run_it(),
            pytest.raises(
                ConfigError, match=r"compare must be a function of \(states, first_actions, second_actions\)"
            ),
        ):
            PairwiseRewards(compare)  # type: ignore[arg-type]
    for number in (0, 1, 3, -2, 2.0, True):
        with (
            subtests.test(number=number),
            as_users_run_it(),
            pytest.raises(ConfigError, match="num_opponents must be an even number from 2"),
        ):
            PairwiseRewards(longer, num_opponents=number)  # type: ignore[arg-type]


def test_without_groups_the_error_says_who_gives_them() -> None:
    with pytest.raises(
        ConfigError, match=r"PairwiseRewards\(longer\) must know which rows are a group. Call in_groups"
    ):
        PairwiseRewards(longer).compute_rewards(["s"], ["a"])
    with pytest.raises(ConfigError, match=r"longer compares the actions of a group, so the call needs group_ids"):
        RewardCalls(PairwiseRewards(longer), RewardConfig())(["s"], ["a"])


def test_a_weighted_sum_passes_the_groups_on_and_reports_the_win_rate() -> None:
    inner = WeightedRewards({"wins": PairwiseRewards(longer)})
    parts = {"inner": inner, "x": lambda states, actions: [float("x" in action) for action in actions]}
    both = WeightedRewards(parts, {"inner": 1.0, "x": 10.0})
    assert hasattr(both, "in_groups")
    assert not hasattr(WeightedRewards({"x": parts["x"]}), "in_groups")
    assert both.in_groups(torch.tensor([1, 1, 1])).compute_rewards(["s"] * 3, ["x", "abc", "ab"]).tolist() == [
        10.0,
        1.0,
        0.5,
    ]
    found = RewardCalls(both, RewardConfig())(["s"] * 3, ["x", "abc", "ab"], group_ids=torch.tensor([1, 1, 1]))
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

    ask = RewardCalls(PairwiseRewards(compare), RewardConfig(on_failure="drop"))
    actions = ["a", "bad", "bcd", "abc", "bc", "x"]
    found = ask(["s"] * 6, actions, group_ids=torch.tensor([0, 1, 0, 1, 2, 2]))
    assert calls[0] == sorted(actions)
    assert sorted(calls[1:]) == [["a", "bcd"], ["abc", "bad"], ["bc", "x"]]
    assert found.values.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert found.kept is not None
    assert found.kept.tolist() == [True, False, True, False, True, True]
    assert found.metrics["rows/dropped"] == 2


class Rarity:
    """A judge that has `in_groups` and no other sign that it compares: the share of the group's other rows."""

    def __init__(self, group_ids: Any = None) -> None:
        self.group_ids = group_ids

    def in_groups(self, group_ids: Tensor) -> "Rarity":
        return Rarity(group_ids)

    def compute_rewards(self, states: Any, actions: Any) -> list[float]:
        if "bad" in actions:
            raise ValueError("cannot be judged")
        groups = [int(group) for group in self.group_ids]
        same = [
            sum(row == pair for row in zip(groups, actions, strict=True)) for pair in zip(groups, actions, strict=True)
        ]
        return [1 / count for count in same]

    def train(self, *_: Any) -> None: ...

    eval = to = train


def test_in_groups_alone_is_enough_and_a_sum_has_it_exactly_if_a_part_has_it() -> None:
    """In group 0, two of three actions are equal. After a failure, each group is asked by itself, or each row."""
    ids, actions = torch.tensor([0, 0, 0, 1, 1]), ["a", "a", "b", "bad", "a"]
    inner = WeightedRewards({"rarity": Rarity()})
    for reward in (Rarity(), inner, WeightedRewards({"inner": inner, "zero": lambda s, a: [0.0] * len(a)})):
        found = RewardCalls(reward, RewardConfig(on_failure="drop"))(["s"] * 5, actions, group_ids=ids)
        assert found.values.tolist() == [0.5, 0.5, 1.0]
        assert found.kept is not None
        assert found.kept.tolist() == [True, True, True, False, False]
    asked: list[int] = []

    def failing(states: Any, actions: Any) -> list[float]:
        asked.append(len(actions))
        return [1 / 0 if action == "bad" else 1.0 for action in actions]

    found = RewardCalls(WeightedRewards({"x": failing}), RewardConfig(on_failure="drop"))(
        ["s"] * 5, actions, group_ids=ids
    )
    assert (asked, found.values.tolist()) == ([5, 1, 1, 1, 1, 1], [1.0] * 4)


def test_deadlines_states_and_async_functions_work_as_for_other_functions() -> None:
    async def awaited(states: Any, first: Any, second: Any) -> list[float]:
        return longer(states, first, second)

    for compare in (awaited, longer):
        ask = RewardCalls(PairwiseRewards(compare), RewardConfig(timeout=60.0), in_process=call_in_process)
        assert ask(["s"] * 2, ["a", "bc"], group_ids=torch.tensor([0, 0])).values.tolist() == [0.0, 1.0]

    class Judge:
        count = 0

        def __call__(self, states: Any, first: Any, second: Any) -> list[float]:
            return longer(states, first, second)

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    rewards = PairwiseRewards(Judge())
    rewards.load_state_dict({"count": 3})
    assert rewards.state_dict() == {"count": 3}
    with pytest.raises(ConfigError, match=r"Judge in another process.*its state"):
        RewardCalls(rewards, RewardConfig(timeout=60.0), in_process=call_in_process)
    assert rewards.train() is rewards.eval() is rewards.to("cpu") is as_reward_model(rewards)


def test_the_conformance_kit_compares_the_actions_of_equal_states() -> None:
    for states in ([{"q": 1}, {"q": 1}, {"q": 2}, {"q": 2}], torch.tensor([1, 1, 2, 2])):
        report = check_reward_model(PairwiseRewards(longer), states, ["a", "bc", "abc", "b"], strict=True)
        assert "From 0 to 1" in str(report)


def test_trainers_and_measurements_give_the_groups() -> None:
    """The actions of `Plain` are 0, 1, 0, 1: each 1 wins against both 0s, and ties with the other 1."""
    rewards = PairwiseRewards(
        lambda states, first, second: [0.5 + 0.5 * (a - b) for a, b in zip(first, second, strict=True)]
    )
    trainer = GRPOTrainer(config=GRPOConfig(group_size=4), policy=Plain(), reward_model=rewards)
    assert trainer.collect(["s", "t"]).rewards.tolist() == pytest.approx([1 / 6, 5 / 6] * 4)
    assert trainer.evaluate(["s", "t"], num_actions_per_state=2)["eval/avg_reward"] == 0.5
    measured = measure_policy(Plain(), ["s", "t"], rewards, num_actions_per_state=2, progress=False)
    assert measured.rewards.tolist() == [[0.0, 1.0]] * 2


def test_preferences_alone_train_the_contextual_bandit() -> None:
    """Four arms. The best arm depends on the signs of the two features. Only comparisons are seen, and a fifth is wrong."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(64, 2, generator=generator)

    def value(states: Tensor, arms: Tensor) -> Tensor:
        corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        return (states * corners[arms]).sum(1)

    def prefer(states: Tensor, first: Tensor, second: Tensor) -> Tensor:
        gap = value(states, first) - value(states, second)
        is_right = torch.rand(len(gap), generator=generator) > 0.2
        return torch.where(gap == 0, 0.5, ((gap > 0) == is_right).double())

    for num_opponents in (None, 2):
        torch.manual_seed(0)
        policy = MLPPolicy(num_features=2, num_actions=4, hidden=(16,))
        config = GRPOConfig(group_size=8, learning_rate=0.02, seed=0)
        rewards = PairwiseRewards(prefer, num_opponents=num_opponents)
        trainer = GRPOTrainer(config=config, policy=policy, reward_model=rewards)
        with as_users_run_it():  # the type checks would take most of the time
            trainer.train(states, num_iterations=30, progress=False)
        best = torch.stack([value(states, torch.full((64,), arm)) for arm in range(4)], dim=1).argmax(1)
        assert float((policy.action_log_probs(states).argmax(1) == best).float().mean()) >= 0.9, num_opponents

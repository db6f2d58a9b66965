"""Reward models: plain functions, the returned `Rewards`, weighted sums, limits of calls, and win rates from preferences."""

import asyncio
import functools
import math
import os
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo import GRPOConfig, GRPOTrainer, RewardConfig, measure_policy
from grpo._common.protocols import kept_state, restore_state
from grpo._retrying.calls import RetriedCalls
from grpo.arguments import reward_name
from grpo.checks import check_reward_model
from grpo.errors import ConfigError, ContractError, DeadlineError, ProtocolError, RewardError
from grpo.reward_model_base import RewardFunction, Rewards, as_reward_model
from grpo.rewards import PairwiseRewards, WeightedRewards, ask_for_rewards, pairs_within_groups, require_killable
from grpo.types import ObjectiveOutput
from tests.support.bad_input_places import Plain
from tests.support.configs import Rows
from tests.support.objective_inputs import as_users_run_it
from tests.support.trainers import trainer_of


class Counting:
    """A callable with a state."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, states: Any, actions: Any) -> list[float]:
        self.count += 1
        return [0.0] * len(states)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def length(states: Any, actions: Any) -> list[float]:
    return [float(len(action)) for action in actions]


@pytest.mark.parametrize(
    ("weight", "expected"), [(2, [12.0, 20.0, math.nan, math.inf]), (0, [10.0, 20.0, math.nan, math.nan])]
)
def test_a_part_that_does_not_apply_adds_nothing(weight: float, expected: list[float]) -> None:
    """NaN: it does not apply. A row without any part has no reward. Infinity is not "does not apply", whatever its weight."""
    x, y = torch.tensor([1.0, math.nan, math.nan, math.inf]), torch.tensor([10.0, 20.0, math.nan, math.nan])
    rewards = WeightedRewards({"x": lambda s, a: x, "y": lambda s, a: y}, {"x": weight, "y": 1})
    found = rewards.compute_rewards(["s"] * 4, ["a"] * 4)
    torch.testing.assert_close(found, torch.tensor(expected), equal_nan=True)
    with pytest.raises(RewardError, match=r"finite numbers; got .* at rows \[2, 3\] of 4"):
        RetriedCalls(rewards, RewardConfig())(["s"] * 4, ["a"] * 4)
    kept = RetriedCalls(rewards, RewardConfig(non_finite="drop"))(["s"] * 4, ["a"] * 4)
    assert kept.values.tolist() == expected[:2]


def test_a_reward_function_is_named_by_its_name_or_its_type() -> None:
    for function, name in [
        (length, "length"),
        (lambda states, actions: [], "<lambda>"),
        (functools.partial(length), "partial"),
        (Counting(), "Counting"),
    ]:
        assert reward_name(RewardFunction(function)) == repr(RewardFunction(function)) == name
    assert reward_name(WeightedRewards({"length": length})) == "WeightedRewards.compute_rewards"


def test_the_state_of_a_wrapped_function_is_found() -> None:
    counting = Counting()
    both = WeightedRewards({"a": counting, "b": length})
    both.compute_rewards(["s"], ["xy"])
    state = both.state_dict()
    assert state == {"a": {"count": 1}, "b": {}}
    both.compute_rewards(["s"], ["xy"])
    both.load_state_dict(state)
    assert counting.count == 1
    with pytest.raises(ConfigError, match=r"function must have load_state_dict\(\) to restore \['count'\]"):
        RewardFunction(length).load_state_dict({"count": 1})


def test_the_state_of_a_network_holds_only_its_buffers() -> None:
    judge = torch.nn.BatchNorm1d(2, track_running_stats=True)
    saved = {name: value.clone() for name, value in kept_state(judge).items()}
    assert set(saved) == {"running_mean", "running_var", "num_batches_tracked"}
    judge(torch.randn(4, 2))
    restore_state(judge, saved)
    assert judge.num_batches_tracked == 0


def test_weighted_rewards_equal_a_hand_worked_sum() -> None:
    """Lengths 2 and 3, and ones: 2 * 2 + .5 and 2 * 3 + .5. Parts are reported before weighting."""
    parts = {"length": length, "one": lambda states, actions: [1.0] * len(actions)}
    weighted = WeightedRewards(parts, {"one": 0.5, "length": 2.0})
    assert weighted.compute_rewards(["s", "t"], ["ab", "abc"]).tolist() == [4.5, 6.5]
    found = ask_for_rewards(weighted, ["s", "t"], ["ab", "abc"])
    assert found.values.tolist() == [4.5, 6.5]
    assert {name: part.tolist() for name, part in found.components.items()} == {"length": [2, 3], "one": [1, 1]}
    assert found.weights == {"one": 0.5, "length": 2.0}
    assert WeightedRewards(parts).weights == {"length": 1.0, "one": 1.0}
    assert WeightedRewards(parts).compute_rewards(["s"], ["ab"]).tolist() == [3]
    # 0.1 in float32 and 0.2 in float64 make a sum that is only as precise as float32
    mixed = {"a": lambda s, a: torch.tensor([0.1]), "b": lambda s, a: torch.tensor([0.2], dtype=torch.float64)}
    total = WeightedRewards(mixed, {"a": 1.0, "b": 2.0}).compute_rewards(["s"], ["x"])
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(0.5)


def test_a_part_of_a_wrong_shape_is_named_and_a_single_row_may_have_a_single_step() -> None:
    column = WeightedRewards({"column": lambda states, actions: [[5.0]] * len(actions)})
    assert column.compute_rewards(["s"], ["a"]).tolist() == [[5]]
    with pytest.raises(RewardError, match=r"<lambda> must return one number per row, \[N\] = \[2\]"):
        column.compute_rewards(["s", "t"], ["a", "b"])


ONE_EACH = " needs at least one reward and one weight for each"


@pytest.mark.parametrize(("rewards", "weights", "message"), [
    ({}, None, ONE_EACH), ({}, {}, ONE_EACH),
    *(({"a": length}, weights, ONE_EACH) for weights in ({}, {"b": 1.0}, {"a": 1.0, "b": 1.0})),
    ([length], None, ""), *(({"a": length}, weights, "") for weights in ([1.0], {"a": math.nan}, {"a": "1"})),
])  # fmt: skip
def test_weighted_rewards_take_dicts_with_a_finite_weight_for_each_reward(
    rewards: Any, weights: Any, message: str
) -> None:
    with as_users_run_it(), pytest.raises(ConfigError, match=rf"^WeightedRewards{message}"):
        WeightedRewards(rewards, weights)


def test_modes_and_devices_are_passed_to_every_part() -> None:
    class Judge(torch.nn.Linear):
        compute_rewards = torch.nn.Linear.forward

    judges = {"a": Judge(1, 1), "b": Judge(1, 1)}
    both = WeightedRewards({**judges, "c": length})
    assert both.eval() is both
    assert [judge.training for judge in judges.values()] == [False, False]
    assert both.train() is both
    assert [judge.training for judge in judges.values()] == [True, True]
    assert both.to("meta") is both
    assert [judge.weight.device.type for judge in judges.values()] == ["meta", "meta"]
    assert both.rewards["a"] is judges["a"]


def test_a_reward_function_ignores_modes_and_returns_its_rewards_unchanged() -> None:
    function = as_reward_model(length)
    assert isinstance(function, RewardFunction)
    assert function.train() is function.eval() is function.to("cpu") is function
    assert function.compute_rewards(["s"], ["abc"]) == [3.0]
    assert function.state_dict() == {}
    function.load_state_dict({})
    model = WeightedRewards({"length": length})
    assert as_reward_model(model) is model


class CallableModel(Counting):
    """It has a method of a reward model, and so it is no reward function."""

    compute_rewards = Counting.__call__


def of_trl(prompts: Any, completions: Any, **kwargs: Any) -> list[float]: ...


def answers(completions: Any, **columns: Any) -> list[float]: ...


SEVERAL = r"must be one reward; got {}.*WeightedRewards\(\{{'name': function, ...\}}, weights\).*CompletionRewards\("
OTHER = r"must be a function of \(states, actions\); got {}.*adapters\.llm\.CompletionRewards\(function\)"


@pytest.mark.parametrize(("wrong", "message"), [
    ([length, length], SEVERAL.format("a list of 2")),
    ((length,), SEVERAL.format("a tuple of 1")),
    ({"a": length}, SEVERAL.format("dict")),
    (of_trl, OTHER.format(r"of_trl\(prompts")),
    (answers, OTHER.format(r"answers\(completions")),
    (lambda completions, answer: [1.0], OTHER.format(r".*lambda.*\(completions, answer")),
    (lambda completions, prompts: [1.0], OTHER.format(r".*lambda.*\(completions, prompts")),
    (lambda action: [1.0], OTHER.format(r"<lambda>\(action\)")),
    (CallableModel(), r"^reward_model must implement RewardModel; CallableModel lacks train\(\), eval\(\), to\(\)"),
    (3, r"^reward_model must implement RewardModel; int lacks compute_rewards\(\)"),
    (Counting, r"^reward_model must be an instance; got the class Counting"),
])  # fmt: skip
def test_what_is_no_reward_model_is_told_what_to_use(wrong: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        GRPOTrainer(config=GRPOConfig(), policy=Plain(), reward_model=wrong)


def test_functions_that_take_states_and_actions_under_any_name_are_accepted() -> None:
    for function in (
        lambda prompts, completions: [1.0],
        lambda states, completions: [1.0],  # TRL would give `completion_ids` too
        lambda *rows: [1.0],
        lambda states, actions, **options: [1.0],
        functools.partial(lambda states, actions, scale: [scale], scale=1.0),
        max,  # without a signature that Python can read
    ):
        assert isinstance(as_reward_model(function), RewardFunction)


def test_a_plain_function_returns_parts_weights_lost_rows_and_metrics() -> None:
    """Row 1 is lost. The others have 2 and 5: 1 + .5 * 2 and 3 + .5 * 4. The call took 0.6 s, and made 3 requests."""

    def judge(states: Any, actions: Any) -> Rewards:
        parts = {"right": [1.0, 0.0, 3.0], "short": torch.tensor([2, 7, 4])}
        return Rewards(
            values=np.array([2.0, 3.5, 5.0]),
            components=parts,
            weights={"short": 0.5},
            lost={"judge/gone": torch.tensor([False, True, False]), "judge/busy": torch.zeros(3, dtype=torch.bool)},
            metrics={"judge/seconds": (1, 0.6), "judge/requests": (0, 3)},
        )

    for timeout in (None, 60.0):
        calls = RetriedCalls(judge, RewardConfig(timeout=timeout))
        found = calls(["s"] * 3, ["a"] * 3, keep_counts=True)
        assert found.values.tolist() == [2.0, 5.0]
        assert {name: part.tolist() for name, part in found.components.items()} == {"right": [1, 3], "short": [2, 4]}
        assert found.weights == {"short": 0.5}
        assert found.kept.tolist() == [True, False, True]
        assert (found.metrics["rows/dropped"], found.metrics["judge/gone"], found.metrics["judge/busy"]) == (1, 1, 0)
        assert calls.measured == {"judge/seconds": (1, 0.6), "judge/requests": (0, 3)}


def test_a_row_may_be_lost_for_several_reasons_and_is_dropped_once() -> None:
    """`a` and `b` lose rows 0 and 1 for one reason, and `b` loses row 1 for another one, too. NaN of lost rows is no error."""
    gone = {"gone": torch.tensor([True, False, False])}
    both = {"gone": torch.tensor([False, True, False]), "busy": torch.tensor([False, True, False])}
    parts = {
        "a": lambda s, a: Rewards(values=[math.nan, 1.0, 1.0], lost=gone),
        "b": lambda s, a: Rewards(values=[1.0, math.nan, 2.0], lost=both, metrics={"seconds": (1, 2.0)}),
        "c": lambda s, a: Rewards(values=[0.0, 0.0, 0.0], metrics={"seconds": (1, 4.0)}),
    }
    calls = RetriedCalls(WeightedRewards(parts), RewardConfig())
    found = calls(["s"] * 3, ["a"] * 3, keep_counts=True)
    assert found.values.tolist() == [3.0]
    assert [found.metrics[name] for name in ("gone", "busy", "rows/dropped")] == [2.0, 1.0, 2.0]
    assert calls.measured == {"seconds": (2, 6.0)}
    lost = {"gone": torch.ones(2, dtype=torch.bool)}
    with pytest.raises(RewardError, match="must give at least one row a reward; it lost those of all 2 rows"):
        RetriedCalls(lambda s, a: Rewards(values=[1.0, 1.0], lost=lost), RewardConfig())(["s"] * 2, ["a"] * 2)


MASK = torch.zeros(2, dtype=torch.bool)
SHAPE, NAMED = "must be numbers in the shape of values, [2]; got", "must be a mapping of names; got"
OF_ROWS, PAIR = "must be a dense bool tensor [N] = [2]; got", "must be 2 numbers; got"
WRONG_FIELDS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"values": "good"}, RewardError, "values must be numbers, [N] or [N, T]; got str 'good'. Use a list"),
    ({"values": torch.ones(2) * 1j}, RewardError, "values must be numbers, [N] or [N, T]; got [2] complex64. Return"),
    ({"values": 1.0}, ContractError, "values must be a dense floating-point tensor [N, *T]; got [] float64"),
    ({"components": [1.0]}, ContractError, f"components {NAMED} a list of 1"),
    ({"components": {1: [1, 2]}}, ContractError, f"components {NAMED} dict {{1: "),
    ({"components": {"a": [1.0]}}, RewardError, f"components['a'] {SHAPE} a list of 1 float. Expand it."),
    ({"components": {"a": torch.ones(2, 1)}}, RewardError, f"components['a'] {SHAPE} [2, 1] float32. Expand it."),
    ({"components": {"a": None}}, RewardError, f"components['a'] {SHAPE} NoneType None. Use a list"),
    ({"weights": {1: 1.0}}, ContractError, f"weights {NAMED} dict {{1: "),
    ({"weights": [1.0]}, ContractError, f"weights {NAMED} a list of 1"),
    ({"weights": {"a": "1"}}, ContractError, "weights['a'] must be a number; got str '1'"),
    ({"weights": {"a": 1.0}, "components": {"b": [1, 2]}}, ContractError,
     "weights must have names of components, ['b']; got ['a']. Remove these."),
    ({"lost": MASK}, ContractError, f"lost {NAMED} [2] bool"),
    ({"lost": {b"gone": MASK}}, ContractError, f"lost {NAMED} dict {{b'gone': "),
    ({"lost": {"gone": MASK.float()}}, ContractError, f"lost['gone'] {OF_ROWS} [2] float32"),
    ({"lost": {"gone": MASK[:1]}}, ContractError, f"lost['gone'] {OF_ROWS} [1] bool"),
    ({"metrics": {("a", "b"): (1, 2.0)}}, ContractError, f"metrics {NAMED} dict {{('a', 'b'): "),
    ({"metrics": {"seconds": 1.0}}, ContractError, f"metrics['seconds'] {PAIR} float 1.0"),
    ({"metrics": {"seconds": (1,)}}, ContractError, f"metrics['seconds'] {PAIR} a tuple of 1"),
    ({"metrics": {"seconds": (1, "2")}}, ContractError, f"metrics['seconds'] {PAIR} a tuple of 2"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "error", "message"), WRONG_FIELDS)
def test_wrong_fields_of_rewards_are_named(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with as_users_run_it(), pytest.raises(error, match=re.escape(f"Rewards.{message}")):
        Rewards(**{"values": [1.0, 2.0], **fields})


def test_metrics_of_batches_and_losses_have_names() -> None:
    batch = Rows.example().batch(GRPOConfig())
    named = r"must be a mapping of names; got dict \{1: "
    for field in ("metrics", "reward_components", "reward_weights"):
        with as_users_run_it(), pytest.raises(ContractError, match=rf"Batch\.{field} {named}"):
            replace(batch, **{field: {1: 1.0}})
    with as_users_run_it(), pytest.raises(ContractError, match=rf"ObjectiveOutput\.metrics {named}"):
        ObjectiveOutput(loss=torch.zeros(()), metrics={1: torch.zeros(3)})  # type: ignore[dict-item]


async def awaited(states: Any, actions: Any) -> list[float]:
    await asyncio.sleep(0.0)
    return [float(len(action)) for action in actions]


def process_id(states: Any, actions: Any) -> list[float]:
    return [float(os.getpid())] * len(actions)


class Model:
    """A reward model without a state that tells its process."""

    def compute_rewards(self, states: Any, actions: Any) -> list[float]:
        return process_id(states, actions)

    def train(self, *_: Any) -> None: ...

    eval = to = train


def asked_within(reward: Any, timeout: float | None) -> Rewards:
    return ask_for_rewards(reward, ["s"], ["a"], timeout=timeout)


def test_async_functions_are_awaited() -> None:
    check_reward_model(awaited, ["s", "t"], ["ab", "abc"], strict=True).raise_for_failures()
    assert ask_for_rewards(awaited, ["s"], ["ab"]).values.tolist() == [2.0]
    both = WeightedRewards({"awaited": awaited, "plain": length}, {"awaited": 1.0, "plain": 0.5})
    assert both.compute_rewards(["s", "t"], ["ab", "abc"]).tolist() == [3.0, 4.5]
    assert [*ask_for_rewards(both, ["s"], ["ab"]).components] == ["awaited", "plain"]

    class Judge(Model):
        compute_rewards = staticmethod(awaited)  # type: ignore[assignment]

    assert ask_for_rewards(Judge(), ["s"], ["ab"]).values.tolist() == [2.0]


def test_async_parts_are_awaited_together_also_inside_of_sums() -> None:
    """Each part waits until all three run."""
    running: list[str] = []

    def part(name: str) -> Any:
        async def judge(states: Any, actions: Any) -> list[float]:
            running.append(name)
            while len(running) < 3:
                await asyncio.sleep(0.001)
            return [1.0]

        return judge

    inner = WeightedRewards({"a": part("a"), "b": part("b")})
    outer = WeightedRewards({"inner": inner, "plain": length, "c": part("c")}, {"inner": 1.0, "plain": 0.5, "c": 10.0})
    assert asked_within(outer, 60.0).values.tolist() == [2.0 + 0.5 + 10.0]
    running.clear()
    with pytest.raises(DeadlineError, match=r"^judge did not answer within 0\.05 s"):
        ask_for_rewards(WeightedRewards({"inner": inner, "c": part("c")}), ["s"], ["a"], timeout=0.05, max_concurrent=2)


def test_without_a_time_limit_every_call_is_made_in_this_process() -> None:
    for reward in (process_id, Model(), WeightedRewards({"a": process_id, "b": Model()}, {"a": 1, "b": 0})):
        assert asked_within(reward, None).values.tolist() == [os.getpid()]


def test_with_a_time_limit_everything_but_async_functions_runs_in_another_process() -> None:
    class Reports(Model):
        def compute_rewards(self, states: Any, actions: Any) -> Any:
            own = process_id(states, actions)
            return Rewards(values=own, components={"process": own})

    inner = WeightedRewards({"d": process_id})
    parts = WeightedRewards({"a": process_id, "b": Model(), "c": inner, "r": Reports()})
    for reward in (process_id, Model(), Reports(), parts):
        found = asked_within(reward, 60.0)
        assert len(found.components) == (4 if reward is parts else isinstance(reward, Reports))
        for values in found.components.values() if found.components else [found.values]:
            assert values.item() != os.getpid()

    class Own(Counting):
        async def __call__(self, states: Any, actions: Any) -> list[float]:
            self.count += 1
            return process_id(states, actions)

    own = Own()
    both = ask_for_rewards(WeightedRewards({"own": own, "other": process_id}), ["s"], ["a"], timeout=60.0)
    assert own.count == 1, "its state stays in this process"
    assert both.components["own"].tolist() == [os.getpid()]
    assert both.components["other"].tolist() != [os.getpid()]


def test_parts_of_every_kind_are_repeated_and_dropped_as_a_plain_function_is() -> None:
    """Of a sum in a sum, a function fails for action "bad", also by itself: its row is left out, and 2 = 1 + 0.5 + 0.5."""

    def picky(states: Any, actions: Any) -> list[float]:
        if "bad" in actions:
            raise ValueError("cannot be judged")
        return [1.0] * len(actions)

    async def half(states: Any, actions: Any) -> list[float]:
        return [0.5] * len(actions)

    class Half(Model):
        def compute_rewards(self, states: Any, actions: Any) -> list[float]:
            return [0.5] * len(actions)

    inner = WeightedRewards({"picky": picky, "half": half})
    for timeout in (None, 60.0):
        config = RewardConfig(timeout=timeout, num_retries=1, retry_delay=0.0, on_failure="drop")
        calls = RetriedCalls(WeightedRewards({"inner": inner, "model": Half()}), config)
        found = calls(["s"] * 3, ["a", "bad", "c"])
        assert found.values.tolist() == [2.0, 2.0]
        assert found.components["inner"].tolist() == [1.5, 1.5]
        assert found.kept.tolist() == [True, False, True]
        assert found.metrics["rewards/retries"] == 1
        assert found.metrics["rewards/failed_calls"] == 2 + 1


class Far(Model):
    def __init__(self) -> None:
        self.judge = torch.nn.Linear(1, 1, device="meta")


class Held(Model):
    def __init__(self) -> None:
        self.table = torch.empty(1, device="meta")


class Network(torch.nn.Linear):
    compute_rewards = torch.nn.Linear.forward


STATE = "so its state (count) would change there and be lost. "
GPU = "but it is on meta, which that process cannot use. "


@pytest.mark.parametrize(("reward", "name", "reason"), [
    (Counting(), "Counting", STATE),
    (torch.nn.BatchNorm1d(1), "BatchNorm1d", "so its state (running_mean, running_var, num_batches_"),
    (Far(), "Far.compute_rewards", GPU),
    (Held(), "Held.compute_rewards", GPU),
    (Network(1, 1, device="meta"), "Network.compute_rewards", GPU),
    (torch.nn.Linear(1, 1, device="meta"), "Linear", GPU),
    (WeightedRewards({"a": length, "b": Counting()}), "Counting", STATE),
])  # fmt: skip
def test_reward_models_that_cannot_run_in_another_process_are_refused(reward: Any, name: str, reason: str) -> None:
    said = f"RewardConfig.timeout=2 calls {name} in another process, which can be killed, {reason}"
    remedy = r"Make it an async function, or set reward\.timeout=None\."
    with pytest.raises(ConfigError, match=re.escape(said) + ".*" + remedy):
        RetriedCalls(reward, RewardConfig(timeout=2.0))
    require_killable(as_reward_model(reward), None)


def test_without_fork_only_async_functions_may_have_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    for reward in (length, Model()):
        with pytest.raises(ConfigError, match=r"this system has no os\.fork"):
            RetriedCalls(reward, RewardConfig(timeout=2.0))
    RetriedCalls(awaited, RewardConfig(timeout=2.0))


# Win rates from preferences: which rows are compared, the arithmetic, groups, failures, and a bandit that learns


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

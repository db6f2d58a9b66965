"""A plain function as a reward model, the returned `Rewards`, and the calls of functions and parts within limits."""

import asyncio
import functools
import os
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from grpo import (
    ConfigError,
    ContractError,
    GRPOConfig,
    GRPOTrainer,
    ProtocolError,
    RewardConfig,
    RewardError,
    Rewards,
    WeightedRewards,
)
from grpo._common.protocols import kept_state, restore_state
from grpo._rewarding.calls import RewardCalls
from grpo.arguments import reward_name
from grpo.checks import check_reward_model
from grpo.errors import DeadlineError
from grpo.reward_model_base import RewardFunction, as_reward_model
from grpo.rewards import ask_for_rewards, call_in_process, require_killable
from grpo.types import ObjectiveOutput
from tests.support.bad_input_places import Plain
from tests.support.configs import Rows
from tests.support.objective_inputs import as_users_run_it


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


def test_a_part_that_does_not_apply_adds_nothing(subtests: pytest.Subtests) -> None:
    """NaN: it does not apply. A row without any part has no reward. Infinity is not "does not apply", whatever its weight."""
    nan, inf = float("nan"), float("inf")
    x, y = torch.tensor([1.0, nan, nan, inf]), torch.tensor([10.0, 20.0, nan, nan])
    for weights, expected in [({"x": 2, "y": 1}, [12.0, 20.0, nan, inf]), ({"x": 0, "y": 1}, [10.0, 20.0, nan, nan])]:
        with subtests.test(weights=weights):
            rewards = WeightedRewards({"x": lambda s, a: x, "y": lambda s, a: y}, weights)
            found = rewards.compute_rewards(["s"] * 4, ["a"] * 4)
            torch.testing.assert_close(found, torch.tensor(expected), equal_nan=True)
            with pytest.raises(RewardError, match=r"finite numbers; got .* at rows \[2, 3\] of 4"):
                RewardCalls(rewards, RewardConfig())(["s"] * 4, ["a"] * 4)
            assert (
                RewardCalls(rewards, RewardConfig(non_finite="drop"))(["s"] * 4, ["a"] * 4).values.tolist()
                == expected[:2]
            )


def test_a_reward_function_is_named_by_its_name_or_its_type(subtests: pytest.Subtests) -> None:
    cases = [
        (length, "length"),
        (lambda states, actions: [], "<lambda>"),
        (functools.partial(length), "partial"),
        (Counting(), "Counting"),
    ]
    for function, name in cases:
        with subtests.test(name=name):
            assert reward_name(RewardFunction(function)) == name
            assert repr(RewardFunction(function)) == name


def test_a_reward_model_is_named_by_its_class_and_method() -> None:
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


def test_the_state_of_a_network_holds_only_its_buffers() -> None:
    judge = torch.nn.BatchNorm1d(2, track_running_stats=True)
    saved = {name: value.clone() for name, value in kept_state(judge).items()}
    assert set(saved) == {"running_mean", "running_var", "num_batches_tracked"}
    judge(torch.randn(4, 2))
    restore_state(judge, saved)
    assert judge.num_batches_tracked == 0


def test_a_state_that_cannot_be_restored_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"function must have load_state_dict\(\) to restore \['count'\]"):
        RewardFunction(length).load_state_dict({"count": 1})


def test_weighted_rewards_have_the_least_precise_dtype_of_their_parts() -> None:
    """0.1 in float32 and 0.2 in float64 make a sum that is only as precise as float32."""
    parts = {"a": torch.tensor([0.1]), "b": torch.tensor([0.2], dtype=torch.float64)}
    rewards = WeightedRewards({"a": lambda s, a: parts["a"], "b": lambda s, a: parts["b"]}, {"a": 1.0, "b": 2.0})
    total = rewards.compute_rewards(["s"], ["x"])
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(0.5)


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


def test_a_part_of_a_wrong_shape_is_named_and_a_single_row_may_have_a_single_step() -> None:
    column = WeightedRewards({"column": lambda states, actions: [[5.0]] * len(actions)})
    assert column.compute_rewards(["s"], ["a"]).tolist() == [[5]]
    with pytest.raises(RewardError, match=r"<lambda> must return one number per row, \[N\] = \[2\]"):
        column.compute_rewards(["s", "t"], ["a", "b"])


def test_rewards_without_weights_and_weights_without_rewards_are_refused() -> None:
    for rewards, weights in [
        ({}, None),
        ({}, {}),
        ({"a": length}, {}),
        ({"a": length}, {"b": 1.0}),
        ({"a": length}, {"a": 1.0, "b": 1.0}),
    ]:
        with pytest.raises(ConfigError, match=r"^WeightedRewards needs at least one reward and one weight for each"):
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
    function = RewardFunction(length)
    assert function.train() is function.eval() is function.to("cpu") is function
    assert function.compute_rewards(["s"], ["abc"]) == [3.0]
    assert function.state_dict() == {}
    function.load_state_dict({})


def test_an_object_with_any_method_of_a_reward_model_is_no_reward_function() -> None:
    assert isinstance(as_reward_model(length), RewardFunction)
    model = WeightedRewards({"length": length})
    assert as_reward_model(model) is model

    class CallableModel(Counting):
        compute_rewards = Counting.__call__

    for wrong, lacks in [(CallableModel(), "CallableModel lacks train"), (3, "int lacks compute_rewards")]:
        with pytest.raises(ProtocolError, match=rf"^reward_model must implement RewardModel; {lacks}"):
            as_reward_model(wrong)
    with pytest.raises(ProtocolError, match=r"^reward_model must be an instance; got the class Counting"):
        as_reward_model(Counting)


def of_trl(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


def test_several_rewards_and_functions_of_another_library_are_told_what_to_use(subtests: pytest.Subtests) -> None:
    def answers(completions: Any, **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    several = (
        r"must be one reward; got {}.*WeightedRewards\(\{{'name': function, ...\}}, weights\).*CompletionRewards\("
    )
    one = r"must be a function of \(states, actions\); got {}.*adapters\.llm\.CompletionRewards\(function\)"
    cases = [
        ([length, length], several.format("a list of 2")),
        ((length,), several.format("a tuple of 1")),
        ({"a": length}, several.format("dict")),
        (of_trl, one.format(r"of_trl\(prompts")),
        (answers, one.format(r"answers\(completions")),
        (lambda completions, answer: [1.0], one.format(r".*lambda.*\(completions, answer")),
        (lambda completions, prompts: [1.0], one.format(r".*lambda.*\(completions, prompts")),
        (lambda action: [1.0], one.format(r"<lambda>\(action\)")),
    ]
    for wrong, message in cases:
        with subtests.test(message=message), pytest.raises(ProtocolError, match=message):
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


# What a reward model may return


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
        calls = RewardCalls(judge, RewardConfig(timeout=timeout), in_process=call_in_process)
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
        "a": lambda s, a: Rewards(values=[float("nan"), 1.0, 1.0], lost=gone),
        "b": lambda s, a: Rewards(values=[1.0, float("nan"), 2.0], lost=both, metrics={"seconds": (1, 2.0)}),
        "c": lambda s, a: Rewards(values=[0.0, 0.0, 0.0], metrics={"seconds": (1, 4.0)}),
    }
    calls = RewardCalls(WeightedRewards(parts), RewardConfig())
    found = calls(["s"] * 3, ["a"] * 3, keep_counts=True)
    assert found.values.tolist() == [3.0]
    assert {name: found.metrics[name] for name in ("gone", "busy", "rows/dropped")} == {
        "gone": 2.0,
        "busy": 1.0,
        "rows/dropped": 2.0,
    }
    assert calls.measured == {"seconds": (2, 6.0)}


def test_a_reward_model_that_loses_every_row_is_an_error() -> None:
    lost = {"gone": torch.ones(2, dtype=torch.bool)}
    with pytest.raises(RewardError, match="must give at least one row a reward; it lost those of all 2 rows"):
        RewardCalls(lambda s, a: Rewards(values=[1.0, 1.0], lost=lost), RewardConfig())(["s"] * 2, ["a"] * 2)


def test_wrong_fields_of_rewards_are_named(subtests: pytest.Subtests) -> None:
    mask = torch.zeros(2, dtype=torch.bool)
    shape, named = "must be numbers in the shape of values, [2]; got", "must be a mapping of names; got"
    of_rows, pair = "must be a dense bool tensor [N] = [2]; got", "must be 2 numbers; got"
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"values": "good"}, RewardError, "values must be numbers, [N] or [N, T]; got str 'good'. Use a list"),
        (
            {"values": torch.ones(2) * 1j},
            RewardError,
            "values must be numbers, [N] or [N, T]; got [2] complex64. Return",
        ),
        ({"values": 1.0}, ContractError, "values must be a dense floating-point tensor [N, *T]; got [] float64"),
        ({"components": [1.0]}, ContractError, f"components {named} a list of 1"),
        ({"components": {1: [1, 2]}}, ContractError, f"components {named} dict {{1: "),
        ({"components": {"a": [1.0]}}, RewardError, f"components['a'] {shape} a list of 1 float. Expand it."),
        ({"components": {"a": torch.ones(2, 1)}}, RewardError, f"components['a'] {shape} [2, 1] float32. Expand it."),
        ({"components": {"a": None}}, RewardError, f"components['a'] {shape} NoneType None. Use a list"),
        ({"weights": {1: 1.0}}, ContractError, f"weights {named} dict {{1: "),
        ({"weights": [1.0]}, ContractError, f"weights {named} a list of 1"),
        ({"weights": {"a": "1"}}, ContractError, "weights['a'] must be a number; got str '1'"),
        (
            {"weights": {"a": 1.0}, "components": {"b": [1, 2]}},
            ContractError,
            "weights must have names of components, ['b']; got ['a']. Remove these.",
        ),
        ({"lost": mask}, ContractError, f"lost {named} [2] bool"),
        ({"lost": {b"gone": mask}}, ContractError, f"lost {named} dict {{b'gone': "),
        ({"lost": {"gone": mask.float()}}, ContractError, f"lost['gone'] {of_rows} [2] float32"),
        ({"lost": {"gone": mask[:1]}}, ContractError, f"lost['gone'] {of_rows} [1] bool"),
        ({"metrics": {("a", "b"): (1, 2.0)}}, ContractError, f"metrics {named} dict {{('a', 'b'): "),
        ({"metrics": {"seconds": 1.0}}, ContractError, f"metrics['seconds'] {pair} float 1.0"),
        ({"metrics": {"seconds": (1,)}}, ContractError, f"metrics['seconds'] {pair} a tuple of 1"),
        ({"metrics": {"seconds": (1, "2")}}, ContractError, f"metrics['seconds'] {pair} a tuple of 2"),
    ]
    for fields, error, message in cases:
        with subtests.test(message), as_users_run_it(), pytest.raises(error, match=re.escape(f"Rewards.{message}")):
            Rewards(**{"values": [1.0, 2.0], **fields})


def test_metrics_of_batches_and_losses_have_names(subtests: pytest.Subtests) -> None:
    batch = Rows.example().batch(GRPOConfig())
    named = r"must be a mapping of names; got dict \{1: "
    for field in ("metrics", "reward_components", "reward_weights"):
        with subtests.test(field), as_users_run_it(), pytest.raises(ContractError, match=rf"Batch\.{field} {named}"):
            replace(batch, **{field: {1: 1.0}})
    with as_users_run_it(), pytest.raises(ContractError, match=rf"ObjectiveOutput\.metrics {named}"):
        ObjectiveOutput(loss=torch.zeros(()), metrics={1: torch.zeros(3)})  # type: ignore[dict-item]


def test_rewards_of_another_number_of_rows_name_the_function() -> None:
    def judge(states: Any, actions: Any) -> Rewards:
        return Rewards(values=[1.0], components={"a": [1.0]})

    with pytest.raises(RewardError, match=r"^judge must return one number per row, \[N\] = \[2\].*; got \[1\] float64"):
        RewardCalls(judge, RewardConfig())(["s"] * 2, ["a"] * 2)


# Limits


async def awaited(states: Any, actions: Any) -> list[float]:
    await asyncio.sleep(0.0)
    return [float(len(action)) for action in actions]


def process_id(states: Any, actions: Any) -> list[float]:
    return [float(os.getpid())] * len(actions)


class Model:
    """A reward model without a state that tells its process, and its mode."""

    def __init__(self) -> None:
        self.modes: list[Any] = []

    def compute_rewards(self, states: Any, actions: Any) -> list[float]:
        return process_id(states, actions)

    def train(self) -> None:
        self.modes.append("train")

    def eval(self) -> None:
        self.modes.append("eval")

    def to(self, device: Any) -> None:
        self.modes.append(device)


def asked_within(reward: Any, timeout: float | None) -> Rewards:
    return ask_for_rewards(reward, ["s"], ["a"], timeout=timeout)


def test_async_functions_are_awaited() -> None:
    assert ask_for_rewards(awaited, ["s"], ["ab"]).values.tolist() == [2.0]
    both = WeightedRewards({"awaited": awaited, "plain": length}, {"awaited": 1.0, "plain": 0.5})
    assert both.compute_rewards(["s", "t"], ["ab", "abc"]).tolist() == [3.0, 4.5]
    assert [*ask_for_rewards(both, ["s"], ["ab"]).components] == ["awaited", "plain"]

    class Judge(Model):
        compute_rewards = staticmethod(awaited)  # type: ignore[assignment]

    assert ask_for_rewards(Judge(), ["s"], ["ab"]).values.tolist() == [2.0]


def test_an_async_function_passes_the_checks_of_reward_models() -> None:
    check_reward_model(awaited, ["s", "t"], ["ab", "abc"], strict=True).raise_for_failures()


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


def test_with_a_time_limit_everything_but_async_functions_runs_in_another_process(subtests: pytest.Subtests) -> None:
    class Reports(Model):
        def compute_rewards(self, states: Any, actions: Any) -> Any:
            own = process_id(states, actions)
            return Rewards(values=own, components={"process": own})

    inner = WeightedRewards({"d": process_id})
    parts = WeightedRewards({"a": process_id, "b": Model(), "c": inner, "r": Reports()})
    for reward in (process_id, Model(), Reports(), parts):
        with subtests.test(reward=str(reward)):
            found = asked_within(reward, 60.0)
            assert len(found.components) == (4 if reward is parts else isinstance(reward, Reports))
            for values in found.components.values() if found.components else [found.values]:
                assert values.item() != os.getpid()

    async def own_process(states: Any, actions: Any) -> list[float]:
        return process_id(states, actions)

    both = ask_for_rewards(WeightedRewards({"own": own_process, "other": process_id}), ["s"], ["a"], timeout=60.0)
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
        calls = RewardCalls(WeightedRewards({"inner": inner, "model": Half()}), config, in_process=call_in_process)
        found = calls(["s"] * 3, ["a", "bad", "c"])
        assert found.values.tolist() == [2.0, 2.0]
        assert found.components["inner"].tolist() == [1.5, 1.5]
        assert found.kept.tolist() == [True, False, True]
        assert found.metrics["rewards/retries"] == 1
        assert found.metrics["rewards/failed_calls"] == 2 + 1


def test_reward_models_that_cannot_run_in_another_process_are_refused(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Far(Model):
        def __init__(self) -> None:
            super().__init__()
            self.judge = torch.nn.Linear(1, 1, device="meta")

    class Network(torch.nn.Linear):
        compute_rewards = torch.nn.Linear.forward

    class Held(Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.empty(1, device="meta")

    named = "RewardConfig.timeout=2 calls {} in another process, which can be killed, "
    remedy = r"Make it an async function, or set reward\.timeout=None\."
    state, gpu = (
        "so its state (count) would change there and be lost. ",
        "but it is on meta, which that process cannot use. ",
    )
    cases: list[tuple[Any, str]] = [
        (Counting(), named.format("Counting") + state),
        (
            torch.nn.BatchNorm1d(1),
            named.format("BatchNorm1d") + "so its state (running_mean, running_var, num_batches_",
        ),
        (Far(), named.format("Far.compute_rewards") + gpu),
        (Held(), named.format("Held.compute_rewards") + gpu),
        (Network(1, 1, device="meta"), named.format("Network.compute_rewards") + gpu),
        (torch.nn.Linear(1, 1, device="meta"), named.format("Linear") + gpu),
        (WeightedRewards({"a": length, "b": Counting()}), named.format("Counting") + state),
    ]
    for reward, message in cases:
        with subtests.test(reward=type(reward).__name__):
            with pytest.raises(ConfigError, match=re.escape(message) + ".*" + remedy):
                RewardCalls(reward, RewardConfig(timeout=2.0), in_process=call_in_process)
            require_killable(as_reward_model(reward), None)
    monkeypatch.delattr(os, "fork")
    for reward in (length, Model()):
        with (
            subtests.test(reward=str(reward), fork=False),
            pytest.raises(ConfigError, match=r"this system has no os\.fork"),
        ):
            RewardCalls(reward, RewardConfig(timeout=2.0), in_process=call_in_process)
    RewardCalls(awaited, RewardConfig(timeout=2.0), in_process=call_in_process)


def test_the_state_of_an_async_function_stays_in_this_process() -> None:
    class Judge(Counting):
        async def __call__(self, states: Any, actions: Any) -> list[float]:
            self.count += 1
            return [0.0] * len(states)

    judge = Judge()
    calls = RewardCalls(judge, RewardConfig(timeout=60.0), in_process=call_in_process)
    calls(["s"], ["a"])
    assert judge.count == 1

"""A plain function as a reward model: what error messages call it, and the state that it keeps."""

import asyncio
import functools
import os
import re
from typing import Any

import pytest
import torch

from grpo import ConfigError, GRPOConfig, GRPOTrainer, ProtocolError, RewardConfig, RewardError, WeightedRewards
from grpo._collecting.reward_calls import RewardCalls
from grpo.arguments import reward_name
from grpo.checks import check_reward_model
from grpo.reward_model_base import (
    ReportsComponents,
    RewardFunction,
    as_reward_model,
    kept_state,
    restore_state,
    with_limits,
)
from tests.support.bad_input_places import Plain


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
    total = WeightedRewards({"a": length, "b": length}, {"a": 1.0, "b": 2.0}).combine(parts)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(0.5)


def test_weighted_rewards_equal_a_hand_worked_sum() -> None:
    """Lengths 2 and 3, and ones: 2 * 2 + .5 and 2 * 3 + .5. Parts are reported before weighting."""
    parts = {"length": length, "one": lambda states, actions: [1.0] * len(actions)}
    weighted = WeightedRewards(parts, {"one": 0.5, "length": 2.0})
    assert weighted.compute_rewards(["s", "t"], ["ab", "abc"]).tolist() == [4.5, 6.5]
    found = weighted.compute_components(["s", "t"], ["ab", "abc"])
    assert {name: part.tolist() for name, part in found.items()} == {"length": [2, 3], "one": [1, 1]}
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


class Components(Model):
    def compute_components(self, states: Any, actions: Any) -> dict[str, torch.Tensor]:
        return {"process": torch.tensor(process_id(states, actions), dtype=torch.float64)}

    def combine(self, components: Any) -> torch.Tensor:
        return components["process"] * 0 + os.getpid()


def test_an_async_function_is_awaited() -> None:
    assert RewardFunction(awaited).compute_rewards(["s"], ["ab"]) == [2.0]
    both = WeightedRewards({"awaited": awaited, "plain": length}, {"awaited": 1.0, "plain": 0.5})
    assert both.compute_rewards(["s", "t"], ["ab", "abc"]).tolist() == [3.0, 4.5]
    assert list(both.compute_components(["s"], ["ab"])) == ["awaited", "plain"]


def test_an_async_function_passes_the_checks_of_reward_models() -> None:
    check_reward_model(awaited, ["s", "t"], ["ab", "abc"], strict=True).raise_for_failures()


def test_without_a_time_limit_every_call_is_made_in_this_process() -> None:
    for reward in (
        process_id,
        Model(),
        Components(),
        WeightedRewards({"a": process_id, "b": Model()}, {"a": 1, "b": 0}),
    ):
        limited = with_limits(as_reward_model(reward), timeout=None, max_concurrent=1)
        assert list(limited.compute_rewards(["s"], ["a"])) == [os.getpid()]


def test_with_a_time_limit_everything_but_async_functions_runs_in_another_process(subtests: pytest.Subtests) -> None:
    parts = WeightedRewards({"a": process_id, "b": Model(), "c": WeightedRewards({"d": process_id})})
    for reward in (process_id, Model(), Components(), parts):
        with subtests.test(reward=str(reward)):
            limited = with_limits(as_reward_model(reward), timeout=60.0, max_concurrent=1)
            assert reward_name(limited) == reward_name(as_reward_model(reward))
            assert isinstance(limited, ReportsComponents) == isinstance(reward, ReportsComponents)
            rewards = [limited.compute_rewards(["s"], ["a"])]
            if isinstance(limited, ReportsComponents):
                components = limited.compute_components(["s"], ["a"])
                rewards += [*components.values()]
                assert reward is parts or float(limited.combine(components)[0]) != os.getpid()
            assert all(float(value[0]) != os.getpid() for value in rewards)

    async def own_process(states: Any, actions: Any) -> list[float]:
        return process_id(states, actions)

    limited = with_limits(as_reward_model(own_process), timeout=60.0, max_concurrent=1)
    assert limited.compute_rewards(["s"], ["a"]) == [os.getpid()]


def test_limits_make_a_copy_of_the_same_parts() -> None:
    model, counting = Model(), Counting()
    original = WeightedRewards({"model": model, "counting": counting, "inner": WeightedRewards({"x": length})})
    limited = original.limit_calls(timeout=None, max_concurrent=3)
    assert (limited.timeout, limited.max_concurrent) == (None, 3)
    assert (original.timeout, original.max_concurrent) == (None, 64)
    assert limited.rewards["inner"].max_concurrent == 3
    limited.compute_components(["s"], ["xy"])
    assert original.state_dict()["counting"] == {"count": 1}
    in_process = with_limits(model, timeout=60.0, max_concurrent=1)
    assert in_process.train() is in_process.eval() is in_process.to("cpu") is in_process
    assert model.modes == ["train", "eval", "cpu"]


def test_a_reward_model_limits_its_calls_itself_if_it_can() -> None:
    class Limiting(Model):
        def limit_calls(self, *, timeout: float | None, max_concurrent: int) -> Any:
            return timeout, max_concurrent

    for timeout in (None, 2.0):
        assert with_limits(Limiting(), timeout=timeout, max_concurrent=5) == (timeout, 5)


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
            model = as_reward_model(reward)
            with pytest.raises(ConfigError, match=re.escape(message) + ".*" + remedy):
                RewardCalls(reward, RewardConfig(timeout=2.0))
            with_limits(model, timeout=None, max_concurrent=1)
    monkeypatch.delattr(os, "fork")
    for reward in (length, Model()):
        with (
            subtests.test(reward=str(reward), fork=False),
            pytest.raises(ConfigError, match=r"this system has no os\.fork"),
        ):
            RewardCalls(reward, RewardConfig(timeout=2.0))
    RewardCalls(awaited, RewardConfig(timeout=2.0))


def test_the_state_of_an_async_function_stays_in_this_process() -> None:
    class Judge(Counting):
        async def __call__(self, states: Any, actions: Any) -> list[float]:
            self.count += 1
            return [0.0] * len(states)

    judge = Judge()
    calls = RewardCalls(judge, RewardConfig(timeout=60.0))
    calls(["s"], ["a"])
    assert judge.count == 1

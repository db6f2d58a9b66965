"""Tasks, samples and groups: JSON and files there and back, splits of tasks, and batches of samples that train."""

import copy
import json
import math
import pickle
import struct
from dataclasses import FrozenInstanceError, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adapters.tools import (
    SampleError,
    TaskError,
    ToolCall,
    ToolGroup,
    ToolSample,
    ToolTask,
    batch_from_groups,
    groups_from_batch,
    load_tasks,
    save_tasks,
    split_tasks,
)  # fmt: skip
from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.errors import ConfigError
from tests.support.plain_states import assert_same, through_checkpoint
from tests.support.tool_policies import TEXTS, VECTORS, policy

TASK_FIELDS = {
    "text": 'Sort "b, a", downwards.', "tool": "sort", "arguments": {"items": ["b", "a"], "down": True},
    "other_calls": [{"tool": "order", "arguments": {"items": ["b", "a"]}}], "slots": {"items": ["b", "a"]},
    "labels": {"difficulty": "medium"},
}  # fmt: skip
TASK = ToolTask(**TASK_FIELDS | {"other_calls": (ToolCall(tool="order", arguments={"items": ["b", "a"]}),)})
FIELDS: dict[str, Any] = {
    "state": "paint it black", "tool": "paint", "arguments": {"colour": "black", "coats": [1, 2.5, None, {"a": True}]},
    "log_prob": (-0.1, -1 / 3), "ref_log_prob": (-0.2, -0.7), "reward": 0.8, "value": (0.5, 0.25), "done": False,
    "final_value": 0.125,
}  # fmt: skip


def sample(**changes: Any) -> ToolSample:
    return ToolSample(**FIELDS | changes)


def rewards_of(states: Any, calls: Any) -> list[float]:
    return [float(call.tool == "shout") + 0.1 * len(call.arguments) for call in calls]


def test_a_sample_survives_a_json_round_trip() -> None:
    first = sample()
    assert json.loads(first.to_json()) == FIELDS | {
        "log_prob": [-0.1, -1 / 3], "ref_log_prob": [-0.2, -0.7], "value": [0.5, 0.25],
    }  # fmt: skip
    assert ToolSample.from_json(first.to_json()) == first
    assert first.action == ToolCall(tool="paint", arguments=FIELDS["arguments"])
    assert "\n" not in sample(state="two\nlines").to_json()


def test_optional_fields_of_a_sample_stay_absent_and_arguments_are_copied() -> None:
    least = ToolSample(state=[1, 2.5], tool="wait", log_prob=[-1], reward=1)  # type: ignore[arg-type]
    assert (least.state, least.log_prob, least.reward, least.arguments) == ((1.0, 2.5), (-1.0,), 1.0, {})
    assert (least.ref_log_prob, least.value, least.done, least.final_value) == (None, None, True, None)
    assert ToolSample.from_json(least.to_json()) == least
    assert ToolSample.from_json('{"state": "s", "tool": "t", "log_prob": [0], "reward": 2}').reward == 2.0
    given_arguments: dict[str, Any] = {"sizes": (1, 2)}
    first = sample(arguments=given_arguments)
    given_arguments["sizes"] = ()
    assert first.arguments == {"sizes": [1, 2]}


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(log_prob=st.lists(FINITE, min_size=1, max_size=3), reward=FINITE, state=st.lists(FINITE, max_size=3))
def test_floats_survive_json_bit_for_bit(log_prob: list[float], reward: float, state: list[float]) -> None:
    first = ToolSample(state=tuple(state), tool="t", log_prob=tuple(log_prob), reward=reward)
    again = ToolSample.from_json(first.to_json())
    for name in ("state", "log_prob"):
        numbers, back = getattr(first, name), getattr(again, name)
        assert struct.pack(f"{len(numbers)}d", *numbers) == struct.pack(f"{len(back)}d", *back)
    assert struct.pack("d", first.reward) == struct.pack("d", again.reward)


def test_records_are_frozen_dataclasses_that_can_be_copied_and_pickled(subtests: pytest.Subtests) -> None:
    for first in (sample(state="not UTF-8: \ud800"), ToolGroup(id=1, samples=(sample(),)), TASK):
        with subtests.test(type(first).__name__):
            for again in (
                pickle.loads(pickle.dumps(first)), copy.deepcopy(first), replace(first), type(first).from_json(first.to_json()),
            ):  # fmt: skip
                assert again == first
                assert again is not first
            assert not hasattr(first, "__dict__"), "slots only"
            with pytest.raises(FrozenInstanceError):
                setattr(first, fields(first)[0].name, None)
            message = f"^{type(first).__name__}.colour: Unexpected keyword argument; got 1"
            with pytest.raises(type(first).error, match=message):
                replace(first, colour=1)


def test_invalid_fields_of_a_sample_are_refused(subtests: pytest.Subtests) -> None:
    for changes, text in (
        ({"reward": math.nan}, r"ToolSample\.reward: Input should be a finite number; got nan"),
        ({"reward": True}, "reward: Input should be a valid number; got True"),
        ({"log_prob": [-math.inf, 0]}, "log_prob.0: Input should be a finite number; got -inf"),
        ({"log_prob": -0.5}, r"log_prob: Input should be a valid tuple; got -0\.5"),
        ({"ref_log_prob": [-0.5]}, "ref_log_prob and value must be as long as log_prob"),
        ({"value": [1, 2, 3]}, "ref_log_prob and value must be as long as log_prob"),
        ({"state": {"text": "x"}}, "state.str: Input should be a valid string"),
        ({"tool": 3}, "tool: Input should be a valid string; got 3"),
        ({"done": 1}, "done: Input should be a valid boolean"),
        ({"done": True}, r"final_value must be a number if .* None otherwise; got final_value=0\.125, done=True"),
        ({"done": True, "final_value": 0.0}, r"None otherwise; got final_value=0\.0, done=True"),
        ({"value": None}, r"None otherwise; got final_value=0\.125, done=False, value=None"),
        ({"final_value": None}, r"None otherwise; got final_value=None, done=False, value=\(0\.5, 0\.25\)"),
        ({"final_value": math.nan}, "final_value: Input should be a finite number; got nan"),
        ({"arguments": {"x": math.inf}}, "arguments: .*not JSON compliant"),
        ({"arguments": {"x": {1, 2}}}, "arguments: .*not JSON serializable"),
        ({"arguments": [1]}, "arguments: Input should be a valid dictionary"),
    ):
        with subtests.test(text), pytest.raises(SampleError, match=text):
            sample(**changes)


def test_what_is_no_sample_group_or_batch_is_refused(subtests: pytest.Subtests) -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    text, one, mood = sample().to_json(), (sample(),), {**sample().to_dict(), "mood": 1}
    for read, value, message in (
        (ToolSample.from_json, "{", "a ToolSample must be JSON"),
        (ToolSample.from_json, "[]", r"ToolSample: Input should be a dictionary .*; got \[\]"),
        (ToolSample.from_json, "[" * 100_000, "a ToolSample must be JSON: maximum recursion depth"),
        (ToolSample.from_json, '{"state": "s", "tool": "t", "reward": 1}', "ToolSample.log_prob: Field required"),
        (ToolSample.from_json, text.replace("0.8", "NaN"), "reward: Input should be a finite number"),
        (ToolSample.from_json, text.replace("0.8", "1" + "0" * 400), "reward: Input should be a valid number"),
        (ToolSample.from_dict, mood, "ToolSample.mood: Unexpected keyword argument; got 1"),
        (lambda deep: sample(arguments={"x": deep}), deep, r"^ToolSample\.arguments: maximum recursion depth"),
        (ToolGroup.from_json, '{"id": 1, "samples": []}', "at least 1 item"),
        (ToolGroup.from_json, '{"id": 1, "samples": {}}', "samples: Input should be a valid tuple"),
        (ToolGroup.from_json, '{"id": 1, "samples": [{}]}', "ToolGroup.samples.0.state: Field required"),
        (ToolGroup.from_json, '{"samples": []}', "ToolGroup.id: Field required"),
        (ToolGroup.from_dict, {"id": 1, "samples": [mood]}, "samples.0.mood: Unexpected"),
        (lambda id: ToolGroup(id=id, samples=one), 1.5, "ToolGroup.id.str: Input should be a valid string"),
        (lambda samples: ToolGroup(id=1, samples=samples), ("no",), "an instance of ToolSample"),
        (lambda x: ToolGroup(id=1, context={"x": x}, samples=one), math.nan, "ToolGroup.context: .*not JSON compliant"),
        *((lambda states: batch_from_groups({"a": [sample(state=state) for state in states]}), states,
           "states must all be texts, or all vectors of one length") for states in (["text", [1.0]], [[1.0], [1.0, 2.0]])),
        (batch_from_groups, {}, "at least one group"),
    ):  # fmt: skip
        with subtests.test(message), pytest.raises(SampleError, match=message):
            read(value)


def test_a_batch_of_groups_equals_hand_worked_tensors() -> None:
    short = sample(tool="wait", arguments={}, log_prob=(-2.0,), ref_log_prob=(-3.0,), value=(1.0,), reward=0.1)
    ended = sample(done=True, final_value=None)
    batch = batch_from_groups([ToolGroup(id="x", samples=(sample(), short)), ToolGroup(id="x", samples=(ended,))])
    assert batch.states == ["paint it black"] * 3
    assert batch.actions[1] == ToolCall(tool="wait")
    assert batch.group_ids.tolist() == [0, 0, 1]  # of one id, but two groups
    assert batch.rewards.tolist() == [0.8, 0.1, 0.8]
    assert batch.mask.tolist() == [[True, True], [True, False], [True, True]]
    assert batch.behaviour_log_probs.tolist() == [[-0.1, -1 / 3], [-2.0, 0.0], [-0.1, -1 / 3]]
    assert batch.ref_log_probs.tolist() == [[-0.2, -0.7], [-3.0, 0.0], [-0.2, -0.7]]
    assert batch.values.tolist() == [[0.5, 0.25], [1.0, 0.0], [0.5, 0.25]]
    assert batch.final_values.tolist() == [0.125, 0.125, 0.0]
    assert batch.old_log_probs is None
    group = ToolGroup(id=0, samples=(sample(), sample(ref_log_prob=None, value=None, final_value=None)))
    batch = batch_from_groups([group])
    assert (batch.ref_log_probs, batch.values, batch.final_values) == (None, None, None), "not all samples have them"


def test_truncated_and_terminated_samples_are_distinguished() -> None:
    """A final value of 0 of a truncated sample is the critic's. One that was never given is None."""
    assert sample(final_value=0.0).final_value == 0.0
    cut_off, ended = sample(value=None, final_value=None), sample(value=None, final_value=None, done=True)
    assert cut_off != ended
    for one in (cut_off, ended):
        assert ToolSample.from_json(one.to_json()) == one
    group = ToolGroup(id=0, samples=(sample(final_value=-0.5), sample(done=True, final_value=None)))
    batch = batch_from_groups([group])
    assert batch.final_values.tolist() == [-0.5, 0.0]
    back = groups_from_batch(batch)[0].samples
    assert [(one.done, one.final_value) for one in back] == [(False, -0.5), (True, None)]


def test_vector_states_become_a_tensor_and_any_key_of_a_mapping_the_id_of_a_group() -> None:
    batch = batch_from_groups({"a": [sample(state=[1, 2]), sample(state=[3, 4])]})
    assert isinstance(batch.states, Tensor)
    assert batch.states.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    batch = batch_from_groups({("x", 1): [sample()], 2: [sample()]}, state=lambda group, _: group.id)
    assert list(batch.states) == ["('x', 1)", "2"]


def test_a_batch_read_back_from_json_trains_the_same(subtests: pytest.Subtests) -> None:
    config = GRPOConfig(group_size=20, num_epochs_per_update=2, seed=3, objective=ObjectiveConfig(kl_coef=0.1))
    for states in (TEXTS[:2], [TASK, TASK], torch.tensor(VECTORS[:2])):
        with subtests.test(type(states[0]).__name__):
            made = policy(num_features=3 if isinstance(states, Tensor) else None)
            own: Any = {"config": config, "reference_policy": copy.deepcopy(made), "reward_model": rewards_of}
            one, other = (GRPOTrainer(policy=copy.deepcopy(made), **own) for _ in range(2))
            batch = one.collect(states)
            groups = [ToolGroup.from_json(group.to_json()) for group in groups_from_batch(batch)]
            assert [len(group.samples) for group in groups] == [20, 20]
            if states[0] is TASK:  # tasks survive in the context of samples
                tasks = batch_from_groups(groups, state=lambda group, _: ToolTask.from_dict(group.context)).states
                assert (tasks, groups[0].samples[0].state) == ([TASK] * 40, TASK.text)
            restored = batch_from_groups(groups)
            assert torch.equal(restored.mask, batch.mask)
            assert torch.equal(restored.behaviour_log_probs.float()[batch.mask], batch.behaviour_log_probs[batch.mask])
            direct, read = one.update(batch), other.update(restored)
            for trained, again in zip(one.policy.parameters(), other.policy.parameters(), strict=True):
                assert torch.equal(trained, again)
            assert not torch.equal(one.policy.network.tool_query.weight, made.network.tool_query.weight)
            assert read["train/total_loss"] == pytest.approx(direct["train/total_loss"], abs=1e-9)


def batch_with(**changes: Any) -> ExperienceBatch:
    rows = {"states": ["a", "b"], "actions": [ToolCall(tool="t")] * 2, "rewards": [0.0, 1.0], "group_ids": [9, 9]}
    return ExperienceBatch.from_rows(**{**rows, "behaviour_log_probs": torch.zeros(2, 2), **changes})


def test_the_log_probs_of_the_sampling_policy_are_kept_before_those_of_the_old_policy() -> None:
    both = batch_with(states=[np.array([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    both = replace(both, old_log_probs=torch.full((2, 2), -1.0))
    samples = groups_from_batch(both)[0].samples
    assert [one.log_prob for one in samples] == [(0.0, 0.0)] * 2
    assert [one.state for one in samples] == [(1.0, 2.0), (3.0, 4.0)], "arrays become vectors"
    assert groups_from_batch(replace(both, behaviour_log_probs=None))[0].samples[0].log_prob == (-1.0, -1.0)


def test_a_batch_that_is_not_of_tool_calls_is_refused(subtests: pytest.Subtests) -> None:
    for changes, text in (
        ({"actions": ["t", "t"]}, "actions must be ToolCalls; got 't'"),
        ({"rewards": torch.zeros(2, 2)}, r"rewards must be one per row, \[N\], .*got rewards \[2, 2\]"),
        ({"behaviour_log_probs": None}, "needs behaviour_log_probs"),
        ({"mask": torch.tensor([[True, True], [False, True]])}, "without holes"),
        ({"behaviour_log_probs": torch.full((2, 2), math.nan)}, "log_prob.0: Input should be a finite number"),
    ):
        with subtests.test(text), pytest.raises(SampleError, match=text):
            groups_from_batch(batch_with(**changes))


def test_samples_groups_tasks_and_calls_come_back_from_a_checkpoint(tmp_path, subtests: pytest.Subtests) -> None:
    whole, short = sample(), sample(state=(0.1, -0.0), ref_log_prob=None, value=None, done=True, final_value=None)
    arguments = {"items": ["b", ("a", 1, 1.0, -0.0)], "deep": {"none": None, "not a number": math.nan, "$tuple": True}}
    slots = {"number": math.nan, "pair": (1, 1.0)}
    for number, one in enumerate((
        whole, ToolGroup(id="7", context={"a": [1, None]}, samples=(whole, short)), ToolGroup(id=7, samples=(short,)),
        ToolCall(tool="sort", arguments=arguments), replace(TASK, text="Grüße,\u2028two\nlines", slots=slots),
    )):  # fmt: skip
        with subtests.test(type(one).__name__, number=number):
            assert_same(through_checkpoint(one, tmp_path / str(number)), one)


# --- tasks
def test_text_tool_and_arguments_suffice_and_every_right_call_is_listed() -> None:
    least = ToolTask(text="add 2 and 3", tool="add", arguments={"a": 2, "b": 3})
    own = ToolCall(tool="add", arguments={"a": 2, "b": 3})
    assert (least.slots, least.labels, least.right_calls) == ({}, {}, (own,))
    other = ToolCall(tool="add", arguments={"a": 3, "b": 2})
    assert replace(least, other_calls=[other]).right_calls == (own, other)  # type: ignore[arg-type]
    assert ToolTask(text="hello", tool=None).right_calls == (None,)
    assert ToolTask(text="hello", tool=None, other_calls=(other,)).right_calls == (None, other)
    size = {"size": 3}
    calls = (ToolCall(tool="sort", arguments=size), ToolCall(tool="order", arguments=MappingProxyType(size)))
    task = replace(TASK, other_calls=calls)
    size["size"] = 4
    assert [call.arguments for call in task.other_calls] == [{"size": 3}, {"size": 3}], "the arguments are copied"
    assert ToolTask.from_json(task.to_json()) == task


def tasks_of(tool: str, count: int) -> list[ToolTask]:
    return [replace(TASK, tool=tool, text=f"{tool} {number}") for number in range(count)]


def test_a_file_of_tasks_is_read_back_as_it_was_written(tmp_path) -> None:
    tasks = [TASK, replace(TASK, text="Grüße,\u2028two\nlines", arguments={}, slots={"number": 2.5})]
    save_tasks(tmp_path / "tasks.jsonl", tasks)
    assert load_tasks(tmp_path / "tasks.jsonl") == tasks
    lines = (tmp_path / "tasks.jsonl").read_text("utf-8").split("\n")
    assert [bool(line) for line in lines] == [True, True, False]
    assert json.loads(lines[0]) == TASK_FIELDS


def test_a_failed_write_keeps_the_previous_file(tmp_path) -> None:
    path = tmp_path / "tasks.jsonl"
    save_tasks(path, [TASK])
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_tasks(path, [TASK, replace(TASK, arguments={"number": math.nan})])
    assert load_tasks(path) == [TASK]
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_that_is_no_task_is_refused_with_its_number(tmp_path, subtests: pytest.Subtests) -> None:
    whole, path = json.dumps(TASK.to_dict()).encode(), tmp_path / "tasks.jsonl"
    for change, message in (
        ({"colour": 1}, "colour: Unexpected keyword argument; got 1"),
        ({"tool": 3}, "tool: Input should be a valid string; got 3"),
        ({"arguments": [1]}, r"arguments: Input should be a valid dictionary; got \[1\]"),
        ({"labels": [1]}, r"labels: Input should be a valid dictionary; got \[1\]"),
        ({"labels": {"difficulty": 1}}, "labels.difficulty: Input should be a valid string; got 1"),
        ({"slots": None}, "slots: Input should be a valid dictionary; got None"),
        ({"other_calls": {}}, "other_calls: Input should be a valid tuple; got {}"),
        ({"other_calls": [{"tool": 3, "arguments": {}}]}, "other_calls.0.tool: Input should be a valid string; got 3"),
        ({"other_calls": [{"tool": "sort", "with": {}}]}, "other_calls.0.with: Unexpected keyword argument; got {}"),
        ({"tool": None}, "ToolTask: a task without a tool must have no arguments; got {'items'"),
        (b'{"text": "', "a ToolTask must be JSON"), (b'"\xff"', "a ToolTask must be JSON"),
        (b"[]", "ToolTask: Input should be a dictionary"), (b"{}", "ToolTask.text: Field required"),
    ):  # fmt: skip
        line = change if isinstance(change, bytes) else json.dumps(TASK.to_dict() | change).encode()
        path.write_bytes(whole + b"\n\n" + line + b"\n")
        with subtests.test(message), pytest.raises(TaskError, match=f"tasks.jsonl, line 3: .*{message}"):
            load_tasks(path)


def test_each_tool_gives_its_share_to_the_held_out_tasks() -> None:
    tasks = [task for pair in zip(tasks_of("a", 10), tasks_of("b", 10), strict=True) for task in pair]
    train, held_out = split_tasks(tasks, 0.3, seed=0)
    assert [sum(task.tool == tool for task in held_out) for tool in "ab"] == [3, 3]
    assert sorted(train + held_out, key=tasks.index) == tasks  # each once
    assert train == sorted(train, key=tasks.index)
    assert held_out == sorted(held_out, key=tasks.index)


def test_a_split_depends_on_the_seed_but_not_on_other_tools() -> None:
    tasks = tasks_of("a", 10)
    assert split_tasks(tasks, 0.3, seed=0) == split_tasks(tasks, 0.3, seed=0)
    assert len({tuple(task.text for task in split_tasks(tasks, 0.3, seed=seed)[1]) for seed in range(10)}) > 5
    with_others = split_tasks(tasks_of("b", 4) + tasks, 0.3, seed=0)[1]
    assert [task for task in with_others if task.tool == "a"] == split_tasks(tasks, 0.3, seed=0)[1]


def test_tasks_with_one_key_are_not_split() -> None:
    tasks = tasks_of("a", 12)  # keys 0 to 3, three tasks each

    def key(task: ToolTask) -> int:
        return int(task.text.removeprefix("a ")) % 4

    train, held_out = split_tasks(tasks, 0.5, seed=1, key=key)
    assert len(held_out) == 6
    assert not {key(task) for task in train} & {key(task) for task in held_out}


def test_all_tasks_or_none_can_be_held_out_and_no_other_share(subtests: pytest.Subtests) -> None:
    for fraction, num_held_out in ((0, 0), (1, 4)):
        train, held_out = split_tasks(tasks_of("a", 4), fraction, seed=0)
        assert (len(train), len(held_out)) == (4 - num_held_out, num_held_out)
    for fraction in (-0.1, 1.1, math.nan):
        with subtests.test(fraction=fraction), pytest.raises(ConfigError, match="held_out_fraction"):
            split_tasks([TASK], fraction, seed=0)

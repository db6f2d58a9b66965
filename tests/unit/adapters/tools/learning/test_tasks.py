"""Tasks: files that come back as they were written, and splits."""

import json
import math
from dataclasses import replace
from types import MappingProxyType

import pytest

from adapters.tools import TaskError, ToolCall, ToolTask, load_tasks, save_tasks, split_tasks
from grpo.errors import ConfigError

FIELDS = {
    "text": 'Sort "b, a", downwards.', "tool": "sort", "arguments": {"items": ["b", "a"], "down": True},
    "other_calls": [{"tool": "order", "arguments": {"items": ["b", "a"]}}], "slots": {"items": ["b", "a"]},
    "labels": {"difficulty": "medium"},
}  # fmt: skip
TASK = ToolTask(**FIELDS | {"other_calls": (ToolCall(tool="order", arguments={"items": ["b", "a"]}),)})


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
    assert json.loads(lines[0]) == FIELDS


def test_an_unfinished_file_follows_no_link(tmp_path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "tasks.jsonl.new").symlink_to(tmp_path / "victim")
    save_tasks(tmp_path / "tasks.jsonl", [TASK])
    assert (tmp_path / "victim").read_text() == "mine"
    assert {entry.name for entry in tmp_path.iterdir()} == {"victim", "tasks.jsonl"}
    assert load_tasks(tmp_path / "tasks.jsonl") == [TASK]


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

"""Calls and results: equality as JSON has it, and what JSON gives back."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.tools import errors
from adapters.tools.catalogue.calls import ToolCall, ToolResult, same_json
from adapters.tools.errors import ToolError
from grpo.errors import ConfigError
from tests.support.plain_states import assert_same, through_checkpoint


class Broken(Mapping[str, Any]):
    """Raises when it is read."""

    def __getitem__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError

    def __len__(self) -> int:
        return 1


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def circle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def test_values_are_equal_as_in_json(subtests: pytest.Subtests) -> None:
    for one, other, same in (
        (1, 1.0, True),
        (0.0, -0.0, True),
        (10**400, 10**400, True),
        (10**400, math.inf, False),
        (True, 1, False),
        (False, 0.0, False),
        (True, True, True),
        (None, None, True),
        (None, False, False),
        ("1", 1, False),
        ("a", "a", True),
        ([1, 2], (1.0, 2.0), True),
        ([1], [1, 2], False),
        ([True], [1], False),
        ({"a": [{"b": 1}]}, {"a": ({"b": 1.0},)}, True),
        ({"a": {"b": True}}, {"a": {"b": 1}}, False),
        ({"a": 1, "b": None}, {"a": 1}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ([], {}, False),
        ([], "", False),
    ):
        with subtests.test(one=one, other=other):
            assert same_json(one, other) is same
            assert same_json(other, one) is same


def test_a_value_that_json_cannot_hold_equals_nothing(subtests: pytest.Subtests) -> None:
    for value in (
        math.nan, math.inf, -math.inf, b"a", {1}, object(), 1j, np.array([1, 2]), np.array(1), np.int64(1), np.bool_(True),
        {1: 2}, [np.array([1, 2])], Broken(), deep(100_000), circle(),
    ):  # fmt: skip
        with subtests.test(type(value).__name__):
            for other in (value, 1, [1], {"a": 1}, "a", True, None):
                assert same_json(value, other) is False
                assert same_json(other, value) is False


def through_json(fields: Any) -> Any:
    return json.loads(json.dumps(fields, allow_nan=False))


def test_a_call_survives_a_json_round_trip() -> None:
    call = ToolCall(tool="add", arguments={"a": 1, "b": [0.1, None, {"c": True}]})
    assert ToolCall.from_dict(through_json(call.to_dict())) == call
    assert ToolCall.from_dict(ToolCall(tool="wait").to_dict()) == ToolCall(tool="wait")


def test_a_result_survives_a_json_round_trip() -> None:
    result = ToolResult(output={"sum": [0.1, 2]}, seconds=0.1 + 0.2)
    assert ToolResult.from_dict(through_json(result.to_dict())) == result
    assert ToolResult.from_dict(ToolResult().to_dict()) == ToolResult()


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ToolError)]


def test_an_error_keeps_its_type_and_message_in_json(subtests: pytest.Subtests) -> None:
    for kind in KINDS:
        with subtests.test(kind.__name__):
            again = ToolResult.from_dict(through_json(ToolResult(error=kind("add: no"), seconds=0.5).to_dict()))
            assert not again.ok
            assert (type(again.error), str(again.error), again.output, again.seconds) == (kind, "add: no", None, 0.5)


def test_every_kind_of_error_is_tested() -> None:
    assert len(KINDS) == 14


def test_json_that_is_no_call_or_result_is_refused(subtests: pytest.Subtests) -> None:
    for make, message in (
        (lambda: ToolCall.from_dict({"tool": "t"}), r"ToolCall\.from_dict needs tool, arguments; got tool\."),
        (lambda: ToolCall.from_dict({"tool": "t", "arguments": {}, "x": 1}), "got tool, arguments, x"),
        (lambda: ToolCall.from_dict({"tool": "t", "arguments": [1]}), r"arguments must have the type .*; got \[1\]"),
        (lambda: ToolCall.from_dict([1]), "needs tool, arguments; got list"),  # type: ignore[arg-type]
        (lambda: ToolResult.from_dict({"output": 1, "error": None, "seconds": True}), "seconds must have the type"),
        (lambda: ToolResult.from_dict({"output": 1, "error": "no", "seconds": 1.0}), "error must have the type"),
        (
            lambda: ToolResult.from_dict({"output": 1, "error": {"type": "ValueError", "message": ""}, "seconds": 1.0}),
            "the error must be one of ToolError, .*; got 'ValueError'",
        ),
        (
            lambda: ToolResult.from_dict({"output": 1, "error": {"type": "ToolError"}, "seconds": 1.0}),
            "needs type, message",
        ),
    ):
        with subtests.test(message), pytest.raises(ConfigError, match=message):
            make()


def test_calls_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    arguments = {"items": ["b", ("a", 1, 1.0, -0.0)], "deep": {"none": None, "not a number": math.nan, "$tuple": True}}
    call = ToolCall(tool="sort", arguments=arguments)
    assert_same(through_checkpoint(call, tmp_path), call)

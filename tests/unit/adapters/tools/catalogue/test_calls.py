"""Calls and results: equality as JSON has it, and calls in checkpoints."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.tools.catalogue.calls import ToolCall, ToolResult, same_json
from adapters.tools.errors import ToolTimeoutError
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


def test_calls_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    arguments = {"items": ["b", ("a", 1, 1.0, -0.0)], "deep": {"none": None, "not a number": math.nan, "$tuple": True}}
    call = ToolCall(tool="sort", arguments=arguments)
    assert_same(through_checkpoint(call, tmp_path), call)


def test_a_result_is_an_output_or_an_error() -> None:
    result, failed = ToolResult(output=None), ToolResult(error=ToolTimeoutError("too slow"))
    assert (result.ok, failed.ok) == (True, False)
    assert (result.seconds, failed.output) == (0.0, None)

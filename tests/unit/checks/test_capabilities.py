"""The place where two values differ: a policy's state and its checkpoint, or what a reward has changed."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo.checks.probe import first_difference

ONES = torch.ones(2)

PLACES: list[tuple[Any, Any, str]] = [
    (ONES, torch.ones(2), ""),
    (ONES, torch.tensor([1.0, 2.0]), "state"),
    (ONES, torch.ones(2, 1), "state"),
    ([1.0, 1.0], ONES, "state"),
    (np.array([1, 2]), np.array([1, 2]), ""),
    (np.array([1, 2]), np.array([1, 3]), "state"),
    ({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 2}}, ""),
    ({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}, "state['b']['c']"),
    ({"a": 1}, {"b": 1}, "state"),
    ({"a": 1, "b": 2}, {"a": 1}, "state"),
    (1, {"a": 1}, "state"),
    ([1, ONES], (1, ONES), ""),
    ([1, [2, 3]], [1, [2, 4]], "state[1][1]"),
    ([0, 2], [1, 3], "state[0]"),
    ([1], [1, 2], "state"),
    (1, [1], "state"),
    (math.nan, math.nan, ""),
    (math.nan, 1.0, "state"),
    (1.0, math.nan, "state"),
    ("a", "b", "state"),
    (SimpleNamespace(a=[1]), SimpleNamespace(a=[1]), ""),
    (SimpleNamespace(a=[1]), SimpleNamespace(a=[2]), "state['a'][0]"),
    (object(), object(), ""),
    (object(), 1, "state"),
]
"""What a policy holds, what its checkpoint holds, and the first place where they differ."""


def test_the_first_place_where_two_states_differ_is_named(subtests: pytest.Subtests) -> None:
    for found, expected, place in PLACES:
        with subtests.test(found=found, expected=expected):
            assert first_difference(found, expected, "state") == place

"""Frozen settings: types and bounds checked on construction, dicts there and back."""

import dataclasses
import math
import re
import sys
from typing import Literal

import pytest

from grpo.arguments import Settings, setting
from grpo.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inner(Settings):
    """A part of `Outer`."""

    depth: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outer(Settings):
    """One field of every kind."""

    count: int = setting(3, at_least=1, at_most=9)
    rate: float = setting(0.5, above=0.0, below=1.0)
    limit: float | None = setting(None, at_least=0.0)
    mode: Literal["slow", "fast"] = "slow"
    choice: Literal["a", "b"] | None = None
    name: str | None = None
    words: tuple[str, ...] = ()
    inner: Inner = Inner()


def test_invalid_values_are_refused_by_field(subtests):
    cases = [  # numbers, choices and parts: test_config.py, for each field
        ("count", 10, "<= 9"),
        ("rate", 1.0, "< 1"),
        ("limit", -math.inf, "None"),
        ("mode", 0, "'slow', 'fast'"),
        ("choice", "c", "'a', 'b' or None"),
        ("name", 5, "str or None"),
        ("words", "ab", "a tuple of str"),
        ("words", ["a"], "a tuple of str"),
        ("words", ("a", 1), "a tuple of str"),
    ]
    for field, value, says in cases:
        with (
            subtests.test(field=field, value=value, says=says),
            pytest.raises(ConfigError, match=rf"Outer\.{field} must be .*{says}.*; got {re.escape(repr(value))}"),
        ):
            Outer(**{field: value})


def test_an_integer_too_large_for_a_float_is_refused():
    assert Outer(limit=sys.float_info.max).limit == sys.float_info.max
    with pytest.raises(ConfigError, match=r"Outer\.limit"):
        Outer(limit=10**400)


def test_the_message_names_owner_requirement_and_value():
    with pytest.raises(ConfigError) as caught:
        Outer(mode="quick")
    assert str(caught.value) == "Outer.mode must be one of 'slow', 'fast'; got 'quick'."


def test_to_dict_returns_plain_values_at_every_level():
    assert Outer(limit=2.0).to_dict() == {
        "count": 3, "rate": 0.5, "limit": 2.0, "mode": "slow", "choice": None, "name": None, "words": (),
        "inner": {"depth": 1},
    }  # fmt: skip


def test_from_dict_reads_nested_dicts_and_fills_in_defaults():
    assert Outer.from_dict({"count": 4, "inner": {"depth": 6}}) == Outer(count=4, inner=Inner(depth=6))
    assert Outer.from_dict({"inner": Inner(depth=6)}) == Outer(inner=Inner(depth=6))
    assert Outer.from_dict({"words": ["a", "b"]}) == Outer(words=("a", "b"))  # JSON has lists only
    assert Outer.from_dict({}) == Outer()


def test_from_dict_refuses_unknown_keys(subtests):
    cases = [
        ({"cuont": 4}, r"Outer has no setting 'cuont'. Did you mean Outer\(count=...\)\?"),
        ({"inner": {"dpeth": 4}}, r"Inner has no setting 'dpeth'. Did you mean Inner\(depth=...\)\?"),
        ({"inner": {"depth": "4"}}, r"Inner\.depth must be int"),
        ({"count": 0}, r"Outer\.count must be >= 1"),
        ({"name": {"depth": 1}}, r"Outer\.name must be str or None"),
    ]
    for values, says in cases:
        with subtests.test(values=values, says=says), pytest.raises(ConfigError, match=says):
            Outer.from_dict(values)

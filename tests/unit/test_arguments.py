"""Checks of arguments: what passes, and what an error says."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from grpo.arguments import is_finite, require_each, require_instances, require_integers, require_numbers, require_widths
from grpo.errors import ConfigError


def test_integers_of_python_and_numpy_from_the_least_on_pass() -> None:
    require_integers("Owner", 2, a=2, b=3, c=np.int64(2))
    require_integers("Owner", 0, a=0)
    require_integers("Owner", 1, optional=True, a=None, b=1)


@pytest.mark.parametrize(
    ("least", "optional", "value", "message"),
    [
        (2, False, 1, r"an integer >= 2; got int 1\."),
        (1, False, True, r"an integer >= 1; got bool True\."),
        (1, False, 2.0, r"an integer >= 1; got float 2\.0\."),
        (1, False, "3", r"an integer >= 1; got str '3'\."),
        (1, False, None, r"an integer >= 1; got NoneType None\."),
        (1, True, 0, r"an integer >= 1, or None; got int 0\."),
    ],
)
def test_what_is_no_integer_is_refused_by_name(least: int, optional: bool, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^Owner: size must be {message}$"):
        require_integers("Owner", least, optional=optional, fine=9, size=value)


def test_finite_numbers_pass() -> None:
    require_numbers("Owner", a=0, b=-1.5, c=np.float32(2), d=Fraction(1, 3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1", None, 1j, 10**400], ids=str)
def test_what_is_no_finite_number_is_refused_by_name(value: Any) -> None:
    assert not is_finite(value)
    with pytest.raises(ConfigError, match=r"^Owner: rate must be a finite number; got \w+ "):
        require_numbers("Owner", fine=1.0, rate=value)


def test_instances_pass_and_others_are_refused_by_name() -> None:
    require_instances("Owner", str | None, "a text, or None", a="x", b=None)
    with pytest.raises(ConfigError, match=r"^Owner: b must be a text, or None; got int 1\.$"):
        require_instances("Owner", str | None, "a text, or None", a="x", b=1)


def test_widths_are_a_list_of_integers_from_1_on(subtests: pytest.Subtests) -> None:
    require_widths("Owner", [])
    require_widths("Owner", (64, np.int64(1)))
    for wrong, message in (
        (8, r"hidden must be a list of widths; got int 8\."),
        ([8, 0], r"hidden\[1\] must be an integer >= 1; got int 0\."),
        (b"8", r"hidden must be a list of widths; got bytes b'8'\."),
    ):
        with subtests.test(message), pytest.raises(ConfigError, match=f"^Owner: {message}$"):
            require_widths("Owner", wrong)


def test_a_list_is_returned_if_each_of_its_values_fits() -> None:
    assert require_each("Owner: words", str, (word for word in ("a", "b"))) == ["a", "b"]
    assert require_each("Owner: words", str, []) == []
    for wrong, shown in ((["a", 1], "1"), ("ab", "'ab'"), (7, "7"), (None, "None")):
        with pytest.raises(ConfigError, match=rf"^Owner: words must be a list of str objects; got {shown}\.$"):
            require_each("Owner: words", str, wrong)

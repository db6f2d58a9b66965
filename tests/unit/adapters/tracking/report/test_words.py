"""How the page writes numbers, times and counts."""

import math

import pytest

from adapters.tracking.report.words import counted, duration, number, percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.12345, "0.123"),
        (-0.5, "-0.5"),
        (0.999_9, "1"),
        (0.00123, "0.00123"),
        (1.2345, "1.23"),
        (12.345, "12.3"),
        (123.45, "123.5"),
        (1234.5, "1,234"),
        (123_456, "123,456"),
        (1.2e8, "1.2e+08"),
        (5.6e-5, "5.6e-05"),
        (math.nan, "-"),
        (math.inf, "-"),
        (None, "-"),
    ],
)
def test_a_number_has_about_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_signed_number_shows_its_sign() -> None:
    assert [number(value, signed=True) for value in (0.5, -0.5, 1500.0, 0.0)] == ["+0.5", "-0.5", "+1,500", "0"]


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0.0, "0 %"),
        (0.123, "12 %"),
        (0.014, "1 %"),
        (0.004, "0.4 %"),
        (0.996, "99.6 %"),
        (1.0, "100 %"),
        (0.95, "95 %"),
    ],
)
def test_a_percentage_never_hides_that_something_is_left(fraction: float, text: str) -> None:
    assert percent(fraction) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0032, "3.2 ms"),
        (0.32, "320 ms"),
        (0.9994, "999 ms"),
        (4.14, "4.1 s"),
        (59.4, "59 s"),
        (59.7, "1 min"),
        (125, "2 min 5 s"),
        (3599.8, "1 h"),
        (12_000, "3 h 20 min"),
        (86_390, "1 d"),
        (187_200, "2 d 4 h"),
    ],
)
def test_a_time_has_at_most_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_counts_agree_with_their_nouns() -> None:
    assert [counted(count, "row") for count in (0, 1, 1200)] == ["0 rows", "1 row", "1,200 rows"]

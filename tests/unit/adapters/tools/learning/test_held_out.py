"""Estimates of what training changes on requests that it did not learn from, with numbers worked out by hand."""

import pytest

from adapters.tools import HeldOut
from adapters.tools.learning.held_out import folds
from grpo.errors import ConfigError


def test_the_error_is_that_of_the_differences() -> None:
    """Differences 1, 0, 0, 0: mean 1/4, standard deviation 1/2, standard error 1/4. 4 (2/4 / 0.05)^2 = 400 requests."""
    found = HeldOut.of([0, 0, 1, 1], [1, 0, 1, 1])
    assert (found.before, found.after, found.gain, found.error) == (0.5, 0.75, 0.25, 0.25)
    assert (found.num_requests, found.requests_needed, found.is_clear) == (4, 400, False)
    assert str(found) == (
        "held out: 0.500 before, 0.750 after (+0.250 +- 0.250, 4 requests); a difference of 0.05 shows from about 400 "
        "requests on"
    )


def test_a_clear_difference_names_no_number_of_requests(subtests: pytest.Subtests) -> None:
    """Differences of 1 for 8 of 10: mean 0.8, standard deviation sqrt(1.6/9), standard error 0.1333."""
    for sign in (1, -1):
        with subtests.test(sign=sign):
            before, after = [0.0] * 10, [1.0] * 8 + [0.0] * 2
            found = HeldOut.of(before, after) if sign == 1 else HeldOut.of(after, before)
            assert found.is_clear
            assert found.error == pytest.approx((1.6 / 9 / 10) ** 0.5)
            assert str(found).endswith("+- 0.133, 10 requests)")


def test_every_place_is_in_one_fold_and_equal_keys_are_together() -> None:
    """Seven keys in three folds: sizes 3, 2 and 2."""
    parts = folds([*"abcdefg"], 3, 0, owner="test")
    assert sorted(place for part in parts for place in part) == [*range(7)]
    assert sorted(map(len, parts)) == [2, 2, 3]
    assert sorted(map(sorted, folds([*"abcb"], 5, 0, owner="test"))) == [[0], [1, 3], [2]]
    assert folds([*"abcdefg"], 3, 1, owner="test") != parts


def test_what_cannot_be_held_out_is_refused(subtests: pytest.Subtests) -> None:
    for keys, num_folds, message in (
        ("aa", 5, "needs at least two different requests to hold some out; got 1"),
        ("ab", 1, "num_folds must be an integer >= 2"),
    ):
        with subtests.test(message), pytest.raises(ConfigError, match=f"^test.*{message}"):
            folds([*keys], num_folds, 0, owner="test")

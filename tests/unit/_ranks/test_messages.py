"""Messages of ranks: what several ranks say is printed once, and what one rank says is printed by that rank."""

import logging
import warnings
from collections.abc import Iterator

import pytest

from grpo import GRPOWarning
from grpo._ranks.messages import PrintedOnce

logger = logging.getLogger("grpo")


@pytest.fixture
def second() -> Iterator[PrintedOnce]:
    """The messages of rank 1."""
    messages = PrintedOnce(1)
    yield messages
    messages.close()


@pytest.fixture
def first() -> Iterator[PrintedOnce]:
    """The messages of rank 0."""
    messages = PrintedOnce(0)
    yield messages
    messages.close()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Warnings that reach the user."""
    printed: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(
            warnings, "showwarning", lambda message, category, *place: printed.append(f"{category.__name__}: {message}")
        )
        yield printed


def said_by_first(*messages: str) -> list[int]:
    """What rank 0 tells the others after it has printed these warnings."""
    of_first = PrintedOnce(0)
    for message in messages:
        warnings.warn(message, GRPOWarning, stacklevel=1)
    numbers = of_first.said()
    of_first.close()
    return numbers


def test_rank_0_prints_at_once_and_tells_what_it_said_once(
    shown: list[str], first: PrintedOnce, caplog: pytest.LogCaptureFixture
) -> None:
    warnings.warn("a", GRPOWarning, stacklevel=1)
    logger.warning("b %d", 1)
    assert shown == ["GRPOWarning: a"]
    assert caplog.messages == ["b 1"]
    assert len(first.said()) == 2
    assert first.said() == []


def test_a_warning_that_rank_0_printed_is_dropped_and_another_one_is_printed_with_its_rank(shown: list[str]) -> None:
    numbers = said_by_first("the same")
    shown.clear()
    messages = PrintedOnce(1)
    warnings.warn("the same", GRPOWarning, stacklevel=1)
    warnings.warn("its own", GRPOWarning, stacklevel=1)
    assert shown == []
    messages.printed_by_first(numbers)
    assert shown == ["GRPOWarning: Rank 1: its own"]
    warnings.warn("the same", GRPOWarning, stacklevel=1)  # later: rank 0 has printed it before
    messages.close()
    assert shown == ["GRPOWarning: Rank 1: its own"]


def test_a_log_line_that_rank_0_printed_is_dropped_and_another_one_is_printed_with_its_rank(
    first: PrintedOnce, caplog: pytest.LogCaptureFixture
) -> None:
    logger.warning("%s: 1", "the same")
    numbers = first.said()
    first.close()
    caplog.clear()
    messages = PrintedOnce(1)
    logger.warning("the same: %d", 1)
    logger.error("the same: %d", 1)  # another level
    assert caplog.messages == []
    messages.printed_by_first(numbers)
    messages.close()
    assert caplog.messages == ["Rank 1: the same: 1"]
    assert caplog.records[0].levelname == "ERROR"


def test_other_ranks_tell_nothing(shown: list[str], second: PrintedOnce) -> None:
    warnings.warn("a", GRPOWarning, stacklevel=1)
    assert second.said() == []


def test_warnings_of_other_packages_are_printed_at_once(shown: list[str], second: PrintedOnce) -> None:
    warnings.warn("a", RuntimeWarning, stacklevel=1)
    assert shown == ["RuntimeWarning: a"]


def test_what_is_held_back_at_the_end_is_printed_and_nothing_is_held_back_afterwards(shown: list[str]) -> None:
    before = warnings.showwarning
    messages = PrintedOnce(1)
    warnings.warn("a", GRPOWarning, stacklevel=1)
    messages.close()
    assert shown == ["GRPOWarning: Rank 1: a"]
    assert warnings.showwarning is before
    assert messages not in logger.filters
    warnings.warn("b", GRPOWarning, stacklevel=1)
    assert shown[1:] == ["GRPOWarning: b"]

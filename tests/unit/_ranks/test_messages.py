"""Messages of ranks: what several ranks say is printed once, and what one rank says is printed by that rank."""

import logging
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from grpo import ConfigError, ContractError, GRPOError, GRPOWarning, RewardError
from grpo._ranks.messages import PrintedOnce
from grpo._ranks.shared_errors import Problem, error_for_all, is_shared, problem_of, shared_by_all
from grpo.errors import NonFiniteGradientError, RankError, RewardRaisedError, TrainingInterrupted

logger = logging.getLogger("grpo")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Warnings that reach the user."""
    printed: list[str] = []

    def show(message, category, *place):
        printed.append(f"{category.__name__}: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        yield printed


def said_by_first(warn: Callable[[], object]) -> list[int]:
    """What rank 0 tells the others after it has printed this."""
    with closing(PrintedOnce(0)) as first:
        warn()
        return first.said()


def test_rank_0_prints_at_once_and_tells_what_it_said_once(shown, caplog) -> None:
    with closing(PrintedOnce(0)) as first:
        warnings.warn("a", GRPOWarning, stacklevel=1)
        logger.warning("b %d", 1)
        assert (shown, caplog.messages, len(first.said())) == (["GRPOWarning: a"], ["b 1"], 2)
        assert first.said() == []


def test_a_warning_that_rank_0_printed_is_dropped_and_another_one_is_printed_with_its_rank(shown: list[str]) -> None:
    numbers = said_by_first(lambda: warnings.warn("the same", GRPOWarning, stacklevel=1))
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


def test_a_log_line_that_rank_0_printed_is_dropped_and_another_one_is_printed_with_its_rank(caplog) -> None:
    numbers = said_by_first(lambda: logger.warning("%s: 1", "the same"))
    caplog.clear()
    with closing(PrintedOnce(1)) as messages:
        logger.warning("the same: %d", 1)
        logger.error("the same: %d", 1)  # another level
        assert caplog.messages == []
        messages.printed_by_first(numbers)
    assert (caplog.messages, caplog.records[0].levelname) == (["Rank 1: the same: 1"], "ERROR")


def test_warnings_of_other_packages_are_printed_at_once_and_other_ranks_tell_nothing(shown) -> None:
    with closing(PrintedOnce(1)) as second:
        warnings.warn("a", RuntimeWarning, stacklevel=1)
        assert shown == ["RuntimeWarning: a"]
        warnings.warn("a", GRPOWarning, stacklevel=1)
        assert second.said() == []


def test_what_is_held_back_at_the_end_is_printed_and_nothing_is_held_back_afterwards(shown: list[str]) -> None:
    before, messages = warnings.showwarning, PrintedOnce(1)
    warnings.warn("a", GRPOWarning, stacklevel=1)
    messages.close()
    assert shown == ["GRPOWarning: Rank 1: a"]
    assert warnings.showwarning is before
    assert messages not in logger.filters
    warnings.warn("b", GRPOWarning, stacklevel=1)
    assert shown[1:] == ["GRPOWarning: b"]


# Errors on their way between ranks: what travels, and which error all ranks raise


def both(*errors: BaseException | None) -> tuple[BaseException | None, ...]:
    """What two ranks raise."""
    problems = [None if error is None else problem_of(error) for error in errors]
    return tuple(error_for_all(problems, error) for error in errors)


@pytest.mark.parametrize(
    ("own", "kind", "text"),
    [
        *(
            (kind("it broke"), kind, "Rank 1: it broke")
            for kind in (ConfigError, RewardRaisedError, NonFiniteGradientError, RankError)
        ),
        (ZeroDivisionError("no division"), RankError, "Rank 1 raised ZeroDivisionError: no division"),
    ],
)
def test_an_error_of_this_package_keeps_its_type_and_others_become_rank_errors(own, kind, text):
    other, raised = both(None, own)
    assert (type(other), type(raised), str(other), str(raised)) == (kind, kind, text, text)
    assert raised.__cause__ is own
    assert other.__cause__ is None
    assert both(None, None) == (None, None)


def test_a_type_of_another_package_travels_as_its_nearest_known_base_class() -> None:
    class ToolError(RewardError): ...

    class OwnError(GRPOError): ...

    class ConfigError(ValueError): ...  # the name of an error that all ranks know, of another type

    class Unprintable(ValueError):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert problem_of(ToolError("x")) == Problem(kind="RewardError", said=": x")
    assert problem_of(OwnError("x")) == Problem(kind="GRPOError", said=": x")
    assert problem_of(ConfigError("x")) == Problem(kind="RankError", said=" raised ConfigError: x")
    assert problem_of(Unprintable()).said == " raised Unprintable: (its message cannot be shown: ZeroDivisionError)"
    newer = error_for_all([None, Problem(kind="NewerError", said=": x")], None)  # a type that this rank does not know
    assert (type(newer), str(newer)) == (RankError, "Rank 1: x")


@pytest.mark.parametrize("error", [ZeroDivisionError(), TrainingInterrupted(2), ContractError("x")])
def test_an_error_can_be_sent_and_is_shared_after_it_was_marked(error):
    assert pickle.loads(pickle.dumps(problem_of(error))) == problem_of(error)
    assert not is_shared(error)
    assert shared_by_all(error) is error
    assert is_shared(error)


def test_the_lowest_failing_rank_decides_and_the_others_are_named() -> None:
    errors = [ContractError("a"), KeyError("b"), ContractError("a"), RewardError("c")]
    error = error_for_all([None, *map(problem_of, errors)], None)
    assert (type(error), str(error)) == (
        ContractError,
        (
            "Rank 1: a (Rank 2 failed, too: raised KeyError: 'b') (Rank 3 failed, too, with the same error.) "
            "(Rank 4 failed, too (RewardError): c)"
        ),
    )


def test_an_error_that_all_ranks_have_is_raised_as_it_is() -> None:
    first, second = ConfigError("the same"), ConfigError("the same")
    assert both(first, second) == (first, second)
    other = both(first, ConfigError("another"))
    assert str(other[0]) == "Rank 0: the same (Rank 1 failed, too (ConfigError): another)"
    divisions = both(ZeroDivisionError("x"), ZeroDivisionError("x"))  # of another package: typed on all ranks
    assert [type(error) for error in divisions] == [RankError, RankError]
    third = error_for_all([problem_of(first), problem_of(second), None], first)
    assert str(third) == "Rank 0: the same (Rank 1 failed, too, with the same error.)"


@pytest.mark.parametrize(("first", "expected"), [(None, 15), (TrainingInterrupted(2), 2)])
def test_an_interrupt_of_one_rank_interrupts_all_ranks_with_its_signal(first, expected):
    found = both(first, TrainingInterrupted(15))
    assert [(type(error), error.signal_number) for error in found] == [(TrainingInterrupted, expected)] * 2


@pytest.mark.parametrize(
    "pair", [(TrainingInterrupted(15), ContractError("x")), (ContractError("x"), TrainingInterrupted(15))]
)
def test_an_error_beats_an_interrupt(pair):
    assert [type(error) for error in both(*pair)] == [ContractError, ContractError]

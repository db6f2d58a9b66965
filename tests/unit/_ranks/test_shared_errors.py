"""Errors on their way between ranks: what travels, and which error all ranks raise."""

import pickle

import pytest

from grpo import ConfigError, ContractError, GRPOError, RewardError
from grpo._ranks.shared_errors import Problem, error_for_all, is_shared, problem_of, shared_by_all
from grpo.errors import NonFiniteGradientError, RankError, RewardRaisedError, TrainingInterrupted


class ToolError(RewardError):
    """An error of another package, with a base class that all ranks know."""


class Unprintable(ValueError):
    def __str__(self) -> str:
        raise ZeroDivisionError


class OwnError(GRPOError):
    """An error of another package that is a `GRPOError`."""


def both(
    first: BaseException | None, second: BaseException | None
) -> tuple[BaseException | None, BaseException | None]:
    """What two ranks raise."""
    problems = [None if error is None else problem_of(error) for error in (first, second)]
    return error_for_all(problems, first), error_for_all(problems, second)


def test_nothing_is_raised_when_no_rank_has_a_problem() -> None:
    assert both(None, None) == (None, None)


def test_an_error_of_this_package_keeps_its_type_and_names_its_rank(subtests: pytest.Subtests) -> None:
    for kind in (ConfigError, RewardRaisedError, NonFiniteGradientError, RankError):
        with subtests.test(kind=kind):
            own = kind("it broke")
            other, raised = both(None, own)
            assert type(other) is type(raised) is kind
            assert str(other) == str(raised) == "Rank 1: it broke"
            assert raised is not None
            assert raised.__cause__ is own
            assert other is not None
            assert other.__cause__ is None


def test_other_errors_become_rank_errors_with_their_type_in_words() -> None:
    own = ZeroDivisionError("no division")
    raised, other = both(own, None)
    assert type(other) is type(raised) is RankError
    assert str(other) == str(raised) == "Rank 0 raised ZeroDivisionError: no division"
    assert raised is not None
    assert raised.__cause__ is own


def test_a_type_of_another_package_travels_as_its_nearest_known_base_class() -> None:
    assert problem_of(ToolError("x")) == Problem(kind="RewardError", said=": x")
    assert problem_of(OwnError("x")) == Problem(kind="GRPOError", said=": x")

    class ConfigError(ValueError):  # the name of an error that all ranks know, of another type
        pass

    assert problem_of(ConfigError("x")) == Problem(kind="RankError", said=" raised ConfigError: x")


def test_a_type_that_this_rank_does_not_know_becomes_a_rank_error() -> None:
    error = error_for_all([None, Problem(kind="NewerError", said=": x")], None)
    assert type(error) is RankError
    assert str(error) == "Rank 1: x"


def test_an_error_whose_message_cannot_be_shown_still_travels() -> None:
    assert problem_of(Unprintable()).said == " raised Unprintable: (its message cannot be shown: ZeroDivisionError)"


def test_the_lowest_failing_rank_decides_and_the_others_are_named() -> None:
    problems = [None, problem_of(ContractError("a")), problem_of(KeyError("b")), problem_of(ContractError("a"))]
    problems.append(problem_of(RewardError("c")))
    error = error_for_all(problems, None)
    assert type(error) is ContractError
    assert str(error) == (
        "Rank 1: a (Rank 2 failed, too: raised KeyError: 'b') (Rank 3 failed, too, with the same error.) "
        "(Rank 4 failed, too (RewardError): c)"
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


def test_an_interrupt_of_one_rank_interrupts_all_ranks_with_its_signal() -> None:
    own = TrainingInterrupted(15)
    other, raised = both(None, own)
    for error in (other, raised):
        assert isinstance(error, TrainingInterrupted)
        assert error.signal_number == 15
    later = both(TrainingInterrupted(2), own)
    assert [error.signal_number for error in later if isinstance(error, TrainingInterrupted)] == [2, 2]


def test_an_error_beats_an_interrupt(subtests: pytest.Subtests) -> None:
    for pair in [(TrainingInterrupted(15), ContractError("x")), (ContractError("x"), TrainingInterrupted(15))]:
        with subtests.test(pair=pair):
            assert [type(error) for error in both(*pair)] == [ContractError, ContractError]


def test_a_problem_can_be_sent() -> None:
    for error in (ContractError("x"), TrainingInterrupted(2)):
        assert pickle.loads(pickle.dumps(problem_of(error))) == problem_of(error)


def test_an_error_is_shared_after_it_was_marked() -> None:
    for error in (ZeroDivisionError(), TrainingInterrupted(2), ContractError()):
        assert not is_shared(error)
        assert shared_by_all(error) is error
        assert is_shared(error)

"""What ranks tell one another: messages that are printed once, errors that all ranks raise, and values as text."""

import enum
import logging
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR

from grpo import ConfigError, ContractError, GRPOError, GRPOWarning, RewardError
from grpo._ranks.description import CHUNK, MAX_ENTRIES, described
from grpo._ranks.equality import weights_of
from grpo._ranks.messages import PrintedOnce
from grpo._ranks.shared_errors import Problem, error_for_all, is_shared, problem_of, shared_by_all
from grpo.errors import NonFiniteGradientError, RankError, RewardRaisedError, TrainingInterrupted

logger = logging.getLogger("grpo")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
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


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Judge:
    url: str
    lock: Any = field(default_factory=threading.Lock)

    def __call__(self, states: Any) -> Any:
        return states


class Service:
    def __init__(self, model: str, url: str) -> None:
        self.model, self.url = model, url

    def __call__(self) -> None: ...

    def settings(self) -> dict[str, str]:
        return {"model": self.model}


def holding(*values: Any) -> Callable[..., Any]:
    return lambda: values


def scheduler(decay: float, steps: int) -> SequentialLR:
    optimizer = SGD([torch.zeros(1)], lr=0.5)
    return SequentialLR(optimizer, [LambdaLR(optimizer, lambda epoch: decay**epoch), StepLR(optimizer, steps)], [3])


def values(one: bool) -> dict[str, Any]:
    """Values of every kind, in two versions. Everything is made anew, so that addresses differ."""
    number = 1 if one else 2
    weights = torch.arange(3.0 * CHUNK + 5).reshape(-1, 1)[5:]
    weights[-1] += number
    signs = torch.tensor([1.0, -1.0 if one else 1.0, 1.0 if one else -1.0], dtype=torch.float64)
    return {
        "number": number,
        "text": "a" * number,
        "list": [0, [number]],
        "number of entries beyond those that are read": [0] * (MAX_ENTRIES + number),
        "large set": {*range(2 * MAX_ENTRIES), -number},
        "long text in a dict": {"a": "x" * 500 + "y" * number},
        "set of texts": {"a", "b", "c", "d" * number},
        "enum": Colour(number),
        "array": np.full(3, number),
        "tensor": torch.ones(3) * number,
        "number in a tensor": torch.tensor(number),
        "large tensor": weights,
        "signs that change places": signs,
        "columns": torch.arange(6).view(2, 3) if one else torch.arange(6).view(3, 2).t(),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16) * number,
        "complex": torch.ones(3, dtype=torch.complex64) * number,
        "closure": holding(number),
        "nested closure": holding(holding(number), object()),
        "default": (lambda a=0, *, b=number: (a, b)),
        "constant": (lambda: 1) if one else (lambda: 2),
        "constants in a set": (lambda x: x in {"p", "q", "r"}) if one else (lambda x: x in {"p", "q", "s"}),
        "partial": partial(SGD, lr=0.1 * number),
        "argument of a partial": partial(print, holding(number)),
        "method of a dataclass": Judge("u" * number).__call__,
        "scheduler's function": scheduler(0.1 * number, 1),
        "scheduler's number": scheduler(0.1, number),
        "settings()": Service("m" * number, "http://a"),
    }


@pytest.mark.parametrize("name", list(values(True)))
def test_equal_values_have_equal_texts_and_different_values_have_not(name):
    first, again, other = (described(values(one)[name]) for one in (True, True, False))
    assert first == again
    assert first != other


DEEP: Any = 1
for _ in range(11):
    DEEP = [DEEP]
COLLIDING = [number * 2**20 for number in range(MAX_ENTRIES + 1)]
"""A set of these numbers has the order in which they were added. A set of texts has another order in each process."""


def buffered(value: float) -> torch.nn.Module:
    module = torch.nn.Module()
    module.get_parameters = dict  # type: ignore[assignment]
    module.register_buffer("scratch", torch.tensor(value), persistent=False)
    return module


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (object(), object(), "object"),
        (holding(object()), holding(object()), None),
        (Judge("u", threading.Lock()), Judge("u", threading.Lock()), "Judge(url='u', lock=lock)"),
        (torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), "Linear"),
        (Judge, Judge, "Judge"),
        (Service("m", "http://a"), Service("m", "http://b"), "Service(model='m')"),
        (DEEP, [DEEP], None),
        ([*range(MAX_ENTRIES), "a"], [*range(MAX_ENTRIES), "b"], None),
        ({*COLLIDING}, {*reversed(COLLIDING)}, None),
        (np.array([None] * 2_000), np.array([None] * 1_000 + [0] + [None] * 999), None),
        (weights_of(buffered(1.0)), weights_of(buffered(2.0)), "{} of 0"),
        (torch.full((2,), torch.nan), torch.full((2,), torch.nan), None),
    ],
)
def test_what_differs_between_processes_or_is_not_read_does_not_count(one, other, text):
    """Addresses, locks, the order of a set, and what `settings()` leaves out. Nor does what the page on scaling names: classes
    count beyond the depth that is read, and the number of entries beyond those that are read."""
    assert described(one) == described(other) == (text or described(one))


def test_of_a_divided_tensor_only_shape_and_dtype_count() -> None:
    """Each rank has other rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        texts = [described(distribute_tensor(torch.full(shape, 1.5), mesh)) for shape in ((3, 2), (1,))]
    finally:
        dist.destroy_process_group()
    assert texts == ["float32[3, 2]", "float32[1]"]


def test_a_name_that_is_bound_later_is_no_error() -> None:
    def made() -> Callable[[], int]:
        def function() -> int:
            return later

        text.append(described(function))
        later = 1
        return function

    text: list[str] = []
    made()
    assert "later='not bound'" in text[0]

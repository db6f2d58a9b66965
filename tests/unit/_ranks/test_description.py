"""Values as text: equal where the values are equal, in whatever process, and different where they differ."""

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR

from grpo._ranks.description import CHUNK, MAX_ENTRIES, described
from grpo._ranks.equality import weights_of


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


def closing(*values: Any) -> Callable[..., Any]:
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
        "closure": closing(number),
        "nested closure": closing(closing(number), object()),
        "default": (lambda a=0, *, b=number: (a, b)),
        "constant": (lambda: 1) if one else (lambda: 2),
        "constants in a set": (lambda x: x in {"p", "q", "r"}) if one else (lambda x: x in {"p", "q", "s"}),
        "partial": partial(SGD, lr=0.1 * number),
        "argument of a partial": partial(print, closing(number)),
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
        (closing(object()), closing(object()), None),
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

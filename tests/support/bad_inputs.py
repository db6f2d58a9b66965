"""Bad input: kinds of values, the places where values enter `grpo`, and what happened to each pair of the two.

A kind is a value of the wrong type, shape, dtype, layout or content, often made from a good value. A place takes one value and
uses it as a user would: it builds a trainer, takes a step, loads a checkpoint. Everything is seeded.
"""

import array
import collections
import decimal
import enum
import fractions
import math
import pathlib
import random
import signal
import time
import types
import warnings
from collections import Counter, UserList
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo import GRPOError

SECONDS = 30.0
"""A call that takes longer counts as a hang. The first call of a process imports parts of torch, which takes seconds."""

Make = Callable[[random.Random, Any], Any]
"""Makes a bad value. The second argument is a good value for the same place."""


class HangError(BaseException):
    """Raised in a call that hangs. No `except Exception` can swallow it."""


class Frame:
    """A table as pandas, polars and pyarrow have it: its length counts rows, and iterating it gives the names of columns."""

    columns = ("state", "reward")

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __getitem__(self, key: Any) -> Any:
        if key not in self.columns:
            raise KeyError(key)
        return [0.0] * 8


class Series(UserList[float]):
    """A column whose rows are found by their labels, which are not their positions."""

    @property
    def iloc(self) -> list[float]:
        return self.data

    def __getitem__(self, key: Any) -> Any:
        return {10 + n: value for n, value in enumerate(self.data)}[key]


class Colour(enum.Enum):
    RED = 1


class Empty:
    """No attribute, no method."""


class Yes(str):
    """A string that is not quite one."""


def endless() -> Iterator[int]:
    """Never ends, and does not fill the memory."""
    while True:
        time.sleep(1e-3)
        yield 0


def inside_itself() -> list[Any]:
    found: list[Any] = [0.0]
    found.append(found)
    return found


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(60):
        found = [found]
    return found


def tensor_like(rng: random.Random, like: Any) -> Tensor:
    """A good tensor for the place, or one of random numbers if the place wants no tensor."""
    if isinstance(like, Tensor):
        return like.detach().clone()
    if isinstance(like, list | tuple) and like and all(isinstance(entry, int | float) for entry in like):
        return torch.tensor(like)
    return torch.tensor([rng.uniform(-1, 1) for _ in range(rng.choice([1, 2, 3, 4, 8]))])


def floats_like(rng: random.Random, like: Any) -> Tensor:
    found = tensor_like(rng, like)
    return found if found.is_floating_point() else found.float()


def one_entry(value: float) -> Make:
    """The good tensor, but for one entry."""

    def make(rng: random.Random, like: Any) -> Tensor:
        found = floats_like(rng, like)
        if found.numel():
            found.view(-1)[rng.randrange(found.numel())] = value
        return found

    return make


def changed(change: Callable[[Tensor], Any]) -> Make:
    return lambda rng, like: change(tensor_like(rng, like))


def changed_floats(change: Callable[[Tensor], Any]) -> Make:
    return lambda rng, like: change(floats_like(rng, like))


def entries_like(rng: random.Random, like: Any) -> list[Any]:
    return list(like) if isinstance(like, list | tuple) else tensor_like(rng, like).tolist()


def with_entry(entry: Any) -> Make:
    """A list, one of whose entries is wrong."""

    def make(rng: random.Random, like: Any) -> list[Any]:
        found = entries_like(rng, like) if isinstance(like, list | tuple | Tensor) else [0.0, 1.0]
        found = found if isinstance(found, list) else [found]
        if found:
            found[rng.randrange(len(found))] = entry
        return found

    return make


def sized(change: Callable[[list[Any]], Any]) -> Make:
    return lambda rng, like: change(entries_like(rng, like) if isinstance(like, list | tuple | Tensor) else [0, 1])


def always(value: Any) -> Make:
    return lambda rng, like: value


def fresh(make: Callable[[], Any]) -> Make:
    return lambda rng, like: make()


def random_text(rng: random.Random, like: Any) -> str:
    return "".join(rng.choice("abc é\0/.{}\n") for _ in range(rng.randrange(1, 9)))


KINDS: dict[str, Make] = {
    # scalars and other things
    "None": always(None),
    "True": always(True),
    "False": always(False),
    "int 0": always(0),
    "negative int": lambda rng, like: -rng.randrange(1, 99),
    "huge int": lambda rng, like: rng.choice([2**63, 2**64 + 1, -(2**70), 10**400]),
    "float 0.5": always(0.5),
    "negative float": lambda rng, like: -rng.random() - 1e-9,
    "huge float": lambda rng, like: rng.choice([1e300, -1e300, 1e-320]),
    "nan": always(math.nan),
    "inf": always(math.inf),
    "-inf": always(-math.inf),
    "complex": always(1j),
    "numpy scalar": lambda rng, like: rng.choice([np.float32(0.5), np.int64(-3), np.float64(math.nan), np.bool_(True)]),
    "decimal": always(decimal.Decimal("-1.5")),
    "fraction": always(fractions.Fraction(1, 3)),
    "empty text": always(""),
    "text": random_text,
    "text like an option": lambda rng, like: rng.choice(["abc", "clip", "auto", "row", "cpu", "NONE", "group_mean"]),
    "a str subclass": always(Yes("yes")),
    "bytes": always(b"abc"),
    "bytearray": fresh(lambda: bytearray(b"abc")),
    "path": always(pathlib.Path("no/such/file")),
    "enum": always(Colour.RED),
    "ellipsis": always(...),
    "object": fresh(Empty),
    "class": always(Empty),
    "function": always(lambda *args, **kwargs: None),
    "module": always(math),
    "exception": fresh(lambda: ValueError("no")),
    "exception class": always(ValueError),
    "namespace": fresh(lambda: types.SimpleNamespace(shape=(8,), dtype=torch.float32)),
    "torch dtype": always(torch.float32),
    "torch device": always(torch.device("cpu")),
    # containers
    "empty list": fresh(list),
    "empty tuple": always(()),
    "empty dict": fresh(dict),
    "dict": fresh(lambda: {"a": 1.0, "b": 2.0}),
    "dict of numbers": fresh(lambda: {0: 1.0, 1: 2.0}),
    "dict of tensors": fresh(lambda: {"w": torch.zeros(2)}),
    "mapping proxy": fresh(lambda: types.MappingProxyType({"a": 1})),
    "set": fresh(lambda: {1.0, 2.0}),
    "frozenset": fresh(lambda: frozenset({"a"})),
    "deque": sized(collections.deque),
    "user list": sized(UserList),
    "range": lambda rng, like: range(rng.randrange(9)),
    "generator": sized(lambda entries: (entry for entry in entries)),
    "iterator": sized(iter),
    "endless generator": fresh(endless),
    "array.array": fresh(lambda: array.array("d", [0.0, 1.0])),
    "memoryview": fresh(lambda: memoryview(b"abcdefgh")),
    "data frame": fresh(Frame),
    "series": sized(Series),
    "list too short": sized(lambda entries: entries[:-1]),
    "list too long": sized(lambda entries: [*entries, *entries[:1]]),
    "tuple": sized(tuple),
    "nested list": sized(lambda entries: [[entry] for entry in entries]),
    "ragged list": fresh(lambda: [[0.0], [0.0, 1.0], []]),
    "list with None": with_entry(None),
    "list with text": with_entry("abc"),
    "list with nan": with_entry(math.nan),
    "list with inf": with_entry(-math.inf),
    "list with a list": with_entry([1.0, 2.0]),
    "list with a dict": with_entry({}),
    "list with a complex": with_entry(1j),
    "list of tensors": sized(lambda entries: [torch.zeros(n % 3) for n in range(len(entries))]),
    "list in itself": fresh(inside_itself),
    "deep list": fresh(deep),
    # arrays
    "array": changed(lambda x: x.numpy()),
    "array of a wrong length": changed(lambda x: x.numpy()[:-1] if x.dim() else x.numpy()),
    "0-d array": always(np.array(1.0)),
    "empty array": always(np.zeros((0, 3))),
    "object array": sized(lambda entries: np.array([{}, None, *entries], dtype=object)),
    "text array": sized(lambda entries: np.array(["a" for _ in entries])),
    "structured array": sized(lambda entries: np.zeros(len(entries), dtype=[("a", "f4"), ("b", "i4")])),
    "date array": sized(lambda entries: np.zeros(len(entries), dtype="datetime64[s]")),
    "complex array": changed(lambda x: x.numpy().astype(np.complex64)),
    "float16 array": changed(lambda x: x.numpy().astype(np.float16)),
    "big-endian array": changed(lambda x: x.numpy().astype(">f8")),
    "reversed array": changed(lambda x: x.numpy()[::-1] if x.dim() else x.numpy()),
    "read-only array": changed(lambda x: np.broadcast_to(x.numpy(), x.shape)),
    "masked array": changed(lambda x: np.ma.masked_array(x.numpy(), mask=np.arange(x.numel()).reshape(x.shape) % 2)),
    "matrix": changed(lambda x: np.asmatrix(x.numpy())),
    # tensors
    "good tensor": changed(lambda x: x),
    "0-d tensor": fresh(lambda: torch.tensor(1.0)),
    "empty tensor": fresh(lambda: torch.zeros(0)),
    "tensor too short": changed(lambda x: x[:-1] if x.dim() else x),
    "tensor too long": changed(lambda x: torch.cat([x, x[:1]]) if x.dim() else x),
    "tensor with one more axis": changed(lambda x: x.unsqueeze(-1)),
    "tensor with one axis in front": changed(lambda x: x.unsqueeze(0)),
    "flat tensor": changed(lambda x: x.flatten()),
    "transposed tensor": changed(lambda x: x.t() if x.dim() == 2 else x.flip(0) if x.dim() else x),
    "wider tensor": changed(lambda x: torch.cat([x, x], -1) if x.dim() else x),
    "int tensor": changed(lambda x: x.long()),
    "uint8 tensor": changed(lambda x: x.to(torch.uint8)),
    "bool tensor": changed(lambda x: x > 0),
    "complex tensor": changed_floats(lambda x: torch.complex(x.float(), x.float())),
    "float16 tensor": changed(lambda x: x.half()),
    "bfloat16 tensor": changed(lambda x: x.bfloat16()),
    "float8 tensor": changed_floats(lambda x: x.to(torch.float8_e4m3fn)),
    "float64 tensor": changed(lambda x: x.double()),
    "sparse tensor": changed(lambda x: x.to_sparse()),
    "sparse csr tensor": changed_floats(lambda x: (x if x.dim() == 2 else x.reshape(-1, 1)).to_sparse_csr()),
    "meta tensor": changed(lambda x: x.to("meta")),
    "nested tensor": changed_floats(lambda x: torch.nested.nested_tensor([x.flatten(), x.flatten()[:1]])),
    "jagged tensor": changed_floats(
        lambda x: torch.nested.nested_tensor([x.flatten(), x.flatten()[:1]], layout=torch.jagged)
    ),
    "quantized tensor": changed_floats(lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8)),
    "expanded tensor": changed(lambda x: x[:1].expand_as(x) if x.dim() else x),
    "parameter": changed_floats(lambda x: torch.nn.Parameter(x)),
    "tensor with a graph": changed_floats(lambda x: x.requires_grad_() * 2),
    "conjugate tensor": changed_floats(lambda x: torch.complex(x.float(), x.float()).conj()),
    "tensor with nan": one_entry(math.nan),
    "tensor with inf": one_entry(math.inf),
    "tensor with -inf": one_entry(-math.inf),
    "tensor with a huge number": one_entry(1e15),
    "all nan": changed_floats(lambda x: torch.full_like(x, math.nan)),
    "tensor of zeros": changed(lambda x: torch.zeros_like(x)),
}
"""Kinds of bad input by name. Some of them are good in some places."""


@dataclass(frozen=True)
class Place:
    """Where a value enters."""

    entry: str
    """The row of the table of counts, such as "step" or "settings"."""
    name: str
    """The place within the entry, such as an argument."""
    call: Callable[[Any], Any]
    """Passes the value. Returns what must be finite."""
    like: Callable[[], Any] = lambda: None
    """Makes a good value."""
    _: KW_ONLY
    is_free: bool = False
    """Whether this is a free mathematical function, or a data class of one."""
    without: frozenset[str] = frozenset()
    """Kinds that are legal here, and cost time or memory."""


@dataclass
class Counts:
    """What became of the inputs of one entry."""

    outcomes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=lambda: collections.defaultdict(list))

    def add(self, outcome: str, example: str) -> None:
        self.outcomes[outcome] += 1
        self.examples[outcome].append(example)


OUTCOMES = ("typed", "accepted", "untyped", "silent NaN", "hang")


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise a `HangError` in the block after so many seconds."""

    def stop(*_: object) -> None:
        raise HangError

    before, start = signal.signal(signal.SIGALRM, stop), time.monotonic()
    others, _ = signal.setitimer(signal.ITIMER_REAL, seconds)  # pytest-timeout has a timer, too
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if others:
            signal.setitimer(signal.ITIMER_REAL, max(others - (time.monotonic() - start), 0.01))


def non_finite(value: Any) -> bool:
    """Whether a number or a tensor within a result is NaN or infinite."""
    if isinstance(value, Tensor):
        is_number = value.is_floating_point() and value.layout == torch.strided and not value.is_meta
        return is_number and not value.is_nested and not bool(value.detach().double().isfinite().all())
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Mapping):
        return any(map(non_finite, value.values()))
    return isinstance(value, list | tuple) and any(map(non_finite, value))


def outcome_of(place: Place, kind: str, seed: int) -> tuple[str, str]:
    """What happens to one bad value in one place, and a line that shows it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    shown = f"{place.entry}: {place.name} <- {kind} (seed {seed})"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = KINDS[kind](rng, place.like())
        except (TypeError, ValueError, RuntimeError, NotImplementedError):
            value = KINDS[kind](rng, None)  # this kind cannot be made from the good value
        try:
            with time_limit(SECONDS):
                result = place.call(value)
        except GRPOError as error:
            return "typed", f"{shown}: {type(error).__name__}: {error}"
        except HangError:
            return "hang", shown
        except Exception as error:  # what is counted here
            return "untyped", f"{shown}: {type(error).__name__}: {str(error)[:150]}"
    return ("silent NaN", f"{shown}: {str(result)[:200]}") if non_finite(result) else ("accepted", shown)


def pairs(places: list[Place], count: int, seed: int) -> Iterator[tuple[Place, str, int]]:
    """`count` inputs in random order, every pair of a place and a kind about equally often."""
    every = [(place, kind) for place in places for kind in KINDS if kind not in place.without]
    rng = random.Random(seed)
    number = 0
    while True:
        rng.shuffle(every)
        for place, kind in every:
            if number == count:
                return
            yield place, kind, seed + number
            number += 1


def counted(places: list[Place], count: int, seed: int) -> dict[str, Counts]:
    """The counts of every entry, from `count` inputs."""
    found: dict[str, Counts] = {place.entry: Counts() for place in places}
    for place, kind, number in pairs(places, count, seed):
        outcome, example = outcome_of(place, kind, number)
        found[place.entry].add(outcome, example)
    return found


def table(found: Mapping[str, Counts]) -> str:
    """The counts as a table, one entry per line."""
    lines = [f"{'entry':34}" + "".join(f"{outcome:>12}" for outcome in OUTCOMES)]
    total: Counter[str] = Counter()
    for entry, counts in found.items():
        lines.append(f"{entry:34}" + "".join(f"{counts.outcomes[outcome]:12}" for outcome in OUTCOMES))
        total += counts.outcomes
    return "\n".join([*lines, f"{'all':34}" + "".join(f"{total[outcome]:12}" for outcome in OUTCOMES)])

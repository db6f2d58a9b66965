"""Objects that a checkpoint can hold, names of tensors in files, limits of a state, and what is not a state."""

import gc
import json
import random
import sys
import weakref
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from grpo import CheckpointError
from grpo._storage.decoding import SavedTensor, decode
from grpo._storage.encoding import MAX_BITS, MAX_DEPTH, SLICE, encode
from grpo.checkpoint import open_checkpoint, read_checkpoint, require_encodable, write_checkpoint
from tests.support.policies import digest

pytestmark = pytest.mark.usefixtures("without_type_checks")


def round_trip(value: Any, folder: Path) -> Any:
    return read_checkpoint(write_checkpoint(folder / "value", {"value": value}, iteration=0))["value"]


@dataclass(frozen=True)
class Episode:
    """An object that qualifies."""

    rewards: torch.Tensor
    inner: Any = None

    def to_state(self) -> dict[str, Any]:
        return {"rewards": self.rewards, "inner": self.inner}

    @classmethod
    def from_state(cls, state: Any) -> "Episode":
        return cls(state["rewards"], state["inner"])

    class Nested:
        """Holds a class."""

        @dataclass(frozen=True, slots=True, kw_only=True)
        class Step:
            """A slotted class within a class."""

            number: int

            def to_state(self) -> int:
                return self.number

            @classmethod
            def from_state(cls, state: int) -> "Episode.Nested.Step":
                return cls(number=state)


def test_frozen_dataclasses_with_to_state_and_from_state_come_back(tmp_path: Path) -> None:
    step = Episode.Nested.Step(number=3)
    found = round_trip([Episode(torch.arange(3.0), (step, {"deep": Episode(torch.ones(1))})), step], tmp_path)
    assert found[1] == step
    assert type(found[0]) is Episode
    assert torch.equal(found[0].rewards, torch.arange(3.0))
    assert found[0].inner[0] == step
    assert torch.equal(found[0].inner[1]["deep"].rewards, torch.ones(1))


class Thawed:
    def to_state(self) -> int:
        return 1

    @classmethod
    def from_state(cls, state: Any) -> "Thawed":
        return cls()


@dataclass
class NotFrozen(Thawed):
    to_state, from_state = Thawed.to_state, classmethod(lambda cls, state: cls())  # type: ignore[assignment]


@dataclass(frozen=True)
class Heir(Episode):
    """Inherits both methods, which would give back the base class."""


@dataclass(frozen=True)
class NoWayBack:
    def to_state(self) -> int:
        return 1


@dataclass(frozen=True)
class StaticWayBack(NoWayBack):
    def to_state(self) -> int:
        return 1

    @staticmethod
    def from_state(state: Any) -> None: ...


def local_class() -> Any:
    @dataclass(frozen=True)
    class Local:
        def to_state(self) -> int:
            return 1

        @classmethod
        def from_state(cls, state: Any) -> Any:
            return cls()

    return Local()


class Color(Enum):
    RED = 1


class Number(IntEnum):
    ONE = 1


class Name(StrEnum):
    A = "a"


Pair = namedtuple("Pair", "a b")


OTHERS = [Thawed(), NotFrozen(), Heir(torch.ones(1)), NoWayBack(), StaticWayBack(), local_class(), Episode]


@pytest.mark.parametrize("value", [*OTHERS, Color.RED, Number.ONE, Name.A, Pair(1, 2)])
def test_what_would_come_back_as_something_else_is_refused_with_advice(value, tmp_path: Path) -> None:
    message = (
        rf"state\['value'\]\[0\] is a {type(value).__name__}, which a checkpoint cannot hold\. .*give the class "
        r"to_state\(\) and from_state\(\), or train without checkpoint_dir"
    )
    with pytest.raises(CheckpointError, match=message):
        round_trip([value], tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match=rf"the buffer\[0\] is a {type(value).__name__}"):
        require_encodable([value], "the buffer")


def test_what_can_be_saved_is_not_refused_beforehand() -> None:
    require_encodable({"x": [Episode(torch.ones(1)), (1, 2.0), np.ones(3), None, float("nan")]}, "state")
    with pytest.raises(CheckpointError, match=r"x\.to_state\(\)\['inner'\]\['y'\] is a set"):
        require_encodable(Episode(torch.ones(1), {"y": set()}), "x")


def test_a_class_is_found_only_if_its_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path / "x", {"value": Episode.Nested.Step(number=3)}, iteration=0)
    assert f"{__name__}:Episode.Nested.Step" in (path / "rank-0" / "state.json").read_text()
    monkeypatch.delitem(sys.modules, __name__)
    with pytest.raises(CheckpointError, match=rf"Import {__name__} before loading") as caught:
        read_checkpoint(path)
    assert type(caught.value) is CheckpointError  # an older checkpoint would not help
    assert __name__ not in sys.modules


@pytest.mark.parametrize("hostile", [
    "os:system", "subprocess:Popen", f"{__name__}:Episode.Nested", f"{__name__}:local_class", "", ":", "builtins:eval",
    f"{__name__}:Thawed", f"{__name__}:Heir", "lazy_module:X", f"{__name__}:Episode.from_state.__func__.__globals__",
])  # fmt: skip
def test_nothing_but_a_frozen_dataclass_is_found_by_its_name(hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = ModuleType("lazy_module")
    lazy.__getattr__ = lambda name: Episode  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, lazy.__name__, lazy)
    with pytest.raises(CheckpointError, match="must be a frozen dataclass"):
        decode(json.dumps({"value": {"$object": hostile, "state": 1}}).encode(), {})


def test_an_error_of_from_state_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path / "x", {"value": Episode(torch.ones(1))}, iteration=0)
    monkeypatch.setattr(Episode, "from_state", classmethod(lambda cls, state: 1 / 0))
    with pytest.raises(CheckpointError, match=r"Episode\.from_state must accept .*ZeroDivisionError") as caught:
        read_checkpoint(path)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@dataclass(frozen=True, eq=False)
class Start:
    """An object that tells how often it is converted."""

    inner: Any
    saved: ClassVar[list["Start"]] = []
    restored: ClassVar[list["Start"]] = []

    def to_state(self) -> Any:
        self.saved.append(self)
        return self.inner

    @classmethod
    def from_state(cls, state: Any) -> "Start":
        cls.restored.append(cls(state))
        return cls.restored[-1]


@pytest.fixture
def _count() -> None:
    Start.saved.clear()
    Start.restored.clear()


@pytest.mark.usefixtures("_count")
def test_an_object_that_occurs_again_is_written_and_restored_once(tmp_path: Path) -> None:
    snapshot = Start({"table": list(range(1000)), "goal": torch.ones(3)})
    first, second, equal = Start(["a", snapshot]), Start(("b", snapshot)), Start(["a", snapshot])
    rows, replay = [first] * 64 + [second], {1: (second, {"x": first})}
    state = {"rows": rows, "replay": replay, "equal": equal, "snapshot": snapshot}
    path = write_checkpoint(tmp_path / "x", state, iteration=0)
    assert Start.saved == [first, snapshot, second, equal]
    assert (path / "rank-0" / "state.json").read_text().count("998, 999") == 1
    found = read_checkpoint(path)
    assert len(Start.restored) == 4
    assert {id(row) for row in found["rows"][:64]} == {id(found["replay"][1][1]["x"])}
    assert found["rows"][64] is found["replay"][1][0]
    assert found["equal"] is not found["rows"][0]  # an equal object is another object
    inner = {id(start.inner[1]) for start in (found["rows"][0], found["rows"][64], found["equal"])}
    assert inner == {id(found["snapshot"])}
    assert [start.inner[0] for start in (*found["rows"][63:], found["equal"])] == ["a", "b", "a"]
    assert digest(found["snapshot"].inner) == digest(snapshot.inner)


@pytest.mark.usefixtures("_count")
def test_parts_that_are_read_one_after_another_share_their_objects(tmp_path: Path) -> None:
    """The rows of the replay buffer and of the unfinished iteration are restored by different calls."""
    start = Start(torch.ones(2))
    path = write_checkpoint(tmp_path / "x", {"replay": [start], "unfinished": {"rows": [start]}}, iteration=0)
    checkpoint = open_checkpoint(path, None)
    later = checkpoint.load(checkpoint.state["unfinished"])  # the part with the reference comes first
    assert later["rows"][0] is checkpoint.load(checkpoint.state["replay"])[0]
    assert len(Start.restored) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """An object that makes new objects whenever it is saved, which are gone before the next one is saved."""

    number: int

    def to_state(self) -> Any:
        return {"number": self.number, "part": Episode.Nested.Step(number=self.number)}

    @classmethod
    def from_state(cls, state: Any) -> "Passing":
        assert state["part"].number == state["number"]
        return cls(number=state["number"])


def test_objects_that_exist_only_while_they_are_saved_are_not_taken_for_one_another(tmp_path: Path) -> None:
    values = [Passing(number=i) for i in range(50)]
    assert round_trip(values, tmp_path) == values


def test_a_reference_counts_as_deep_as_its_object(tmp_path: Path) -> None:
    """Otherwise objects in objects would be nested as deep as one likes, and could not be read."""

    def lists(depth: int, inner: Any) -> Any:
        for _ in range(depth):
            inner = [inner]
        return inner

    low = Start(lists(40, 1))  # the object and 40 lists below it
    deepest = MAX_DEPTH - 2 - 40  # the state, the list of both, and the lists of the object
    found = round_trip([low, lists(deepest, low)], tmp_path)
    for _ in range(deepest):
        found[1] = found[1][0]
    assert found[1] is found[0]
    middle = Start(lists(30, low))  # the reference is below 30 lists, and counts with the object behind it
    assert round_trip([low, middle, lists(MAX_DEPTH - 2 - 71, middle)], tmp_path) is not None
    for value in ([low, lists(deepest + 1, low)], [low, middle, lists(MAX_DEPTH - 2 - 70, middle)]):
        with pytest.raises(CheckpointError, match=rf"nested deeper than {MAX_DEPTH} levels"):
            round_trip(value, tmp_path)


def step(state: Any) -> dict[str, Any]:
    return {"$object": f"{__name__}:Episode.Nested.Step", "state": state}


def test_a_reference_is_the_object_before_it() -> None:
    first, again, other = decode(json.dumps({"x": [step(1), {"$same": 0}, step(2)]}).encode(), {})["x"]
    assert again is first is not other


@pytest.mark.parametrize(
    "values",
    [
        [{"$same": 0}],  # none before
        [{"$same": 0}, step(1)],  # forward
        [step(1), {"$same": 1}],
        [step(1), {"$same": -1}],
        [step({"$same": 0})],  # itself
        [step(1), step([step(2), {"$same": 2}])],  # the object around it
        [step(1), step(2), {"$same": True}],
        [step(1), {"$same": 0.0}],
        [step(1), {"$same": "0"}],
        [step(1), {"$same": None}],
        [step(1), {"$same": 0, "x": 1}],
    ],
)
def test_references_to_objects_that_are_not_complete_are_refused(values):
    with pytest.raises(ValueError, match=r"\$same"):
        decode(json.dumps({"x": values}).encode(), {})


def test_tensors_have_readable_names_in_the_file(tmp_path: Path) -> None:
    state = {
        "parameters": {"actor.weight": torch.ones(2), "actor": {"weight": torch.zeros(2)}},
        "list": [torch.ones(1), np.ones(2)],
        "__metadata__": torch.full((2,), 5.0),
        "": torch.full((2,), 6.0),
        "ü\ud800": torch.full((2,), 7.0),
        3: {"$x": torch.full((2,), 8.0)},
        "object": Episode(torch.full((2,), 9.0)),
    }
    path = write_checkpoint(tmp_path / "x", state, iteration=0)
    with safe_open(path / "rank-0" / "tensors.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.get_tensor("parameters.actor.weight").tolist() == [1.0, 1.0]
        assert file.get_tensor("parameters.actor.weight.2").tolist() == [0.0, 0.0]
    assert {"list.0", "list.1", "__metadata__.2", "3.$x", "object.rewards", "??"} <= names
    found = read_checkpoint(path)
    assert digest(found.pop("object").rewards, found) == digest(state.pop("object").rewards, state)


def nested(depth: int) -> Any:
    value: Any = 1
    for i in range(depth):
        value = [{"x": value}, (value,), {1: value}][i % 3] if i % 4 else [value]
    return value


def test_states_up_to_the_limit_of_nesting_come_back_and_deeper_ones_are_refused(tmp_path: Path) -> None:
    assert digest(round_trip(nested(MAX_DEPTH), tmp_path)) == digest(nested(MAX_DEPTH))
    endless: list[Any] = []
    endless.append(endless)
    of_itself: list[Any] = []
    of_itself.append(Start(of_itself))
    for value in (nested(MAX_DEPTH + 1), nested(5000), endless, of_itself):
        with pytest.raises(CheckpointError, match=rf"nested deeper than {MAX_DEPTH} levels, or contains itself"):
            round_trip(value, tmp_path)
    decode(b'{"x": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", {})
    for depth in (MAX_DEPTH + 1, 3 * MAX_DEPTH):
        with pytest.raises(ValueError, match=f"nested deeper than {MAX_DEPTH} levels"):
            decode(b'{"x": ' + b"[" * depth + b"]" * depth + b"}", {})


def test_integers_that_python_would_not_read_are_refused(tmp_path: Path) -> None:
    largest = 2**MAX_BITS - 1
    assert round_trip([largest, -largest], tmp_path) == [largest, -largest]
    assert round_trip(largest, tmp_path) == largest
    for value in (largest + 1, [1, -largest - 1], 10**10_000):
        with pytest.raises(CheckpointError, match=rf"must have at most {MAX_BITS} bits; it has"):
            round_trip(value, tmp_path)


@pytest.mark.parametrize("length", [0, 1, SLICE - 1, SLICE, SLICE + 1, 3 * SLICE])
def test_long_lists_come_back_whole(length, tmp_path: Path) -> None:
    """Around the number of entries that are converted at a time, with one entry that is not a plain number."""
    for odd in {None, 0, length // 2, length - 1}:
        values: list[Any] = [float(i) if i % 2 else i for i in range(length)]
        if odd is not None and 0 <= odd < length:
            values[odd] = (odd, [True])
        assert round_trip(values, tmp_path) == values
        assert round_trip(tuple(values), tmp_path) == tuple(values)


def test_text_is_passed_on_in_parts() -> None:
    parts: list[bytes] = []
    encode({"x": list(range(2_000_000))}, parts.append)
    assert json.loads(b"".join(parts)) == {"x": list(range(2_000_000))}
    assert len(parts) > 10
    assert max(map(len, parts)) < 2**21


@pytest.mark.parametrize(
    "value", [torch.eye(3).to_sparse(), torch.ones(2, device="meta"), torch.ones(2, dtype=torch.complex128)]
)
def test_sparse_meta_and_unusual_tensors_are_refused_by_their_place(value, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\['value'\]\['x'\] is a tensor of torch\..*cannot hold"):
        round_trip({"x": value}, tmp_path)


@pytest.mark.parametrize("value", [
    {"$tensor": "x"}, {"$tensor": 1}, {"$tensor": ["x"]}, {"$tuple": 1}, {"$items": {"a": 1}}, {"$items": [[1]]},
    {"$items": [[1, 2, 3]]}, {"$items": [1]}, {"$items": [[[1], 2]]}, {"$other": 1}, {"$tuple": [], "more": 1},
    {"$array": "x"}, {"$object": "x"},
])  # fmt: skip
def test_markers_that_encode_does_not_write_are_refused(value):
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode(json.dumps({"x": value}).encode(), {})


@pytest.mark.parametrize("change", [
    {"dtype": "O"}, {"dtype": "float32"}, {"dtype": "f8,f8"}, {"dtype": "V8"}, {"dtype": "no"}, {"shape": [4.0]},
    {"shape": [-2, -2]}, {"shape": [True, 4]}, {"shape": [5]}, {"shape": 4}, {"$array": "b"},
])  # fmt: skip
def test_arrays_whose_description_does_not_fit_are_refused(tmp_path, change):
    path = write_checkpoint(tmp_path / "x", {"a": np.arange(4.0)}, iteration=0)
    places = open_checkpoint(path, None)._tensors.places
    right = {"$array": "a", "dtype": "float64", "shape": [2, 2]}
    decode(json.dumps({"x": right}).encode(), places)
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode(json.dumps({"x": {**right, **change}}).encode(), places)


def test_placeholders_tell_what_will_be_read(tmp_path: Path) -> None:
    shared = torch.ones(2, 3, dtype=torch.float16)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "x", {"a": shared, "b": [shared]}, iteration=0), None)
    assert checkpoint.state["a"] == SavedTensor(name="a", shape=(2, 3), dtype=torch.float16) == checkpoint.state["b"][0]
    assert torch.equal(checkpoint.load(checkpoint.state["b"])[0], shared)
    both = checkpoint.load(checkpoint.state)
    assert both["a"] is both["b"][0]


# What a state may hold: values come back as they were, through the files of a checkpoint, or are refused by their place


ODD_VALUES: list[Any] = [
    (1, (2, ("three", [4, (5,)])), ()),
    {1: "int", "1": "str", None: "none", 2.5: "float", (1, "a"): "tuple", True + 1: "two"},
    {"$tensor": "0", "$items": [1], "$tuple": (1,), "$array": {"$tensor": 3}, "$": 0, "a$": 1},
    [{"$tuple": [1, 2]}, ({"$tensor": "7"},)],
    {"": {}, "empty": [], "also": ()},
    [float("nan"), float("inf"), float("-inf"), 1e308, 5e-324, -0.0, 0.1, 2**200, -(2**63), True, False, None],
    ["", "\0", "line\nbreak", "\u2028", "ü", "\U0001f600", '"\\', "\ud800"],
    torch.empty(0),
    torch.empty(0, 3, dtype=torch.int64),
    torch.tensor(3.5, dtype=torch.float64),
    torch.tensor(True),
    torch.randn(4, 3).t(),
    torch.arange(10)[::3],
    torch.zeros(2, 2).expand(3, 2, 2),
    torch.tensor([1.0, float("nan"), float("-inf"), -0.0]),
    np.arange(12.0).reshape(3, 4).T[::2],
    random.Random(1).getstate(),
]


def test_unusual_values_survive_a_round_trip(tmp_path: Path) -> None:
    for value, found in zip(ODD_VALUES, round_trip(ODD_VALUES, tmp_path), strict=True):
        assert (digest(found), type(found)) == (digest(value), type(value)), value
        if isinstance(value, Mapping):
            assert [(type(key), key) for key in found] == [(type(key), key) for key in value]


DTYPES = [
    "bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", ">f8", "<U3", "S2", "M8[s]",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_and_shape_survive_a_round_trip(dtype, tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = [(), (3,), (2, 3), (0,), (2, 0, 3)]
    arrays = [np.arange(int(np.prod(shape))).reshape(shape).astype(dtype) for shape in shapes]
    for array, found in zip(arrays, round_trip(arrays, tmp_path), strict=True):
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert found.flags.writeable


@pytest.mark.parametrize("value", [np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("x")])
def test_numpy_scalars_come_back_as_what_item_makes_of_them(value, tmp_path: Path) -> None:
    found = round_trip(value, tmp_path)
    assert (found, type(found)) == (value, type(value.item()))


def test_shared_tensors_and_views_come_back_equal_and_are_stored_once(tmp_path: Path) -> None:
    shared = torch.randn(1000)
    views = {"head": shared[:10], "flat": shared.view(10, 100)}
    state = {"a": shared, "b": {"again": shared}, **views, "c": shared.clone()}
    path = write_checkpoint(tmp_path / "shared", state, iteration=0)
    assert digest(read_checkpoint(path)) == digest(state)
    size = (path / "rank-0" / "tensors.safetensors").stat().st_size
    assert size < 4000 * 3 + 2000  # a, flat and c; b is a, head is small


def test_what_was_read_is_released_without_a_collection_of_garbage(tmp_path: Path) -> None:
    """Otherwise a trainer would hold its old weights and two copies of the new ones."""
    path = write_checkpoint(tmp_path / "x", {"a": [torch.ones(9), np.ones(9)]}, iteration=0)
    checkpoint = open_checkpoint(path, None)
    gc.disable()
    try:
        found = checkpoint.load(checkpoint.state)
        left = [weakref.ref(value) for value in found["a"]]
        del found
        assert [reference() for reference in left] == [None, None]
    finally:
        gc.enable()


def test_an_array_that_occurs_again_is_stored_once_and_comes_back_as_one(tmp_path: Path) -> None:
    """The rows of a group have one state, whose picture or observation may be large."""
    shared = np.arange(12)
    views = {"shape": shared.reshape(3, 4), "turned": shared.reshape(3, 4).T, "bytes": shared.view(np.uint8)}
    others = {"equal": shared.copy(), "head": shared[:6], **views}
    state = {"rows": [{"seen": shared}, {"seen": shared}], **others}
    path = write_checkpoint(tmp_path / "shared", state, iteration=0)
    with safe_open(path / "rank-0" / "tensors.safetensors", framework="np") as file:
        assert len(file.keys()) == 6
    found = read_checkpoint(path)
    assert found["rows"][0]["seen"] is found["rows"][1]["seen"]
    np.testing.assert_array_equal(found["rows"][0]["seen"], shared)
    for name in others:
        np.testing.assert_array_equal(found[name], state[name])


def test_a_parameter_is_saved_without_its_graph(tmp_path: Path) -> None:
    found = round_trip(torch.nn.Parameter(torch.ones(2)) * 2, tmp_path)
    assert isinstance(found, Tensor)
    assert not found.requires_grad


class Unknown: ...


@pytest.mark.parametrize(
    ("state", "place", "kind"),
    [
        ({"a": {"b": [0, lambda: 1]}}, r"state\['a'\]\['b'\]\[1\]", "function"),
        ({"a": (Unknown(),)}, r"state\['a'\]\[0\]", "Unknown"),
        ({"a": {1: {2, 3}}}, r"state\['a'\]\[1\]", "set"),
        ({"a": b"bytes"}, r"state\['a'\]", "bytes"),
        ({"a": 1j}, r"state\['a'\]", "complex"),
        ({"a": np.array([object()])}, r"state\['a'\]", "ndarray"),
        ({"a": np.zeros(2, dtype=[("x", "f4"), ("y", "i8")])}, r"state\['a'\]", "ndarray"),
        ({"a": np.zeros(2, dtype=[("x", "O")])}, r"state\['a'\]", "ndarray"),
        ({"a": [np.zeros(2, dtype="V8")]}, r"state\['a'\]\[0\]", "ndarray"),
        ({"a": {Unknown(): 1}}, r"state\['a'\]", "Unknown"),
        *(({"a": {key: 1}}, r"state\['a'\]", type(key).__name__) for key in (Color.RED, Number.ONE, Name.A)),
        ({"a": np.complex64(1 + 2j)}, r"state\['a'\]", "complex"),
        ({"a": np.datetime64("2020-01-01")}, r"state\['a'\]", "date"),
        ({"a": np.bytes_(b"x")}, r"state\['a'\]", "bytes"),
        ({"a": {"$x": [torch.float32]}}, r"state\['a'\]\['\$x'\]\[0\]", "dtype"),
    ],
)
def test_an_unsupported_value_is_named_with_its_place(tmp_path, state, place, kind):
    with pytest.raises(CheckpointError, match=rf"{place} is a {kind}, which a checkpoint cannot hold"):
        write_checkpoint(tmp_path / "bad", state, iteration=0)
    assert not list(tmp_path.iterdir())

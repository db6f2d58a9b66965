"""What a state may hold: values come back as they were, through the files of a checkpoint, or are refused by their place."""

import gc
import random
import weakref
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo import CheckpointError
from grpo.checkpoint import open_checkpoint, read_checkpoint, write_checkpoint
from tests.support.policies import digest

pytestmark = pytest.mark.usefixtures("without_type_checks")


def round_trip(value: Any, folder: Path) -> Any:
    return read_checkpoint(write_checkpoint(folder / "value", {"value": value}, iteration=0))["value"]


ODD_VALUES: list[Any] = [
    (1, (2, ("three", [4, (5,)])), ()),
    {1: "int", "1": "str", None: "none", 2.5: "float", (1, "a"): "tuple", True + 1: "two"},
    {"$tensor": "0", "$items": [1], "$tuple": (1,), "$array": {"$tensor": 3}, "$": 0, "a$": 1},
    [{"$tuple": [1, 2]}, ({"$tensor": "7"},)],
    {"": {}, "empty": [], "also": ()},
    [float("inf"), float("-inf"), 1e308, 5e-324, -0.0, 0.1, 2**200, -(2**63), True, False, None],
    ["", "\0", "line\nbreak", "\u2028", "ü", "\U0001f600", '"\\', "\ud800"],
    torch.empty(0),
    torch.empty(0, 3, dtype=torch.int64),
    torch.tensor(3.5, dtype=torch.float64),
    torch.tensor(True),
    torch.randn(4, 3).t(),
    torch.arange(10)[::3],
    torch.zeros(2, 2).expand(3, 2, 2),
    torch.tensor([1.0, float("nan"), float("-inf"), -0.0]),
    random.Random(1).getstate(),
]


def test_unusual_values_survive_a_round_trip(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for value, found in zip(ODD_VALUES, round_trip(ODD_VALUES, tmp_path), strict=True):
        with subtests.test(value=value):
            assert digest(found) == digest(value)
            assert type(found) is type(value)
            if isinstance(value, Mapping):
                assert list(found) == list(value)
                assert [type(key) for key in found] == [type(key) for key in value]


def test_nan_survives_a_round_trip(tmp_path: Path) -> None:
    assert str(round_trip(float("nan"), tmp_path)) == "nan"


DTYPES = [
    "bool",
    "i1",
    "u1",
    "i2",
    "u2",
    "i4",
    "u4",
    "i8",
    "u8",
    "f2",
    "f4",
    "f8",
    "c8",
    "c16",
    ">f8",
    "<U3",
    "S2",
    "M8[s]",
]
SHAPES: list[tuple[int, ...]] = [(), (3,), (2, 3), (0,), (2, 0, 3)]


def test_arrays_of_every_dtype_and_shape_survive_a_round_trip(subtests: pytest.Subtests, tmp_path: Path) -> None:
    arrays = [np.arange(int(np.prod(shape))).reshape(shape).astype(dtype) for dtype, shape in product(DTYPES, SHAPES)]
    for array, found in zip(arrays, round_trip(arrays, tmp_path), strict=True):
        with subtests.test(array=array):
            assert isinstance(found, np.ndarray)
            assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
            assert found.flags.writeable


def test_non_contiguous_arrays_survive_a_round_trip(tmp_path: Path) -> None:
    array = np.arange(12.0).reshape(3, 4).T[::2]
    np.testing.assert_array_equal(round_trip(array, tmp_path), array)


def test_numpy_scalars_survive_a_round_trip_or_are_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """What `item()` makes a Python number or string of comes back."""
    for value in [np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("x")]:
        with subtests.test(value=value):
            found = round_trip(value, tmp_path / type(value).__name__)
            assert type(found) is type(value.item())
            assert found == value
    for value in [np.complex64(1 + 2j), np.datetime64("2020-01-01"), np.bytes_(b"x")]:
        with subtests.test(value=value), pytest.raises(CheckpointError, match=r"state\['value'\] is a "):
            round_trip(value, tmp_path / type(value).__name__)


def test_tensors_of_every_dtype_survive_a_round_trip(subtests: pytest.Subtests, tmp_path: Path) -> None:
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.complex64,
    ]  # fmt: skip
    tensors = [torch.tensor([[0.0, 1.0, 3.140625], [2.0, 100.0, 7.5]]).to(dtype) for dtype in dtypes]
    for tensor, found in zip(tensors, round_trip(tensors, tmp_path), strict=True):
        with subtests.test(dtype=tensor.dtype):
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)


def test_shared_tensors_and_views_come_back_equal_and_are_stored_once(tmp_path: Path) -> None:
    shared = torch.randn(1000)
    state = {
        "a": shared,
        "b": {"again": shared},
        "head": shared[:10],
        "flat": shared.view(10, 100),
        "c": shared.clone(),
    }
    path = write_checkpoint(tmp_path / "shared", state, iteration=0)
    found = read_checkpoint(path)
    assert digest(found) == digest(state)
    assert (
        path / "rank-0" / "tensors.safetensors"
    ).stat().st_size < 4000 * 3 + 2000  # a, flat and c; b is a, head is small


def test_what_was_read_is_released_without_a_collection_of_garbage(tmp_path: Path) -> None:
    """Otherwise a trainer would hold its old weights and two copies of the new ones."""
    checkpoint = open_checkpoint(
        write_checkpoint(tmp_path / "x", {"a": [torch.ones(9), np.ones(9)]}, iteration=0), None
    )
    gc.disable()
    try:
        found = checkpoint.load(checkpoint.state)
        left = [weakref.ref(value) for value in found["a"]]
        del found
        assert [reference() for reference in left] == [None, None]
    finally:
        gc.enable()


def test_a_parameter_is_saved_without_its_graph(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    found = round_trip(parameter * 2, tmp_path)
    assert isinstance(found, Tensor)
    assert not found.requires_grad


class Unknown:
    """Something no checkpoint can hold."""


def test_an_unsupported_value_is_named_with_its_place(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for state, place, kind in [
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
        ({"a": {"$x": [torch.float32]}}, r"state\['a'\]\['\$x'\]\[0\]", "dtype"),
    ]:
        with subtests.test(state=state, place=place, kind=kind):
            with pytest.raises(CheckpointError, match=rf"{place} is a {kind}, which a checkpoint cannot hold"):
                write_checkpoint(tmp_path / "bad", state, iteration=0)
            assert not list(tmp_path.iterdir())

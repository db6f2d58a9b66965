"""Plain data of episode starts comes back with its types, its shared parts and its order."""

from collections import OrderedDict, deque
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adapters.control.environments.episodes import EpisodeStart
from adapters.control.environments.plain_data import pack, unpack
from adapters.control.environments.snapshots import Snapshot
from grpo.errors import CheckpointError, ContractError
from tests.support.plain_states import assert_same, through_checkpoint

EVERYTHING: dict[Any, Any] = {
    "none": None,
    "numbers": (1, -0.0, float("nan"), float("inf"), True, 2**200, 3 - 4j),
    "text": "Grüße \ud800",
    "bytes": b"\x00\xff",
    "scalars": [np.float32(0.1), np.int64(7), np.bool_(True), np.complex64(1j), np.str_("a")],
    "arrays": [np.arange(6, dtype=np.int16).reshape(2, 3), np.array(0.5), np.zeros((0, 4)), np.array([b"ab", b"c"])],
    "nested": [[], (), {}, [()], ([],)],
    "sets": ({3, 1}, frozenset({(1, "a")}), set()),
    "queues": [deque([1, [2]], maxlen=3), deque()],
    ("tuple", 1): {2: "two", 2.5: None, None: 0},
}


def test_every_type_comes_back_as_itself(tmp_path: Path) -> None:
    assert_same(unpack(pack(EVERYTHING)), EVERYTHING)
    assert_same(unpack(through_checkpoint(pack(EVERYTHING), tmp_path)), EVERYTHING)


def test_objects_in_several_places_stay_one_object() -> None:
    array, words, table, queue, group = np.zeros(2), ["a"], {"k": 1}, deque([1]), {1}
    shared = [array, words, table, queue, group]
    found = unpack(pack({"first": [*shared, ["a"]], "second": tuple(shared)}))
    assert all(one is other for one, other in zip(found["first"], found["second"], strict=False))
    assert found["first"][1] == found["first"][5]
    assert found["first"][1] is not found["first"][5]


def test_objects_within_shared_objects_and_after_them_keep_their_numbers() -> None:
    inner = [1]
    outer = [inner, {"inner": inner}]
    last: list[Any] = []
    found = unpack(pack([outer, inner, last, outer, last]))
    assert found == [outer, inner, last, outer, last]
    assert found[0] is found[3]
    assert found[0][0] is found[0][1]["inner"] is found[1]
    assert found[2] is found[4]


def test_an_object_that_contains_itself_comes_back() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    found = unpack(pack(circle))
    assert found[0] == 1
    assert found[1] is found


class Command(IntEnum):
    LEFT = 1


def test_types_that_would_be_lost_are_refused_in_words(subtests: pytest.Subtests) -> None:
    values = [Command.LEFT, OrderedDict(a=1), object(), torch.zeros(2), np.array([None]), len]
    for value in values:
        with subtests.test(kind=type(value).__name__):
            message = (
                rf"must be plain data to be saved in a checkpoint; it contains a .*{type(value).__name__}. Use numbers"
            )
            with pytest.raises(ContractError, match=message):
                pack([value])


def test_packed_data_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ContractError, match="cannot contain 'pickle'"):
        unpack({"pickle": "cos\nsystem"})


def test_starts_come_back_from_a_checkpoint(tmp_path: Path, subtests: pytest.Subtests) -> None:
    snapshot = Snapshot(
        environment="Taxi-v4", observation=np.int64(3), layers=(("Wrapper", {"values": EVERYTHING}), ("Taxi", {}))
    )
    starts = {
        "empty": EpisodeStart(),
        "seed": EpisodeStart(seed=2**40),
        "options": EpisodeStart(seed=1, options={"goal": np.float32(0.5), "cells": (1, [2])}),
        "snapshot": EpisodeStart(snapshot=snapshot),
    }
    for name, start in starts.items():
        with subtests.test(start=name):
            assert_same(through_checkpoint(start, tmp_path / name), start)


def test_a_start_with_other_objects_cannot_be_saved(tmp_path: Path) -> None:
    start = EpisodeStart(options={"goal": object()})
    with pytest.raises((ContractError, CheckpointError), match=r"must be plain data .* contains a builtins.object"):
        through_checkpoint(start, tmp_path)

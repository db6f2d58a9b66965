"""Buffers by hand, and under eight threads; mini-batches."""

import doctest
import itertools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from adapters.tools.learning import buffers
from adapters.tools.learning.buffers import ExperienceBuffer, GroupBuffer, mini_batches
from grpo import ConfigError, HasState
from tests.support.threads import NUM_THREADS, run_beside

PER_THREAD = 2_000


@dataclass(frozen=True)
class Note:
    """An item that JSON cannot hold as it is."""

    text: str
    number: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Note":
        return cls(**values)


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(buffers) == (0, 8)


def test_a_full_buffer_drops_and_counts_the_oldest_items() -> None:
    buffer = ExperienceBuffer[int](capacity=3)
    buffer.add(1)
    buffer.extend([2, 3])
    assert (buffer.snapshot(), buffer.num_dropped, len(buffer)) == ([1, 2, 3], 0, 3)
    buffer.extend([4, 5])  # 1 and 2 leave
    assert (buffer.snapshot(), buffer.num_dropped) == ([3, 4, 5], 2)
    buffer.extend(range(10, 17))  # 3 that were there, and 4 of 7 that are new
    assert (buffer.snapshot(), buffer.num_dropped) == ([14, 15, 16], 9)
    buffer.clear()
    assert (buffer.snapshot(), buffer.num_dropped) == ([], 0)
    buffer.add(3)
    assert buffer.snapshot() == [3]
    usual = ExperienceBuffer[int]()
    usual.extend(range(10_001))
    assert (len(usual), usual.num_dropped, usual.snapshot()[0]) == (10_000, 1, 1)


def test_a_snapshot_keeps_all_items_and_a_drain_removes_them() -> None:
    buffer = ExperienceBuffer[str]()
    buffer.extend("ab")
    buffer.snapshot().append("c")
    assert buffer.drain() == ["a", "b"]
    assert (buffer.drain(), len(buffer), buffer.num_dropped) == ([], 0, 0)


def test_the_state_of_a_buffer_survives_json_and_a_smaller_capacity() -> None:
    buffer = ExperienceBuffer[float](capacity=3)
    buffer.extend([0.1, 0.2, 0.3, 0.4])
    assert isinstance(buffer, HasState)
    state = json.loads(json.dumps(buffer.state_dict()))
    same, smaller = ExperienceBuffer[float](capacity=3), ExperienceBuffer[float](capacity=2)
    same.add(9.0)
    same.load_state_dict(state)
    assert (same.snapshot(), same.num_dropped) == ([0.2, 0.3, 0.4], 1)
    same.add(0.5)  # the capacity still holds
    assert (same.snapshot(), same.num_dropped) == ([0.3, 0.4, 0.5], 2)
    smaller.load_state_dict(state)
    assert (smaller.snapshot(), smaller.num_dropped) == ([0.3, 0.4], 2)


def test_items_that_convert_to_dicts_survive_json() -> None:
    notes = [Note("a", 1), Note("b"), Note("c", 3)]
    buffer, again = (ExperienceBuffer[Note](capacity=2, item_type=Note) for _ in range(2))
    buffer.extend(notes)
    state = buffer.state_dict()
    assert state == {"items": [{"text": "b", "number": 0}, {"text": "c", "number": 3}], "num_dropped": 1}
    again.load_state_dict(json.loads(json.dumps(state)))
    assert (again.snapshot(), again.num_dropped) == (buffer.snapshot(), 1) == (notes[1:], 1)


ALL = Counter(itertools.product(range(NUM_THREADS), range(PER_THREAD)))


def test_eight_threads_add_and_others_drain_and_save_and_nothing_is_lost_doubled_or_parted() -> None:
    """Items that are added together stay together, in a state too, and come out of their own group."""
    items = ExperienceBuffer[tuple[int, int]](capacity=NUM_THREADS * PER_THREAD)
    groups = GroupBuffer[int, tuple[int, int]]()
    drained: list[tuple[list[tuple[int, int]], dict[int, list[tuple[int, int]]]]] = []

    def add(thread: int) -> None:
        for number in range(0, PER_THREAD, 2):
            pair = [(thread, number), (thread, number + 1)]
            items.extend(pair)
            groups.extend(number % 7, pair)

    def drain() -> None:
        drained.append((items.drain(), groups.drain()))

    saved: list[list[tuple[int, int]]] = []

    def save() -> None:
        saved.append(items.state_dict()["items"])
        saved.extend(group for _, group in groups.state_dict()["groups"])

    run_beside(add, drain, drain, save)
    drain()
    of_groups = [group for _, drained_groups in drained for group in drained_groups.values()]
    of_items = [part for part, _ in drained]
    assert Counter(itertools.chain(*of_items)) == Counter(itertools.chain(*of_groups)) == ALL
    for parts in (of_items, of_groups, saved):
        pairs = [pair for part in parts for pair in zip(part[::2], part[1::2], strict=True)]
        assert all(other == (one[0], one[1] + 1) for one, other in pairs)
    for _, drained_groups in drained:
        for group_id, part in drained_groups.items():
            assert all(number % 7 == group_id for _, number in part[::2])
    assert items.num_dropped == 0


def test_groups_come_out_once_in_the_order_of_their_first_items() -> None:
    buffer = GroupBuffer[str, int]()
    buffer.add("b", 1)
    buffer.add("a", 2)
    buffer.extend("b", [3, 4])
    buffer.extend("empty", [])
    assert len(buffer) == 4
    groups = buffer.drain()
    assert list(groups.items()) == [("b", [1, 3, 4]), ("a", [2])]
    assert (buffer.drain(), len(buffer)) == ({}, 0)
    buffer.add("b", 5)
    assert groups["b"] == [1, 3, 4]  # what was handed out is the caller's
    assert buffer.drain() == {"b": [5]}
    buffer.extend("a", [1, 2])
    buffer.add("b", 3)
    assert buffer.drain(min_size=2) == {"a": [1, 2]}, "small groups stay until they are large enough"
    assert len(buffer) == 1
    buffer.add("b", 4)
    assert buffer.drain(min_size=2) == {"b": [3, 4]}
    buffer.add("b", 5)
    buffer.clear()
    assert buffer.drain() == {}


def test_groups_survive_json_with_their_ids_and_their_order() -> None:
    buffer, again = (GroupBuffer[Any, Note](item_type=Note) for _ in range(2))
    ids = ["b", 7, "7", ("task", 3, ("x",)), 2.5, None, True]
    for number, group_id in enumerate(ids):
        buffer.extend(group_id, [Note("one", number), Note("other")])
    again.add("was there", Note("gone"))
    assert isinstance(buffer, HasState)
    again.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert len(buffer) == len(again) == 14
    groups = again.drain()
    assert list(groups) == ids
    assert [type(group_id) for group_id in groups] == [type(group_id) for group_id in ids]
    assert list(groups.items()) == list(buffer.drain().items())


def test_the_state_of_groups_is_a_copy() -> None:
    buffer, again = GroupBuffer[str, int](), GroupBuffer[str, int]()
    buffer.add("a", 1)
    state = buffer.state_dict()
    buffer.add("a", 2)
    again.load_state_dict(state)
    again.add("a", 3)
    assert state == {"groups": [["a", [1]]]}
    assert again.drain() == {"a": [1, 3]}


def test_mini_batches_keep_the_order_and_the_remainder() -> None:
    assert mini_batches(list(range(7)), 3) == [[0, 1, 2], [3, 4, 5], [6]]
    assert mini_batches("abcd", 2) == ["ab", "cd"]
    assert mini_batches([1, 2], 5) == [[1, 2]]
    assert mini_batches([], 5) == []


def test_invalid_settings_are_refused(subtests: pytest.Subtests) -> None:
    for make, text in (
        (lambda: ExperienceBuffer(0), "ExperienceBuffer: capacity must be an integer >= 1; got int 0"),
        (lambda: GroupBuffer().drain(min_size=0), "GroupBuffer.drain: min_size must be an integer >= 1; got int 0"),
        (lambda: ExperienceBuffer(item_type=int), r"ExperienceBuffer\.item_type must have to_dict and from_dict; got int"),
        (lambda: GroupBuffer(item_type=Counter), r"GroupBuffer\.item_type must have to_dict and from_dict; got Counter"),
        (lambda: mini_batches([1], 0), "mini_batches: batch_size must be an integer >= 1; got int 0"),
    ):  # fmt: skip
        with subtests.test(text=text), pytest.raises(ConfigError, match=text):
            make()

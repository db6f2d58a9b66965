"""Index arithmetic against plain lists: every row once, groups together, one index inside another."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo import ActionScores, ContractError
from grpo._collecting.out_of_memory import PassSizes
from grpo._collecting.scoring import score_in_parts
from grpo._collecting.update_plan import (
    compose_index,
    epoch_of_updates,
    num_updates_per_epoch,
    parts_in_order,
    planned_parts,
)
from grpo._ranks.processes import SeveralProcesses


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(index: torch.Tensor | slice, num_rows: int) -> list[int]:
    return torch.arange(num_rows)[index].tolist()


def updates(group_ids: list[int], batch_size: int | None, seed: int = 0) -> list[list[int]]:
    ids = torch.tensor(group_ids)
    return [rows_of(index, len(ids)) for index in epoch_of_updates(ids, batch_size, generator(seed))]


GROUP_IDS = st.lists(st.integers(-3, 3), min_size=1, max_size=20)


@settings(max_examples=60)
@given(group_ids=GROUP_IDS, batch_size=st.none() | st.integers(1, 25), seed=st.integers(0, 99))
def test_an_epoch_holds_every_row_once_with_groups_together(group_ids, batch_size, seed):
    parts = updates(group_ids, batch_size, seed)
    order = [row for part in parts for row in part]
    assert sorted(order) == list(range(len(group_ids)))
    if batch_size is not None and batch_size < len(group_ids):
        runs = [group for group, _ in itertools.groupby(group_ids[row] for row in order)]
        assert sorted(runs) == sorted(set(group_ids))
        for group in set(group_ids):  # and in their own order within it
            members = [row for row in order if group_ids[row] == group]
            assert members == sorted(members)


@settings(max_examples=60)
@given(group_ids=GROUP_IDS, batch_size=st.none() | st.integers(1, 25))
def test_every_update_but_the_last_is_full(group_ids, batch_size):
    sizes = [len(part) for part in updates(group_ids, batch_size)]
    full = batch_size or len(group_ids)
    assert sizes == [full] * (len(group_ids) // full) + [len(group_ids) % full] * (len(group_ids) % full > 0)
    assert len(sizes) == num_updates_per_epoch(len(group_ids), batch_size)


@pytest.mark.parametrize("batch_size", [None, 4, 5])
def test_one_update_of_everything_copies_nothing(batch_size):
    assert list(epoch_of_updates(torch.tensor([1, 0, 1, 0]), batch_size, generator(0))) == [slice(0, 4)]


def test_groups_come_in_an_order_that_the_generator_decides_anew_in_each_epoch():
    group_ids = [g for g in range(4) for _ in range(2)]
    firsts = {updates(group_ids, 2, seed)[0][0] for seed in range(40)}
    assert (firsts, updates(group_ids, 3, seed=5)) == ({0, 2, 4, 6}, updates(group_ids, 3, seed=5))
    group_ids, one = torch.arange(16), generator(0)
    first, second = (torch.cat(list(epoch_of_updates(group_ids, 4, one))).tolist() for _ in range(2))
    assert first != second


@pytest.mark.parametrize(
    ("num_rows", "size", "expected"),
    [
        *((5, size, [slice(0, 5)]) for size in (None, 5, 9)),
        (5, 2, [slice(0, 2), slice(2, 4), slice(4, 5)]),
        (1, 1, [slice(0, 1)]),
        (0, 3, []),
        (0, None, []),
    ],
)
def test_rows_are_cut_into_consecutive_parts_of_the_given_size(num_rows, size, expected):
    assert parts_in_order(num_rows, size) == expected


@pytest.mark.parametrize("plan", [[[2, 0], [1, 3]], [(3, 2, 1, 0)], [[0], [], [1, 2, 3]]])
def test_a_plan_is_followed_without_its_empty_parts(plan):
    parts = planned_parts("Policy.plan", plan, 4)
    assert [part.tolist() for part in parts] == [list(part) for part in plan if part]


@pytest.mark.parametrize(
    "plan", [[], [[0, 1, 2]], [[0, 1, 2, 3, 3]], [[0, 1], [1, 2]], [[0, 1, 2, 4]], [[-1, 0, 1, 2]], [[0, 1, 2, 3, 4]]]
)
def test_a_plan_that_misses_or_repeats_a_row_is_refused(plan):
    with pytest.raises(ContractError, match=r"Policy\.plan must return every row of range\(4\) exactly once"):
        planned_parts("Policy.plan", plan, 4)


@settings(max_examples=80)
@given(data=st.data(), num_rows=st.integers(1, 12))
def test_composed_indices_equal_indexing_twice(data, num_rows):
    def index_into(size: int) -> torch.Tensor | slice:
        if data.draw(st.booleans()):
            start = data.draw(st.integers(0, size))
            return slice(start, data.draw(st.integers(start, size)))
        order = torch.tensor(data.draw(st.permutations(range(size))), dtype=torch.int64)
        return order[: data.draw(st.integers(0, size))]

    outer = index_into(num_rows)
    inner = index_into(len(rows_of(outer, num_rows)))
    assert rows_of(compose_index(outer, inner), num_rows) == torch.arange(num_rows)[outer][inner].tolist()


# Where all ranks make equally many forward passes, a rank with fewer parts makes further ones, and none is repeated


class Dividing(SeveralProcesses):
    """An engine that divides weights. Ranks meet only to find their number of passes."""

    num_ranks = 2
    divides_weights = True

    def __init__(self, equal_count: Callable[[int], int]) -> None:
        self._equal_count = equal_count

    def equal_count(self, count: int) -> int:
        return self._equal_count(count)

    def gather_objects(self, value: Any) -> list[Any]:
        raise AssertionError("nothing else is exchanged")


def test_a_rank_on_its_own_makes_no_further_passes() -> None:
    assert PassSizes("scoring").num_missing(3) == 0
    assert PassSizes("scoring", Dividing(lambda count: count + 2)).num_missing(3) == 2


@pytest.mark.parametrize("num_passes", [2, 3, 5])
def test_further_passes_score_the_first_row_and_change_nothing(num_passes: int) -> None:
    seen: list[list[int]] = []
    asked: list[int] = []

    def score(states: list[int], actions: list[int], group_ids: torch.Tensor) -> ActionScores:
        assert len(states) == len(actions) == len(group_ids)
        seen.append(list(states))
        log_probs = -torch.tensor(states, dtype=torch.float32)[:, None]
        return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool))

    def equal_count(count: int) -> int:
        assert seen == []  # all ranks know the number before the first pass
        asked.append(count)
        return num_passes

    rows, sizes = [7, 8, 9], PassSizes("scoring", Dividing(equal_count))
    found = score_in_parts(score, rows, rows, torch.arange(3), lambda halvings: parts_in_order(3, 2, halvings), sizes)
    assert (asked, found.log_probs.tolist()) == ([2], [[-7.0], [-8.0], [-9.0]])
    assert seen == [[7, 8], [9], *[[7]] * (num_passes - 2)]


def test_memory_that_runs_out_is_an_error_with_advice() -> None:
    sizes = PassSizes("scoring", Dividing(lambda count: count))
    for _ in sizes.passes([slice(0, 4)]):
        error = torch.OutOfMemoryError("full")
        assert not sizes.accept(error)
    (note,) = error.__notes__
    assert note.startswith("grpo: scoring ran out of memory. With divided weights it is not repeated")
    assert (sizes.num_halvings, sizes.num_repeated) == (0, 0)

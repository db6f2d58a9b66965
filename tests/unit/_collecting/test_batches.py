"""Rows of a batch: selected, joined, scored, and divided into updates and forward passes."""

import dataclasses
import itertools
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo import ActionScores, ContractError, ExperienceBatch
from grpo._collecting.batches import gather_rewards, join_batches, select_batch
from grpo._collecting.out_of_memory import PassSizes
from grpo._collecting.scoring import ReferenceScorer, batch_fields, score_in_parts
from grpo._collecting.update_plan import (
    compose_index,
    epoch_of_updates,
    num_updates_per_epoch,
    parts_in_order,
    planned_parts,
)
from grpo._ranks.processes import SeveralProcesses
from tests.support.imitated_ranks import on_ranks
from tests.support.policies import TablePolicy


def batch_of(rewards: list[float], group_ids: list[int], width: int = 2, **others: Any) -> ExperienceBatch:
    mask = torch.ones(len(rewards), width, dtype=torch.bool)
    made = ExperienceBatch.from_rows(list(range(len(rewards))), ["x"] * len(rewards), rewards, group_ids, mask=mask)
    return dataclasses.replace(made, **others)


def test_joined_batches_are_padded_and_their_groups_stay_separate():
    joined = join_batches([batch_of([1.0, 2.0, 3.0], [-4, -4, 9]), batch_of([4.0, 5.0], [-4, 9])])
    assert (joined.group_ids.tolist(), joined.rewards.tolist()) == ([0, 0, 1, 2, 3], [1, 2, 3, 4, 5])
    assert joined.states == [0, 1, 2, 0, 1]
    joined = join_batches([batch_of([1.0], [0], width=1), batch_of([2.0], [0], width=3)])
    assert joined.mask.tolist() == [[True, False, False], [True, True, True]]


def test_what_one_batch_lacks_becomes_0_or_nan_or_is_missing_after_joining() -> None:
    zeros = torch.zeros(1, 2)
    fields = {"final_values": torch.tensor([5.0]), "behaviour_log_probs": zeros, "old_log_probs": zeros}
    joined = join_batches([batch_of([1.0], [0], **fields), batch_of([2.0], [0])])
    assert joined.final_values.tolist() == [5, 0]
    assert joined.behaviour_log_probs.isnan().tolist() == [[False, False], [True, True]]
    assert joined.old_log_probs is None


def test_selected_rows_keep_all_their_fields() -> None:
    batch = batch_of([1.0, 2.0, 3.0], [0, 0, 1], values=torch.arange(6.0).view(3, 2))
    part = select_batch(batch, torch.tensor([2, 0]))
    assert (part.states, part.actions, part.rewards.tolist()) == ([2, 0], ["x", "x"], [3, 1])
    assert part.values.tolist() == [[4, 5], [0, 1]]


def gathered_by(*batches: ExperienceBatch) -> list[Any]:
    return on_ranks(len(batches), lambda engine: gather_rewards(batches[engine.rank], engine))


def test_ranks_with_different_fields_are_refused() -> None:
    message = r"Every rank's batch must hold the same fields; they hold \[\[\], \['values'\]\]"
    for error in gathered_by(batch_of([1.0], [0]), batch_of([1.0], [0], values=torch.ones(1, 2))):
        assert type(error) is ContractError
        assert re.search(message, str(error))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_missing_final_values_of_a_rank_are_gathered_as_zeros_in_the_dtype_of_values(dtype: torch.dtype) -> None:
    """Rewards may have another dtype than the critic's values."""
    batch = batch_of([1.0], [0], values=torch.ones(1, 2, dtype=dtype))
    assert batch.rewards.dtype == torch.float64
    other = dataclasses.replace(batch, final_values=torch.tensor([5.0], dtype=dtype))
    (gathered, own), _ = gathered_by(batch, other)
    assert (gathered.final_values.tolist(), gathered.final_values.dtype) == ([0.0, 5.0], dtype)
    assert own == slice(0, 1)


def test_rows_of_all_ranks_are_joined_in_rank_order_and_their_groups_stay_separate() -> None:
    """Rank 0 has three rows of two steps, and rank 1 two rows of one step. Both ranks have a group 0."""
    _, (gathered, own) = gathered_by(batch_of([3.0, 4.0, 5.0], [0, 0, 7]), batch_of([1.0, 2.0], [0, 0], width=1))
    assert (gathered.rewards.tolist(), gathered.group_ids.tolist()) == ([3, 4, 5, 1, 2], [0, 0, 1, 2, 2])
    assert (gathered.mask.tolist(), own) == ([[True, True]] * 3 + [[True, False]] * 2, slice(3, 5))


def test_the_batch_of_all_ranks_has_no_rows_of_one_rank_only() -> None:
    """Fields of this rank's two rows beside rewards of all four rows would contradict one another."""
    scores = torch.zeros(2, 2)
    names = ("old_log_probs", "behaviour_log_probs", "ref_log_probs", "entropy")
    batch = batch_of([1.0, 2.0], [0, 0], reward_weights={"part": 2.0}, **dict.fromkeys(names, scores))
    (gathered, _), _ = gathered_by(batch, batch)
    assert gathered.rewards.tolist() == [1, 2, 1, 2]
    assert (len(gathered.states), len(gathered.actions)) == (0, 0)
    assert [getattr(gathered, name) for name in names] == [None] * 4
    assert gathered.reward_weights == {"part": 2.0}


def test_rank_metrics_are_summed_except_averaged_means_and_local_seconds() -> None:
    own_metrics = {"rows/dropped": 2.0, "rewards/mean_drawn": 1.0, "time/sample": 3.0}
    others = {"rows/dropped": 5.0, "rewards/mean_drawn": 4.0, "time/sample": 9.0}
    (gathered, _), _ = gathered_by(*(batch_of([1.0], [0], metrics=metrics) for metrics in (own_metrics, others)))
    assert gathered.metrics == {"rows/dropped": 7.0, "rewards/mean_drawn": 2.5, "time/sample": 3.0}


# Scoring any policy: which method is called, how scores of several forwards are joined, and which scores are kept


def test_final_values_survive_scoring_in_parts() -> None:
    def score(states: Any, actions: Any, group_ids: Tensor) -> ActionScores:
        final = torch.tensor([5.0]) if states[0] == "truncated" else None
        zeros = torch.zeros(len(states), 1)
        return ActionScores(log_probs=zeros, mask=zeros == 0, values=zeros, final_values=final)

    states, sizes = ["truncated", "terminated"], PassSizes("scoring")
    scores = score_in_parts(score, states, [0, 0], torch.tensor([0, 1]), lambda _: [slice(0, 1), slice(1, 2)], sizes)
    assert scores.final_values.tolist() == [5, 0]


class TwoSteps(TablePolicy):
    def reference_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        return torch.tensor([[-1.0, -2.0]])


def test_reference_log_probs_are_padded_to_the_width_of_the_batch_and_never_cut() -> None:
    def scored(mask: list[bool]) -> list[list[float]]:
        batch = ExperienceBatch.from_rows(["a"], [0], [0.0], [0], mask=[mask])
        return ReferenceScorer(TwoSteps(), None, nullcontext)(
            batch, lambda _: [slice(0, 1)], PassSizes("scoring")
        ).tolist()

    assert scored([True, True, False]) == [[-1.0, -2.0, 0.0]]
    with pytest.raises(ContractError, match=r"TwoSteps.reference_log_prob.* at most \[1, 1\]; got \[1, 2\] bool"):
        scored([True])
    with pytest.raises(ContractError, match=r"must score every step that the policy decided, .*; got \[1, 2\] bool"):
        scored([True, True, True])


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ((), {"old_log_probs"}),
        (("entropy", "old_log_probs"), {"old_log_probs", "entropy"}),
        (("values", "state_keys"), {"old_log_probs", "values", "final_values"}),
    ],
)
def test_training_keeps_copies_of_the_scores_that_it_needs(needs, expected):
    weights = torch.ones(2, 1, requires_grad=True)
    view = weights.view(2, 1)
    scores = {"log_probs": view, "entropy": view, "values": view, "final_values": view[:, 0]}
    fields = batch_fields(ActionScores(mask=torch.ones(2, 1, dtype=torch.bool), **scores), needs)
    with torch.no_grad():
        weights.zero_()
    assert set(fields) == expected
    assert all(values.flatten().tolist() == [1, 1] and not values.requires_grad for values in fields.values())
    assert batch_fields(None, needs) == {}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers_of(index: torch.Tensor | slice, num_rows: int) -> list[int]:
    return torch.arange(num_rows)[index].tolist()


def updates(group_ids: list[int], batch_size: int | None, seed: int = 0) -> list[list[int]]:
    ids = torch.tensor(group_ids)
    return [numbers_of(index, len(ids)) for index in epoch_of_updates(ids, batch_size, generator(seed))]


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
    inner = index_into(len(numbers_of(outer, num_rows)))
    assert numbers_of(compose_index(outer, inner), num_rows) == torch.arange(num_rows)[outer][inner].tolist()


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

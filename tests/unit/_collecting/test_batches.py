"""Selecting rows of a batch, joining batches, and fields that only some batches or ranks have."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo import ContractError, ExperienceBatch
from grpo._collecting.batches import gather_rewards, join_batches, select_batch
from grpo._ranks.processes import SeveralProcesses


def batch_of(rewards: list[float], group_ids: list[int], width: int = 2, **others: Any) -> ExperienceBatch:
    mask = torch.ones(len(rewards), width, dtype=torch.bool)
    made = ExperienceBatch.from_rows(list(range(len(rewards))), ["x"] * len(rewards), rewards, group_ids, mask=mask)
    return dataclasses.replace(made, **others)


def test_equal_group_ids_of_two_batches_stay_separate_groups() -> None:
    joined = join_batches([batch_of([1.0, 2.0, 3.0], [-4, -4, 9]), batch_of([4.0, 5.0], [-4, 9])])
    assert joined.group_ids.tolist() == [0, 0, 1, 2, 3]
    assert joined.rewards.tolist() == [1, 2, 3, 4, 5]
    assert joined.states == [0, 1, 2, 0, 1]


def test_a_narrower_batch_is_padded_and_masked() -> None:
    joined = join_batches([batch_of([1.0], [0], width=1), batch_of([2.0], [0], width=3)])
    assert joined.mask.tolist() == [[True, False, False], [True, True, True]]


def test_missing_final_values_become_0_when_batches_are_joined() -> None:
    joined = join_batches([batch_of([1.0], [0], final_values=torch.tensor([5.0])), batch_of([2.0], [0])])
    assert joined.final_values.tolist() == [5, 0]


def test_missing_behaviour_log_probs_become_nan_when_batches_are_joined() -> None:
    joined = join_batches([batch_of([1.0], [0], behaviour_log_probs=torch.zeros(1, 2)), batch_of([2.0], [0])])
    assert joined.behaviour_log_probs.isnan().tolist() == [[False, False], [True, True]]


def test_a_field_that_one_batch_lacks_is_none_after_joining() -> None:
    joined = join_batches([batch_of([1.0], [0], old_log_probs=torch.zeros(1, 2)), batch_of([2.0], [0])])
    assert joined.old_log_probs is None


def test_selected_rows_keep_all_their_fields() -> None:
    batch = batch_of([1.0, 2.0, 3.0], [0, 0, 1], values=torch.arange(6.0).view(3, 2))
    part = select_batch(batch, torch.tensor([2, 0]))
    assert (part.states, part.actions) == ([2, 0], ["x", "x"])
    assert part.rewards.tolist() == [3, 1]
    assert part.values.tolist() == [[4, 5], [0, 1]]


class TwoRanks(SeveralProcesses):
    """This rank's rows, and the same rows on a second rank, changed by `differ`."""

    num_ranks = 2

    def __init__(self, differ: Callable[[Any], Any], rank: int = 0) -> None:
        self.differ, self.rank = differ, rank

    def gather_objects(self, value: Any) -> list[Any]:
        of_ranks = [value, self.differ(value)]
        return of_ranks[::-1] if self.rank else of_ranks


def changed(**fields: Any) -> Callable[[ExperienceBatch], ExperienceBatch]:
    return lambda own: dataclasses.replace(own, **fields)


def test_ranks_with_different_fields_are_refused() -> None:
    engine = TwoRanks(changed(values=torch.ones(1, 2)))
    with pytest.raises(
        ContractError, match=r"Every rank's batch must hold the same fields; they hold \[\[\], \['values'\]\]"
    ):
        gather_rewards(batch_of([1.0], [0]), engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_missing_final_values_of_a_rank_are_gathered_as_zeros_in_the_dtype_of_values(dtype: torch.dtype) -> None:
    """Rewards may have another dtype than the critic's values."""
    batch = batch_of([1.0], [0], values=torch.ones(1, 2, dtype=dtype))
    assert batch.rewards.dtype == torch.float64
    gathered, own = gather_rewards(batch, TwoRanks(changed(final_values=torch.tensor([5.0], dtype=dtype))))
    assert (gathered.final_values.tolist(), gathered.final_values.dtype) == ([0.0, 5.0], dtype)
    assert own == slice(0, 1)


def test_rows_of_all_ranks_are_joined_in_rank_order_and_their_groups_stay_separate() -> None:
    """Rank 0 has three rows of two steps, and rank 1, which calls, two rows of one step. All ranks have a group 0."""
    other = batch_of([3.0, 4.0, 5.0], [0, 0, 7])
    gathered, own = gather_rewards(batch_of([1.0, 2.0], [0, 0], width=1), TwoRanks(lambda own: other, rank=1))
    assert gathered.rewards.tolist() == [3, 4, 5, 1, 2]
    assert gathered.group_ids.tolist() == [0, 0, 1, 2, 2]
    assert gathered.mask.tolist() == [[True, True]] * 3 + [[True, False]] * 2
    assert own == slice(3, 5)


def test_the_batch_of_all_ranks_has_no_rows_of_one_rank_only() -> None:
    """Fields of this rank's two rows beside rewards of all four rows would contradict one another."""
    scores = torch.zeros(2, 2)
    names = ("old_log_probs", "behaviour_log_probs", "ref_log_probs", "entropy")
    batch = batch_of([1.0, 2.0], [0, 0], reward_weights={"part": 2.0}, **dict.fromkeys(names, scores))
    gathered, _ = gather_rewards(batch, TwoRanks(lambda own: own))
    assert gathered.rewards.tolist() == [1, 2, 1, 2]
    assert (len(gathered.states), len(gathered.actions)) == (0, 0)
    assert [getattr(gathered, name) for name in names] == [None] * 4
    assert gathered.reward_weights == {"part": 2.0}


def test_rank_metrics_are_summed_except_averaged_means_and_local_seconds() -> None:
    own_metrics = {"rows/dropped": 2.0, "rewards/mean_drawn": 1.0, "time/sample": 3.0}
    other_metrics = {"rows/dropped": 5.0, "rewards/mean_drawn": 4.0, "time/sample": 9.0}
    engine = TwoRanks(changed(metrics=other_metrics))
    gathered, _ = gather_rewards(batch_of([1.0], [0], metrics=own_metrics), engine)
    assert gathered.metrics == {"rows/dropped": 7.0, "rewards/mean_drawn": 2.5, "time/sample": 3.0}


def test_state_keys_that_are_not_integers_per_step_are_refused(subtests: pytest.Subtests) -> None:
    for keys in [[0, 1], [[0.5, 1.0]], [[[0]]]]:
        with subtests.test(keys=keys), pytest.raises(ContractError, match=r"state_keys must be integers \[N, T\]"):
            ExperienceBatch.from_rows([0], ["x"], [1.0], [0], mask=torch.ones(1, 2, dtype=torch.bool), state_keys=keys)

"""Parts of a batch, several as one, and what is there in one and missing in another."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import ConfigError, ContractError, ExperienceBatch
from grpo._collecting.batches import gather_rewards, join_batches, select_batch


def batch_of(rewards: list[float], group_ids: list[int], width: int = 2, **others: Any) -> ExperienceBatch:
    mask = torch.ones(len(rewards), width, dtype=torch.bool)
    made = ExperienceBatch.from_rows(list(range(len(rewards))), ["x"] * len(rewards), rewards, group_ids, mask=mask)
    return dataclasses.replace(made, **others)


def test_groups_of_two_batches_stay_apart_whatever_their_numbers() -> None:
    joined = join_batches([batch_of([1.0, 2.0, 3.0], [-4, -4, 9]), batch_of([4.0, 5.0], [-4, 9])])
    assert joined.group_ids.tolist() == [0, 0, 1, 2, 3]
    assert joined.rewards.tolist() == [1, 2, 3, 4, 5]
    assert joined.states == [0, 1, 2, 0, 1]


def test_a_narrower_batch_is_padded_and_masked() -> None:
    joined = join_batches([batch_of([1.0], [0], width=1), batch_of([2.0], [0], width=3)])
    assert joined.mask.tolist() == [[True, False, False], [True, True, True]]


def test_final_values_that_are_missing_are_those_of_rows_that_terminated() -> None:
    joined = join_batches([batch_of([1.0], [0], final_values=torch.tensor([5.0])), batch_of([2.0], [0])])
    assert joined.final_values is not None
    assert joined.final_values.tolist() == [5, 0]


def test_behaviour_log_probs_that_are_missing_are_unscored() -> None:
    joined = join_batches([batch_of([1.0], [0], behaviour_log_probs=torch.zeros(1, 2)), batch_of([2.0], [0])])
    assert joined.behaviour_log_probs is not None
    assert joined.behaviour_log_probs.isnan().tolist() == [[False, False], [True, True]]


def test_what_has_to_be_there_for_all_rows_is_there_for_none() -> None:
    joined = join_batches([batch_of([1.0], [0], old_log_probs=torch.zeros(1, 2)), batch_of([2.0], [0])])
    assert joined.old_log_probs is None


def test_selected_rows_take_everything_of_theirs_along() -> None:
    batch = batch_of([1.0, 2.0, 3.0], [0, 0, 1], values=torch.arange(6.0).view(3, 2))
    part = select_batch(batch, torch.tensor([2, 0]))
    assert (part.states, part.actions) == ([2, 0], ["x", "x"])
    assert part.rewards.tolist() == [3, 1]
    assert part.values is not None
    assert part.values.tolist() == [[4, 5], [0, 1]]


class TwoRanks:
    """This rank's rows, and the same rows on a second rank, changed by `differ`."""

    rank, num_ranks = 0, 2

    def __init__(self, differ: Callable[[Any], Any]) -> None:
        self.differ = differ

    def sum(self, values: Tensor) -> Tensor:
        return 2 * values

    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        return torch.cat([rows, rows]), 0

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, self.differ(value)]


def test_ranks_that_hold_different_fields_are_told_so() -> None:
    engine = TwoRanks(lambda own: (own[0], ["values"], *own[2:]))
    with pytest.raises(
        ContractError, match=r"Every rank's batch must hold the same fields; they hold \[\[\], \['values'\]\]"
    ):
        gather_rewards(batch_of([1.0], [0]), engine)


def test_final_values_that_one_rank_lacks_are_zeros_like_its_values() -> None:
    """All gathered tensors have one dtype, and rewards may have another dtype than the critic's values."""
    batch = batch_of([1.0], [0], values=torch.ones(1, 2))
    assert batch.rewards.dtype == torch.float64
    gathered, own = gather_rewards(batch, TwoRanks(lambda own: (*own[:2], True, *own[3:])))
    assert gathered.final_values is not None
    assert (gathered.final_values.tolist(), gathered.final_values.dtype) == ([0.0, 0.0], torch.float32)
    assert own == slice(0, 1)


def test_metrics_are_added_up_over_ranks_but_means_are_averaged_and_seconds_are_this_ranks() -> None:
    own_metrics = {"rows/dropped": 2.0, "rewards/mean_drawn": 1.0, "time/sample": 3.0}
    other_metrics = {"rows/dropped": 5.0, "rewards/mean_drawn": 4.0, "time/sample": 9.0}
    engine = TwoRanks(lambda own: (*own[:3], other_metrics))
    gathered, _ = gather_rewards(batch_of([1.0], [0], metrics=own_metrics), engine)
    assert gathered.metrics == {"rows/dropped": 7.0, "rewards/mean_drawn": 2.5, "time/sample": 3.0}


def test_keys_of_states_are_integers_per_step(subtests: pytest.Subtests) -> None:
    for keys in [[0, 1], [[0.5, 1.0]], [[[0]]]]:
        with subtests.test(keys=keys), pytest.raises(ContractError, match=r"state_keys must be integers \[N, T\]"):
            ExperienceBatch.from_rows([0], ["x"], [1.0], [0], mask=torch.ones(1, 2, dtype=torch.bool), state_keys=keys)


def test_lists_will_do_for_a_mask_and_for_keys() -> None:
    batch = ExperienceBatch.from_rows([0], ["x"], [1.0], [0], mask=[[True, False]], state_keys=[[3, 4]])
    assert batch.mask.tolist() == [[True, False]]
    assert batch.state_keys is not None
    assert batch.state_keys.tolist() == [[3, 4]]


def test_an_exact_divergence_needs_no_reference_policy() -> None:
    from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig
    from tests.support.policies import TablePolicy

    with pytest.raises(ConfigError, match=r"would ignore reference_policy"):
        GRPOTrainer(
            config=GRPOConfig(objective=ObjectiveConfig(kl_estimator="exact", kl_coef=0.1)),
            policy=TablePolicy(),
            reward_model=lambda states, actions: [0.0] * len(states),
            reference_policy=TablePolicy(),
        )

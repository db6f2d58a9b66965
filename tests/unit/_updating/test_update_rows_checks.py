"""Updates on one of two ranks, and the checks of the scores that an update reads."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo import ActionScores, ContractError, ExperienceBatch, ObjectiveConfig
from grpo._ranks.processes import SeveralProcesses
from grpo._updating.update import Update
from grpo._updating.update_rows import UpdateRows
from tests.support.policies import RowScoring, TablePolicy
from tests.support.trainers import ROLLOUTS, by_hand

# Several ranks


class OtherRank(SeveralProcesses):
    """Beside a rank that plans so many updates per epoch, and has so many live rows in each."""

    num_ranks = 2

    def __init__(self, num_updates: int, num_live: int) -> None:
        self.num_updates, self.num_live = num_updates, num_live

    def gather_objects(self, value: Any) -> list[Any]:
        """Its rewards are those of this rank. It plans one epoch, and counts live rows, all rows and demonstrations of each
        update."""
        return [
            value,
            value if isinstance(value, ExperienceBatch) else [[[self.num_live, 2.0, 0.0]] * self.num_updates],
        ]


def test_a_rank_takes_part_in_every_update_in_which_another_rank_has_a_live_row(subtests: pytest.Subtests) -> None:
    """Three groups of two rows in updates of one group; only the second group is live on this rank."""
    rewards, groups = [1.0, 1.0, 0.0, 2.0, 5.0, 5.0], [0, 0, 1, 1, 2, 2]
    for num_updates, num_live, sizes, num_dead in [
        (1, 0, [2], 2),  # the other rank has fewer updates, and no live row
        (5, 0, [2], 4),
        (3, 1, [2, 2, 2], 0),
        (5, 1, [2, 2, 2, 0, 0], 0),  # without rows, this rank waits for the other one
    ]:
        with subtests.test(num_updates=num_updates, num_live=num_live):
            trainer, _ = by_hand(policy=TablePolicy(states=[0, 1, 2]), config={"batch_size": 2})
            trainer.updates.context.engine = OtherRank(num_updates, num_live)
            rows = trainer.prepared(ExperienceBatch.from_rows(groups, [0] * 6, rewards, groups))
            assert [len(torch.arange(6)[update.selected]) for update in rows.updates()] == sizes
            assert (rows.num_planned, rows.num_dead) == (max(num_updates, 3), num_dead)


def test_rows_that_are_restored_keep_their_plan_without_a_meeting() -> None:
    """A rank may be put back to its last stop point while the others go on."""
    trainer, _ = by_hand(policy=TablePolicy(states=[0, 1, 2]), config={"batch_size": 2})
    trainer.updates.context.engine = OtherRank(5, 1)
    rows = trainer.prepared(ExperienceBatch.from_rows([0, 0, 1, 1], [0] * 4, [0.0, 1.0, 0.0, 2.0], [0, 0, 1, 1]))
    next(iter(rows.updates()))
    state = rows.state_dict()

    class Gone(OtherRank):
        def gather_objects(self, value: Any) -> list[Any]:
            raise AssertionError("nobody comes")

    trainer.updates.context.engine = Gone(5, 1)
    again = UpdateRows.from_state_dict(state, trainer.updates.context)
    assert [len(torch.arange(4)[update.selected]) for update in again.updates()] == [2, 0, 0, 0]
    assert again.num_planned == 5


# What is checked of the scores


class Changing(RowScoring):
    """Its scores in updates are changed by a function."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        scores = super().score_actions(states, actions)
        return self.change(scores) if self.training else scores


def test_log_probs_above_0_are_refused_in_an_update_by_a_surrogate_of_probabilities() -> None:
    policy = Changing(lambda scores: replace(scores, log_probs=scores.log_probs + 5.0))
    trainer, _ = by_hand(policy=policy, config={"objective": ObjectiveConfig(surrogate="dppo")})
    (update,) = trainer.prepared(ExperienceBatch.from_rows(**ROLLOUTS)).updates()
    with pytest.raises(ContractError, match=r"surrogate=Dppo\(.*needs log-probs of probabilities"):
        read_all(trainer, update)


def read_all(trainer: Any, update: Update) -> None:
    """Read the inputs of every micro-batch, with the policy in train()."""
    trainer.policy.train()
    for micro in update.micro_batches():
        update.scored(micro)


def warnings_of_two_iterations(policy: Any, **settings: Any) -> list[str]:
    """The warnings of two iterations of two updates."""
    trainer, _ = by_hand(policy=policy, config={"num_epochs_per_update": 2, **settings})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            rows = trainer.prepared(ExperienceBatch.from_rows(**ROLLOUTS))
            trainer.policy.eval()
            for update in rows.updates():
                read_all(trainer, update)
            trainer.policy.eval()
    return [str(warning.message) for warning in caught]


def test_log_probs_that_differ_in_train_mode_are_warned_of_once(subtests: pytest.Subtests) -> None:
    """Rounding in half precision explains 0.05. Later updates are expected to differ."""
    for change, num_warnings in [(0.04, 0), (0.06, 1), (-0.06, 1)]:
        with subtests.test(change=change):
            shifted = Changing(lambda scores, change=change: replace(scores, log_probs=scores.log_probs + change))
            messages = warnings_of_two_iterations(shifted)
            assert len(messages) == num_warnings
            text = f"the same in train() and eval(); they differ by up to {abs(change):.2g}"
            assert all(text in message for message in messages)


def test_the_last_micro_batch_of_the_first_update_is_compared_too() -> None:
    calls: list[int] = []

    def change(scores: ActionScores) -> ActionScores:
        calls.append(len(scores.log_probs))
        return replace(scores, log_probs=scores.log_probs + 0.1 * (len(calls) == 2))

    (message,) = warnings_of_two_iterations(Changing(change), micro_batch_size=2)
    assert calls[:2] == [2, 2]
    assert "differ by up to 0.1," in message


def test_the_warning_names_dropout_where_there_is_any() -> None:
    shifted = Changing(lambda scores: replace(scores, log_probs=scores.log_probs + 1))
    assert "Set dropout to 0, use no batch statistics, and let" in warnings_of_two_iterations(shifted)[0]
    shifted.net = torch.nn.Sequential(torch.nn.Dropout(0.0), torch.nn.Dropout(0.1))
    assert "set it to 0 (net.1.p=0.1)" in warnings_of_two_iterations(shifted)[0]

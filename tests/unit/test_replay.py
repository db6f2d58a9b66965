"""Rows of recent iterations are used again, with the advantages and old log-probs they had, until they are too old."""

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer, ObjectiveInputs, ObjectiveOutput, grpo_objective
from grpo.objective_config import ObjectiveConfig
from tests.policies import RowScoring, TablePolicy


def seen_by(trainer_settings: dict[str, Any], num_steps: int) -> tuple[list[ObjectiveInputs], TablePolicy]:
    """What the loss was given at each of `num_steps` updates of the rows (a: 0, 1) and (b: 1, 0)."""
    seen: list[ObjectiveInputs] = []
    policy = TablePolicy(script=[[0, 1], [1, 0]])

    def objective(inputs: ObjectiveInputs) -> ObjectiveOutput:
        seen.append(inputs)
        return grpo_objective(inputs, ObjectiveConfig())

    count = iter(range(100))
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=2, max_grad_norm=None, **trainer_settings),
        policy=policy,
        reward_model=lambda states, actions: [1.0, 0.0, 0.0, float(1 + next(count))],
        optimizer=torch.optim.SGD(policy.parameters(), lr=1.0),
        objective=objective,
    )
    for _ in range(num_steps):
        trainer.step(["a", "b"])
    return seen, policy


def test_rows_are_used_until_they_are_older_than_the_limit() -> None:
    seen, _ = seen_by({"replay_iterations": 2}, num_steps=5)
    assert [len(inputs.mask) for inputs in seen] == [4, 8, 12, 12, 12]
    # newest first: the second group's advantage grows by 1/2 with each iteration
    assert seen[4].advantages[3::4].tolist() == pytest.approx([2.5, 2.0, 1.5])


def test_without_replay_every_row_is_used_once() -> None:
    seen, _ = seen_by({}, num_steps=3)
    assert [len(inputs.mask) for inputs in seen] == [4, 4, 4]
    assert all(inputs.old_log_probs is None for inputs in seen)


def test_a_replayed_rows_ratio_is_to_the_policy_that_scored_it() -> None:
    seen, _ = seen_by({"replay_iterations": 1}, num_steps=2)
    old = seen[1].old_log_probs
    assert old is not None
    new_rows, replayed = old[:4], old[4:]
    assert torch.equal(new_rows, seen[1].log_probs[:4])  # the ratio of new rows is 1
    assert torch.equal(replayed, seen[0].log_probs)  # that of the others has moved on with the policy
    assert not torch.equal(replayed, seen[1].log_probs[4:])


def test_groups_of_different_iterations_stay_apart() -> None:
    policy = TablePolicy(script=[[0, 1], [1, 0]])
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=2, replay_iterations=1, objective=ObjectiveConfig(aggregation="group_mean")),
        policy=policy,
        reward_model=lambda states, actions: [1.0, 0.0, 0.0, 1.0],
    )
    trainer.step(["a", "b"])
    assert trainer.step(["a", "b"])["rows/replayed"] == 4
    (recent,) = trainer.recent.state_dict()["rows"]
    assert recent["batch"]["group_ids"].tolist() == [0, 0, 1, 1]


def test_ragged_rows_are_padded_to_the_widest_and_rewards_per_step_stay_with_them() -> None:
    torch.manual_seed(0)
    policy = RowScoring(max_steps=4)
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=2, replay_iterations=1, max_grad_norm=None),
        policy=policy,
        reward_model=lambda states, actions: [0.0] * len(states),
        optimizer=torch.optim.SGD(policy.parameters(), lr=0.0),
    )
    short = ExperienceBatch.from_rows([0, 0], [(1, 0), (2,)], [[1.0, 0.0], [0.5, 0.0]], [0, 0], mask=mask_of([2, 1]))
    long = ExperienceBatch.from_rows(
        [1, 1], [(1, 2, 1, 0), (0,)], [[1.0, 0.5, 0.0, 0.0], [2.0, 0, 0, 0]], [0, 0], mask=mask_of([4, 1])
    )
    trainer.update(short)
    metrics = trainer.update(long)
    assert metrics["rows/replayed"] == 2
    assert metrics["steps/max"] == 4  # what is reported is of the new rows
    assert sum(policy.rows_scored[-1:]) == 4  # both batches in one forward


def mask_of(lengths: list[int]) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)

"""Rows of recent iterations are used again, with the advantages and old log-probs they had, until they are too old."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import (
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    ObjectiveConfig,
    ObjectiveInputs,
    ObjectiveOutput,
    grpo_objective,
)
from grpo._training.training_rows import ReplayBuffer, TrainingRows
from tests.support.policies import RecordingSGD, RowScoring, TablePolicy


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
    (recent,) = trainer.replay.state_dict()["rows"]
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


def rows_with(advantages: list[Any], lengths: list[int]) -> TrainingRows:
    """Rows of so many steps, all of one group, with these advantages per row or per step."""
    batch = ExperienceBatch.from_rows(
        [0] * len(lengths), [0] * len(lengths), [0.0] * len(lengths), [0] * len(lengths), mask=mask_of(lengths)
    )
    return TrainingRows(batch=batch, advantages=torch.tensor(advantages))


PER_ROW = rows_with([2.0, -3.0], lengths=[1, 2])
PER_STEP = rows_with([[1.0, 4.0, 5.0], [6.0, 0.0, 0.0]], lengths=[3, 1])
OF_TWO_ROWS = [[2.0, 2.0, 0.0], [-3.0, -3.0, 0.0]]
OF_STEPS = [[1.0, 4.0, 5.0], [6.0, 0.0, 0.0]]


def test_advantages_per_row_and_per_step_are_joined(subtests: pytest.Subtests) -> None:
    """An advantage of a row is that of each of its steps, up to the width of its own batch; beyond, there is no step."""
    for earlier, new, expected in [
        (PER_ROW, PER_STEP, [*OF_STEPS, *OF_TWO_ROWS]),
        (PER_STEP, PER_ROW, [*OF_TWO_ROWS, *OF_STEPS]),
        (PER_STEP, PER_STEP, [*OF_STEPS, *OF_STEPS]),
        (PER_ROW, PER_ROW, [2.0, -3.0, 2.0, -3.0]),
    ]:
        with subtests.test(earlier=earlier, new=new, expected=expected):
            buffer = ReplayBuffer(1)
            assert buffer.join(earlier) is earlier
            joined = buffer.join(new)
            assert joined.advantages.tolist() == expected
            assert joined.num_replayed == 2
            assert joined.batch.mask.shape == (4, max(earlier.batch.mask.shape[1], new.batch.mask.shape[1]))


def test_returns_are_joined_where_every_iteration_has_them() -> None:
    """A critic's targets, padded to the widest; without those of one iteration there is nothing to train a critic by."""
    with_returns = replace(PER_ROW, returns=torch.tensor([[1.0, 0.0], [2.0, 3.0]]))
    also = replace(PER_STEP, returns=torch.tensor([[4.0, 5.0, 6.0], [7.0, 0.0, 0.0]]))
    buffer = ReplayBuffer(1)
    buffer.join(with_returns)
    joined = buffer.join(also)
    assert joined.returns is not None
    assert joined.returns.tolist() == [[4.0, 5.0, 6.0], [7.0, 0.0, 0.0], [1.0, 0.0, 0.0], [2.0, 3.0, 0.0]]
    buffer.join(PER_STEP)
    assert buffer.join(also).returns is None


def test_one_update_of_rows_with_advantages_per_row_and_rows_with_advantages_per_step() -> None:
    """Advantages 8, 0, 0, 0 per row, then the same per step: at rate 0 the gradient is that of either alone."""
    values = torch.tensor([8.0, 0.0, 0.0, 0.0])
    shapes = iter([values, values.unsqueeze(1)])
    policy = TablePolicy(script=[[0, 1], [1, 0]])
    optimizer = RecordingSGD(policy, lr=0.0)
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=2, replay_iterations=1, max_grad_norm=None),
        policy=policy,
        reward_model=lambda states, actions: [0.0] * len(states),
        optimizer=optimizer,
        advantages=lambda batch: next(shapes),
    )
    metrics = [trainer.step(["a", "b"]) for _ in range(2)]
    assert [each["rows/skipped_zero_advantage"] for each in metrics] == [3.0, 6.0]
    assert optimizer.gradients[0].tolist() == [-1.0, 1.0, 0.0, 0.0]  # -8 (e0 - p) / 4
    assert torch.equal(optimizer.gradients[1], optimizer.gradients[0])


def test_kept_rows_are_saved_and_restored() -> None:
    buffer, fresh = ReplayBuffer(2), ReplayBuffer(2)
    for rows in (PER_ROW, PER_STEP):
        buffer.join(rows)
    fresh.load_state_dict(buffer.state_dict())
    new = rows_with([[9.0]], lengths=[1])
    ours, theirs = buffer.join(new), fresh.join(new)
    assert theirs.num_replayed == 4
    for name in ("group_ids", "rewards", "mask"):
        assert torch.equal(getattr(theirs.batch, name), getattr(ours.batch, name)), name
    assert torch.equal(theirs.advantages, ours.advantages)

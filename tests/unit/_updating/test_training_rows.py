"""The rows of an iteration: their advantages, replayed rows of recent iterations, and rows split into steps."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import (
    AdvantageConfig,
    AdvantageEstimator,
    ContractError,
    ExperienceBatch,
    ObjectiveConfig,
    ObjectiveInputs,
    ObjectiveOutput,
    grpo_objective,
)
from grpo._ranks.processes import SeveralProcesses
from grpo._updating.training_rows import ReplayBuffer, TrainingRows, split_steps, with_advantages
from grpo.engine import OneProcess
from tests.support.policies import RecordingSGD, RowScoring, TablePolicy
from tests.support.trainers import SCRIPT, by_hand


def seen_by(num_steps: int, **settings: Any) -> list[ObjectiveInputs]:
    """What the loss was given at each of `num_steps` updates of the rows (a: 0, 1) and (b: 1, 0)."""
    seen, count = [], itertools.count(1)

    def objective(inputs: ObjectiveInputs) -> ObjectiveOutput:
        seen.append(inputs)
        return grpo_objective(inputs, ObjectiveConfig())

    rewards = lambda states, actions: [1.0, 0.0, 0.0, float(next(count))]  # noqa: E731
    trainer, _ = by_hand(rewards=rewards, config=settings, objective=objective)
    for _ in range(num_steps):
        trainer.step(["a", "b"])
    return seen


@pytest.mark.parametrize(("limit", "num_rows"), [(2, [4, 8, 12, 12, 12]), (0, [4] * 5)])
def test_rows_are_used_until_they_are_older_than_the_limit(limit, num_rows) -> None:
    seen = seen_by(5, replay_iterations=limit)
    assert [len(inputs.mask) for inputs in seen] == num_rows
    # newest first: the second group's advantage grows by 1/2 with each iteration
    assert seen[4].advantages[3::4].tolist() == pytest.approx([2.5, 2.0, 1.5][: limit + 1])
    assert all((inputs.old_log_probs is None) == (len(inputs.mask) == 4) for inputs in seen)


def test_the_ratio_of_a_replayed_row_is_to_the_policy_that_scored_it() -> None:
    seen = seen_by(2, replay_iterations=1)
    old = seen[1].old_log_probs
    new_rows, replayed = old[:4], old[4:]
    assert torch.equal(new_rows, seen[1].log_probs[:4])  # the ratio of new rows is 1
    assert torch.equal(replayed, seen[0].log_probs)  # that of the others has moved on with the policy
    assert not torch.equal(replayed, seen[1].log_probs[4:])


def test_groups_of_different_iterations_stay_apart() -> None:
    trainer, _ = by_hand(config={"replay_iterations": 1, "objective": ObjectiveConfig(aggregation="group_mean")})
    trainer.step(["a", "b"])
    assert trainer.step(["a", "b"])["rows/replayed"] == 4
    (recent,) = trainer.updates.replay.state_dict()["rows"]
    assert recent["batch"]["group_ids"].tolist() == [0, 0, 1, 1]


def test_ragged_rows_are_padded_to_the_widest_and_rewards_per_step_stay_with_them() -> None:
    trainer, policy = by_hand(policy=RowScoring(max_steps=4), config={"replay_iterations": 1})
    short = ExperienceBatch.from_rows([0, 0], [(1, 0), (2,)], [[1.0, 0.0], [0.5, 0.0]], [0, 0], mask=mask_of([2, 1]))
    rewards = [[1.0, 0.5, 0.0, 0.0], [2.0, 0, 0, 0]]
    long = ExperienceBatch.from_rows([1, 1], [(1, 2, 1, 0), (0,)], rewards, [0, 0], mask=mask_of([4, 1]))
    trainer.update(short)
    metrics = trainer.update(long)
    assert (metrics["rows/replayed"], metrics["steps/max"]) == (2, 4)  # what is reported is of the new rows
    assert policy.rows_scored[-1] == 4  # both batches in one forward


def mask_of(lengths: list[int]) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


def rows_with(advantages: list[Any], lengths: list[int]) -> TrainingRows:
    """Rows of so many steps, all of one group, with these advantages per row or per step."""
    zeros = [0] * len(lengths)
    batch = ExperienceBatch.from_rows(zeros, zeros, [0.0] * len(lengths), zeros, mask=mask_of(lengths))
    return TrainingRows(batch=batch, advantages=torch.tensor(advantages))


PER_ROW = rows_with([2.0, -3.0], lengths=[1, 2])
PER_STEP = rows_with([[1.0, 4.0, 5.0], [6.0, 0.0, 0.0]], lengths=[3, 1])
OF_TWO_ROWS = [[2.0, 2.0, 0.0], [-3.0, -3.0, 0.0]]
OF_STEPS = [[1.0, 4.0, 5.0], [6.0, 0.0, 0.0]]


@pytest.mark.parametrize(("earlier", "new", "expected"), [
    (PER_ROW, PER_STEP, [*OF_STEPS, *OF_TWO_ROWS]), (PER_STEP, PER_ROW, [*OF_TWO_ROWS, *OF_STEPS]),
    (PER_STEP, PER_STEP, [*OF_STEPS, *OF_STEPS]), (PER_ROW, PER_ROW, [2.0, -3.0, 2.0, -3.0]),
])  # fmt: skip
def test_advantages_per_row_and_per_step_can_be_joined(earlier, new, expected):
    """An advantage of a row is that of each of its steps, up to the width of its own batch; beyond, there is no step."""
    buffer = ReplayBuffer(1)
    assert buffer.join(earlier) is earlier
    joined = buffer.join(new)
    assert (joined.advantages.tolist(), joined.num_replayed) == (expected, 2)
    assert joined.batch.mask.shape == (4, max(earlier.batch.mask.shape[1], new.batch.mask.shape[1]))


def test_returns_are_joined_only_if_every_iteration_has_them() -> None:
    """A critic's targets, padded to the widest; without those of one iteration there is nothing to train a critic by."""
    with_returns = replace(PER_ROW, returns=torch.tensor([[1.0, 0.0], [2.0, 3.0]]))
    also = replace(PER_STEP, returns=torch.tensor([[4.0, 5.0, 6.0], [7.0, 0.0, 0.0]]))
    buffer = ReplayBuffer(1)
    buffer.join(with_returns)
    assert buffer.join(also).returns.tolist() == [[4.0, 5.0, 6.0], [7.0, 0.0, 0.0], [1.0, 0.0, 0.0], [2.0, 3.0, 0.0]]
    buffer.join(PER_STEP)
    assert buffer.join(also).returns is None


def test_rows_with_advantages_per_row_and_per_step_share_one_correct_update() -> None:
    """Advantages 8, 0, 0, 0 per row, then the same per step: at rate 0 the gradient is that of either alone."""
    values = torch.tensor([8.0, 0.0, 0.0, 0.0])
    shapes = iter([values, values.unsqueeze(1)])
    policy = TablePolicy(script=SCRIPT)
    optimizer = RecordingSGD(policy, lr=0.0)
    options = {"optimizer": optimizer, "advantages": lambda batch: next(shapes)}
    trainer, _ = by_hand(policy=policy, config={"replay_iterations": 1}, **options)
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


def test_reference_log_probs_of_replayed_rows_are_forgotten_on_request() -> None:
    buffer = ReplayBuffer(2)
    scored = replace(PER_ROW, batch=replace(PER_ROW.batch, ref_log_probs=torch.zeros(2, 2)))
    for rows in (scored, scored):
        buffer.join(rows)
    buffer.forget_reference()
    for _ in range(2):  # as many iterations are kept as before
        assert buffer.join(scored).num_replayed == 4
    assert scored.batch.ref_log_probs is not None


class TwoRanks(SeveralProcesses):
    """This rank comes second. The first rank has one row, of one step and reward 6."""

    rank, num_ranks = 1, 2

    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """Advantages of the user's own: the first rank has 6."""
        return torch.cat([rows.new_full((1,), 6.0), rows]), 1

    def gather_objects(self, value: Any) -> list[Any]:
        assert len(value.states) == len(value.actions) == 0  # nothing that advantages do not read
        return [replace(ExperienceBatch.from_rows([0], [0], [6.0], [0]), states=(), actions=()), value]


def own_batch(rewards: Any) -> ExperienceBatch:
    return ExperienceBatch.from_rows([0, 0], [0, 0], rewards, [0, 0], mask=mask_of([2, 1]))


def test_the_estimator_sees_the_rewards_of_all_ranks() -> None:
    """The mean of 6, 1 and 2 is 3; this rank's rows are the last two."""
    estimator = AdvantageEstimator(AdvantageConfig(baseline="global_mean"))
    rows, all_ranks = with_advantages(own_batch([1.0, 2.0]), estimator, TwoRanks())
    assert (all_ranks.advantages.tolist(), rows.advantages.tolist()) == ([3.0, -2.0, -1.0], [-2.0, -1.0])
    assert rows.returns is None
    assert (rows.batch.num_rows, all_ranks.batch.num_rows) == (2, 3)


def test_user_advantages_see_only_the_rows_of_their_rank() -> None:
    seen: list[ExperienceBatch] = []

    def advantages(batch: ExperienceBatch) -> Tensor:
        seen.append(batch)
        return torch.tensor([0.5, -0.5])

    batch = own_batch([1.0, 2.0])
    rows, all_ranks = with_advantages(batch, advantages, TwoRanks())
    assert (seen, rows.advantages.tolist()) == ([batch], [0.5, -0.5])
    assert all_ranks.advantages.tolist() == [6.0, 0.5, -0.5]


def test_the_returns_of_a_critic_are_those_of_this_ranks_rows() -> None:
    """Lambda 1 and no discount: the return of a step is the sum of the rewards from there on."""
    estimator = AdvantageEstimator(AdvantageConfig(credit="gae", gae_lambda=1.0))
    batch = replace(own_batch([[1.0, 2.0], [4.0, 0.0]]), values=torch.zeros(2, 2))
    rows, all_ranks = with_advantages(batch, estimator, OneProcess())
    assert rows.returns.tolist() == [[3.0, 2.0], [4.0, 0.0]]
    assert rows.advantages.shape == all_ranks.advantages.shape == (2, 2)


class Splitting(TablePolicy):
    """`SplitsSteps`: states and actions of steps are numbered."""

    num_missing = 0

    def split_steps(self, states: Any, actions: Any) -> tuple[list[int], list[int]]:
        return [10, 11, 12], [20, 21, 22][self.num_missing :]


def test_split_steps_keep_all_their_fields() -> None:
    """Rows of two steps and of one: masked values are left out."""
    names = ["old_log_probs", "behaviour_log_probs", "ref_log_probs", "entropy", "values"]
    known = {name: torch.tensor([[1.0, 2.0], [3.0, 99.0]]) + place for place, name in enumerate(names)}
    batch = replace(own_batch([5.0, 6.0]), **known, reward_components={"x": torch.zeros(2)}, final_values=torch.ones(2))
    returns = torch.tensor([[7.0, 8.0], [9.0, 99.0]])
    split = split_steps(TrainingRows(batch=batch, advantages=torch.tensor([0.5, -1.5]), returns=returns), Splitting())
    assert (split.batch.states, split.batch.actions) == ([10, 11, 12], [20, 21, 22])
    assert (split.advantages.tolist(), split.returns.tolist()) == ([0.5, 0.5, -1.5], [[7.0], [8.0], [9.0]])
    for place, name in enumerate(known):
        assert getattr(split.batch, name).tolist() == [[1.0 + place], [2.0 + place], [3.0 + place]], name
    assert (split.batch.mask.tolist(), split.batch.group_ids.tolist()) == ([[True]] * 3, [0, 1, 2])
    assert (split.batch.rewards.tolist(), split.batch.reward_components) == ([0.0] * 3, {})
    assert split.batch.final_values is None


def test_advantages_of_steps_stay_with_their_steps() -> None:
    rows = TrainingRows(batch=own_batch([5.0, 6.0]), advantages=torch.tensor([[1.0, 2.0], [3.0, 99.0]]))
    split = split_steps(rows, Splitting())
    assert (split.advantages.tolist(), split.returns, split.batch.old_log_probs) == ([1.0, 2.0, 3.0], None, None)


def test_splitting_into_a_wrong_number_of_steps_is_refused() -> None:
    rows = TrainingRows(batch=own_batch([5.0, 6.0]), advantages=torch.zeros(2))
    policy = Splitting()
    policy.num_missing = 1
    message = r"Splitting\.split_steps must return one row per valid step = 3; got 3 states and 2 actions"
    with pytest.raises(ContractError, match=message):
        split_steps(rows, policy)

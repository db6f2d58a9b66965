"""The rows of an iteration and of its updates: advantages, replayed rows, rows split into steps, skipped rows, selections."""

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import (
    ActionScores,
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
from grpo._running.in_progress import IterationInProgress
from grpo._updating.training_rows import ReplayBuffer, TrainingRows, split_steps, with_advantages
from grpo._updating.update import Update
from grpo._updating.update_rows import UpdateRows
from grpo.surrogates import Steps
from tests.support.imitated_ranks import on_ranks
from tests.support.policies import Changing, Critic, Planning, RecordingSGD, RowScoring, TablePolicy, flat
from tests.support.trainers import ROLLOUTS, by_hand, quarters


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


def own_batch(rewards: Any) -> ExperienceBatch:
    return ExperienceBatch.from_rows([0, 0], [0, 0], rewards, [0, 0], mask=mask_of([2, 1]))


ONE_ROW = ExperienceBatch.from_rows([0], [0], [6.0], [0])
"""One step with the reward 6, of the first rank."""


def on_two_ranks(advantages_of: Callable[[], Any], *batches: ExperienceBatch) -> list[Any]:
    """On each rank, this rank's rows and the rows of all ranks."""
    return on_ranks(2, lambda engine: with_advantages(batches[engine.rank], advantages_of(), engine))


def test_the_estimator_sees_the_rewards_of_all_ranks() -> None:
    """The mean of 6, 1 and 2 is 3."""
    estimator = partial(AdvantageEstimator, AdvantageConfig(baseline="global_mean"))
    (first, _), (rows, all_ranks) = on_two_ranks(estimator, ONE_ROW, own_batch([1.0, 2.0]))
    assert (first.advantages.tolist(), rows.advantages.tolist()) == ([3.0], [-2.0, -1.0])
    assert (all_ranks.advantages.tolist(), all_ranks.batch.num_rows, rows.returns) == ([3.0, -2.0, -1.0], 3, None)


def test_user_advantages_see_only_the_rows_of_their_rank() -> None:
    own = lambda: lambda batch: -batch.rewards  # noqa: E731
    found = on_two_ranks(own, ONE_ROW, own_batch([1.0, 2.0]))
    for (rows, all_ranks), expected in zip(found, ([-6.0], [-1.0, -2.0]), strict=True):
        assert (rows.advantages.tolist(), all_ranks.advantages.tolist()) == (expected, [-6.0, -1.0, -2.0])


def test_the_returns_of_a_critic_are_those_of_this_ranks_rows() -> None:
    """With lambda 1, the return of a step is the sum of the rewards from there on. Rows are as wide as on their rank."""
    estimator = partial(AdvantageEstimator, AdvantageConfig(credit="gae", gae_lambda=1.0))
    one = replace(ONE_ROW, rewards=torch.tensor([[6.0]]), values=torch.zeros(1, 1))
    two = replace(own_batch([[1.0, 2.0], [4.0, 0.0]]), values=torch.zeros(2, 2))
    for (rows, all_ranks), expected in zip(on_two_ranks(estimator, one, two), ([[6]], [[3, 2], [4, 0]]), strict=True):
        assert rows.returns.tolist() == expected
        assert (rows.advantages.shape, all_ranks.advantages.shape) == (rows.returns.shape, (3, 2))


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


def prepared(rewards: list[float], group_ids: list[int], *, own_loss: Any = None, **settings: Any) -> UpdateRows:
    """The rows of an iteration, one step each, all of the action 0."""
    trainer, _ = by_hand(policy=TablePolicy(states=sorted(set(group_ids))), objective=own_loss, config=settings)
    return trainer.prepared(ExperienceBatch.from_rows(list(group_ids), [0] * len(rewards), rewards, group_ids))


def rows_of(rows: UpdateRows, selected: Any) -> list[int]:
    return torch.arange(rows.data.batch.num_rows)[selected].tolist()


# Groups 0 and 2 have equal rewards; row 4 has the mean of group 1.
REWARDS = [1.0, 1.0, 0.0, 2.0, 1.0, 5.0, 5.0]
GROUPS = [0, 0, 1, 1, 1, 2, 2]


def test_updates_without_any_advantage_are_skipped_and_counted() -> None:
    """Three groups in updates of about one group each, two epochs: the dead groups' updates are not yielded."""
    rows = prepared([1.0, 1.0, 0.0, 2.0, 5.0, 5.0], [0, 0, 1, 1, 2, 2], batch_size=2, num_epochs_per_update=2, seed=1)
    assert [sorted(rows_of(rows, update.selected)) for update in rows.updates()] == [[2, 3], [2, 3]]
    assert (rows.num_planned, rows.num_dead, rows.num_skipped) == (6, 4, 4)
    # while an update is made, it and the updates before it have been counted
    rows = prepared(REWARDS, GROUPS, num_epochs_per_update=3)
    assert [rows.num_planned for _ in rows.updates()] == [1, 2, 3]
    assert (rows.num_planned, rows.num_dead) == (3, 0)


def test_rows_without_an_advantage_are_not_forwarded_but_count_in_the_weights() -> None:
    rows = prepared(REWARDS, GROUPS)
    (update,) = rows.updates()
    assert rows_of(rows, update.selected) == list(range(7))
    assert ([rows_of(rows, micro) for micro in update.micro_batches()], rows.num_skipped) == ([[2, 3]], 5)
    assert update.weights.steps.tolist() == [[pytest.approx(1 / 7)]] * 7
    (micro,) = update.micro_batches()
    inputs = update.scored(micro).inputs
    assert inputs.advantages.tolist() == [-1.0, 1.0]
    assert inputs.weights.tolist() == [[pytest.approx(1 / 7)]] * 2


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": ObjectiveConfig(entropy_coef=0.1)},
        {"objective": ObjectiveConfig(surrogate="kl_cov")},
        {"objective": ObjectiveConfig(surrogate="dro")},
        {"objective": ObjectiveConfig(surrogate=lambda steps: -steps.advantages * steps.ratio())},
    ],
)
def test_no_row_is_skipped_where_another_term_or_surrogate_may_have_a_gradient(settings):
    rows = prepared(REWARDS, GROUPS, **settings)
    (update,) = rows.updates()
    assert [rows_of(rows, micro) for micro in update.micro_batches()] == [list(range(7))]
    assert (rows.num_skipped, rows.num_dead) == (0, 0)


def test_no_row_is_skipped_where_a_critic_is_trained() -> None:
    """Rewards of 0 are what the critic expects, so every advantage is 0; the critic's error still has a gradient."""
    trainer, _ = by_hand(policy=Critic(), config={"advantage": AdvantageConfig(credit="gae")})
    rows = trainer.prepared(ExperienceBatch.from_rows(**{**ROLLOUTS, "rewards": [0.0] * 4}))
    assert not rows.data.advantages.any()
    (update,) = rows.updates()
    assert [rows_of(rows, micro) for micro in update.micro_batches()] == [[0, 1, 2, 3]]
    assert (rows.num_skipped, rows.num_dead) == (0, 0)


@pytest.mark.parametrize(("size", "batch_size"), list(product([None, 1, 2, 4, 9], [None, 1, 2, 3, 5, 9])))
def test_each_epoch_forwards_every_row_with_an_advantage_exactly_once(size, batch_size):
    """Groups of 2 to 4 rows, in mixed order; two rows have no advantage. Forwards hold at most `micro_batch_size` rows."""
    groups = [2, 0, 1, 0, 2, 1, 0, 1, 2, 0]
    rewards = [1.0, 4.0, 0.0, 1.0, 2.0, 1.0, 2.0, 2.0, 3.0, 5.0]  # rows 4 (2 of 1, 2, 3) and 5 (1 of 0, 1, 2)
    rows = prepared(rewards, groups, batch_size=batch_size, micro_batch_size=size, seed=4)
    seen = []
    for update in rows.updates():
        chosen = rows_of(rows, update.selected)
        for micro in update.micro_batches():
            places = torch.arange(len(chosen))[micro].tolist()
            assert len(places) <= (size or 10)
            seen += [chosen[place] for place in places]
        assert batch_size is None or len(chosen) <= batch_size
    assert sorted(seen) == [0, 1, 2, 3, 6, 7, 8, 9]


def test_the_policys_plan_covers_the_live_rows_of_each_update() -> None:
    """Its positions are turned into those of the update: rows 1 and 3 of four have no advantage."""
    policy = Planning()
    policy.plan = lambda num_rows: [[place] for place in reversed(range(num_rows))]  # type: ignore[method-assign]
    trainer, _ = by_hand(policy=policy, advantages=lambda batch: torch.tensor([3.0, 0.0, 1.0, 0.0]))
    rows = trainer.prepared(ExperienceBatch.from_rows(**ROLLOUTS))
    (update,) = rows.updates()
    assert [rows_of(rows, micro) for micro in update.micro_batches()] == [[2], [0]]
    given = [update.scored(micro).inputs for micro in update.micro_batches()]
    assert [inputs.advantages.tolist() for inputs in given] == [[1.0], [3.0]]
    assert [inputs.mask.shape[1] for inputs in given] == [2, 3]  # each as wide as its own rows
    assert [inputs.weights.shape[1] for inputs in given] == [2, 3]


def test_the_sum_of_scores_covers_the_passes_since_the_last_attempt() -> None:
    """Each log-prob is log 1/2."""
    (update,) = prepared([0.0, 1.0, 2.0, 4.0], [0, 0, 0, 0], micro_batch_size=3, batch_size=4).updates()
    for micro in update.micro_batches():
        update.scored(micro)
    assert update.sum_of_scores().item() == pytest.approx(4 * math.log(0.5))
    update.forget_scores()
    assert update.sum_of_scores().item() == 0.0


class KnowsEverything(RowScoring):
    """Gives values and a KL too, which differ from step to step."""

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        scores = super().score_actions(states, actions)
        return replace(scores, values=2.0 * scores.log_probs, kl=scores.log_probs.square())


def test_the_loss_receives_each_rows_own_fields_cut_to_its_steps() -> None:
    """Each forward has one row, of 3, 1, 2 and 1 steps. Each field holds that row's values, cut to its own steps."""
    loss = ObjectiveConfig(entropy_coef=0.125, entropy_aggregation="step_mean", top_entropy_fraction=0.5)
    reference = RowScoring()
    config = {"objective": loss, "advantage": AdvantageConfig(credit="gae"), "micro_batch_size": 1}
    trainer, policy = by_hand(policy=KnowsEverything(), reference_policy=reference, config=config)
    behaviour = torch.arange(12.0).reshape(4, 3) - 20.0
    rows = trainer.prepared(ExperienceBatch.from_rows(**ROLLOUTS, behaviour_log_probs=behaviour))
    (update,) = rows.updates()
    known, states, actions = rows.data.batch, ROLLOUTS["states"], ROLLOUTS["actions"]
    for row, micro in enumerate(update.micro_batches()):
        inputs, width, one = update.scored(micro).inputs, len(actions[row]), slice(row, row + 1)
        scores = policy.score_actions(states[one], actions[one])
        expected = {
            **{name: getattr(scores, name) for name in ("log_probs", "mask", "entropy", "values", "kl")},
            "ref_log_probs": reference.score_actions(states[one], actions[one]).log_probs,
            "behaviour_log_probs": behaviour[one, :width],
            "old_values": known.values[one, :width],
            "advantages": rows.data.advantages[one, :width],
            "returns": rows.data.returns[one, :width],
            "weights": torch.full((1, width), 1 / (4 * width)),
            "entropy_weights": torch.full((1, width), 1 / 7),
            "keep": update.keep[one, :width],
        }
        torch.testing.assert_close({name: getattr(inputs, name) for name in expected}, expected, check_dtype=False)
        assert inputs.log_probs.requires_grad
        assert (inputs.kl_coef, inputs.entropy_coef) == (0.04, 0.125)
        assert inputs.old_log_probs is None  # one update of rows that the current policy was scored with
        assert inputs.selected is None


class Choosing:
    """A surrogate that drops every second step of the update, counted over all its rows, and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[list[float], list[float]]] = []

    def __call__(self, steps: Steps) -> Tensor:
        assert steps.selected is not None
        return torch.where(steps.selected, 0.0, -steps.ratio() * steps.advantages)

    def select(self, log_probs: Tensor, advantages: Tensor, generator: torch.Generator | None) -> Tensor:
        assert generator is not None
        self.shown.append((log_probs.tolist(), advantages.tolist()))
        return torch.arange(len(log_probs)) % 2 == 1


def test_a_surrogates_selection_is_made_once_per_update_from_all_its_steps() -> None:
    """Seven steps in rows of 3, 1, 2 and 1: the second, fourth and sixth are chosen, in forwards of one row too."""
    surrogate = Choosing()
    config = {"micro_batch_size": 1, "objective": ObjectiveConfig(surrogate=surrogate)}
    trainer, policy = by_hand(policy=RowScoring(), config=config)
    (update,) = trainer.prepared(ExperienceBatch.from_rows(**ROLLOUTS)).updates()
    given = [update.scored(micro).inputs for micro in update.micro_batches()]
    assert all(inputs.old_log_probs is None for inputs in given)  # the log-probs that it chose by are the current ones
    chosen = [inputs.selected.tolist() for inputs in given]
    assert chosen == [[[False, True, False]], [[True]], [[False, True]], [[False]]]
    ((log_probs, advantages),) = surrogate.shown
    scored = policy.score_actions(ROLLOUTS["states"], ROLLOUTS["actions"])
    assert log_probs == pytest.approx(scored.log_probs[ROLLOUTS["mask"]].tolist())
    assert advantages == [-0.5, -0.5, -0.5, 0.5, -0.5, -0.5, 0.5]


def test_no_steps_are_selected_for_a_user_objective() -> None:
    surrogate = Choosing()
    config = {"objective": ObjectiveConfig(surrogate=surrogate, top_entropy_fraction=0.4)}
    own_loss = lambda inputs: grpo_objective(inputs, ObjectiveConfig())  # noqa: E731
    trainer, _ = by_hand(policy=RowScoring(), config=config, objective=own_loss)
    (update,) = trainer.prepared(ExperienceBatch.from_rows(**ROLLOUTS)).updates()
    assert (update.keep, update.chosen, surrogate.shown) == (None, None, [])


def test_dead_groups_still_update_if_the_kl_has_a_gradient() -> None:
    """d/d logits of 0.5 (1/4) sum over rows of k3: per row 0.5/4 (1 - exp(-x)) (e - p); x = ln 2, ln 2/3."""
    objective = ObjectiveConfig(kl_coef=0.5)
    trainer, policy = by_hand(rewards=[1.0] * 4, reference_policy=quarters(), config={"objective": objective})
    metrics, entry = trainer.step(["a", "b"]), 0.125 * (0.5 * 0.5 + (-0.5) * (-0.5))
    torch.testing.assert_close(policy.logits.detach(), torch.tensor([[-entry, entry]] * 2, dtype=torch.float64))
    assert metrics["train/skipped_updates"] == metrics["rows/skipped_zero_advantage"] == 0.0


@pytest.mark.parametrize(
    ("batch_size", "aggregation"), list(product([None, 4], ["row_mean", "step_mean", "group_mean"]))
)
def test_skipping_rows_without_an_advantage_does_not_change_the_gradient(batch_size, aggregation):
    """A custom objective that calls the built-in one switches the skipping off."""
    objective, recorded = ObjectiveConfig(aggregation=aggregation), []
    for custom in (None, lambda inputs, objective=objective: grpo_objective(inputs, objective)):
        torch.manual_seed(3)
        policy = RowScoring()
        optimizer = RecordingSGD(policy)
        config = {"objective": objective, "seed": 2, "batch_size": batch_size, "num_epochs_per_update": 2}
        trainer, _ = by_hand(policy=policy, optimizer=optimizer, objective=custom, config=config)
        states = [0, 0, 0, 1, 1, 2, 2, 2]
        actions = [(1, 0), (2, 2, 0), (0,), (1, 1), (0,), (2, 0), (1, 1, 1, 1), (0,)]
        mask = torch.tensor([[place < len(action) for place in range(4)] for action in actions])
        rewards = [0.0, 1.0, 2.0, 5.0, 5.0, 1.0, 1.0, 7.0]  # row 1 and the whole second group have advantage 0
        policy.rows_scored.clear()
        metrics = trainer.update(ExperienceBatch.from_rows(states, actions, rewards, states, mask=mask))
        recorded.append((flat(optimizer.gradients), metrics["rows/skipped_zero_advantage"], sum(policy.rows_scored)))
    (skipping, num_skipped, forwarded), (whole, none_skipped, all_forwarded) = recorded
    torch.testing.assert_close(skipping, whole, rtol=1e-12, atol=1e-14)
    assert (num_skipped, none_skipped) == (3.0, 0.0)
    assert all_forwarded - forwarded == 2 * 3  # in each of two epochs


def test_long_rows_whose_log_probs_sum_beyond_float16_are_trained() -> None:
    """The sum of 32,000 log-probs of -4 is beyond what float16 holds; each of them is finite."""

    class Half(TablePolicy):
        def score_actions(self, states: Any, actions: Any) -> ActionScores:
            log_probs = (self.logits.sum() - 4.0).expand(len(states), 1000).half()
            return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool))

    trainer, _ = by_hand(policy=Half(script=[[0, 1]] * 16), rewards=torch.arange(32.0))
    assert trainer.step(list(range(16)))["train/num_updates"] == 1


# Updates on one of two ranks, and the checks of the scores that an update reads


class OtherRank(SeveralProcesses):
    """Beside a rank that plans so many updates per epoch, and has so many live rows in each."""

    num_ranks = 2

    def __init__(self, num_updates: int, num_live: int) -> None:
        self.num_updates, self.num_live = num_updates, num_live

    def gather_objects(self, value: Any) -> list[Any]:
        """Its rewards are those of this rank. It plans one epoch, and counts live rows, all rows and demonstrations of each
        update."""
        counts = [[[self.num_live, 2.0, 0.0]] * self.num_updates]
        return [value, value if isinstance(value, ExperienceBatch) else counts]


@pytest.mark.parametrize(
    ("num_updates", "num_live", "sizes", "num_dead"),
    [
        (1, 0, [2], 2),  # the other rank has fewer updates, and no live row
        (5, 0, [2], 4),
        (3, 1, [2, 2, 2], 0),
        (5, 1, [2, 2, 2, 0, 0], 0),  # without rows, this rank waits for the other one
    ],
)
def test_a_rank_takes_part_in_every_update_in_which_another_rank_has_a_live_row(num_updates, num_live, sizes, num_dead):
    """Three groups of two rows in updates of one group; only the second group is live on this rank."""
    rewards, groups = [1.0, 1.0, 0.0, 2.0, 5.0, 5.0], [0, 0, 1, 1, 2, 2]
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
    in_progress = IterationInProgress(trainer.updates.context, trainer.meter)
    in_progress.rows = rows
    state = in_progress.state_dict()

    class Gone(OtherRank):
        def gather_objects(self, value: Any) -> list[Any]:
            raise AssertionError("nobody comes")

    trainer.updates.context.engine = Gone(5, 1)
    in_progress.load_state_dict(state)
    again = in_progress.rows
    assert again is not rows
    assert [len(torch.arange(4)[update.selected]) for update in again.updates()] == [2, 0, 0, 0]
    assert again.num_planned == 5


def test_log_probs_above_0_are_refused_in_an_update_by_a_surrogate_of_probabilities() -> None:
    policy = Changing(lambda scores: replace(scores, log_probs=scores.log_probs + 5.0))
    trainer, _ = by_hand(policy=policy, config={"objective": ObjectiveConfig(surrogate="dppo")})
    (update,) = trainer.prepared(ExperienceBatch.from_rows(**ROLLOUTS)).updates()
    with pytest.raises(ContractError, match=r"surrogate=Dppo\(.*needs log-probs of probabilities"):
        read_all(trainer, update)


def read_all(trainer: Any, update: Update) -> None:
    trainer.policy.train()
    for micro in update.micro_batches():
        update.scored(micro)


def warnings_of_two_iterations(policy: Any, **settings: Any) -> list[str]:
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


@pytest.mark.parametrize(("change", "num_warnings"), [(0.04, 0), (0.06, 1), (-0.06, 1)])
def test_log_probs_that_differ_in_train_mode_are_warned_of_once(change, num_warnings):
    """Rounding in half precision explains 0.05. Later updates are expected to differ."""
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

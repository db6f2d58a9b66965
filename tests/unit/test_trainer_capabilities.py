"""Every capability that a policy may have: how often it is called, with what, and that it changes no number."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo import ActionScores, ExperienceBatch, ObjectiveConfig
from grpo.engine import OneProcess
from grpo.errors import ConfigError, ContractError, GRPOWarning, NonFiniteGradientError
from tests.support.imitated_ranks import ImitatedRank, on_ranks
from tests.support.policies import (
    EpisodePolicy,
    ExactSampling,
    GroupScoring,
    Planning,
    RecordingSGD,
    RowScoring,
    TablePolicy,
    VectorPolicy,
    gradient_of,
    weights_of,
)
from tests.support.trainers import REWARDS, SCRIPT, by_hand, trainer_of


class Synced(TablePolicy):
    def sync_sampler(self) -> None:
        self.calls["sync"] += 1


def test_the_sampler_is_synced_only_when_the_weights_changed(tmp_path: Any) -> None:
    rewards = list(REWARDS)
    trainer, policy = by_hand(policy=Synced(script=SCRIPT), rewards=lambda states, actions: list(rewards))
    assert policy.calls["sync"] == 0
    trainer.collect(["a", "b"])
    assert policy.calls["sync"] == 1  # before the first collection
    trainer.collect(["a", "b"])
    trainer.evaluate(["a", "b"], num_actions_per_state=2)
    assert policy.calls["sync"] == 1
    trainer.step(["a", "b"])
    assert policy.calls["sync"] == 2  # this one changed weights
    rewards[:] = [1.0] * 4
    trainer.step(["a", "b"])
    assert policy.calls["sync"] == 2  # this one did not
    trainer.save_checkpoint(tmp_path / "here")
    trainer.load_checkpoint(tmp_path / "here")
    assert policy.calls["sync"] == 3
    trainer.collect(["a", "b"])
    assert policy.calls["sync"] == 3


def test_a_sampler_that_was_never_used_is_synced_before_its_first_use() -> None:
    trainer, policy = by_hand(policy=Synced(script=SCRIPT))
    trainer.evaluate(["a", "b"])
    assert policy.calls["sync"] == 1
    # an update without effect, of rollouts made elsewhere, all of the same reward, leaves a stale sampler stale
    trainer, policy = by_hand(policy=Synced(script=SCRIPT))
    trainer.update(ExperienceBatch.from_rows(["a", "a"], [0, 1], [1.0, 1.0], [0, 0]))
    trainer.collect(["a", "b"])
    assert policy.calls["sync"] == 1


def test_the_sampler_is_synced_with_updates_applied_before_bad_gradients_end_a_run() -> None:
    """The first of two updates is applied. The second is not finite and ends the run, and the caller continues anyway."""
    policy, factors = Synced(script=SCRIPT), iter([1.0, math.nan])
    policy.logits.register_hook(lambda gradient: gradient * next(factors))
    trainer, _ = by_hand(policy=policy, config={"batch_size": 2, "max_skipped_updates": 1})
    with pytest.raises(NonFiniteGradientError):
        trainer.step(["a", "b"])
    assert weights_of(policy).any()
    trainer.collect(["a", "b"])
    assert policy.calls["sync"] == 2


def counted(policy: Any, *, num_iterations: int = 1, **settings: Any) -> dict[str, int]:
    """How often each method was called in the last of some iterations."""
    trainer = trainer_of(policy, group_size=3, **settings)
    for _ in range(num_iterations):
        policy.calls.clear()
        trainer.step([0, 1])
    return dict(policy.calls)


def test_each_kind_of_sampler_costs_its_minimal_number_of_passes() -> None:
    exact, behaviour_only = ExactSampling(), ExactSampling()
    behaviour_only.tells_scores = False
    # exact scores: never a pass without gradient for any number of updates (6 rows in updates of 2: 3 per pass)
    assert counted(exact) == {"sample": 1, "score with gradient": 1}
    assert counted(exact, batch_size=2, num_epochs_per_update=2) == {"sample": 1, "score with gradient": 6}
    # behaviour alone: none for one update, exactly one for several
    assert counted(behaviour_only) == {"sample": 1, "score with gradient": 1}
    assert counted(behaviour_only, num_epochs_per_update=2) == {"sample": 1, "score": 1, "score with gradient": 2}
    assert counted(behaviour_only, batch_size=2) == {"sample": 1, "score": 1, "score with gradient": 3}
    # a sampler that does not say which steps count: one pass finds them, and serves as the old log-probs
    assert counted(RowScoring()) == {"score": 1, "score with gradient": 1}
    assert counted(RowScoring(), num_epochs_per_update=2) == {"score": 1, "score with gradient": 2}
    # a plain policy that has shown one log-prob per row needs none for one update
    plain = {"generate": 1, "score with gradient": 1}
    assert counted(TablePolicy(states=(0, 1)), num_iterations=2) == plain
    assert counted(TablePolicy(states=(0, 1)), num_iterations=2, num_epochs_per_update=2) == {
        "generate": 1, "score": 1, "score with gradient": 2,
    }  # fmt: skip


def test_a_single_update_also_uses_a_samplers_scores_as_old_log_probs() -> None:
    """They are 1/4 below what the policy scores in the update, so that every ratio is exp(1/4)."""

    class Lower(ExactSampling):
        def sample_actions(self, states: Any, num_actions_per_state: int) -> Any:
            sampled = super().sample_actions(states, num_actions_per_state)
            scores = dataclasses.replace(sampled.scores, log_probs=sampled.scores.log_probs - 0.25)
            return dataclasses.replace(sampled, scores=scores, behaviour_log_probs=None)

    trainer, _ = by_hand(policy=Lower(), rewards=lambda states, actions: torch.arange(4.0))
    with pytest.warns(GRPOWarning, match="the first ratio is not 1"):
        metrics = trainer.step([0, 1])
    assert metrics["train/ratio_mean"] == pytest.approx(math.exp(0.25))


RAGGED_GROUPS = [[(1, 2, 0), (0,)], [(2, 2, 2, 1)], [(1, 0), (0,), (2, 1)]]


def test_a_group_without_an_advantage_is_not_forwarded() -> None:
    """Groups and rows have the same gradients: below, and for each preset in `tests/property`."""
    policy = GroupScoring()
    states = [state for state, group in enumerate(RAGGED_GROUPS) for _ in group]
    actions = [action for group in RAGGED_GROUPS for action in group]
    mask = torch.tensor([[place < len(action) for place in range(4)] for action in actions])
    batch = ExperienceBatch.from_rows(states, actions, [1.0, 2.0, 0.0, 3.0, 4.0, 8.0], states, mask=mask)
    trainer, _ = by_hand(policy=policy)
    trainer.update(batch)
    assert policy.group_sizes == [[2, 3]]


class VectorGroups(VectorPolicy):
    """`ScoresGroups` over vectors: the hidden layer once per state. Remembers what it was given."""

    def score_groups(self, states: Any, actions: Any) -> Any:
        self.given = type(states), type(actions)
        log_softmax = self._log_softmax(states)
        chosen = [torch.as_tensor(group, dtype=torch.int64) for group in actions]
        rows = torch.repeat_interleave(torch.arange(len(chosen)), torch.tensor([len(group) for group in chosen]))
        log_probs = log_softmax[rows].gather(1, torch.cat(chosen).unsqueeze(1))
        return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool))


KINDS: dict[str, Any] = {"list": list, "tensor": Tensor, "array": np.ndarray}


def held_in(container: str, values: Tensor) -> Any:
    return {"list": values.tolist, "tensor": lambda: values, "array": values.numpy}[container]()


@pytest.mark.parametrize("sizes", [[1, 3, 2], [2, 2, 2]])
@pytest.mark.parametrize("container", KINDS)
def test_groups_may_be_lists_tensors_or_arrays(container: str, sizes: list[int]) -> None:
    torch.manual_seed(1)
    by_group, by_row = VectorGroups(dtype=torch.float64), VectorPolicy(dtype=torch.float64)
    by_row.load_state_dict(by_group.state_dict())
    ids = [group for group, size in enumerate(sizes) for _ in range(size)]
    states = held_in(container, torch.randn(3, 3, dtype=torch.float64)[ids])
    actions = held_in(container, torch.randint(4, (6,)))
    recorded = []
    for policy in (by_group, by_row):
        optimizer = RecordingSGD(policy)
        objective = ObjectiveConfig(entropy_coef=0.1, entropy_estimator="score_function")
        trainer, _ = by_hand(policy=policy, optimizer=optimizer, config={"objective": objective})
        trainer.update(ExperienceBatch.from_rows(states, actions, [1.0, 0.0, 2.0, 5.0, 1.0, 0.5], ids))
        recorded.append(optimizer.gradients[0])
    torch.testing.assert_close(recorded[0], recorded[1], rtol=1e-12, atol=1e-14)
    assert by_group.given == (KINDS[container], KINDS[container] if sizes == [2, 2, 2] else list)


def test_states_and_actions_keep_their_container_types() -> None:
    """From the sampler to the reward and back to the policy; the same numbers, whatever the container."""
    weights = []
    for container, kind in KINDS.items():
        torch.manual_seed(6)
        policy = VectorPolicy(container=container, dtype=torch.float64)
        given = held_in(container, torch.randn(3, 3, dtype=torch.float64))
        seen: list[Any] = []

        def reward(row_states: Any, actions: Any, seen: list[Any] = seen) -> Any:
            seen.append((type(row_states), type(actions), len(row_states), len(actions)))
            return [float(action) for action in actions]

        trainer_of(policy, reward, batch_size=5, micro_batch_size=2, seed=9).step(given)
        assert seen == [(kind, kind, 12, 12)]
        assert set(policy.seen) == {(kind, kind)}
        weights.append(weights_of(policy))
        torch.testing.assert_close(weights[-1], weights[0], rtol=1e-12, atol=1e-14)


def test_scoring_and_updates_follow_the_policys_plan() -> None:
    policy = Planning()
    policy.plan = lambda num_rows: [list(range(1, num_rows)), [0]]  # type: ignore[method-assign]
    assert counted(policy) == {"plan": 2, "score": 2, "score with gradient": 2}
    assert policy.rows_scored == [5, 1, 3, 1]  # rewards 0, 1, 2: the middle row of each group has no advantage


def episode_batch(policy: EpisodePolicy) -> tuple[ExperienceBatch, Tensor, Tensor, Tensor]:
    """Six episodes in two groups; and, step by step: observations, moves, advantages."""
    states = [0.0] * 3 + [1.0] * 3
    actions = [policy._play(state) for state in states]
    rewards = [1.0, 2.0, 6.0, 0.0, 1.0, 5.0]
    lengths = torch.tensor([len(moves) for _, moves in actions])
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    batch = ExperienceBatch.from_rows(states, actions, rewards, [0, 0, 0, 1, 1, 1], mask=mask)
    advantages = torch.tensor([-2.0, -1.0, 3.0, -2.0, -1.0, 3.0], dtype=torch.float64).repeat_interleave(lengths)
    return batch, *policy.split_steps(states, actions), advantages


def test_minibatches_of_split_steps_have_the_brute_force_gradients() -> None:
    """At rate 0 the policy stays the old one: the gradients of all minibatches, weighted by their steps, are those of
    all steps at once; batch_size counts steps, and each epoch draws every step once."""
    policy = EpisodePolicy()
    batch, observations, moves, advantages = episode_batch(policy)
    num_steps = len(moves)
    optimizer = RecordingSGD(policy, lr=0.0)
    config = {"batch_size": 4, "num_epochs_per_update": 2, "seed": 3}
    trainer, _ = by_hand(policy=policy, optimizer=optimizer, config=config)
    policy.rows_scored.clear()
    trainer.update(batch)
    sizes = [4] * (num_steps // 4) + ([num_steps % 4] if num_steps % 4 else [])
    assert policy.rows_scored == [6, *sizes, *sizes]  # whole episodes for the old policy, then steps
    assert len(optimizer.gradients) == 2 * len(sizes)
    whole = gradient_of(policy, -(policy.log_probs_of(observations, moves) * advantages).sum())
    for epoch in (optimizer.gradients[: len(sizes)], optimizer.gradients[len(sizes) :]):
        total = sum((size * found for size, found in zip(sizes, epoch, strict=True)), torch.zeros(()))
        torch.testing.assert_close(total, whole, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(optimizer.gradients[0], optimizer.gradients[len(sizes)])  # drawn anew


def test_one_update_of_all_split_steps_uses_the_mean_over_steps_and_counts_rows() -> None:
    policy = EpisodePolicy()
    batch, observations, moves, advantages = episode_batch(policy)
    expected = gradient_of(policy, -(policy.log_probs_of(observations, moves) * advantages).mean())
    optimizer = RecordingSGD(policy)
    metrics = by_hand(policy=policy, optimizer=optimizer)[0].update(batch)
    torch.testing.assert_close(optimizer.gradients[0], expected, rtol=1e-12, atol=1e-14)
    assert metrics["rewards/mean"] == 2.5
    assert metrics["steps/mean"] == pytest.approx(len(moves) / 6)
    # rewards 1, 2, 3 and 0, 1, 2: the middle episode of each group has advantage 0, however many steps it has
    policy = EpisodePolicy()
    batch, *_ = episode_batch(policy)
    batch = dataclasses.replace(batch, rewards=torch.tensor([1.0, 2.0, 3.0, 0.0, 1.0, 2.0]))
    assert int(batch.mask[1].sum() + batch.mask[4].sum()) > 2
    assert by_hand(policy=policy)[0].update(batch)["rows/skipped_zero_advantage"] == 2.0


STEP = torch.tensor([[0.125, -0.125]] * 2, dtype=torch.float64)
"""Minus the gradient of the logits without a penalty: advantages are +-1/2, so per row (1/4)(1/2)(e - p), p = (1/2, 1/2)."""


class Penalised(TablePolicy):
    """Penalty |logits - 1|^2 / 4. At logits of 0 it is 4/4 = 1, with gradient (0 - 1)/2 = -1/2 for each of the four logits."""

    def penalty(self) -> Tensor:
        self.calls["penalty"] += 1
        return 0.25 * (self.logits - 1).square().sum()


@pytest.mark.parametrize("size", [None, 1, 3])
def test_a_penalty_is_added_once_per_update_however_many_passes_it_has(size: Any) -> None:
    trainer, policy = by_hand(policy=Penalised(script=SCRIPT), config={"micro_batch_size": size})
    metrics = trainer.step(["a", "b"])
    torch.testing.assert_close(policy.logits.detach(), STEP + 0.5, rtol=1e-12, atol=1e-12)
    assert policy.calls["penalty"] == 1
    assert metrics["train/penalty"] == 1.0
    assert metrics["train/total_loss"] == metrics["train/policy_loss"]
    assert metrics["train/grad_norm"] == pytest.approx(math.sqrt(2 * 0.625**2 + 2 * 0.375**2))


def test_a_loss_scale_does_not_change_a_penalty() -> None:
    trainer, policy = by_hand(policy=Penalised(script=SCRIPT), config={"autocast_dtype": "float16"})
    assert trainer.optimizer_step.scaler.get_scale() > 1
    metrics = trainer.step(["a", "b"])
    torch.testing.assert_close(policy.logits.detach(), STEP + 0.5, rtol=1e-3, atol=1e-3)
    assert metrics["train/penalty"] == 1.0


def test_every_update_has_the_penalty_of_its_own_weights() -> None:
    """Without advantages in the second state, only the penalty moves its logits: 0, then 0 + 1/2, then 1/2 + 1/4. Penalties:
    the first is 1, and the second has distances of 1/2 there, and of 1/2 -+ 1/8 in the other state."""
    trainer, policy = by_hand(
        policy=Penalised(script=SCRIPT), rewards=[1.0, 0.0, 2.0, 2.0], config={"num_epochs_per_update": 2}
    )
    metrics = trainer.step(["a", "b"])
    torch.testing.assert_close(policy.logits[1].detach(), torch.full((2,), 0.75, dtype=torch.float64))
    first = policy.calls["penalty"]
    assert first == 2
    # two of four rows have an advantage, and each has its weight of 1/4 as before
    second = (2 * 0.5**2 + 0.375**2 + 0.625**2) / 4
    assert metrics["train/penalty"] == pytest.approx((1 + second) / 2)


def test_the_ranks_add_a_penalty_once_together() -> None:
    """Each rank has one of the two states. Their rows together are those of one process."""
    of = {("a", 0): 1.0, ("a", 1): 0.0, ("b", 1): 3.0, ("b", 0): 4.0}  # `REWARDS`

    def run(engine: ImitatedRank) -> Any:
        policy = Penalised(script=[SCRIPT[engine.rank]])
        reward = lambda states, actions: [of[pair] for pair in zip(states, actions, strict=True)]  # noqa: E731
        trainer, _ = by_hand(policy=policy, rewards=reward, engine=engine, config={"micro_batch_size": 1})
        metrics = trainer.step(["ab"[engine.rank]])
        return policy.logits.detach().clone(), metrics, policy.calls["penalty"]

    for logits, metrics, num_calls in on_ranks(2, run):
        torch.testing.assert_close(logits, STEP + 0.5, rtol=1e-12, atol=1e-12)
        assert metrics["train/penalty"] == 1.0
        assert num_calls == 1


@pytest.mark.parametrize(("penalty", "text"), [
    (lambda self: 0.5, "must return a scalar with gradient; got float"),
    (lambda self: self.logits.square(), "must return a scalar with gradient; got"),
    (lambda self: self.logits.detach().sum(), "must return a scalar with gradient; got"),
    (lambda self: self.logits.sum() * math.nan, "and a penalty; some are not"),
])  # fmt: skip
def test_what_is_no_penalty_is_refused_and_no_weight_changes(penalty: Any, text: str) -> None:
    policy = type("Wrong", (TablePolicy,), {"penalty": penalty})(script=SCRIPT)
    trainer, _ = by_hand(policy=policy)
    with pytest.raises(ContractError, match=f"^Wrong.*{text}"):
        trainer.step(["a", "b"])
    assert not policy.logits.any()


def test_a_penalty_and_divided_weights_are_refused() -> None:
    divided = type("Divided", (OneProcess,), {"divides_weights": True})()
    with pytest.raises(ConfigError, match=r"^Penalised.penalty\(\) cannot be used with Divided, .*Use Replicated"):
        by_hand(policy=Penalised(), engine=divided, optimizer=RecordingSGD)

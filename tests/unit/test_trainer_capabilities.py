"""Every capability that a policy may have: how often it is called, with what, and that it changes no number."""

import dataclasses
import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo import (
    ActionScores,
    ContractError,
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    GRPOWarning,
    NonFiniteGradientError,
    ObjectiveConfig,
)
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
from tests.support.trainers import REWARDS, SCRIPT, by_hand


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


def test_a_first_evaluation_syncs_the_sampler() -> None:
    trainer, policy = by_hand(policy=Synced(script=SCRIPT))
    trainer.evaluate(["a", "b"])
    assert policy.calls["sync"] == 1


def test_an_update_without_effect_leaves_a_stale_sampler_stale() -> None:
    """Rollouts made elsewhere, all of the same reward, before the sampler was ever used."""
    trainer, policy = by_hand(policy=Synced(script=SCRIPT))
    trainer.update(ExperienceBatch.from_rows(["a", "a"], [0, 1], [1.0, 1.0], [0, 0]))
    trainer.collect(["a", "b"])
    assert policy.calls["sync"] == 1


def test_the_sampler_is_synced_with_updates_applied_before_bad_gradients_end_a_run() -> None:
    """The first of two updates is applied. The second is not finite and ends the run, and the caller continues anyway."""
    policy = Synced(script=SCRIPT)
    num_backwards = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal num_backwards
        num_backwards += 1
        return gradient * math.nan if num_backwards == 2 else gradient

    policy.logits.register_hook(hook)
    trainer, _ = by_hand(policy=policy, config={"batch_size": 2, "max_skipped_updates": 1})
    with pytest.raises(NonFiniteGradientError):
        trainer.step(["a", "b"])
    assert weights_of(policy).any()
    trainer.collect(["a", "b"])
    assert policy.calls["sync"] == 2


def counted(policy: Any, *, num_iterations: int = 1, **settings: Any) -> dict[str, int]:
    """How often each method was called in the last of some iterations."""
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=3, **settings),
        policy=policy,
        reward_model=lambda states, actions: torch.arange(6.0),
    )
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


def test_exact_scores_are_the_old_log_probs_and_behaviour_is_kept_apart() -> None:
    policy = ExactSampling()
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=3), policy=policy, reward_model=lambda states, actions: torch.arange(6.0)
    )
    batch = trainer.collect([0, 1])
    expected = policy.score_actions(batch.states, batch.actions)
    mask = batch.mask[:, : expected.mask.shape[1]]
    assert torch.equal(mask, expected.mask)
    assert batch.old_log_probs is not None
    torch.testing.assert_close(batch.old_log_probs[:, : mask.shape[1]][mask], expected.log_probs[mask].detach())
    assert batch.group_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.states == [0, 0, 0, 1, 1, 1]
    policy.tells_scores = False
    batch = trainer.collect([0, 1])
    assert batch.old_log_probs is None
    assert batch.behaviour_log_probs is not None


def test_a_single_update_also_uses_a_samplers_scores_as_old_log_probs() -> None:
    """They are 1/4 below what the policy scores in the update, so that every ratio is exp(1/4)."""

    class Lower(ExactSampling):
        def sample_actions(self, states: Any, num_actions_per_state: int) -> Any:
            sampled = super().sample_actions(states, num_actions_per_state)
            assert sampled.scores is not None
            scores = dataclasses.replace(sampled.scores, log_probs=sampled.scores.log_probs - 0.25)
            return dataclasses.replace(sampled, scores=scores, behaviour_log_probs=None)

    trainer, _ = by_hand(policy=Lower(), rewards=lambda states, actions: torch.arange(4.0))
    with pytest.warns(GRPOWarning, match="the first ratio is not 1"):
        metrics = trainer.step([0, 1])
    assert metrics["train/ratio_mean"] == pytest.approx(math.exp(0.25))


RAGGED_GROUPS = [[(1, 2, 0), (0,)], [(2, 2, 2, 1)], [(1, 0), (0,), (2, 1)]]


def test_scoring_groups_equals_scoring_rows_in_value_and_gradient() -> None:
    torch.manual_seed(8)
    by_group = GroupScoring()
    by_row = RowScoring()
    by_row.load_state_dict(by_group.state_dict())
    recorded = []
    for policy in (by_group, by_row):
        optimizer = RecordingSGD(policy)
        trainer, _ = by_hand(policy=policy, optimizer=optimizer)
        states = [state for state, group in enumerate(RAGGED_GROUPS) for _ in group]
        actions = [action for group in RAGGED_GROUPS for action in group]
        mask = torch.tensor([[place < len(action) for place in range(4)] for action in actions])
        batch = ExperienceBatch.from_rows(states, actions, [1.0, 2.0, 0.0, 3.0, 4.0, 8.0], states, mask=mask)
        scores = trainer.collector.scorer(batch.states, batch.actions, batch.group_ids)
        by_hand_scores = by_row.score_actions(states, actions)
        assert torch.equal(scores.mask, by_hand_scores.mask)
        torch.testing.assert_close(scores.log_probs, by_hand_scores.log_probs, equal_nan=True)
        trainer.update(batch)
        recorded.append(optimizer.gradients[0])
    torch.testing.assert_close(recorded[0], recorded[1], rtol=1e-12, atol=1e-14)
    assert by_group.group_sizes[0] == [2, 1, 3]
    assert by_group.group_sizes[-1] == [2, 3]  # the group of one has no advantage, and is not forwarded
    assert by_row.calls["groups"] == 0


class VectorGroups(VectorPolicy):
    """`ScoresGroups` over vectors: the hidden layer once per state. Remembers what it was given."""

    def score_groups(self, states: Any, actions: Any) -> Any:
        self.given = type(states), type(actions)
        log_softmax = self._log_softmax(states)
        chosen = [torch.as_tensor(group, dtype=torch.int64) for group in actions]
        rows = torch.repeat_interleave(torch.arange(len(chosen)), torch.tensor([len(group) for group in chosen]))
        log_probs = log_softmax[rows].gather(1, torch.cat(chosen).unsqueeze(1))
        return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool))


def test_groups_may_be_lists_tensors_or_arrays(subtests: pytest.Subtests) -> None:
    for container, ragged in product(["list", "tensor", "array"], [False, True]):
        with subtests.test(container=container, ragged=ragged):
            torch.manual_seed(1)
            by_group = VectorGroups(dtype=torch.float64)
            by_row = VectorPolicy(dtype=torch.float64)
            by_row.load_state_dict(by_group.state_dict())
            make = {"list": lambda x: x.tolist(), "tensor": lambda x: x, "array": lambda x: x.numpy()}[container]
            sizes = [1, 3, 2] if ragged else [2, 2, 2]
            ids = [group for group, size in enumerate(sizes) for _ in range(size)]
            states = make(torch.randn(3, 3, dtype=torch.float64)[ids])
            actions = make(torch.randint(4, (6,)))
            recorded = []
            for policy in (by_group, by_row):
                optimizer = RecordingSGD(policy)
                objective = ObjectiveConfig(entropy_coef=0.1, entropy_estimator="score_function")
                trainer, _ = by_hand(policy=policy, optimizer=optimizer, config={"objective": objective})
                trainer.update(ExperienceBatch.from_rows(states, actions, [1.0, 0.0, 2.0, 5.0, 1.0, 0.5], ids))
                recorded.append(optimizer.gradients[0])
            torch.testing.assert_close(recorded[0], recorded[1], rtol=1e-12, atol=1e-14)
            kinds = {"list": list, "tensor": Tensor, "array": np.ndarray}
            assert by_group.given[0] is kinds[container]
            assert by_group.given[1] is (list if ragged else kinds[container])


def test_states_and_actions_keep_their_container_types(subtests: pytest.Subtests) -> None:
    """From the sampler to the reward and back to the policy; the same numbers, whatever the container."""
    for container in ["list", "tensor", "array"]:
        with subtests.test(container=container):
            weights, kinds = [], {"list": list, "tensor": Tensor, "array": np.ndarray}
            for kind in ("list", container):
                torch.manual_seed(6)
                policy = VectorPolicy(container=kind, dtype=torch.float64)
                states = torch.randn(3, 3, dtype=torch.float64)
                given = {"list": states.tolist(), "tensor": states, "array": states.numpy()}[kind]
                seen: list[Any] = []

                def reward(row_states: Any, actions: Any, seen: list[Any] = seen) -> Any:
                    seen.append((type(row_states), type(actions), len(row_states), len(actions)))
                    return [float(action) for action in actions]

                trainer = GRPOTrainer(
                    config=GRPOConfig(group_size=4, batch_size=5, micro_batch_size=2, seed=9),
                    policy=policy,
                    reward_model=reward,
                )
                trainer.step(given)
                assert seen == [(kinds[kind], kinds[kind], 12, 12)]
                assert set(policy.seen) == {(kinds[kind], kinds[kind])}
                weights.append(weights_of(policy))
            torch.testing.assert_close(weights[0], weights[1], rtol=1e-12, atol=1e-14)


def test_scoring_and_updates_follow_the_policys_plan() -> None:
    policy = Planning()
    policy.plan = lambda num_rows: [list(range(1, num_rows)), [0]]  # type: ignore[method-assign]
    assert counted(policy) == {"plan": 2, "score": 2, "score with gradient": 2}
    assert policy.rows_scored == [5, 1, 3, 1]  # rewards 0, 1, 2: the middle row of each group has no advantage


def test_a_plan_that_is_no_partition_is_refused(subtests: pytest.Subtests) -> None:
    for plan in [[[0, 1]], [[0, 1, 2], [2, 3, 4, 5]], [[0, 1, 2, 3, 4, 6]], [[-1, 0, 1, 2, 3, 4]]]:
        with subtests.test(plan=plan):
            policy = Planning()
            policy.plan = lambda num_rows, plan=plan: plan  # type: ignore[method-assign, misc]
            with pytest.raises(
                ContractError, match=r"Planning\.plan_micro_batches must return every row of range\(6\)"
            ):
                counted(policy)


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
    trainer, _ = by_hand(
        policy=policy, optimizer=optimizer, config={"batch_size": 4, "num_epochs_per_update": 2, "seed": 3}
    )
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


def test_one_update_of_all_split_steps_uses_the_mean_over_steps() -> None:
    policy = EpisodePolicy()
    batch, observations, moves, advantages = episode_batch(policy)
    expected = gradient_of(policy, -(policy.log_probs_of(observations, moves) * advantages).mean())
    optimizer = RecordingSGD(policy)
    trainer, _ = by_hand(policy=policy, optimizer=optimizer)
    metrics = trainer.update(batch)
    torch.testing.assert_close(optimizer.gradients[0], expected, rtol=1e-12, atol=1e-14)
    assert metrics["rewards/mean"] == 2.5
    assert metrics["steps/mean"] == pytest.approx(len(moves) / 6)


def test_skipped_rows_are_counted_as_rows_even_if_steps_are_split() -> None:
    """Rewards 1, 2, 3 and 0, 1, 2: the middle episode of each group has advantage 0, however many steps it has."""
    policy = EpisodePolicy()
    batch, *_ = episode_batch(policy)
    batch = dataclasses.replace(batch, rewards=torch.tensor([1.0, 2.0, 3.0, 0.0, 1.0, 2.0]))
    assert int(batch.mask[1].sum() + batch.mask[4].sum()) > 2
    assert by_hand(policy=policy)[0].update(batch)["rows/skipped_zero_advantage"] == 2.0

"""Normalised observations: statistics change with the weights only, and belong to checkpoints, copies and references."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from adapters.control import EnvironmentReward, EpisodeOptions, EpisodePolicy
from adapters.control.environments.episodes import episode_starts
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig, SampledActions
from tests.support.control_policies import STARTS, trainer_of
from tests.support.imitated_ranks import ImitatedRank, on_ranks
from tests.support.out_of_memory import SmallMemory


def normalizing_policy() -> EpisodePolicy:
    return EpisodePolicy(
        "Pendulum-v1", num_members=3, options=EpisodeOptions(max_episode_steps=9, normalize_observations=True)
    )


def test_statistics_include_all_observations_and_are_constant_within_an_iteration() -> None:
    policy = normalizing_policy()
    assert policy.normalizer is not None
    trainer = trainer_of(policy)
    seen: list[Tensor] = []
    x = torch.tensor([[0.5, -0.5, 3.0]])
    for iteration in range(3):
        batch = trainer.collect(episode_starts(2)(iteration))
        if seen:
            everything = torch.cat(seen).double().numpy()
            np.testing.assert_allclose(policy.normalizer.mean, everything.mean(0), rtol=1e-12)
            np.testing.assert_allclose(
                policy.normalizer.squares / policy.normalizer.count, everything.var(0), rtol=1e-9
            )
        else:
            assert torch.equal(policy.normalizer(x), x)
        seen += [episode.observations for episode in batch.actions]
        before = policy.normalizer(x)
        assert trainer.update(batch)["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert torch.equal(policy.normalizer(x), before)
    assert float(policy.normalizer.count) == 2 * 2 * 3 * 9


def test_sampling_twice_within_an_iteration_uses_the_same_statistics() -> None:
    """Dynamic sampling samples twice, and so does an evaluation within an iteration. The first ratio is still 1."""
    policy = normalizing_policy()
    with torch.no_grad():
        for value in policy.parameters():
            value.mul_(5.0)
    trainer = trainer_of(policy)
    trainer.step(STARTS)
    batch = trainer.collect(STARTS)
    trainer.evaluate(STARTS)
    metrics = trainer.update(batch)
    assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/ratio_std"] < 1e-5


def test_episodes_that_are_discarded_when_memory_runs_out_are_not_in_the_statistics() -> None:
    policy = normalizing_policy()
    assert policy.normalizer is not None
    SmallMemory(fails_at=[1]).used_by(policy, "_as_rows", lambda steps, episodes: len(episodes))
    batch = trainer_of(policy).collect(STARTS)
    assert float(policy.normalizer.pending_count) == sum(len(episode) for episode in batch.actions)


def test_statistics_change_only_together_with_the_weights() -> None:
    policy = normalizing_policy()
    assert policy.normalizer is not None
    for _ in range(3):
        policy.sample_actions(STARTS, 3)
        policy.train()
        policy.eval()
    assert float(policy.normalizer.count) == 0.0
    with torch.no_grad():
        next(policy.actor.parameters()).add_(0.1)
    twin = normalizing_policy()
    twin.load_state_dict(policy.state_dict())
    for either in (policy, copy.deepcopy(policy), twin):
        either.sample_actions(STARTS, 3)
        either.sample_actions(STARTS, 3)
        assert either.normalizer is not None
        assert float(either.normalizer.count) == 3 * len(STARTS) * 3 * 9


def test_a_synchronised_reference_normalises_as_the_policy_does() -> None:
    policy = normalizing_policy()
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=3, seed=0, reference_sync_every=1, objective=ObjectiveConfig(kl_coef=0.1)),
        policy=policy,
        reward_model=EnvironmentReward(),
        reference_policy=(reference := copy.deepcopy(policy)),
    )
    for iteration in range(3):
        trainer.step(episode_starts(2)(iteration))
    x = torch.randn(5, 3)
    torch.testing.assert_close(reference.decide(x), policy.decide(x))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    def trainer() -> GRPOTrainer:
        policy = EpisodePolicy(
            "Pendulum-v1",
            num_members=3,
            critic=True,
            options=EpisodeOptions(hidden=(8,), max_episode_steps=12, normalize_observations=True),
        )
        return trainer_of(policy, batch_size=20, num_epochs_per_update=2, advantage=AdvantageConfig(credit="gae"))

    def untimed(metrics: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in metrics.items() if not name.startswith("time/")}

    starts = episode_starts(2)
    torch.manual_seed(1)
    unbroken = trainer()
    history = [untimed(unbroken.step(starts(iteration))) for iteration in range(4)]
    torch.manual_seed(1)
    first = trainer()
    for iteration in range(2):
        assert untimed(first.step(starts(iteration))) == history[iteration]
    first.save_checkpoint(tmp_path / "half")
    torch.manual_seed(99)
    second = trainer()
    second.load_checkpoint(tmp_path / "half")
    assert second.iteration == 2
    for iteration in range(2, 4):
        assert untimed(second.step(starts(iteration))) == history[iteration]
    for name, value in unbroken.policy.state_dict().items():
        assert torch.equal(second.policy.state_dict()[name], value), name


def test_ranks_normalise_with_the_observations_of_all_ranks() -> None:
    """An evaluation before the trainer is built, and one after each iteration, belong to them. No observation counts twice."""

    policies = [normalizing_policy(), normalizing_policy()]
    policies[1].load_state_dict(policies[0].state_dict())

    def run(engine: ImitatedRank) -> tuple[EpisodePolicy, Tensor]:
        policy, seen = policies[engine.rank], list[Tensor]()
        sample = policy.sample_actions

        def noting(states: Any, num_actions_per_state: int) -> SampledActions:
            sampled = sample(states, num_actions_per_state)
            seen.extend(episode.observations for group in sampled.actions for episode in group)
            return sampled

        policy.sample_actions = noting  # type: ignore[method-assign]
        policy.sample_actions(STARTS[: 1 + engine.rank], 2)  # another number on each rank
        config = GRPOConfig(group_size=3, seed=0)
        trainer = GRPOTrainer(config=config, policy=policy, reward_model=EnvironmentReward(), engine=engine)
        for _ in range(3):
            trainer.step(STARTS)
            trainer.evaluate(STARTS)
        trainer.step(STARTS)
        assert policy.normalizer is not None
        policy.normalizer.begin()
        return policy, torch.cat(seen)

    (first, one), (second, two) = on_ranks(2, run)
    everything = torch.cat([one, two]).double()
    assert first.normalizer is not None
    assert float(first.normalizer.count) == len(everything)
    torch.testing.assert_close(first.normalizer.mean, everything.mean(0), rtol=1e-9, atol=1e-9)
    assert {
        name for name, value in first.state_dict().items() if not torch.equal(value, second.state_dict()[name])
    } == set()

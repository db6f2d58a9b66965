"""Observations are encoded as Gymnasium's `flatten` does, and normalised by the moments that numpy computes."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from torch import Tensor

from adapters.control import EnvironmentReward, EpisodePolicy
from adapters.control.environments.episodes import episode_starts
from adapters.control.policy.observations import MAX_DEVIATION, ObservationEncoder, RunningNormalizer
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig, SampledActions
from grpo.errors import ConfigError
from tests.support.control_environments import GOALS, space_of_everything
from tests.support.control_policies import STARTS, policy_of, trainer_of
from tests.support.imitated_ranks import ImitatedRank, on_ranks
from tests.support.out_of_memory import SmallMemory

FLAT = [
    spaces.Box(-1.0, 1.0, (3,), np.float64),
    spaces.Box(-1.0, 1.0, (2, 3), np.float32),
    spaces.Box(-5, 5, (), np.int64),
    spaces.Box(0, 255, (4, 4), np.uint8),
    spaces.Discrete(5),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([3, 2, 4]),
    spaces.MultiDiscrete([[3, 2], [4, 2]], start=[[1, 0], [-3, 2]]),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
    spaces.Tuple((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float64))),
    GOALS,
    space_of_everything(),
]


def batch_of(space: spaces.Space, num_rows: int) -> tuple[list[Any], Any]:
    """Samples, and the batch of them that a pool returns."""
    space.seed(3)
    samples = [space.sample() for _ in range(num_rows)]
    return samples, concatenate(space, samples, create_empty_array(space, num_rows))


def test_observations_are_encoded_as_gymnasium_flattens_them(subtests: pytest.Subtests) -> None:
    for space in FLAT:
        for num_rows in (1, 5):
            with subtests.test(space=str(space), num_rows=num_rows):
                samples, batch = batch_of(space, num_rows)
                encoder = ObservationEncoder(space)
                encoded = encoder(batch)
                if isinstance(space, spaces.Box):
                    batch[...] = 0  # environments overwrite their observations
                assert encoded.dtype == encoder.dtype == torch.float32
                assert encoder.shape == (spaces.flatdim(space),)
                expected = np.stack([spaces.flatten(space, sample).astype(np.float32) for sample in samples])
                np.testing.assert_array_equal(encoded.numpy(), expected)
                assert (len(np.unique(expected, axis=0)) > 1) == (num_rows > 1)


def test_images_keep_shape_and_dtype(subtests: pytest.Subtests) -> None:
    for dtype in (np.uint8, np.float32):
        with subtests.test(dtype=dtype):
            space = spaces.Box(0, 255, (6, 5, 3), dtype)
            encoder = ObservationEncoder(space, keeps_images=True)
            _, batch = batch_of(space, 2)
            encoded, expected = encoder(batch), batch.copy()
            batch[:] = 0
            assert ObservationEncoder(space).shape == (90,)
            assert ObservationEncoder(spaces.Box(0, 255, (36, 36, 1), dtype)).is_image
            assert (encoder.is_image, encoder.shape, encoded.dtype) == (True, (6, 5, 3), encoder.dtype)
            np.testing.assert_array_equal(encoded.numpy(), expected, strict=True)


def test_spaces_without_a_fixed_size_are_refused(subtests: pytest.Subtests) -> None:
    for space in (spaces.Text(3), spaces.Sequence(spaces.Discrete(2)), spaces.Dict(words=spaces.Text(3))):
        with subtests.test(space=str(space)), pytest.raises(ConfigError, match=r"no fixed size. Wrap the environment"):
            ObservationEncoder(space)


def test_moments_include_all_observations(subtests: pytest.Subtests) -> None:
    seen = torch.randn(60, 3, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 300.0]) + torch.tensor([5.0, 0.0, 1e4])
    for sizes in ([60], [1, 59], [20, 20, 20], [7, 1, 1, 51]):
        for num_begins in (1, 99):
            with subtests.test(sizes=sizes, num_begins=num_begins):
                normalizer = RunningNormalizer((3,))
                for place, part in enumerate(seen.split(sizes)):
                    normalizer.see(part)
                    if place < num_begins - 1:
                        normalizer.begin()
                normalizer.begin()
                np.testing.assert_allclose(normalizer.mean, seen.numpy().mean(0), rtol=1e-12)
                np.testing.assert_allclose(normalizer.squares / normalizer.count, seen.numpy().var(0), rtol=1e-9)
                x = torch.tensor([[5.001, 0.5, 10100.0]])
                expected = (x.double() - seen.mean(0)) / (seen.var(0, correction=0) + 1e-8).sqrt()
                # float32 rounds 5.001 by up to 2.4e-7, which is 2.4e-4 standard deviations of 1e-3
                torch.testing.assert_close(normalizer(x), expected.float(), rtol=1e-3, atol=1e-3)


def test_new_observations_take_effect_when_the_next_iteration_begins() -> None:
    normalizer = RunningNormalizer((2,))
    x = torch.tensor([[7.0, 3.0]])
    normalizer.begin()
    assert normalizer(x).tolist() == [[7.0, 3.0]]  # unchanged without statistics
    normalizer.see(torch.tensor([[7.0, 1.0], [7.0, 3.0]]))  # mean 2, variance 1, and a constant
    assert normalizer(x).tolist() == [[7.0, 3.0]]
    for _ in range(2):  # the second time without new observations
        normalizer.begin()
        assert normalizer(x).tolist() == [[0.0, pytest.approx(1.0)]]
    bounds = normalizer(torch.tensor([[7.0, 1e9], [7.0, -1e9]]))
    assert bounds.tolist() == [[0.0, MAX_DEVIATION], [0.0, -MAX_DEVIATION]]


# --- in a policy: statistics change with the weights only, and belong to checkpoints, copies and references


def normalizing_policy() -> EpisodePolicy:
    return policy_of("Pendulum-v1", num_members=3, max_episode_steps=9, normalize_observations=True)


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


@pytest.mark.filterwarnings("ignore:EpisodePolicy. the environment seeds torch's global generator:grpo.GRPOWarning")
def test_ranks_normalise_with_the_observations_of_all_ranks() -> None:
    """An evaluation before the trainer is built, and one after each iteration, belong to them. No observation counts twice.

    The ranks are threads here and share the global generator, so one may find it as the other left it.
    """
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

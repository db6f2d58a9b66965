"""Torsos, what a custom torso has to return, and networks in NumPy; observations, and their normalisation."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from torch import Tensor, nn

from adapters.control import EnvironmentReward, EpisodePolicy
from adapters.control.environments.episodes import episode_starts
from adapters.control.policy.fast_forward import SINGLE_THREADED, fast_forward
from adapters.control.policy.networks import CNNTorso, MixedTorso, SharedStd, mlp_torso, num_outputs
from adapters.control.policy.observations import MAX_DEVIATION, ObservationEncoder, RunningNormalizer
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig, SampledActions
from grpo.errors import ConfigError
from tests.support.control_environments import GOALS, space_of_everything
from tests.support.control_policies import STARTS, policy_of, trainer_of
from tests.support.imitated_ranks import ImitatedRank, on_ranks
from tests.support.odd_environments import OBSERVED
from tests.support.out_of_memory import SmallMemory


def test_an_mlp_computes_the_layers_written_out_by_hand() -> None:
    torso = mlp_torso(3, (4, 2), "relu")
    assert [type(layer) for layer in torso] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU]
    x = torch.randn(5, 3)
    torch.testing.assert_close(torso[0].weight.T @ torso[0].weight, 2.0 * torch.eye(3))  # orthogonal, gain sqrt(2)
    hidden = (x @ torso[0].weight.T).clamp(min=0)  # biases are initially 0
    torch.testing.assert_close(torso(x), (hidden @ torso[2].weight.T).clamp(min=0))
    assert mlp_torso(3)(x).shape == (5, 64)
    torch.testing.assert_close(mlp_torso(3, (4,))(1e6 * x).abs(), torch.ones(5, 4))  # tanh


def test_an_mlp_without_layers_or_with_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hidden needs at least one width; got \(\)"):
        mlp_torso(3, ())
    with pytest.raises(ConfigError, match="activation must be one of 'tanh', 'relu'; got str 'gelu'"):
        mlp_torso(3, (4,), "gelu")  # type: ignore[arg-type]


def test_a_cnn_scales_integer_pixels_only() -> None:
    torso = CNNTorso((36, 40, 3), num_features=5)
    pixels = torch.randint(256, (2, 36, 40, 3), dtype=torch.uint8)
    features = torso(pixels)
    assert features.shape == (2, 5)
    torch.testing.assert_close(torso(pixels.float() / 255.0), features)
    torch.testing.assert_close(torso(pixels.double() / 255.0), features)  # Box images may be float64
    assert not torch.equal(torso(pixels.float()), features)  # floats are not scaled


def test_channels_first_and_last_give_the_same_features() -> None:
    last, first = CNNTorso((40, 44, 3)), CNNTorso((3, 40, 44))
    first.load_state_dict(last.state_dict())
    images = torch.randint(256, (2, 40, 44, 3), dtype=torch.uint8)
    torch.testing.assert_close(first(images.permute(0, 3, 1, 2)), last(images), rtol=0, atol=0)


def test_a_mixed_torso_scales_pixels_and_reads_every_part() -> None:
    space = OBSERVED["a dict with pixels"]
    torso = MixedTorso(list(space.spaces.values()), 5)  # type: ignore[attr-defined]
    observation = torch.rand(2, 36 * 36 * 3 + 2) * 255
    features = torso.images[0](observation[:, :-2].unflatten(1, (36, 36, 3)) / 255)
    expected = torso.joined(torch.cat([features, observation[:, -2:]], 1))
    torch.testing.assert_close(torso(observation), expected)


def test_a_shared_standard_deviation_is_trained_by_all_observations() -> None:
    head = SharedStd(4, 2, gain=1.0, initial_log_std=-0.5)
    parameters = head(torch.randn(3, 4))
    assert parameters[:, 2:].tolist() == [[-0.5, -0.5]] * 3
    assert len(parameters[:, :2].unique(dim=0)) == 3
    parameters[:, 2:].sum().backward()
    assert head.log_std.grad is not None
    assert head.log_std.grad.tolist() == [3.0, 3.0]


def test_a_cnn_refuses_small_images() -> None:
    with pytest.raises(ConfigError, match=r"at least 36 x 36; got 35 x 99. Pass a custom torso"):
        CNNTorso((35, 99, 3))


class Remembers(nn.Module):
    """A recurrent network of its own making: the features depend on earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.memory = torch.zeros(4)

    def forward(self, observations: Tensor) -> Tensor:
        features = (self.layer(observations) + self.memory).tanh()
        self.memory = features.detach().mean(0)
        return features


class ReturnsItsState(Remembers):
    def forward(self, observations: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        features = self.layer(observations)
        return features, features


class NeedsItsState(Remembers):
    def forward(self, observations: Tensor, state: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(observations) + state


class MixesRows(Remembers):
    def forward(self, observations: Tensor) -> Tensor:
        return self.layer(observations - observations.mean(0))


class Returns(nn.Module):
    def __init__(self, output: Tensor | tuple[Tensor, ...]) -> None:
        super().__init__()
        self.output = output

    def forward(self, observations: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.output


def test_torsos_with_a_memory_or_a_wrong_output_are_refused(subtests: pytest.Subtests) -> None:
    """Every step is scored alone, so a torso would run without its memory."""
    wrong = r"Returns: a torso must map \[n, \*observation\] .* got"
    for torso, message in (
        (Returns(torch.zeros(3, 2, 3)), rf"{wrong} \[3, 2, 3\]"),
        (Returns(torch.zeros(3)), rf"{wrong} \[3\]"),
        (Returns(()), f"{wrong} a tuple of 0"),
        (nn.LSTM(3, 4), "LSTM: a torso must have no memory.*LSTM. Let the environment show .*FrameStackObservation"),
        (nn.Sequential(nn.Linear(3, 4), nn.GRUCell(4, 4)), "Sequential: a torso must have no memory.*got GRUCell"),
        (nn.Sequential(nn.RNN(3, 4)), "a torso must have no memory.*got RNN"),
        (Remembers(), "Remembers: a torso must return equal features .* it has a memory or is random"),
        (ReturnsItsState(), "a torso must map .* got a tuple of 2 .* also returns a hidden state, it has a memory"),
        (NeedsItsState(), "take no other argument; it raised TypeError: .*'state'"),
        (MixesRows(), "MixesRows: a torso must compute the features of an observation from this observation alone"),
        (nn.Linear(4, 4), r"must map observations \['n', 3\] of float32 .* it raised RuntimeError: mat1 and mat2"),
    ):
        with subtests.test(message), pytest.raises(ConfigError, match=message):
            num_outputs(torso, (3,), torch.float32)


def test_torsos_are_tried_in_evaluation_mode_and_left_as_they_were() -> None:
    assert num_outputs(mlp_torso(3, (7,)), (3,), torch.float32) == 7
    torso = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.LayerNorm(4)).train()
    torso[2].eval()
    before = {name: value.clone() for name, value in torso.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert num_outputs(torso, (3,), torch.float32) == 4
    assert torch.equal(torch.rand(3), expected)
    assert [part.training for part in torso] == [True, True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in torso.state_dict().items())
    assert num_outputs(nn.Sequential(nn.Flatten(), nn.LazyLinear(5)), (3, 2), torch.float32) == 5


# --- networks in NumPy: as torch's, with the current weights, for supported modules only


def network(activation: str = "tanh") -> nn.Sequential:
    head = SharedStd(16, 3, gain=1.0, initial_log_std=-0.5)
    return nn.Sequential(mlp_torso(5, (8, 16), activation), head)


def filled_normalizer() -> RunningNormalizer:
    normalizer = RunningNormalizer((5,))
    normalizer.see(3.0 + 2.0 * torch.randn(100, 5))
    normalizer.begin()
    return normalizer


def test_fast_outputs_equal_torchs() -> None:
    normalizer = filled_normalizer()
    observations = 3.0 + 20.0 * torch.randn(32, 5)  # some beyond the normaliser's bounds
    before = observations.clone()
    policies = ((normalizer, network("tanh")), (normalizer, network("relu")), (nn.Tanh(), nn.Linear(5, 2, bias=False)))
    for modules in policies:
        with torch.no_grad():
            expected = nn.Sequential(*modules)(observations)
        np.testing.assert_allclose(fast_forward(*modules)(observations.numpy()), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(observations, before)


def test_an_optimizers_changes_are_used() -> None:
    policy = network()
    fast, observations = fast_forward(policy), torch.randn(4, 5)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1, fused=True)
    policy(observations).sum().backward()
    optimizer.step()
    np.testing.assert_allclose(fast(observations.numpy()), policy(observations).detach().numpy(), rtol=1e-5, atol=1e-6)


class Doubled(nn.Linear):
    def forward(self, values):
        return 2.0 * super().forward(values)


def hooked() -> nn.Module:
    layer = nn.Linear(5, 5)
    layer.register_forward_hook(lambda module, inputs, output: 2.0 * output)
    return layer


def test_unsupported_modules_run_in_torch(subtests: pytest.Subtests) -> None:
    gelu, double = nn.Sequential(nn.Linear(5, 5), nn.GELU()), nn.Linear(5, 5).double()
    for module in (gelu, double, Doubled(5, 5), hooked(), nn.Dropout(0.5)):
        with subtests.test(module=type(module).__name__):
            assert fast_forward(module) is None
            assert fast_forward(nn.Tanh(), module) is None
    assert fast_forward(None, nn.Tanh()) is not None


def test_large_batches_run_in_torch() -> None:
    """The largest tensor has 64 x 64 weights, which are multiplied once per row."""
    assert fast_forward(nn.Linear(64, 64)).max_rows == SINGLE_THREADED // (64 * 64)


# --- observations are encoded as Gymnasium's `flatten` does, and normalised by the moments that numpy computes


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
    assert normalizer(x).tolist() == [[7.0, 3.0]]  # unchanged without statistics
    normalizer.begin()
    assert normalizer(x).tolist() == [[7.0, 3.0]]
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

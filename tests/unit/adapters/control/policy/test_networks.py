"""Torsos and heads: shapes, initial weights, and what a custom torso has to return. And networks in NumPy."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adapters.control.policy.fast_forward import SINGLE_THREADED, fast_forward
from adapters.control.policy.networks import CNNTorso, MixedTorso, SharedStd, mlp_torso, num_outputs
from adapters.control.policy.observations import RunningNormalizer
from grpo.errors import ConfigError
from tests.support.odd_environments import OBSERVED


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


def test_a_cnn_refuses_small_images() -> None:
    with pytest.raises(ConfigError, match=r"at least 36 x 36; got 35 x 99. Pass a custom torso"):
        CNNTorso((35, 99, 3))


def test_a_shared_standard_deviation_is_equal_for_all_observations() -> None:
    head = SharedStd(4, 2, gain=1.0, initial_log_std=-0.5)
    parameters = head(torch.randn(3, 4))
    assert parameters[:, 2:].tolist() == [[-0.5, -0.5]] * 3
    assert len(parameters[:, :2].unique(dim=0)) == 3
    parameters[:, 2:].sum().backward()
    assert head.log_std.grad is not None
    assert head.log_std.grad.tolist() == [3.0, 3.0]


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
        (Returns(torch.zeros(3, 2, 3)), rf"{wrong} .*\[3, 2, 3\]"),
        (Returns(torch.zeros(3)), rf"{wrong} .*\[3\]"),
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

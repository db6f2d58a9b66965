"""Torsos and heads: shapes, initial weights, and what a custom torso has to return."""

import pytest
import torch
from torch import Tensor, nn

from adapters.control.policy.networks import CNNTorso, SharedStd, linear, mlp_torso, num_outputs
from grpo.errors import ConfigError


def test_an_mlp_computes_the_layers_written_out_by_hand() -> None:
    torso = mlp_torso(3, (4, 2), "relu")
    assert [type(layer) for layer in torso] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU]
    x = torch.randn(5, 3)
    torch.testing.assert_close(torso[0].weight.T @ torso[0].weight, 2.0 * torch.eye(3))  # orthogonal, gain sqrt(2)
    hidden = (x @ torso[0].weight.T).clamp(min=0)  # biases are initially 0
    torch.testing.assert_close(torso(x), (hidden @ torso[2].weight.T).clamp(min=0))
    assert mlp_torso(3)(x).shape == (5, 64)
    torch.testing.assert_close(mlp_torso(3, (4,))(1e6 * x).abs(), torch.ones(5, 4))  # tanh


def test_initial_weights_are_orthogonal() -> None:
    layer = linear(6, 4, gain=0.5)
    torch.testing.assert_close(layer.weight @ layer.weight.T, 0.25 * torch.eye(4))
    assert not layer.bias.any()


def test_an_mlp_without_layers_or_with_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hidden needs at least one width.*; got \(\), 'tanh'"):
        mlp_torso(3, ())
    with pytest.raises(ConfigError, match=r"activation must be one of \['tanh', 'relu'\]; got \(4,\), 'gelu'"):
        mlp_torso(3, (4,), "gelu")  # type: ignore[arg-type]


def test_a_cnn_scales_integer_pixels_only() -> None:
    torso = CNNTorso((36, 40, 3), num_features=5)
    pixels = torch.randint(256, (2, 36, 40, 3), dtype=torch.uint8)
    features = torso(pixels)
    assert features.shape == (2, 5)
    torch.testing.assert_close(torso(pixels.float() / 255.0), features)
    torch.testing.assert_close(torso(pixels.double() / 255.0), features)  # Box images may be float64
    assert not torch.equal(torso(pixels.float()), features)  # floats are not scaled


def test_a_cnn_expects_channels_last() -> None:
    torso = CNNTorso((36, 36, 2))
    with torch.no_grad():
        torso.convolutions[0].weight[:, 1].zero_()  # ignore the second channel
    image = torch.rand(1, 36, 36, 2)
    other = image.clone()
    other[..., 1] += 1.0
    torch.testing.assert_close(torso(other), torso(image))
    other[..., 0] += 1.0
    assert not torch.allclose(torso(other), torso(image))


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


class Wrong(nn.Module):
    def __init__(self, output: Tensor | tuple[Tensor, ...]) -> None:
        super().__init__()
        self.output = output

    def forward(self, observations: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.output


def test_the_number_of_features_is_inferred_and_wrong_outputs_are_refused(subtests: pytest.Subtests) -> None:
    assert num_outputs(mlp_torso(3, (7,)), (3,), torch.float32) == 7
    for output, got in ((torch.zeros(3, 2, 3), r"\[3, 2, 3\]"), (torch.zeros(3), r"\[3\]"), ((), "a tuple of 0")):
        with (
            subtests.test(got=got),
            pytest.raises(ConfigError, match=rf"Wrong: a torso must map \[n, \*observation\] .* got {got}"),
        ):
            num_outputs(Wrong(output), (3,), torch.float32)


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


def test_torsos_with_a_memory_are_refused(subtests: pytest.Subtests) -> None:
    """Every step is scored alone, so such a torso would run without its memory."""
    for torso, message in (
        (
            nn.LSTM(3, 4),
            "LSTM: a torso must have no memory.*got LSTM. Let the environment show .*FrameStackObservation",
        ),
        (nn.Sequential(nn.Linear(3, 4), nn.GRUCell(4, 4)), "Sequential: a torso must have no memory.*got GRUCell"),
        (nn.Sequential(nn.RNN(3, 4)), "a torso must have no memory.*got RNN"),
        (Remembers(), "Remembers: a torso must return equal features .* it has a memory or is random"),
        (ReturnsItsState(), "a torso must map .* got a tuple of 2 .* also returns a hidden state, it has a memory"),
        (NeedsItsState(), "take no other argument; it raised TypeError: .*'state'"),
        (MixesRows(), "MixesRows: a torso must compute the features of an observation from this observation alone"),
    ):
        with subtests.test(torso=type(torso).__name__), pytest.raises(ConfigError, match=message):
            num_outputs(torso, (3,), torch.float32)


def test_torsos_are_tried_in_evaluation_mode_and_left_as_they_were() -> None:
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


def test_a_torso_that_cannot_take_the_observations_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"must map observations \['n', 4\] of float32 .* it raised RuntimeError: mat1 and mat2"
    ):
        num_outputs(nn.Linear(3, 4), (4,), torch.float32)

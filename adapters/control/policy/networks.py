"""Small networks: torsos map observations to features, and heads map features to parameters of a distribution."""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from grpo.errors import ConfigError

Activation: TypeAlias = Literal["tanh", "relu"]

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


def linear(num_inputs: int, num_outputs: int, gain: float) -> nn.Linear:
    """A linear layer with an orthogonal initial weight times `gain`, and bias 0."""
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp_torso(num_inputs: int, hidden: Sequence[int] = (64, 64), activation: Activation = "tanh") -> nn.Sequential:
    """Fully connected layers, each followed by its activation.

    Args:
        num_inputs: Length of a flat observation.
        hidden: Widths of the layers, at least one. Larger widths can represent more and cost more per step.
        activation: `tanh` is bounded and the common choice for control. `relu` is faster in wide layers.
    """
    if not hidden or activation not in ACTIVATIONS:
        raise ConfigError(
            f"mlp_torso: hidden needs at least one width, and activation must be one of {list(ACTIVATIONS)}; got {hidden}, "
            f"{activation!r}."
        )
    layers: list[nn.Module] = []
    for num_outputs in hidden:
        layers += [linear(num_inputs, num_outputs, math.sqrt(2.0)), ACTIVATIONS[activation]()]
        num_inputs = num_outputs
    return nn.Sequential(*layers)


class CNNTorso(nn.Module):
    """Three convolutions and a linear layer for images [n, height, width, channels] of at least 36 x 36 pixels.

    Integer pixels are divided by 255. Float pixels are not scaled.

    Args:
        shape: Shape of an image, (height, width, channels).
        num_features: Number of features. A larger number can represent more and costs more per step.

    Source:
        Mnih et al. 2015, "Human-level control through deep reinforcement learning".
    """

    def __init__(self, shape: tuple[int, ...], num_features: int = 256) -> None:
        super().__init__()
        height, width, channels = shape
        if min(height, width) < 36:
            raise ConfigError(
                f"CNNTorso: images must be at least 36 x 36; got {height} x {width}. Pass a custom torso."
            )
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 16, 8, stride=4), nn.ReLU(),
            nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=1), nn.ReLU(),
            nn.Flatten(),
        )  # fmt: skip
        with torch.no_grad():
            num_flat = self.convolutions(torch.zeros(1, channels, height, width)).shape[1]
        self.features = nn.Sequential(linear(num_flat, num_features, math.sqrt(2.0)), nn.ReLU())

    def forward(self, images: Shaped[Tensor, "n height width channels"]) -> Float[Tensor, "n features"]:
        """Map images to features."""
        scaled = images.float() if images.is_floating_point() else images.float() / 255.0
        return self.features(self.convolutions(scaled.permute(0, 3, 1, 2)))


class SharedStd(nn.Module):
    """Head with a mean from the features and a trainable log standard deviation shared by all observations: [n, 2 D]."""

    def __init__(self, num_features: int, num_actions: int, *, gain: float, initial_log_std: float) -> None:
        super().__init__()
        self.mean = linear(num_features, num_actions, gain)
        self.log_std = nn.Parameter(torch.full((num_actions,), float(initial_log_std)))

    def forward(self, features: Float[Tensor, "n features"]) -> Float[Tensor, "n parameters"]:
        """Means and log standard deviations, concatenated."""
        mean = self.mean(features)
        return torch.cat([mean, self.log_std.expand_as(mean)], dim=1)


def num_outputs(module: nn.Module, example: Tensor) -> int:
    """Number of features that a torso returns for an observation."""
    with torch.no_grad():
        features = module(example)
    if not isinstance(features, Tensor) or features.dim() != 2:
        shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(
            f"{type(module).__name__}: a torso must map [n, *observation] to features [n, F]; got {shape}. Return one row of "
            "features per observation."
        )
    return features.shape[1]

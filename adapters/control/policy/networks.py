"""Small networks: torsos map observations to features, and heads map features to parameters of a distribution."""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from grpo.arguments import describe, require_instances, require_integers, require_widths
from grpo.errors import ConfigError

from .observations import is_large

Activation: TypeAlias = Literal["tanh", "relu"]

REMEDY = (
    "Let the environment show what has to be remembered: use gymnasium.wrappers.FrameStackObservation, or make previous "
    "actions a part of the observation."
)
"""What to do instead of a memory in the network."""

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
    require_integers("mlp_torso", 1, num_inputs=num_inputs)
    require_widths("mlp_torso", hidden)
    require_instances("mlp_torso", Activation, activation=activation)
    if not hidden:
        raise ConfigError(f"mlp_torso: hidden needs at least one width; got {hidden}.")
    layers: list[nn.Module] = []
    for num_outputs in hidden:
        layers += [linear(num_inputs, num_outputs, math.sqrt(2.0)), ACTIVATIONS[activation]()]
        num_inputs = num_outputs
    return nn.Sequential(*layers)


class CNNTorso(nn.Module):
    """Three convolutions and a linear layer for images of at least 36 x 36 pixels, with their channels last or first.

    Integer pixels are divided by 255. Float pixels are not scaled.

    Args:
        shape: Shape of an image, (height, width, channels) or (channels, height, width). The channels are first if that axis is
            the shortest.
        num_features: Number of features. A larger number can represent more and costs more per step.

    Source:
        Mnih et al. 2015, "Human-level control through deep reinforcement learning".
    """

    def __init__(self, shape: tuple[int, ...], num_features: int = 256) -> None:
        super().__init__()
        require_instances("CNNTorso", Sequence, "(height, width, channels)", shape=shape)
        if len(shape) != 3:
            raise ConfigError(f"CNNTorso: shape must be (height, width, channels); got {describe(shape)}.")
        self.is_channels_first = all(isinstance(side, int) for side in shape) and shape[0] < min(shape[1:])
        height, width, channels = (*shape[1:], shape[0]) if self.is_channels_first else shape
        require_integers("CNNTorso", 1, height=height, width=width, channels=channels, num_features=num_features)
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

    def forward(self, images: Shaped[Tensor, "n rows columns planes"]) -> Float[Tensor, "n features"]:
        """Map images to features."""
        scaled = images.float() if images.is_floating_point() else images.float() / 255.0
        return self.features(self.convolutions(scaled if self.is_channels_first else scaled.permute(0, 3, 1, 2)))


class MixedTorso(nn.Module):
    """For flat observations with images among their parts: a `CNNTorso` for each image, and a layer over all parts.

    Args:
        parts: The spaces of the parts, in the order of the flat observation.
        num_features: Number of features, also of each image.
    """

    def __init__(self, parts: Sequence[spaces.Space], num_features: int = 256) -> None:
        super().__init__()
        self.widths = [spaces.flatdim(part) for part in parts]
        self.shapes = [part.shape if is_large(part) else None for part in parts]
        self.scales = [255.0 if np.issubdtype(part.dtype or float, np.integer) else 1.0 for part in parts]
        self.images = nn.ModuleList([CNNTorso(shape, num_features) for shape in self.shapes if shape is not None])
        num_numbers = sum(width for width, shape in zip(self.widths, self.shapes, strict=True) if shape is None)
        joined = num_features * len(self.images) + num_numbers
        self.joined = nn.Sequential(linear(joined, num_features, math.sqrt(2.0)), nn.ReLU())

    def forward(self, observations: Float[Tensor, "n features"]) -> Float[Tensor, "n F"]:
        """Map flat observations to features."""
        networks = iter(self.images)
        columns = zip(observations.split(self.widths, 1), self.shapes, self.scales, strict=True)
        parts = [
            values if shape is None else next(networks)(values.unflatten(1, shape) / scale)
            for values, shape, scale in columns
        ]
        return self.joined(torch.cat(parts, 1))


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


def num_outputs(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Number of features F that a torso returns for an observation. The module computes three random observations.

    Args:
        module: Torso or critic. It is not changed.
        shape: Shape of an observation.
        dtype: Data type of an observation.

    Raises:
        ConfigError: The module is recurrent, does not return [n, F], or its features of one observation depend on other
            observations or on earlier calls.
    """
    name = type(module).__name__
    recurrent = [type(part).__name__ for part in module.modules() if isinstance(part, nn.RNNBase | nn.RNNCellBase)]
    if recurrent:
        raise ConfigError(
            f"{name}: a torso must have no memory, because every step is scored alone; got {recurrent[0]}. {REMEDY}"
        )
    random = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    example = random.to(dtype) if dtype.is_floating_point else (255 * random).to(dtype)
    modes = {part: part.training for part in module.modules()}
    module.eval()  # without dropout, and with the stored statistics of normalising layers
    try:
        with torch.no_grad():
            features, again, alone = module(example), module(example), module(example[:1])
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{name}: a torso must map observations {['n', *shape]} of {str(dtype).removeprefix('torch.')} to features [n, F], "
            f"and take no other argument; it raised {type(error).__name__}: {error}. Correct its forward()."
        ) from error
    finally:
        for part, mode in modes.items():
            part.training = mode
    if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != len(example):
        raise ConfigError(
            f"{name}: a torso must map [n, *observation] to features [n, F]; got {describe(features)} for n = {len(example)}. "
            "Return one row of features per observation. If the module also returns a hidden state, it has a memory. "
            + REMEDY
        )
    if not torch.allclose(features, again, rtol=0.0, atol=0.0, equal_nan=True):
        raise ConfigError(
            f"{name}: a torso must return equal features for equal observations, because every step is scored alone; two "
            f"calls in eval mode differ by up to {float((features - again).abs().max()):.2g}, so it has a memory or is random. "
            + REMEDY
        )
    if not torch.allclose(features[:1], alone, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise ConfigError(
            f"{name}: a torso must compute the features of an observation from this observation alone, because a batch has "
            "steps of several episodes; together with two others they differ by up to "
            f"{float((features[:1] - alone).abs().max()):.2g}. Do not mix rows along the first axis."
        )
    return features.shape[1]

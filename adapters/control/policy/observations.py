"""Observations of any Gymnasium space as tensors, and their running normalisation."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from adapters.control.environments.pool_base import finite_rows
from grpo.arguments import describe
from grpo.errors import ConfigError, ContractError

MIN_VARIANCE = 1e-8
"""Added to variances, so that constant observations are normalised to 0 without a division by 0."""

MAX_DEVIATION = 10.0
"""Normalised observations are clamped to this many standard deviations."""


MAX_FLAT = 10_000
"""Maximum length of a flat observation for the default torso. Its first layer has this many weights per unit."""

IMAGE_SIDE = 36
"""Integers with two axes of at least this length are an image, in a part of an observation or in a stack of frames."""


class ObservationEncoder:
    """Encodes a batch of observations as one tensor [n, *shape].

    A box with three axes, two of them at least 36 long, is an image and keeps its shape and dtype. All other observations are
    flattened to float32, with one-hot categories and with the parts of `Dict` and `Tuple` concatenated in Gymnasium's order.

    Args:
        space: Space of a single observation.
        keeps_images: Whether smaller boxes with three axes keep their shape and dtype, too, for a network of the user's.

    Raises:
        ConfigError: The space has no fixed size (`Text`, `Graph`, `Sequence`).
    """

    def __init__(self, space: spaces.Space, *, keeps_images: bool = False) -> None:
        self.space = space
        self.parts = _parts(space)
        """The space itself, or the parts of a nested space, in the order of the flat observation."""
        has_axes = isinstance(space, spaces.Box) and len(space.shape) == 3
        self.is_image = has_axes and (keeps_images or is_large(space))
        self._encode: Any = np.array if self.is_image else _encoder(space)
        self.shape: tuple[int, ...] = space.shape if self.is_image else (spaces.flatdim(space),)  # type: ignore[assignment]
        self.dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype if self.is_image else torch.float32

    def __call__(self, observations: Any) -> Shaped[Tensor, "n *features"]:
        """Encode a batch. The result is a copy, because environments may overwrite their observations."""
        return torch.from_numpy(self._encode(observations))

    def require_flat(self) -> None:
        """Check that the default network suits the flat observation.

        Raises:
            ConfigError: A part of the observation is an image without channels or a stack of images, or the observation is too
                long.
        """
        images = [part for part in self.parts if is_large(part) and len(part.shape or ()) != 3]
        if images:
            raise ConfigError(
                f"EpisodePolicy: the default networks take images with three axes, [height, width, channels] or [channels, "
                f"height, width]; got {images[0]} in {type(self.space).__name__} observations, which would be flattened to "
                f"{self.shape[0]:,} numbers. Stack frames along the last axis, or add one to images without channels, with "
                "gymnasium.wrappers.TransformObservation. Or pass a torso that takes the flat observation."
            )
        if not self.has_images and self.shape[0] > MAX_FLAT:
            raise ConfigError(
                f"EpisodePolicy: a flat observation must have at most {MAX_FLAT:,} numbers for the default network; got "
                f"{self.shape[0]:,} from {self.space}. Reduce the observation with gymnasium.wrappers.TransformObservation, or "
                "pass a torso."
            )

    @property
    def has_images(self) -> bool:
        """Whether a part of a nested observation is an image."""
        return any(is_large(part) for part in self.parts)


def _parts(space: spaces.Space) -> list[spaces.Space]:
    """The space itself, or the parts of a nested space."""
    match space:
        case spaces.Dict():
            return [leaf for part in space.spaces.values() for leaf in _parts(part)]
        case spaces.Tuple():
            return [leaf for part in space.spaces for leaf in _parts(part)]
        case _:
            return [space]


def is_large(space: spaces.Space) -> bool:
    """Whether a space has images that are too large for a fully connected network."""
    if not isinstance(space, spaces.Box):
        return False
    is_picture = np.issubdtype(space.dtype, np.integer) or len(space.shape) == 3
    return is_picture and sum(side >= IMAGE_SIDE for side in space.shape) >= 2


def _encoder(space: spaces.Space) -> Callable[[Any], Any]:
    """A function that encodes batches of a space as float32 [n, width]."""
    match space:
        case spaces.Box() | spaces.MultiBinary():
            width = int(np.prod(space.shape))
            return lambda batch: np.array(batch, dtype=np.float32).reshape(-1, width)
        case spaces.Discrete() | spaces.MultiDiscrete():
            nvec = space.n if isinstance(space, spaces.Discrete) else space.nvec
            sizes, starts = np.ravel(nvec), np.ravel(space.start)
            offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])

            def one_hot(batch: Any) -> Any:
                numbers = np.asarray(batch).reshape(-1, len(sizes)) - starts
                if not ((numbers >= 0) & (numbers < sizes)).all():  # numpy would take -1 as the last category
                    raise ContractError(
                        f"EpisodePolicy: observations must lie in {space}; got {batch!r:.100}. Correct the environment, or its "
                        "observation_space."
                    )
                places = numbers + offsets
                encoded = np.zeros((len(places), int(sizes.sum())), dtype=np.float32)
                np.put_along_axis(encoded, places, 1.0, axis=1)
                return encoded

            return one_hot
        case spaces.Dict():
            parts = {name: _encoder(part) for name, part in space.spaces.items()}
            return lambda batch: np.concatenate([encode(batch[name]) for name, encode in parts.items()], axis=1)
        case spaces.Tuple():
            encoders = [_encoder(part) for part in space.spaces]
            return lambda batch: np.concatenate([e(part) for e, part in zip(encoders, batch, strict=True)], axis=1)
        case _:
            raise ConfigError(
                f"EpisodePolicy: observations of {space} have no fixed size. Wrap the environment so that it returns a Box, "
                "Discrete, MultiDiscrete, MultiBinary, Dict or Tuple (gymnasium.wrappers.TransformObservation)."
            )


def as_batch(space: spaces.Space, observation: Any) -> tuple[Any, bool]:
    """Turn a single observation into a batch of one. Returns the batch, and whether the observation was single.

    Raises:
        ContractError: It is neither an observation of the space nor a batch, or it is not finite.
    """
    try:
        batch, singles = _as_arrays(space, observation)
    except ContractError:
        raise
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ContractError(
            f"EpisodePolicy.predict needs an observation of {space}, or a batch of them; got {describe(observation)}."
        ) from error
    if len(set(singles)) > 1:
        raise ContractError(f"EpisodePolicy.predict: some parts of the observation of {space} are batches, others not.")
    return batch, singles[0]


def _as_arrays(space: spaces.Space, observation: Any) -> tuple[Any, list[bool]]:
    """A batch of arrays, and for each part whether it was a single observation."""
    if isinstance(space, spaces.Dict):
        parts = {name: _as_arrays(part, observation[name]) for name, part in space.spaces.items()}
        return {name: batch for name, (batch, _) in parts.items()}, [one for _, ones in parts.values() for one in ones]
    if isinstance(space, spaces.Tuple):
        pairs = [_as_arrays(part, one) for part, one in zip(space.spaces, observation, strict=True)]
        return tuple(batch for batch, _ in pairs), [one for _, ones in pairs for one in ones]
    values, shape = np.asarray(observation), space.shape or ()
    single = values.ndim == len(shape)
    values = values[None] if single else values
    if values.shape[1:] != shape or not np.can_cast(values.dtype, space.dtype or values.dtype, "same_kind"):
        raise ValueError(f"{values.dtype} {list(values.shape)} is no batch of {space}")
    if not finite_rows(values, len(values)).all():
        raise ContractError(
            f"EpisodePolicy.predict: an observation must be finite, also as float32; got {describe(observation)}."
        )
    return values, [single]


class RunningNormalizer(nn.Module):
    """Normalise observations to (x - mean) / std with statistics of all observations so far, clamped to [-10, 10].

    New observations are included at the next `begin`. Sampling and scoring in one iteration use the same statistics, so that
    the first ratio is 1. The statistics are buffers and are saved in checkpoints.

    Source of the combined mean and variance: Chan et al. 1979, "Updating formulae and a pairwise algorithm", eq. 2.1.
    """

    mean: Tensor
    squares: Tensor
    count: Tensor
    pending_mean: Tensor
    pending_squares: Tensor
    pending_count: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        for name in ("mean", "squares", "pending_mean", "pending_squares"):  # squares: summed squared deviations
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        for name in ("count", "pending_count"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def forward(self, observations: Float[Tensor, "n *features"]) -> Float[Tensor, "n *features"]:
        """Normalised observations."""
        return ((observations - self.shift) * self.scale).clamp(-MAX_DEVIATION, MAX_DEVIATION)

    def see(self, observations: Float[Tensor, "n *features"]) -> None:
        """Collect statistics of these observations. They take effect at the next `begin`."""
        values = observations.double()
        part = (values.new_tensor(len(values)), values.mean(0), values.var(0, correction=0) * len(values))
        for own, merged in zip(self.pending, _merge(self.pending, part), strict=True):
            own.copy_(merged)

    def begin(self) -> None:
        """Normalise with all statistics collected so far, those of this process included."""
        self.include([self.pending])
        if float(self.count) > 0.0:
            self.shift.copy_(self.mean)
            self.scale.copy_((self.squares / self.count + MIN_VARIANCE).rsqrt())

    @property
    def pending(self) -> "Moments":
        """The statistics that this process has collected, and not included."""
        return self.pending_count, self.pending_mean, self.pending_squares

    def include(self, parts: Sequence["Moments"]) -> None:
        """Include statistics, and forget those that this process has collected. They take effect at the next `begin`."""
        own = (self.count, self.mean, self.squares)
        for part in parts:
            if float(part[0]) > 0.0:
                for value, merged in zip(own, _merge(own, part), strict=True):
                    value.copy_(merged)
        for value in self.pending:
            value.zero_()


Moments = tuple[Tensor, Tensor, Tensor]
"""Count, mean, summed squared deviations."""


def _merge(first: Moments, second: Moments) -> Moments:
    count = first[0] + second[0]
    apart = second[1] - first[1]
    mean = first[1] + apart * (second[0] / count)
    return count, mean, first[2] + second[2] + apart.square() * (first[0] * second[0] / count)

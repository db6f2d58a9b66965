"""Distributions composed of other distributions, for `Dict` and `Tuple` spaces."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from grpo.errors import ConfigError, ContractError

from .action_distribution import ActionDistribution, refuse_mask, require_mask_shape, wide


class Composite:
    """Independent distributions for the parts of a `Dict` or `Tuple` space: pi(action) = product of pi(part).

    Parts may be composites themselves. Parameters, noise, masks and actions are concatenated in the order of the parts.
    Integers are stored as floats, exactly up to 2^24.

    Args:
        parts: Distributions by name in the order of the space (`Dict`), or a sequence of distributions (`Tuple`).
    """

    action_dtype = torch.float32

    def __init__(self, parts: Mapping[str, ActionDistribution] | Sequence[ActionDistribution]) -> None:
        self.names = list(parts) if isinstance(parts, Mapping) else None
        self.parts = list(parts.values()) if isinstance(parts, Mapping) else list(parts)
        if not self.parts:
            raise ConfigError(
                "Composite needs at least one part; got an empty Dict or Tuple. Use a space with at least one part."
            )
        self._parameter_widths = [part.num_parameters for part in self.parts]
        self._noise_widths = [part.num_noise for part in self.parts]
        self._category_widths = [part.num_categories for part in self.parts]
        self._action_widths = [int(np.prod(part.action_shape)) for part in self.parts]
        self.num_parameters = sum(self._parameter_widths)
        self.num_noise = sum(self._noise_widths)
        self.num_categories = sum(self._category_widths)
        self.action_shape: tuple[int, ...] = (sum(self._action_widths),)

    def noise(self, rng: np.random.Generator, num_steps: int) -> NDArray[np.float32]:
        """Noise of all parts, concatenated."""
        return np.concatenate([part.noise(rng, num_steps) for part in self.parts], axis=1)

    def sample(
        self,
        parameters: Float[Tensor, "n P"],
        noise: Float[Tensor, "n num_noise"],
        allowed: Bool[Tensor, "n K"] | None = None,
    ) -> Float[Tensor, "n D"]:
        """Sample an action for every part."""
        columns = zip(
            self.parts,
            parameters.split(self._parameter_widths, -1),
            noise.split(self._noise_widths, -1),
            self._masks(parameters, allowed),
            strict=True,
        )
        return self._joined([part.sample(own, random, mask) for part, own, random, mask in columns], parameters)

    def mode(
        self, parameters: Float[Tensor, "n P"], allowed: Bool[Tensor, "n K"] | None = None
    ) -> Float[Tensor, "n D"]:
        """The modes of all parts, concatenated."""
        owns = parameters.split(self._parameter_widths, -1)
        columns = zip(self.parts, owns, self._masks(parameters, allowed), strict=True)
        return self._joined([part.mode(own, mask) for part, own, mask in columns], parameters)

    def log_prob(
        self,
        parameters: Float[Tensor, "n P"],
        actions: Float[Tensor, "n D"],
        allowed: Bool[Tensor, "n K"] | None = None,
    ) -> Float[Tensor, " n"]:
        """log pi(actions), summed over the parts."""
        columns = zip(
            self.parts,
            parameters.split(self._parameter_widths, -1),
            self._split(actions),
            self._masks(parameters, allowed),
            strict=True,
        )
        return torch.stack([part.log_prob(own, taken, mask) for part, own, taken, mask in columns]).sum(0)

    def entropy(
        self, parameters: Float[Tensor, "n P"], allowed: Bool[Tensor, "n K"] | None = None
    ) -> Float[Tensor, " n"] | None:
        """Sum of the parts' entropies. None if a part has no closed form."""
        owns = parameters.split(self._parameter_widths, -1)
        columns = zip(self.parts, owns, self._masks(parameters, allowed), strict=True)
        entropies = [part.entropy(own, mask) for part, own, mask in columns]
        known = [entropy for entropy in entropies if entropy is not None]
        return torch.stack(known).sum(0) if len(known) == len(entropies) else None

    def to_env(self, actions: Float[Tensor, "n D"]) -> list[Any]:
        """One dict or tuple per row."""
        columns = [part.to_env(taken) for part, taken in zip(self.parts, self._split(actions), strict=True)]
        rows = zip(*columns, strict=True)
        return list(rows) if self.names is None else [dict(zip(self.names, row, strict=True)) for row in rows]

    def from_env(self, actions: Any) -> Float[Tensor, "n D"]:
        """Convert a list of n dicts or tuples to [n, D]."""
        keys: list[Any] = list(range(len(self.parts))) if self.names is None else self.names
        for row, action in enumerate(actions):
            found = list(range(len(action))) if self.names is None else list(action)
            if set(found) != set(keys):
                raise ContractError(
                    f"Composite.from_env: every action needs exactly the parts {keys}; action {row} has {found}."
                )
        columns = zip(self.parts, keys, strict=True)
        parts = [part.from_env([action[key] for action in actions]) for part, key in columns]
        return torch.cat([part.float().reshape(len(actions), -1) for part in parts], dim=1)

    def _masks(self, parameters: Tensor, allowed: Bool[Tensor, "n K"] | None) -> Sequence[Bool[Tensor, "n K"] | None]:
        """The mask of each part. None for parts without categories."""
        if allowed is None:
            return [None] * len(self.parts)
        if not self.num_categories:
            refuse_mask(self, allowed)
        require_mask_shape(self, parameters, allowed)
        masks = allowed.split(self._category_widths, -1)
        return [mask if width else None for mask, width in zip(masks, self._category_widths, strict=True)]

    def _split(self, actions: Float[Tensor, "n D"]) -> list[Tensor]:
        """The columns of each part, in the part's own shape and dtype."""
        columns = actions.split(self._action_widths, -1)
        return [_as_own(part, taken) for part, taken in zip(self.parts, columns, strict=True)]

    def _joined(self, actions: Sequence[Tensor], parameters: Tensor) -> Float[Tensor, "n D"]:
        dtype = wide(parameters[:0]).dtype
        return torch.cat([taken.to(dtype).reshape(len(parameters), -1) for taken in actions], dim=1)


def _as_own(part: ActionDistribution, columns: Float[Tensor, "n D"]) -> Tensor:
    """Convert columns of a composite action to the part's own shape and dtype."""
    if not part.action_dtype.is_floating_point:
        columns = columns.long()
    return columns if part.action_shape else columns.squeeze(-1)

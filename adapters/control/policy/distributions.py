"""Action distributions for every Gymnasium space: `distribution_for(space)`.

`discrete_actions` and `box_actions` define the basic distributions, and `composite` combines them. This module exports all.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, assert_never

import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Float, Shaped
from numpy.typing import NDArray
from torch import Tensor

from grpo.arguments import describe, require_instances, require_integers
from grpo.errors import ConfigError, ContractError

from .action_distribution import ActionDistribution, WithoutCategories
from .box_actions import Beta, Gaussian, SquashedGaussian
from .composite import Composite
from .discrete_actions import Bernoulli, Categorical, MultiCategorical

__all__ = [
    "ActionDistribution",
    "Bernoulli",
    "Beta",
    "Categorical",
    "Composite",
    "FromTorch",
    "Gaussian",
    "Kind",
    "MultiCategorical",
    "SquashedGaussian",
    "distribution_for",
]

Kind: TypeAlias = Literal["auto", "gaussian", "squashed", "beta"]
"""Distribution for boxes. `auto` is `gaussian`, in units of the box and clipped to its bounds. `squashed` and `beta` stay
within finite bounds."""


def distribution_for(space: spaces.Space[Any], kind: Kind = "auto") -> ActionDistribution:
    """Create the action distribution of a space.

    Args:
        space: `Discrete`, `MultiDiscrete`, `MultiBinary`, `Box` of floats, or a `Dict` or `Tuple` of these, also nested.
        kind: Distribution for the boxes in the space.

    Raises:
        ConfigError: The space or kind is not supported, a box has integers, or `squashed` or `beta` has infinite bounds.

    Example:
        >>> distribution_for(spaces.Dict(arm=spaces.Box(-1, 1, (6,)), grip=spaces.Discrete(2))).num_parameters
        14
    """
    require_instances("distribution_for", Kind, kind=kind)
    match space:
        case spaces.Discrete():
            return Categorical(space)
        case spaces.MultiDiscrete():
            return MultiCategorical(space)
        case spaces.MultiBinary():
            return Bernoulli(space)
        case spaces.Box():
            return _box_distribution(space, kind)
        case spaces.Dict():
            return Composite({name: distribution_for(part, kind) for name, part in space.spaces.items()})
        case spaces.Tuple():
            return Composite([distribution_for(part, kind) for part in space.spaces])
        case _:
            raise ConfigError(
                f"distribution_for: actions must be Discrete, MultiDiscrete, MultiBinary, Box, or a Dict or Tuple of these; "
                f"got {space}. Wrap the environment (gymnasium.wrappers.TransformAction), or pass a custom distribution."
            )


def _box_distribution(space: spaces.Box, kind: Kind) -> ActionDistribution:
    match kind:
        case "auto" | "gaussian":
            return Gaussian(space)
        case "squashed":
            return SquashedGaussian(space)
        case "beta":
            return Beta(space)
        case _:
            assert_never(kind)


class FromTorch(WithoutCategories):
    """A custom distribution: a function from parameters [n, P] to a `torch.distributions.Distribution` over n rows.

    Sampling uses torch's global generator: `num_noise` is 0, and a row's sample depends on the number of rows. A sample has
    [n] or [n, D] numbers, encoded as the space's actions. Log-probs and entropies are summed to one number per row.

    Args:
        space: Action space. It defines the conversion to and from the environment.
        num_parameters: Number of parameters P.
        build: Maps parameters [n, P] to a distribution.

    Example:
        >>> laplace = FromTorch(spaces.Box(-1, 1, (3,)), 3, lambda mean: torch.distributions.Laplace(mean, 0.1))
        >>> laplace.sample(torch.zeros(2, 3), torch.empty(2, 0)).shape
        torch.Size([2, 3])
    """

    num_noise = 0

    def __init__(
        self,
        space: spaces.Space[Any],
        num_parameters: int,
        build: Callable[[Float[Tensor, "n P"]], torch.distributions.Distribution],
    ) -> None:
        require_integers("FromTorch", 1, num_parameters=num_parameters)
        if not callable(build):
            raise ConfigError(f"FromTorch: build must be a function of parameters [n, P]; got {describe(build)}.")
        self.num_parameters = num_parameters
        self._build = build
        encoding = distribution_for(space)
        self.action_shape, self.action_dtype = encoding.action_shape, encoding.action_dtype
        self.to_env, self.from_env = encoding.to_env, encoding.from_env

    def noise(self, rng: np.random.Generator, num_steps: int) -> NDArray[np.float32]:
        """No noise, [num_steps, 0]."""
        return np.empty((num_steps, 0), dtype=np.float32)

    def _sample(self, parameters: Float[Tensor, "n P"], noise: Float[Tensor, "n 0"]) -> Shaped[Tensor, "n *action"]:
        """Sample from the distribution with torch's global generator."""
        return self._encoded(self._build(parameters).sample())

    def _mode(self, parameters: Float[Tensor, "n P"]) -> Shaped[Tensor, "n *action"]:
        """The distribution's mode."""
        distribution = self._build(parameters)
        try:
            return self._encoded(distribution.mode)
        except NotImplementedError as error:
            raise ConfigError(
                f"FromTorch: {type(distribution).__name__} has no mode, which deterministic actions need. Add a "
                "property `mode` to the distribution that `build` returns, or act with deterministic=False."
            ) from error

    def _log_prob(self, parameters: Float[Tensor, "n P"], actions: Shaped[Tensor, "n *action"]) -> Float[Tensor, " n"]:
        """The distribution's log-prob, summed to one number per row."""
        values = actions.to(torch.promote_types(parameters.dtype, torch.float32))  # torch takes integers as floats
        return self._per_row(self._build(parameters).log_prob(values), len(parameters))

    def _entropy(self, parameters: Float[Tensor, "n P"]) -> Float[Tensor, " n"] | None:
        """The distribution's entropy, summed to one number per row. None if the distribution has no entropy."""
        try:
            entropy = self._build(parameters).entropy()
        except NotImplementedError:  # there is no closed form
            return None
        return self._per_row(entropy, len(parameters))

    def _encoded(self, values: Tensor) -> Shaped[Tensor, "n *action"]:
        required = list(self.action_shape)
        if list(values.shape[1:]) != required:
            raise ContractError(
                f"FromTorch: actions must be [n, *action] = {['n', *required]}; the distribution from `build` gave "
                f"{list(values.shape)}. Its batch shape and event shape together must be [n, *action]."
            )
        return values if self.action_dtype.is_floating_point else values.long()

    def _per_row(self, values: Tensor, num_rows: int) -> Float[Tensor, " n"]:
        if not values.dim() or len(values) != num_rows:
            raise ContractError(
                f"FromTorch: log_prob and entropy must have n = {num_rows} rows; the distribution from `build` gave "
                f"{list(values.shape)}. Its batch shape must begin with n."
            )
        return values.flatten(1).sum(-1) if values.dim() > 1 else values

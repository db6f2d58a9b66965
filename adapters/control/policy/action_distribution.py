"""The interface of action distributions, and helpers that they share.

Axes: n rows, P parameters per row, K concatenated categories, D numbers of a flattened action.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from numpy.typing import NDArray
from torch import Tensor

from grpo.errors import ContractError


@runtime_checkable
class ActionDistribution(Protocol):
    """pi(action | parameters), row by row. A network outputs the parameters.

    A batch of actions is one tensor: int64 [n] for `Discrete`, int64 [n, D] for `MultiDiscrete` and `MultiBinary`, floats
    [n, D] for `Box`, `Dict` and `Tuple`, flattened. Categories count from 0, whatever the space's `start`.

    `allowed` is the mask of allowed categories; None allows all. A masked category is never sampled, has log-prob -inf, and its
    logit has gradient 0. A mask of another shape than [n, num_categories], a mask for a distribution without categories, and a
    row without an allowed category raise `ContractError`.
    """

    num_parameters: int
    """Number of parameters per row, P."""
    num_noise: int
    """Number of random numbers that `sample` uses per row."""
    num_categories: int
    """Width K of `allowed`. 0 if the distribution does not support masks."""
    action_shape: tuple[int, ...]
    """Shape of one action: () or (D,)."""
    action_dtype: torch.dtype
    """Data type of actions: int64, or float32 (float64 if the parameters are float64)."""

    def noise(self, rng: np.random.Generator, num_steps: int) -> NDArray[np.float32]:
        """Draw the noise that `sample` uses for `num_steps` rows, [num_steps, num_noise]."""
        ...

    def sample(
        self,
        parameters: Float[Tensor, "n P"],
        noise: Float[Tensor, "n num_noise"],
        allowed: Bool[Tensor, "n K"] | None = None,
    ) -> Shaped[Tensor, "n *action"]:
        """Sample an action per row. It depends only on the row's parameters, noise and mask."""
        ...

    def mode(
        self, parameters: Float[Tensor, "n P"], allowed: Bool[Tensor, "n K"] | None = None
    ) -> Shaped[Tensor, "n *action"]:
        """The deterministic action of each row."""
        ...

    def log_prob(
        self,
        parameters: Float[Tensor, "n P"],
        actions: Shaped[Tensor, "n *action"],
        allowed: Bool[Tensor, "n K"] | None = None,
    ) -> Float[Tensor, " n"]:
        """log pi(actions[i] | parameters[i]) in nats, differentiable. For boxes it is a density in the environment's units."""
        ...

    def entropy(
        self, parameters: Float[Tensor, "n P"], allowed: Bool[Tensor, "n K"] | None = None
    ) -> Float[Tensor, " n"] | None:
        """Exact entropy of each row in nats, differentiable. None if there is no closed form."""
        ...

    def to_env(self, actions: Shaped[Tensor, "n *action"]) -> Any:
        """Convert actions to a batch for `env.step`: an array, or a list for `Dict` and `Tuple`."""
        ...

    def from_env(self, actions: Any) -> Shaped[Tensor, "n *action"]:
        """The inverse of `to_env`. Also accepts a list of single actions."""
        ...


def wide(parameters: Float[Tensor, "n P"]) -> Float[Tensor, "n P"]:
    """Convert to at least float32. bfloat16 has only 3 decimal digits, too few for the ratio of two probabilities."""
    return parameters.float() if parameters.dtype.itemsize < 4 else parameters


class WithoutCategories(ABC):
    """Base class of distributions that have no categories to mask: each method refuses a mask."""

    num_categories = 0

    def sample(
        self,
        parameters: Float[Tensor, "n P"],
        noise: Float[Tensor, "n num_noise"],
        allowed: Bool[Tensor, "n K"] | None = None,
    ) -> Shaped[Tensor, "n *action"]:
        """Sample an action per row. It depends only on the row's parameters and noise."""
        refuse_mask(self, allowed)
        return self._sample(parameters, noise)

    def mode(
        self, parameters: Float[Tensor, "n P"], allowed: Bool[Tensor, "n K"] | None = None
    ) -> Shaped[Tensor, "n *action"]:
        """The deterministic action of each row."""
        refuse_mask(self, allowed)
        return self._mode(parameters)

    def log_prob(
        self,
        parameters: Float[Tensor, "n P"],
        actions: Shaped[Tensor, "n *action"],
        allowed: Bool[Tensor, "n K"] | None = None,
    ) -> Float[Tensor, " n"]:
        """log pi(actions[i] | parameters[i]) in nats, summed over the dimensions of the action."""
        refuse_mask(self, allowed)
        return self._log_prob(parameters, actions)

    def entropy(
        self, parameters: Float[Tensor, "n P"], allowed: Bool[Tensor, "n K"] | None = None
    ) -> Float[Tensor, " n"] | None:
        """Exact entropy of each row in nats. None if there is no closed form."""
        refuse_mask(self, allowed)
        return self._entropy(parameters)

    @abstractmethod
    def _sample(self, parameters: Tensor, noise: Tensor) -> Tensor: ...

    @abstractmethod
    def _mode(self, parameters: Tensor) -> Tensor: ...

    @abstractmethod
    def _log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor: ...

    @abstractmethod
    def _entropy(self, parameters: Tensor) -> Tensor | None: ...


def refuse_mask(distribution: object, allowed: Tensor | None) -> None:
    """Reject a mask. Used by distributions without categories."""
    if allowed is not None:
        raise ContractError(
            f"{type(distribution).__name__} has no categories that a mask could exclude; got a mask of {list(allowed.shape)}. "
            "Pass allowed=None (action_mask=None)."
        )


def require_mask_shape(
    distribution: ActionDistribution, parameters: Float[Tensor, "n P"], allowed: Bool[Tensor, "n K"]
) -> None:
    """Check that the mask is bool [n, num_categories]."""
    required = [len(parameters), distribution.num_categories]
    if allowed.dtype != torch.bool or list(allowed.shape) != required:
        raise ContractError(
            f"{type(distribution).__name__}: the mask must be bool [n, K] = {required}, True for allowed categories; got "
            f"{str(allowed.dtype).removeprefix('torch.')} {list(allowed.shape)}."
        )


def as_batch_of(distribution: object, actions: Any, shape: tuple[int, ...], kinds: str) -> NDArray[Any]:
    """Convert actions of the environment to an array [n, D]. `kinds` has numpy's letters of the accepted dtypes."""
    batch = np.asarray(actions)
    if batch.shape[1:] != shape or not batch.ndim or batch.dtype.kind not in kinds:
        raise ContractError(
            f"{type(distribution).__name__}.from_env needs [n, *shape] = {['n', *shape]} of the space's dtype; got "
            f"{batch.dtype} {list(batch.shape)}. Pass a batch of actions in the environment's format."
        )
    return batch.reshape(len(batch), -1)


def require_range(distribution: object, categories: NDArray[Any], sizes: Sequence[int] | int) -> None:
    """Check that categories are at least 0 and below `sizes`."""
    outside = (categories < 0) | (categories >= np.asarray(sizes))
    if outside.any():
        row = int(outside.nonzero()[0][0])
        raise ContractError(
            f"{type(distribution).__name__}.from_env: action {row} is not in the space. Minus the space's start, each category "
            f"must be at least 0 and below {sizes}; got {categories[row].tolist()}. Pass actions of this action space."
        )

"""What a distribution of actions is, and what all of them share.

Axis letters: n rows, P parameters per row, K categories side by side, D numbers of a flattened action.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from numpy.typing import NDArray
from torch import Tensor

from grpo.errors import ContractError


class ActionDistribution(Protocol):
    """pi(action | parameters), row by row; the parameters are what a network gives.

    A batch of actions is one tensor: int64 [n] for `Discrete`, int64 [n, D] for `MultiDiscrete` and `MultiBinary`, floats
    [n, D] for `Box`, `Dict` and `Tuple`, flattened. Categories count from 0, whatever the space's `start`.

    `allowed` says which categories may be taken; None: all. What is not allowed is never sampled, has log-probability -inf, and
    its logits get gradient 0. A mask without the form [n, num_categories], a mask for a distribution without categories, and a
    row that allows nothing are `ContractError`s.
    """

    num_parameters: int
    """P"""
    num_noise: int
    """Random numbers that `sample` takes per row."""
    num_categories: int
    """K, the width of `allowed`; 0: nothing can be masked."""
    action_shape: tuple[int, ...]
    """Of one action: () or (D,)."""
    action_dtype: torch.dtype
    """int64, or float32 (which float64 parameters make float64)."""

    def noise(self, rng: np.random.Generator, num_steps: int) -> NDArray[np.float32]:
        """What `sample` takes for `num_steps` rows, [num_steps, num_noise]."""
        ...

    def sample(
        self,
        parameters: Float[Tensor, "n P"],
        noise: Float[Tensor, "n num_noise"],
        allowed: Bool[Tensor, "n K"] | None = None,
    ) -> Shaped[Tensor, "n *action"]:
        """A random action per row: a function of this row's parameters, noise and mask, and of nothing else."""
        ...

    def mode(
        self, parameters: Float[Tensor, "n P"], allowed: Bool[Tensor, "n K"] | None = None
    ) -> Shaped[Tensor, "n *action"]:
        """The action of a policy that does not explore."""
        ...

    def log_prob(
        self,
        parameters: Float[Tensor, "n P"],
        actions: Shaped[Tensor, "n *action"],
        allowed: Bool[Tensor, "n K"] | None = None,
    ) -> Float[Tensor, " n"]:
        """log pi(actions[i] | parameters[i]) in nats, with gradient; a density for boxes, in the environment's units."""
        ...

    def entropy(
        self, parameters: Float[Tensor, "n P"], allowed: Bool[Tensor, "n K"] | None = None
    ) -> Float[Tensor, " n"] | None:
        """In nats, exact and with gradient; None: there is no closed form."""
        ...

    def to_env(self, actions: Shaped[Tensor, "n *action"]) -> Any:
        """A batch whose element i is what `env.step` takes: an array, or a list for `Dict` and `Tuple`."""
        ...

    def from_env(self, actions: Any) -> Shaped[Tensor, "n *action"]:
        """The inverse of `to_env`; also takes a list of single actions."""
        ...


def wide(parameters: Float[Tensor, "n P"]) -> Float[Tensor, "n P"]:
    """float32 at least: the three digits of bfloat16 would make noise of the ratio of two probabilities."""
    return parameters.float() if parameters.dtype.itemsize < 4 else parameters


def refuse_mask(distribution: object, allowed: Tensor | None) -> None:
    """For distributions without categories."""
    if allowed is not None:
        raise ContractError(
            f"{type(distribution).__name__} has no categories that a mask could exclude; got a mask of {list(allowed.shape)}. "
            "Pass allowed=None (action_mask=None)."
        )


def require_mask_shape(
    distribution: ActionDistribution, parameters: Float[Tensor, "n P"], allowed: Bool[Tensor, "n K"]
) -> None:
    """Bool [n, num_categories]."""
    required = [len(parameters), distribution.num_categories]
    if allowed.dtype != torch.bool or list(allowed.shape) != required:
        raise ContractError(
            f"{type(distribution).__name__}: the mask must be bool [n, K] = {required}, True for what is allowed; got "
            f"{str(allowed.dtype).removeprefix('torch.')} {list(allowed.shape)}."
        )


def as_batch_of(distribution: object, actions: Any, shape: tuple[int, ...], kinds: str) -> NDArray[Any]:
    """Actions of an environment as one array [n, D]; `kinds` are numpy's letters for the dtypes that may come."""
    batch = np.asarray(actions)
    if batch.shape[1:] != shape or not batch.ndim or batch.dtype.kind not in kinds:
        raise ContractError(
            f"{type(distribution).__name__}.from_env needs [n, *shape] = {['n', *shape]} of the space's dtype; got "
            f"{batch.dtype} {list(batch.shape)}. Pass a batch of actions as the environment took them."
        )
    return batch.reshape(len(batch), -1)


def require_range(distribution: object, categories: NDArray[Any], sizes: Sequence[int] | int) -> None:
    """Whole numbers from 0 to below `sizes`."""
    outside = (categories < 0) | (categories >= np.asarray(sizes))
    if outside.any():
        row = int(outside.nonzero()[0][0])
        raise ContractError(
            f"{type(distribution).__name__}.from_env: action {row} is not in the space: counted from its start it is "
            f"{categories[row].tolist()}, and must lie in 0 to below {sizes}."
        )

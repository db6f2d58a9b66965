"""Distributions of integers, for `Discrete`, `MultiDiscrete` and `MultiBinary` spaces."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from grpo.arguments import require_instances
from grpo.errors import ContractError

from .action_distribution import WithoutCategories, as_batch_of, require_mask_shape, require_range, wide


def masked_log_softmax(
    logits: Float[Tensor, "*rows K"], allowed: Bool[Tensor, "*rows K"] | None
) -> Float[Tensor, "*rows K"]:
    """log p(k) = logits[k] - log sum over allowed j of exp(logits[j]), and -inf for a masked k."""
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    return logits.log_softmax(-1)


def masked_entropy(logits: Float[Tensor, "*rows K"], allowed: Bool[Tensor, "*rows K"] | None) -> Float[Tensor, "*rows"]:
    """H = -sum over allowed k of p(k) log p(k)."""
    log_probs = masked_log_softmax(logits, allowed)
    probs = log_probs.exp()
    if allowed is not None:
        log_probs = log_probs.masked_fill(~allowed, 0.0)  # 0 times -inf is NaN, and so is its gradient
    return -torch.linalg.vecdot(probs, log_probs)


class _Categories:
    """D independent variables: pi(k_1 ... k_D) = product over d of softmax(logits of d)[k_d].

    The parameters are the logits of all variables, concatenated. They are rearranged into a table [n, D, largest K], so that
    one call handles all variables. Entries beyond a variable's own K are masked.

    Sampling is argmax(logits + Gumbel noise) (Maddison et al. 2014, arXiv:1411.0030, section 2), which needs no softmax.

    Args:
        sizes: Number of values of each variable, K.
        start: The smallest value of each variable.
        dtype: Data type of the environment's actions.
    """

    action_dtype = torch.int64

    def __init__(self, sizes: NDArray[Any], start: NDArray[Any], dtype: Any) -> None:
        self.env_shape, self.env_dtype, self.start = sizes.shape, dtype, start.ravel().astype(np.int64)
        sizes = sizes.ravel().astype(np.int64)
        self.num_parameters = self.num_noise = self.num_categories = int(sizes.sum())
        self.action_shape: tuple[int, ...] = (len(sizes),) if self.env_shape else ()
        self.sizes: list[int] = sizes.tolist()
        columns = np.arange(sizes.max())
        valid = columns < sizes[:, None]
        first = np.cumsum(sizes) - sizes
        self._places = torch.from_numpy(np.where(valid, first[:, None] + columns, 0).ravel())
        self._valid = None if valid.all() else torch.from_numpy(valid)

    def noise(self, rng: np.random.Generator, num_steps: int) -> NDArray[np.float32]:
        """Gumbel noise."""
        return rng.gumbel(size=(num_steps, self.num_noise)).astype(np.float32)

    def sample(
        self, parameters: Float[Tensor, "n K"], noise: Float[Tensor, "n K"], allowed: Bool[Tensor, "n K"] | None = None
    ) -> Int64[Tensor, "n *D"]:
        """Sample a category per row and variable."""
        return self.mode(parameters + noise, allowed)

    def mode(
        self, parameters: Float[Tensor, "n K"], allowed: Bool[Tensor, "n K"] | None = None
    ) -> Int64[Tensor, "n *D"]:
        """The most likely category of each variable. Ties go to the first one."""
        logits, possible = self._table(parameters), self._possible(parameters, allowed)
        found = (logits if possible is None else logits.masked_fill(~possible, -torch.inf)).argmax(-1)
        return found if self.action_shape else found.squeeze(-1)

    def log_prob(
        self,
        parameters: Float[Tensor, "n K"],
        actions: Int64[Tensor, "n *D"],
        allowed: Bool[Tensor, "n K"] | None = None,
    ) -> Float[Tensor, " n"]:
        """log pi(actions), summed over the variables."""
        log_probs = masked_log_softmax(self._table(wide(parameters)), self._possible(parameters, allowed))
        return log_probs.gather(-1, actions.view(len(actions), -1, 1)).sum((-2, -1))

    def entropy(
        self, parameters: Float[Tensor, "n K"], allowed: Bool[Tensor, "n K"] | None = None
    ) -> Float[Tensor, " n"]:
        """Entropy in nats, summed over the variables."""
        return masked_entropy(self._table(wide(parameters)), self._possible(parameters, allowed)).sum(-1)

    def to_env(self, actions: Int64[Tensor, "n *D"]) -> NDArray[Any]:
        """Integers [n, *shape of the space], counted from the space's `start`."""
        batch = (actions.cpu().numpy() + self.start).astype(self.env_dtype, copy=False)
        return batch.reshape(len(batch), *self.env_shape)

    def from_env(self, actions: Any) -> Int64[Tensor, "n *D"]:
        """Integers [n] or [n, D], counted from 0."""
        categories = as_batch_of(self, actions, self.env_shape, "iu").astype(np.int64) - self.start
        categories = categories.reshape(len(categories), *self.action_shape)
        require_range(self, categories, self.sizes if self.action_shape else self.sizes[0])
        return torch.from_numpy(categories)

    def _table(self, concatenated: Tensor) -> Tensor:
        """Rearrange [n, sum of K] to [n, D, largest K]. The result is a view if all K are equal."""
        if self._valid is not None:
            concatenated = concatenated.index_select(1, self._places.to(concatenated.device))
        return concatenated.unflatten(1, (len(self.sizes), -1))

    def _possible(self, parameters: Tensor, allowed: Bool[Tensor, "n K"] | None) -> Bool[Tensor, "*n D K"] | None:
        """Mask of the allowed entries of the table. None if all entries are allowed."""
        valid = None if self._valid is None else self._valid.to(parameters.device)
        if allowed is None:
            return valid
        require_mask_shape(self, parameters, allowed)
        table = self._table(allowed) if valid is None else self._table(allowed) & valid
        possible = table.any(-1)
        if not possible.all():
            row, variable = (~possible).nonzero()[0].tolist()
            which = f" of variable {variable}" if self.action_shape else ""
            raise ContractError(
                f"{type(self).__name__}: every row of the mask must allow an action; row {row} allows none{which}. Correct the "
                "mask, or end the episode when no action is possible."
            )
        return table


class Categorical(_Categories):
    """Categories of a `Discrete` space: pi(k) = softmax(parameters)[k]."""

    def __init__(self, space: spaces.Discrete) -> None:
        require_instances("Categorical", spaces.Discrete, "a Discrete space", space=space)
        super().__init__(np.asarray(space.n), np.asarray(space.start), space.dtype)


class MultiCategorical(_Categories):
    """Independent variables of a `MultiDiscrete` space, whose logits are concatenated."""

    def __init__(self, space: spaces.MultiDiscrete) -> None:
        require_instances("MultiCategorical", spaces.MultiDiscrete, "a MultiDiscrete space", space=space)
        super().__init__(space.nvec, space.start, space.dtype)


class Bernoulli(WithoutCategories):
    """Independent bits of a `MultiBinary` space: pi(bit d is 1) = sigmoid(parameters[d])."""

    action_dtype = torch.int64

    def __init__(self, space: spaces.MultiBinary) -> None:
        require_instances("Bernoulli", spaces.MultiBinary, "a MultiBinary space", space=space)
        self.env_shape = space.shape
        self.num_parameters = self.num_noise = int(np.prod(space.shape))
        self.action_shape: tuple[int, ...] = (self.num_parameters,)

    def noise(self, rng: np.random.Generator, num_steps: int) -> NDArray[np.float32]:
        """Logistic noise: P(noise < x) = sigmoid(x)."""
        return rng.logistic(size=(num_steps, self.num_noise)).astype(np.float32)

    def _sample(self, parameters: Float[Tensor, "n D"], noise: Float[Tensor, "n D"]) -> Int64[Tensor, "n D"]:
        """Sample 0 or 1 per row and bit."""
        return (noise < parameters).long()

    def _mode(self, parameters: Float[Tensor, "n D"]) -> Int64[Tensor, "n D"]:
        """The more likely value of each bit."""
        return (parameters > 0).long()

    def _log_prob(self, parameters: Float[Tensor, "n D"], actions: Int64[Tensor, "n D"]) -> Float[Tensor, " n"]:
        """log pi(actions), summed over the bits: log sigmoid(x) for 1, log sigmoid(-x) for 0."""
        logits = wide(parameters)
        return functional.logsigmoid(torch.where(actions.bool(), logits, -logits)).sum(-1)

    def _entropy(self, parameters: Float[Tensor, "n D"]) -> Float[Tensor, " n"]:
        """Entropy in nats, summed over the bits: H = y sigmoid(-y) - log sigmoid(y), y = |x|, where no digits cancel."""
        size = wide(parameters).abs()
        return (size * torch.sigmoid(-size) - functional.logsigmoid(size)).sum(-1)

    def to_env(self, actions: Int64[Tensor, "n D"]) -> NDArray[np.int8]:
        """Bits as int8 [n, *shape of the space]."""
        return actions.cpu().numpy().astype(np.int8).reshape(len(actions), *self.env_shape)

    def from_env(self, actions: Any) -> Int64[Tensor, "n D"]:
        """Bits as int64 [n, D]."""
        bits = as_batch_of(self, actions, self.env_shape, "iub").astype(np.int64)
        require_range(self, bits, 2)
        return torch.from_numpy(bits)

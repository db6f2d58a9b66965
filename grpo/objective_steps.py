"""A block's tensors, as every term of the loss reads them."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .divergence import MAX_LOG_RATIO, may_exceed_bounds
from .masking import OnMask, raised
from .objective_config import ObjectiveConfig
from .ratios import Ratio, bounded_exp, log_ratio_at_level
from .types import ObjectiveInputs

T = TypeVar("T")


class once(Generic[T]):
    """A property that is computed when it is first read: `functools.cached_property` without its lock (Python < 3.12).

    The lock takes longer than most that is computed here, and a compiler cannot look through it.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    def __get__(self, owner: Any, _kind: Any = None) -> T:
        """Only asked where the owner has no attribute of that name yet."""
        value = self._compute(owner)
        setattr(owner, self._name, value)
        return value


class Steps:
    """What `ObjectiveInputs` hold and what follows from it: 0 off the mask, in float32 or better, computed when it is read.

    There is no gradient in it: every term gives its slopes itself.
    """

    def __init__(self, inputs: ObjectiveInputs, config: ObjectiveConfig) -> None:
        self.inputs = inputs
        self.config = config
        self.on_mask = OnMask(inputs.mask)
        self._log_probs = raised(inputs.log_probs)
        self.dtype = self._log_probs.dtype

    @property
    def mask(self) -> Bool[Tensor, "N T"]:
        """The valid steps."""
        return self.inputs.mask

    @once
    def log_probs(self) -> Float[Tensor, "N T"]:
        """Log pi."""
        return self.on_mask(self._log_probs)

    @once
    def advantages(self) -> Float[Tensor, "N #T"]:
        """One per row, or one per step."""
        advantages = self.inputs.advantages.to(self.dtype)
        return advantages.unsqueeze(1) if advantages.dim() == 1 else self.on_mask(advantages)

    @once
    def weights(self) -> Float[Tensor, "N T"]:
        """The aggregation, 0 off the mask by contract."""
        return self.inputs.weights.to(self.dtype)

    @once
    def step_log_ratio(self) -> Float[Tensor, "N T"]:
        """Log pi - log pi_old of each step."""
        if self.inputs.old_log_probs is None:
            return torch.zeros_like(self._log_probs)
        return self.less(self.inputs.old_log_probs)

    @once
    def log_ratio(self) -> Float[Tensor, "N #T"]:
        """The same at the ratio level."""
        if self.inputs.old_log_probs is None:
            return torch.zeros_like(self._log_probs[:, :1])
        return log_ratio_at_level(self.step_log_ratio, self.mask, self.config.ratio_level)

    @once
    def ratio(self) -> Ratio:
        """Its exponential, which is 1 throughout where the old policy is the one now."""
        if self.inputs.old_log_probs is None:
            one = torch.ones_like(self.log_ratio)
            return Ratio(one, one)
        return bounded_exp(self.log_ratio)

    @once
    def row_log_ratio(self) -> Float[Tensor, "N 1"]:
        """Of the whole row: the sum over its steps, each bounded. VESPO's, whatever the ratio level."""
        bounded = self.step_log_ratio
        if may_exceed_bounds(bounded):
            bounded = bounded.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return bounded.sum(1, keepdim=True)

    @once
    def loss_ratio(self) -> Ratio:
        """The ratio that the surrogate looks at."""
        if self.config.surrogate == "vespo" and self.inputs.old_log_probs is not None:
            return bounded_exp(self.row_log_ratio)
        return self.ratio

    @once
    def step_ratio(self) -> Ratio:
        """Each step's own ratio."""
        own = self.config.ratio_level == "step" or self.inputs.old_log_probs is None
        return self.ratio if own else bounded_exp(self.step_log_ratio)

    @once
    def sampled_log_probs(self) -> Float[Tensor, "N T"]:
        """What the steps were sampled with: behaviour log-probs where they are known, else those before any update."""
        old = self.inputs.old_log_probs
        old = self.log_probs if old is None else self.on_mask(raised(old))
        if self.inputs.behaviour_log_probs is None:
            return old.to(self.dtype)
        behaviour = self.on_mask(raised(self.inputs.behaviour_log_probs))
        return torch.where(behaviour.isnan(), old, behaviour).to(self.dtype)

    def less(self, others: Tensor) -> Float[Tensor, "N T"]:
        """log_probs - others."""
        return self.on_mask.in_place(self._log_probs - others.detach().to(self.dtype))

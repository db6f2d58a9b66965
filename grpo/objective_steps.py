"""A block's tensors, as every term of the loss reads them."""

from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .masking import OnMask, raised
from .objective_config import ObjectiveConfig
from .ratios import Ratio, bounded_exp, log_ratio_at_level
from .types import ObjectiveInputs


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

    @cached_property
    def log_probs(self) -> Float[Tensor, "N T"]:
        """Log pi."""
        return self.on_mask(self._log_probs)

    @cached_property
    def advantages(self) -> Float[Tensor, "N #T"]:
        """One per row, or one per step."""
        advantages = self.inputs.advantages.to(self.dtype)
        return advantages.unsqueeze(1) if advantages.dim() == 1 else self.on_mask(advantages)

    @cached_property
    def weights(self) -> Float[Tensor, "N T"]:
        """The aggregation, 0 off the mask by contract."""
        return self.inputs.weights.to(self.dtype)

    @cached_property
    def step_log_ratio(self) -> Float[Tensor, "N T"]:
        """Log pi - log pi_old of each step."""
        if self.inputs.old_log_probs is None:
            return torch.zeros_like(self._log_probs)
        return self.less(self.inputs.old_log_probs)

    @cached_property
    def log_ratio(self) -> Float[Tensor, "N #T"]:
        """The same at the ratio level."""
        if self.inputs.old_log_probs is None:
            return torch.zeros_like(self._log_probs[:, :1])
        return log_ratio_at_level(self.step_log_ratio, self.mask, self.config.ratio_level)

    @cached_property
    def ratio(self) -> Ratio:
        """Its exponential, which is 1 throughout where the old policy is the one now."""
        if self.inputs.old_log_probs is None:
            one = torch.ones_like(self.log_ratio)
            return Ratio(one, one)
        return bounded_exp(self.log_ratio)

    @cached_property
    def step_ratio(self) -> Ratio:
        """Each step's own ratio."""
        own = self.config.ratio_level == "step" or self.inputs.old_log_probs is None
        return self.ratio if own else bounded_exp(self.step_log_ratio)

    @cached_property
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

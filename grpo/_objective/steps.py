"""`Steps`: the values that a surrogate reads."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo._common.conversion import as_float32
from grpo.errors import ConfigError
from grpo.types import ObjectiveInputs, zero_outside

from .checks import require_step_loss
from .ratios import RatioLevel, bounded_exp, log_ratio_at_level
from .sampler import SamplerCorrection


class Steps:
    """The values that a surrogate reads: tensors [N, T], 0 outside the mask, float32 or better, differentiable in `log_probs`.

    Args:
        inputs: The rows of a micro-batch.
        correction: Turns behaviour log-probs into importance weights. None: no correction.

    Attributes:
        mask: [N, T], the valid steps.
        log_probs: [N, T], log pi, with gradient.
        old_log_probs: [N, T], log pi_old, without gradient. If the inputs have none: the current log-probs, so that the ratio
            is exactly 1.
        old_is_current: whether the inputs have no old log-probs, so that the current policy is the old one.
        sampled_log_probs: [N, T], the log-probs with which the steps were sampled: behaviour log-probs if they are known, else
            `old_log_probs`.
        advantages: [N, 1], one per row, or [N, T], one per step.
        sampler_weights: [N, 1] or [N, T], importance weights from the sampler to the old policy. None: no correction.
        selected: [N, T] bool, what the surrogate's own `select` chose. None: nothing was chosen.

    Raises:
        ConfigError: There is a correction, but there are no behaviour log-probs.
    """

    def __init__(self, inputs: ObjectiveInputs, correction: SamplerCorrection | None = None) -> None:
        self.mask: Tensor = inputs.mask
        self.log_probs: Tensor = zero_outside(as_float32(inputs.log_probs), self.mask)
        self.old_log_probs: Tensor = self.log_probs.detach()
        self.old_is_current = inputs.old_log_probs is None
        if inputs.old_log_probs is not None:
            self.old_log_probs = self.constant(inputs.old_log_probs)
        self.advantages: Tensor = (
            inputs.advantages.detach().to(self.log_probs.dtype).unsqueeze(1)
            if inputs.advantages.dim() == 1
            else self.constant(inputs.advantages)
        )
        self.sampled_log_probs: Tensor = self.old_log_probs
        self.sampler_weights: Tensor | None = None
        self.selected: Tensor | None = inputs.selected
        self._x = self.log_probs - self.old_log_probs
        self._ratios: dict[RatioLevel, Tensor] = {}
        if inputs.behaviour_log_probs is None:
            if correction is not None:
                raise ConfigError(
                    f"objective.sampler_correction={correction!r} needs behaviour_log_probs. Return them in "
                    "SampledActions, pass them to ExperienceBatch.from_rows, or set sampler_correction=None."
                )
            return
        behaviour = self.constant(inputs.behaviour_log_probs)
        self.sampled_log_probs = torch.where(behaviour.isnan(), self.old_log_probs, behaviour)
        if correction is not None:
            weights = correction(self.old_log_probs, behaviour, self.mask)
            self.sampler_weights = require_step_loss(correction, weights, self.mask)

    def constant(self, values: Tensor) -> Float[Tensor, "N T"]:
        """Values without gradient, in the precision of `log_probs`, 0 outside the mask."""
        return zero_outside(values.detach().to(self.log_probs.dtype), self.mask)

    def log_ratio(self, level: RatioLevel = "step") -> Float[Tensor, "N #T"]:
        """log rho at the level (see `log_ratio_at_level`): [N, T], or [N, 1] for one ratio per row. Not clamped."""
        return log_ratio_at_level(self._x, self.mask, level)

    def ratio(self, level: RatioLevel = "step") -> Float[Tensor, "N #T"]:
        """rho = exp(log_ratio) at the level, with the log-ratio clamped to +-20 first."""
        if level not in self._ratios:
            x = self.log_ratio(level)
            self._ratios[level] = x.exp() if self.old_is_current else bounded_exp(x)  # on-policy, x is exactly 0
        return self._ratios[level]

    def require_selected(self) -> Bool[Tensor, "N T"]:
        """The steps that the surrogate's `select` chose.

        Raises:
            ConfigError: Nothing was chosen.
        """
        if self.selected is None:
            raise ConfigError(
                "This surrogate reads the steps that its select() chose, and there are none. Evaluate it through "
                "grpo_objective, or pass ObjectiveInputs.selected."
            )
        return self.selected

"""The loss that updates call: `grpo_objective`, compiled or not, or the user's own. Its metrics are added up."""

from functools import partial

import torch

from grpo._common.conversion import describe, widest_float
from grpo._objective.sampler import sampler_divergence
from grpo.config import GRPOConfig, ObjectiveConfig
from grpo.errors import ContractError, warn_user
from grpo.grpo_objective import Objective, unchecked_objective
from grpo.metrics import Meter
from grpo.types import ObjectiveInputs, ObjectiveOutput

REPORTED_AS = {
    "kl_coef": "kl_penalty",
    "entropy_coef": "entropy_bonus",
    "value_coef": "value_loss",
    "surrogate": "policy_loss",
    "sampler_correction": "sampler_ratio",
    "top_entropy_fraction": "kept_fraction",
    "off_policy_threshold": "kept_fraction",
}
"""Maps a setting of the loss to the metric that shows its term."""


class MeteredObjective:
    """Calls the loss, checks its result, and adds its metrics to a meter.

    Args:
        config: the settings of the loss, and whether it is compiled.
        own: the user's whole objective. None: `grpo_objective`.
        meter: adds up the metrics.
    """

    def __init__(self, config: GRPOConfig, own: Objective | None, meter: Meter) -> None:
        self._config, self._meter = config.objective, meter
        self._is_own = own is not None
        self._has_named_dropped_terms = own is None
        ours: Objective = partial(unchecked_objective, config=config.loss)
        self._objective = own if own is not None else torch.compile(ours) if config.compile_objective else ours

    def __call__(self, inputs: ObjectiveInputs) -> ObjectiveOutput:
        """The loss of one micro-batch. Any result but an `ObjectiveOutput` raises a `ContractError`."""
        output = self._objective(inputs)
        if not isinstance(output, ObjectiveOutput):
            raise ContractError(
                f"objective must return ObjectiveOutput(loss=..., metrics=...); got {describe(output)}. "
                "metrics may be empty."
            )
        self._meter.add(output.metrics)
        if "total_loss" not in output.metrics:
            loss = output.loss.detach()
            loss = loss.to(widest_float(loss.device))
            self._meter.add({"total_loss": torch.stack([torch.zeros_like(loss), loss, torch.zeros_like(loss)])})
        if inputs.behaviour_log_probs is not None and not self._is_own:
            old = inputs.log_probs if inputs.old_log_probs is None else inputs.old_log_probs
            self._meter.add({"sampler_divergence": sampler_divergence(old, inputs.behaviour_log_probs, inputs.mask)})
        if not self._has_named_dropped_terms:
            self._name_dropped_terms(inputs, output)
        return output

    def _name_dropped_terms(self, inputs: ObjectiveInputs, output: ObjectiveOutput) -> None:
        """Warn, once, about each configured term that the user's objective does not report."""
        self._has_named_dropped_terms = True
        asked = {name: getattr(self._config, name) for name in REPORTED_AS}
        asked |= {"sampler_correction": self._config.correction}
        asked |= {"kl_coef": inputs.kl_coef or 0.0, "entropy_coef": inputs.entropy_coef or 0.0}
        asked["value_coef"] = 0.0 if inputs.returns is None else self._config.value_coef
        default = ObjectiveConfig(kl_coef=0.0, value_coef=0.0)
        dropped = [
            f"{name}={value!r}"
            for name, value in asked.items()
            if value != getattr(default, name) and REPORTED_AS[name] not in output.metrics
        ]
        if dropped:
            warn_user(
                f"objective=... replaces the whole loss, and does not report the terms that these settings ask for: "
                f"{', '.join(dropped)}. Compute these terms in your objective (grpo.surrogates and grpo.divergence have them) "
                "and report their metrics, or leave the settings at their defaults. To change only the policy's loss, pass "
                "ObjectiveConfig(surrogate=...) instead."
            )

"""The loss as updates call it: ours, ours compiled, or the user's own, with what it measures added up."""

import warnings
from functools import partial

import torch

from grpo._objective.sampler import sampler_divergence
from grpo.config import GRPOConfig, ObjectiveConfig
from grpo.errors import ContractError, GRPOWarning
from grpo.grpo_objective import Objective, grpo_objective
from grpo.metrics import Meter
from grpo.types import ObjectiveInputs, ObjectiveOutput
from grpo.writing import describe

COEFFICIENTS = {"kl_coef": "kl_penalty", "entropy_coef": "entropy_bonus", "value_coef": "value_loss"}
"""The metric by which a term shows whose coefficient is not 0."""

SETTINGS = {
    "surrogate": "policy_loss",
    "sampler_correction": "sampler_ratio",
    "top_entropy_fraction": "kept_fraction",
    "off_policy_threshold": "kept_fraction",
}
"""The metric by which a setting shows that is not the default."""


class MeteredObjective:
    """Calls the loss, checks what it returns, and adds its metrics to a meter.

    Args:
        config: the loss's settings, and whether it is compiled.
        own: the user's whole objective. None: `grpo_objective`.
        meter: where metrics are added up.
    """

    def __init__(self, config: GRPOConfig, own: Objective | None, meter: Meter) -> None:
        self._config = config.objective
        self.is_own = own is not None
        """The objective is the user's, so no shortcut applies."""
        self._meter = meter
        self._has_named_dropped_terms = own is None
        ours: Objective = partial(grpo_objective, config=config.objective)
        if own is None and config.compile_objective:
            ours = torch.compile(ours)
        self._objective = own or ours

    def __call__(self, inputs: ObjectiveInputs) -> ObjectiveOutput:
        """The loss of one micro-batch.

        Raises:
            ContractError: the objective returns something else than `ObjectiveOutput`.
        """
        output = self._objective(inputs)
        if not isinstance(output, ObjectiveOutput):
            raise ContractError(
                f"objective must return ObjectiveOutput(loss=..., metrics=...); got {describe(output)}. "
                "metrics may be empty."
            )
        self._meter.add(output.metrics)
        if "total_loss" not in output.metrics:
            loss = output.loss.detach().double()
            self._meter.add({"total_loss": torch.stack([torch.zeros_like(loss), loss, torch.zeros_like(loss)])})
        if inputs.behaviour_log_probs is not None and not self.is_own:
            old = inputs.log_probs if inputs.old_log_probs is None else inputs.old_log_probs
            self._meter.add({"sampler_divergence": sampler_divergence(old, inputs.behaviour_log_probs, inputs.mask)})
        if not self._has_named_dropped_terms:
            self._name_dropped_terms(inputs, output)
        return output

    def _name_dropped_terms(self, inputs: ObjectiveInputs, output: ObjectiveOutput) -> None:
        """Warn, once, about each configured term that the user's objective does not report."""
        self._has_named_dropped_terms = True
        dropped = [
            name for name, metric in configured_terms(self._config, inputs).items() if metric not in output.metrics
        ]
        if dropped:
            warnings.warn(
                f"objective=... stands in for the whole loss and reports nothing of what these settings ask for: "
                f"{', '.join(dropped)}. Compute these terms in your objective (grpo.surrogates and grpo.divergence have them) "
                "and report their metrics, or leave the settings at their defaults. To change only the policy's loss, pass "
                "ObjectiveConfig(surrogate=...) instead.",
                GRPOWarning,
                stacklevel=2,
            )


def configured_terms(config: ObjectiveConfig, inputs: ObjectiveInputs) -> dict[str, str]:
    """The terms that the settings ask for beyond the default loss, each with the metric by which it shows."""
    default = ObjectiveConfig()
    value_coef = 0.0 if inputs.returns is None else config.value_coef
    coefs = {"kl_coef": inputs.kl_coef, "entropy_coef": inputs.entropy_coef, "value_coef": value_coef}
    changed = {name: getattr(config, name) for name in SETTINGS if getattr(config, name) != getattr(default, name)}
    return {f"{name}={coef}": COEFFICIENTS[name] for name, coef in coefs.items() if coef} | {
        f"{name}={value!r}": SETTINGS[name] for name, value in changed.items()
    }

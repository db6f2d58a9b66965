"""The loss that updates call: `grpo_objective`, compiled or not, or the user's own, and the cross-entropies beside it.

Its metrics are added up.
"""

from functools import partial, reduce

import torch
from jaxtyping import Float
from torch import Tensor

from grpo._common.conversion import as_float32, describe, widest_float
from grpo._objective.metrics import Measured, MeasuredLoss
from grpo._objective.sampler import sampler_divergence
from grpo.config import GRPOConfig
from grpo.errors import ContractError, warn_user
from grpo.grpo_objective import Objective, unchecked_objective
from grpo.metrics import Meter
from grpo.types import ObjectiveInputs, ObjectiveOutput, zero_outside

from .update import Given, Scored

REPORTED_AS = {"kl_coef": "kl_penalty", "entropy_coef": "entropy_bonus"}
REPORTED_AS |= {"value_coef": "value_loss", "auxiliary_loss": "auxiliary_loss"}
"""Maps the coefficient of a term of the loss to the metric that shows the term."""


class MeteredObjective:
    """Calls the loss, checks its result, and adds its metrics to a meter. Demonstrations and observations are beside it."""

    def __init__(self, config: GRPOConfig, own: Objective | None, meter: Meter) -> None:
        self._config, self._meter = config.objective, meter
        self._has_named_dropped_terms = False
        ours = partial(unchecked_objective, config=config.loss)
        self._ours = torch.compile(ours) if config.compile_objective else ours
        self._own = own

    def __call__(self, scored: Scored) -> Float[Tensor, ""]:
        """The loss of one micro-batch: the objective of its sampled rows, and the cross-entropies of what was given."""
        losses = [] if scored.inputs is None else [self.of_sampled(scored.inputs).loss]
        if scored.demonstrations is not None:
            losses.append(self._of_given("demonstration_loss", self._config.demonstration_coef, scored.demonstrations))
        if scored.observations is not None:
            losses.append(self._of_given("observation_loss", self._config.observation_coef, scored.observations))
        return reduce(torch.add, losses)

    def _of_given(self, name: str, coef: float, given: Given) -> Float[Tensor, ""]:
        """The loss of steps that somebody else took: their cross-entropy, and the policy's own loss a.

        L = -coef sum_{n,t} w[n,t] log pi[n,t] + sum_{n,t} w[n,t] a[n,t],  with w of `step_weights`
        """

        def weighted_sum(values: Tensor) -> Tensor:
            values = zero_outside(as_float32(values), given.weights > 0)
            return (given.weights.to(values.dtype) * values).sum()

        terms = {name: -coef * weighted_sum(given.log_probs)}
        if given.auxiliary_loss is not None:
            terms["auxiliary_loss"] = weighted_sum(given.auxiliary_loss)
        loss = reduce(torch.add, terms.values())
        measured = {name: term.detach() for name, term in {**terms, "total_loss": loss}.items()}
        self._meter.add(Measured(terms=measured, per_step={}, mask=given.weights > 0))
        return loss

    def of_sampled(self, inputs: ObjectiveInputs) -> MeasuredLoss | ObjectiveOutput:
        """The loss of sampled rows. Any result of the user's objective but `ObjectiveOutput` raises a `ContractError`."""
        if self._own is not None:
            return self._call_own(self._own, inputs)
        output = self._ours(inputs)
        self._meter.add(output.measured)
        if inputs.behaviour_log_probs is not None:
            old = inputs.log_probs if inputs.old_log_probs is None else inputs.old_log_probs
            gap, scored = sampler_divergence(old, inputs.behaviour_log_probs, inputs.mask)
            self._meter.add(Measured(terms={}, per_step={"sampler_divergence": gap}, mask=scored))
        return output

    def _call_own(self, own: Objective, inputs: ObjectiveInputs) -> ObjectiveOutput:
        output = own(inputs)
        if not isinstance(output, ObjectiveOutput):
            raise ContractError(
                f"objective must return ObjectiveOutput(loss=..., metrics=...); got {describe(output)}. metrics may be empty."
            )
        self._meter.add(output.metrics)
        if "total_loss" not in output.metrics:
            loss = output.loss.detach()
            loss = loss.to(widest_float(loss.device))
            self._meter.add({"total_loss": torch.stack([torch.zeros_like(loss), loss, torch.zeros_like(loss)])})
        if not self._has_named_dropped_terms:
            self._name_dropped_terms(inputs, output)
        return output

    def _name_dropped_terms(self, inputs: ObjectiveInputs, output: ObjectiveOutput) -> None:
        """Warn, once, about each term that has a coefficient and that the user's objective does not report."""
        self._has_named_dropped_terms = True
        asked = {"kl_coef": inputs.kl_coef, "entropy_coef": inputs.entropy_coef}
        asked["value_coef"] = None if inputs.returns is None else self._config.value_coef
        asked["auxiliary_loss"] = None if inputs.auxiliary_loss is None else 1.0  # its coefficient is the policy's
        dropped = [f"{k}={v!r}" for k, v in asked.items() if v and REPORTED_AS[k] not in output.metrics]
        if dropped:
            warn_user(
                f"objective=... replaces the whole loss, and does not report the terms of {', '.join(dropped)}. Compute these "
                "terms in your objective (grpo.surrogates and grpo.divergence have them) and report their metrics, or set the "
                "coefficients to 0. To change only the policy's loss, pass ObjectiveConfig(surrogate=...) instead."
            )

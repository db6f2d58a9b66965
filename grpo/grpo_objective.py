"""The loss: surrogate + KL - entropy (+ value error), each summed with weights that hold the normalisation."""

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ._common.conversion import as_float32
from ._objective.checks import require_finite_inputs, require_step_loss
from ._objective.metrics import MeasuredLoss, measured_steps
from ._objective.sampler import near_policy_rows
from ._objective.selection import kept_by_entropy, selected_by
from ._objective.steps import Steps
from ._objective.weights import step_weights
from .config import ObjectiveConfig
from .divergence import estimate_kl, kl_k3, score_function_entropy
from .errors import ConfigError
from .surrogates import traits_of
from .types import ObjectiveInputs, ObjectiveOutput, zero_outside

__all__ = ["Objective", "Steps", "grpo_objective", "step_weights"]

Objective = Callable[[ObjectiveInputs], ObjectiveOutput]
"""The type of a loss: `GRPOTrainer(objective=...)` accepts any such callable in place of `grpo_objective`."""


def grpo_objective(inputs: ObjectiveInputs, config: ObjectiveConfig) -> ObjectiveOutput:
    """The GRPO loss of one micro-batch.

    L = sum_{n,t} w[n,t] (m u l + kl_coef d + value_coef e + a)[n,t] - entropy_coef sum_{n,t} w_H[n,t] H[n,t]

    l is the surrogate on rho = exp(log_probs - old_log_probs). m is 1 for the steps that the surrogate counts, and 0 for other
    steps (see `top_entropy_fraction` and `off_policy_threshold`). u is the sampler correction, d the estimate of KL(pi || ref),
    e the squared error of a critic, a the policy's own loss, and H the entropy. Without `old_log_probs`, rho is exactly 1 and
    has the gradient of log_probs.

    Args:
        inputs: The rows of the micro-batch. Half precision is converted to float32.
        config: The settings of the loss. `aggregation` and `fixed_length` have no effect here, because `inputs.weights` already
            contain them.

    Returns:
        The loss, differentiable in `log_probs`, `entropy`, `kl`, `values` and `auxiliary_loss`; and its metrics: the terms
        (total = policy + kl - entropy + value + auxiliary) and the metrics per step, which `step_moments` lists.

    Raises:
        ConfigError: The inputs have no reference log-probs, entropy or behaviour log-probs, but a term needs them.
        ContractError: The surrogate does not return a loss per step, or an input is NaN or infinite (found on the CPU only).

    Source:
        Shao et al. 2024, arXiv:2402.03300, eq. 3.
    """
    loss, measured = unchecked_objective(inputs, config)
    require_finite_inputs(loss, inputs)
    return ObjectiveOutput(loss=loss, metrics=measured.moments())


def unchecked_objective(inputs: ObjectiveInputs, config: ObjectiveConfig) -> MeasuredLoss:
    """The same loss for the trainer, which checks once per update that scores are finite, and computes metrics at the end."""
    inputs = with_selections(inputs, config)
    traits = traits_of(config.surrogate)
    steps = Steps(inputs, config.correction)
    weights = steps.constant(inputs.weights)
    counted = counted_steps(inputs, steps, config)
    policy_weights = weights if counted is None else zero_outside(weights, counted)
    if steps.sampler_weights is not None and not traits.uses_sampler_weights:  # VESPO has them in its loss already
        policy_weights = zero_outside(policy_weights * steps.sampler_weights, steps.mask)
    has_reference = inputs.ref_log_probs is not None
    kl_coef = config.kl_coef_with(has_reference=has_reference) if inputs.kl_coef is None else inputs.kl_coef
    entropy_coef = config.entropy_coef if inputs.entropy_coef is None else inputs.entropy_coef
    kl, measured_kl = divergence(inputs, steps, config, kl_coef)
    entropy = entropy_of(inputs, steps, config, entropy_coef)

    surrogate_loss = require_step_loss(config.surrogate, config.surrogate(steps), steps.mask)  # type: ignore[operator]
    terms = {"policy_loss": policy_weights * zero_outside(surrogate_loss, steps.mask)}
    if kl is not None:
        terms["kl_penalty"] = kl_coef * weights * kl  # the KL also counts steps that the surrogate leaves out
    if entropy_coef > 0:
        entropy_weights = weights if inputs.entropy_weights is None else steps.constant(inputs.entropy_weights)
        terms["entropy_bonus"] = -entropy_coef * entropy_weights * entropy
    if inputs.returns is not None and inputs.values is not None:
        terms["value_loss"] = config.value_coef * weights * value_error(inputs, config.value_clip)
    if inputs.auxiliary_loss is not None:
        terms["auxiliary_loss"] = weights * zero_outside(as_float32(inputs.auxiliary_loss), steps.mask)
    sums = {name: term.sum() for name, term in terms.items()}
    loss = reduce(torch.add, sums.values()).to(steps.log_probs.dtype)

    with torch.no_grad():
        nothing_moved = steps.old_is_current and inputs.behaviour_log_probs is None  # every ratio is 1
        stopped = None if traits.stopped is None or nothing_moved else traits.stopped(steps)
        per_step = {"entropy": entropy, "kl": measured_kl, "kept_fraction": counted}
        if "entropy_bonus" in sums:
            sums["entropy_bonus"] = -sums["entropy_bonus"]  # subtracted in the loss, and reported without the sign
        measured = measured_steps({**sums, "total_loss": loss}, steps, traits.level, stopped, per_step)
    return MeasuredLoss(loss, measured)


def with_selections(inputs: ObjectiveInputs, config: ObjectiveConfig) -> ObjectiveInputs:
    """Select steps as the settings say, unless the caller has already selected steps. Select among these rows only."""
    select = traits_of(config.surrogate).select
    if inputs.keep is None and config.top_entropy_fraction < 1:
        inputs = replace(inputs, keep=kept_by_entropy(inputs.mask, inputs.entropy, config.top_entropy_fraction))
    if inputs.selected is None and select is not None:
        inputs = replace(inputs, selected=selected_by(select, inputs.mask, inputs.log_probs, inputs.advantages))
    return inputs


def counted_steps(inputs: ObjectiveInputs, steps: Steps, config: ObjectiveConfig) -> Bool[Tensor, "N T"] | None:
    """Return the mask of the steps that the surrogate counts. None: the surrogate counts all steps."""
    if config.off_policy_threshold is None:
        return inputs.keep
    sampled = steps.old_log_probs if inputs.behaviour_log_probs is None else steps.constant(inputs.behaviour_log_probs)
    near = near_policy_rows(steps.log_probs, sampled, steps.advantages, steps.mask, config.off_policy_threshold)
    return near.expand_as(steps.mask) if inputs.keep is None else inputs.keep & near


def divergence(
    inputs: ObjectiveInputs, steps: Steps, config: ObjectiveConfig, kl_coef: float
) -> tuple[Float[Tensor, "N T"] | None, Float[Tensor, "N T"] | None]:
    """Return the KL per step for the loss, and the KL per step for the metrics. None: there is no reference.

    Metrics show k3 or the exact KL, whatever estimator the loss uses. Both are never negative, so runs can be compared.
    """
    if config.kl_estimator == "exact":
        if inputs.kl is not None:
            exact = zero_outside(as_float32(inputs.kl), steps.mask)
            return exact, exact
        if kl_coef > 0:
            raise ConfigError(
                f"objective.kl_coef={kl_coef} with kl_estimator='exact' needs the KL itself, and the policy gives none. Return "
                "it in ActionScores.kl (HFPolicy does with HFOptions(exact_kl_top=...)), or estimate it: kl_estimator='k3' and "
                "a reference policy."
            )
        return None, None
    if inputs.ref_log_probs is None:
        if kl_coef > 0:
            raise ConfigError(
                f"objective.kl_coef={kl_coef} needs a reference. Pass reference_policy=..., or set kl_coef=0."
            )
        return None, None
    x = steps.log_probs - steps.constant(inputs.ref_log_probs)
    estimate = estimate_kl(config.kl_estimator, x, steps.ratio(traits_of(config.surrogate).level))
    return estimate, estimate if config.kl_estimator == "k3" else kl_k3(x.detach())


def entropy_of(
    inputs: ObjectiveInputs, steps: Steps, config: ObjectiveConfig, entropy_coef: float
) -> Float[Tensor, "N T"]:
    """The entropy per step: exact if the settings ask for it and the policy computes it, else estimated."""
    match config.entropy_estimator:
        case "exact":
            if inputs.entropy is not None:
                return zero_outside(as_float32(inputs.entropy), steps.mask)
            if entropy_coef > 0:
                raise ConfigError(
                    f"objective.entropy_coef={entropy_coef} needs an exact entropy, and the policy gives none. Return it in "
                    "ActionScores.entropy (some policies do on request: exact_entropy=True), or set "
                    "entropy_estimator='score_function'."
                )
        case "score_function":
            pass
        case _:
            assert_never(config.entropy_estimator)
    estimate = score_function_entropy(steps.log_probs, steps.ratio("step"))
    if steps.sampler_weights is None:
        return estimate
    return zero_outside(estimate * steps.sampler_weights, steps.mask)  # an expectation over the old policy's samples


def value_error(inputs: ObjectiveInputs, clip: float | None) -> Float[Tensor, "N T"]:
    """Squared error of a critic, e = (v - R)^2. If `value_clip` = c bounds the distance of a value v from v_old:

    e = max((v - R)^2, (v_old + clip(v - v_old, -c, c) - R)^2)

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 9; the clip comes from its reference implementation.
    """
    assert inputs.values is not None
    assert inputs.returns is not None
    v = zero_outside(as_float32(inputs.values), inputs.mask)  # NaN in padding must not reach the gradient
    returns = zero_outside(inputs.returns.detach().to(v.dtype), inputs.mask)
    error = (v - returns).square()
    if clip is None or inputs.old_values is None:
        return error
    v_old = zero_outside(inputs.old_values.detach().to(v.dtype), inputs.mask)
    return torch.maximum(error, (v_old + (v - v_old).clamp(-clip, clip) - returns).square())  # the worse one counts

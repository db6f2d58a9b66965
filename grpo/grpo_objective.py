"""The loss: surrogate + KL - entropy (+ value error), each summed with a weights tensor that holds the normalisation."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from torch import Tensor

from .blockwise import Evaluated, in_blocks
from .log_prob_gradient import LogProbGradient
from .masking import OnMask
from .metrics import total
from .objective_config import DEFAULT_KL_COEF, ObjectiveConfig
from .objective_metrics import objective_metrics
from .objective_steps import Steps
from .objective_terms import counted_steps, divergence, entropy, sampler_correction, surrogate, value_error
from .selection import select_steps
from .types import ObjectiveInputs, ObjectiveOutput

Objective = Callable[[ObjectiveInputs], ObjectiveOutput]
"""The extension point: any such callable can stand in for `grpo_objective`."""


def grpo_objective(inputs: ObjectiveInputs, config: ObjectiveConfig) -> ObjectiveOutput:
    """The GRPO loss of one micro-batch.

    L = sum_{n,t} w[n,t] (m[n,t] u[n,t] l[n,t] + kl_coef d[n,t] + value_coef e[n,t]) - entropy_coef sum_{n,t} w_H[n,t] H[n,t]

    with l the surrogate on rho = exp(log_probs - old_log_probs), m the steps it counts (`keep`, rows that are not too far off),
    u what corrects for the sampler, d the estimate of the divergence from the reference, e the squared error of a critic, and H
    the entropy. Without `old_log_probs` rho is exactly 1 and its gradient that of log_probs (REINFORCE).

    Every term gives its slope beside its value, and the gradient is put together from these: there is no graph to differentiate,
    and large inputs are evaluated in blocks of rows. The loss can be differentiated once, with respect to `log_probs`,
    `entropy`, `kl` and `values`.

    Args:
        inputs: see `ObjectiveInputs`; half precision is raised to float32.
        config: `aggregation` and `fixed_length` are not read here: they are in `inputs.weights`.

    Returns:
        The loss, and moments of `total_loss`, `policy_loss`, `kl_penalty`, `entropy_bonus`, `value_loss` (shares that add up:
        total = policy + kl - entropy + value), `ratio`, `clip_fraction`, `clip_fraction_low`, `clip_fraction_high`,
        `ratio_clamped_fraction`, `entropy` (sampled where it is not known), and where there is one `kl`, `sampler_ratio`,
        `kept_fraction`.

    Raises:
        ConfigError: a term lacks what it is computed from (a reference, an entropy, behaviour log-probs).
        ContractError: densities where the surrogate is for probabilities.

    Source:
        Shao et al. 2024, arXiv:2402.03300, eq. 3.
    """
    lacks_keep = inputs.keep is None and (config.top_entropy_fraction < 1.0 or config.surrogate == "clip_cov")
    if lacks_keep or (inputs.penalised is None and config.surrogate == "kl_cov"):
        keep, penalised = select_steps(
            config,
            mask=inputs.mask,
            log_probs=inputs.log_probs.detach(),
            advantages=inputs.advantages,
            entropy=None if inputs.entropy is None else inputs.entropy.detach(),
        )
        inputs = replace(
            inputs,
            keep=keep if inputs.keep is None else inputs.keep,
            penalised=penalised if inputs.penalised is None else inputs.penalised,
        )
    return in_blocks(partial(_evaluate, config), inputs)


def _evaluate(config: ObjectiveConfig, inputs: ObjectiveInputs, wanted: Collection[str]) -> Evaluated:
    """The loss of some rows, its gradient with respect to the inputs in `wanted`, and what is reported."""
    steps = Steps(inputs, config)
    weights = steps.weights
    gradient = LogProbGradient(steps, wanted="log_probs" in wanted)
    gradients: dict[str, Tensor] = {}
    spread: dict[str, Tensor] = {}

    correction = sampler_correction(steps)
    policy = surrogate(steps, correction)
    counted = counted_steps(steps)
    policy_weights = weights if counted is None else OnMask(counted)(weights)
    if correction is not None and config.surrogate != "vespo":
        policy_weights = policy_weights * correction
    gradient.add(policy, policy_weights)
    loss = total(policy.loss * policy_weights)
    shares = {"policy_loss": loss}

    kl_coef = _coef(inputs.kl_coef, config.kl_coef, DEFAULT_KL_COEF if inputs.ref_log_probs is not None else 0.0)
    kl = divergence(steps, kl_coef)
    if kl is not None:
        term, spread["kl"] = kl
        gradient.add(term, weights, kl_coef)
        if "kl" in wanted and config.kl_estimator == "exact":
            gradients["kl"] = steps.on_mask(kl_coef * weights)
        shares["kl_penalty"] = kl_coef * total(term.loss * weights)
        loss = loss + shares["kl_penalty"]

    entropy_coef = _coef(inputs.entropy_coef, config.entropy_coef, 0.0)
    bonus = entropy(steps, entropy_coef)
    spread["entropy"] = bonus.loss
    if entropy_coef > 0:
        entropy_weights = weights if inputs.entropy_weights is None else inputs.entropy_weights.to(steps.dtype)
        gradient.add(bonus, entropy_weights, -entropy_coef, by_own_ratio=True)
        if "entropy" in wanted and config.entropy_estimator == "exact":
            gradients["entropy"] = steps.on_mask(-entropy_coef * entropy_weights)
        shares["entropy_bonus"] = entropy_coef * total(bonus.loss * entropy_weights)
        loss = loss - shares["entropy_bonus"]

    critic = value_error(steps)
    if critic is not None:
        error, slope = critic
        if "values" in wanted:
            gradients["values"] = config.value_coef * (slope * weights)
        shares["value_loss"] = config.value_coef * total(error * weights)
        loss = loss + shares["value_loss"]

    if "log_probs" in wanted:
        gradients["log_probs"] = gradient.total()
    if correction is not None:
        spread["sampler_ratio"] = steps.on_mask(correction)
    names, moments = objective_metrics({**shares, "total_loss": loss}, spread, steps, counted)
    return Evaluated(loss=loss, gradients=gradients, names=names, moments=moments)


def _coef(current: float | None, configured: float | None, default: float) -> float:
    """The adaptive coefficient where there is one, else the configured one."""
    return current if current is not None else configured if configured is not None else default

"""The loss: surrogate + KL - entropy (+ value error), each summed with a weights tensor that holds the normalisation."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .blockwise import Gradients, in_blocks, with_gradients
from .log_prob_gradient import LogProbGradient
from .masking import OnMask
from .metrics import StepSums
from .objective_config import DEFAULT_KL_COEF, ObjectiveConfig
from .objective_metrics import objective_metrics, observe
from .objective_steps import Steps
from .objective_terms import counted_steps, divergence, entropy, sampler_correction, surrogate, value_error
from .selection import select_steps
from .step_loss import times
from .types import ObjectiveInputs, ObjectiveOutput

Objective = Callable[[ObjectiveInputs], ObjectiveOutput]
"""The extension point: any such callable can stand in for `grpo_objective`."""


def grpo_objective(inputs: ObjectiveInputs, config: ObjectiveConfig) -> ObjectiveOutput:
    """The GRPO loss of one micro-batch.

    L = sum_{n,t} w[n,t] (m[n,t] u[n,t] l[n,t] + kl_coef d[n,t] + value_coef e[n,t]) - entropy_coef sum_{n,t} w_H[n,t] H[n,t]

    with l the surrogate on rho = exp(log_probs - old_log_probs), m the steps it counts (`keep`, rows that are not too far off),
    u what corrects for the sampler, d the estimate of the divergence from the reference, e the squared error of a critic, and H
    the entropy. Without `old_log_probs` rho is exactly 1 and its gradient that of log_probs (REINFORCE).

    Every term gives its slope beside its value, and the gradient is put together from these: there is no graph to
    differentiate, and large inputs are evaluated in blocks of rows. The loss can be differentiated once, with respect to
    `log_probs`, `entropy`, `kl` and `values`.

    Args:
        inputs: see `ObjectiveInputs`; half precision is raised to float32.
        config: `aggregation` and `fixed_length` are not read here: they are in `inputs.weights`.

    Returns:
        The loss, and moments of `total_loss`, `policy_loss`, `kl_penalty`, `entropy_bonus`, `value_loss` (shares that add up:
        total = policy + kl - entropy + value), `ratio` (the surrogate's: VESPO's is the row's), `clip_fraction`,
        `clip_fraction_low`, `clip_fraction_high`, `ratio_clamped_fraction`, `entropy` (sampled where it is not known), and
        where there is one `kl`, `sampler_ratio`, `kept_fraction`.

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
    coefs = Coefs.of(inputs, config)
    sums, gradients = in_blocks(partial(_evaluate, config, coefs), inputs)
    with torch.no_grad():
        shares = {"policy_loss": sums["policy_loss"]}
        shares |= {name: coef * sums[name] for name, coef in coefs._asdict().items() if name in sums}
        total = sums["policy_loss"]
        for name in list(shares)[1:]:
            total = total - shares[name] if name == "entropy_bonus" else total + shares[name]
        device = inputs.mask.device
        metrics = objective_metrics(sums, {**shares, "total_loss": total}, config, device)
        loss = torch.as_tensor(total, dtype=torch.promote_types(inputs.log_probs.dtype, torch.float32), device=device)
    return ObjectiveOutput(loss=with_gradients(loss, gradients, inputs), metrics=metrics)


class Coefs(NamedTuple):
    """What the terms beside the surrogate are multiplied with, by the share of the loss that they are."""

    kl_penalty: float
    entropy_bonus: float
    value_loss: float

    @classmethod
    def of(cls, inputs: ObjectiveInputs, config: ObjectiveConfig) -> "Coefs":
        """The adaptive coefficients where there are any, else the configured ones."""
        kl, entropy_coef = config.kl_coef, config.entropy_coef
        if kl is None:
            kl = DEFAULT_KL_COEF if inputs.ref_log_probs is not None else 0.0
        return cls(
            kl_penalty=kl if inputs.kl_coef is None else inputs.kl_coef,
            entropy_bonus=entropy_coef if inputs.entropy_coef is None else inputs.entropy_coef,
            value_loss=config.value_coef,
        )


def _evaluate(
    config: ObjectiveConfig, coefs: Coefs, inputs: ObjectiveInputs, wanted: Collection[str], sums: StepSums
) -> Gradients:
    """Add up the terms of some rows, and give their gradients with respect to the inputs in `wanted`."""
    steps = Steps(inputs, config)
    weights = steps.weights
    gradient = LogProbGradient(steps, wanted="log_probs" in wanted)
    gradients: Gradients = {}
    spread: dict[str, Tensor] = {}

    correction = sampler_correction(steps)
    policy = surrogate(steps, correction)
    counted = counted_steps(steps)
    policy_weights = weights if counted is None else OnMask(counted)(weights)
    if correction is not None:
        spread["sampler_ratio"] = steps.on_mask(correction)
        if config.surrogate != "vespo":
            policy_weights = policy_weights * correction
    gradient.add(policy, policy_weights)
    sums.add("policy_loss", times(policy.loss, policy_weights))

    kl = divergence(steps, coefs.kl_penalty)
    if kl is not None:
        term, spread["kl"] = kl
        sums.add("kl_penalty", term.loss * weights)
        gradient.add(term, weights, coefs.kl_penalty)
        if "kl" in wanted and config.kl_estimator == "exact":
            gradients["kl"] = steps.on_mask(coefs.kl_penalty * weights)

    bonus = entropy(steps, coefs.entropy_bonus)
    spread["entropy"] = bonus.loss
    if coefs.entropy_bonus > 0:
        entropy_weights = weights if inputs.entropy_weights is None else inputs.entropy_weights.to(steps.dtype)
        sums.add("entropy_bonus", bonus.loss * entropy_weights)
        gradient.add(bonus, entropy_weights, -coefs.entropy_bonus, by_own_ratio=True)
        if "entropy" in wanted and config.entropy_estimator == "exact":
            gradients["entropy"] = steps.on_mask(-coefs.entropy_bonus * entropy_weights)

    critic = value_error(steps)
    if critic is not None:
        error, slope = critic
        sums.add("value_loss", error * weights)
        if "values" in wanted:
            gradients["values"] = coefs.value_loss * (slope * weights)

    observe(sums, spread, steps, counted)
    if "log_probs" in wanted:
        gradients["log_probs"] = gradient.total()
    return gradients

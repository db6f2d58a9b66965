"""The loss: surrogate + KL - entropy (+ value error), each summed with a weights tensor that holds the normalisation."""

from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .blockwise import in_blocks, on_mask
from .divergence import MAX_LOG_RATIO, estimate_kl, kl_k3, score_function_entropy
from .errors import ConfigError, ContractError
from .objective_config import DEFAULT_KL_COEF, ObjectiveConfig
from .objective_metrics import objective_metrics
from .off_policy import on_policy_rows, sampler_weights
from .ratios import bounded_exp, log_ratio_at_level
from .selection import select_steps
from .surrogates import (
    MIN_LOG_VESPO_WEIGHT,
    cispo_surrogate,
    clipped_surrogate,
    dppo_tv_surrogate,
    dro_surrogate,
    gmpo_surrogate,
    kl_cov_surrogate,
    reinforce_surrogate,
    sapo_surrogate,
    vespo_surrogate,
)
from .types import ObjectiveInputs, ObjectiveOutput

Objective = Callable[[ObjectiveInputs], ObjectiveOutput]
"""The extension point: any such callable can stand in for `grpo_objective`."""


def grpo_objective(inputs: ObjectiveInputs, config: ObjectiveConfig) -> ObjectiveOutput:
    """The GRPO loss of one micro-batch.

    L = sum_{n,t} w[n,t] (m[n,t] u[n,t] l[n,t] + kl_coef d[n,t] + value_coef e[n,t]) - entropy_coef sum_{n,t} w_H[n,t] H[n,t]

    with l the surrogate on rho = exp(log_probs - old_log_probs), m the steps it counts (`keep`, rows that are not too far off),
    u what corrects for the sampler, d the estimate of the divergence from the reference, e the squared error of a critic, and H
    the entropy. Without `old_log_probs` rho is exactly 1 and its gradient that of log_probs (REINFORCE).

    Large inputs are evaluated in blocks of rows, each with its gradient: the same numbers, in less time and memory.

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
    return in_blocks(lambda rows: _objective_of(rows, config), inputs)


def _objective_of(inputs: ObjectiveInputs, config: ObjectiveConfig) -> ObjectiveOutput:
    """What carries a gradient is 0 off the mask here."""
    mask, log_probs = inputs.mask, inputs.log_probs
    weights = inputs.weights.to(log_probs.dtype)
    advantages = inputs.advantages.to(log_probs.dtype)
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else torch.where(mask, advantages, 0.0)

    if inputs.old_log_probs is None:  # the ratio is 1, and no bound is reached
        step_log_ratio = log_probs - log_probs.detach()
    else:
        step_log_ratio = _difference(log_probs, inputs.old_log_probs, mask)
    log_ratio = log_ratio_at_level(step_log_ratio, mask, config.ratio_level)
    ratio = log_ratio.exp() if inputs.old_log_probs is None else bounded_exp(log_ratio)

    correction = _sampler_correction(inputs, config, log_probs)
    surrogate = _surrogate(inputs, config, log_probs, step_log_ratio, log_ratio, ratio, advantages, correction)
    counted = _counted_steps(inputs, config, log_probs, advantages)
    policy_weights = weights if counted is None else torch.where(counted, weights, 0.0)
    if correction is not None and config.surrogate != "vespo":
        policy_weights = policy_weights * correction
    shares = {"policy_loss": (surrogate * policy_weights).sum()}
    loss = shares["policy_loss"]
    spread: dict[str, Tensor] = {}

    kl_coef = _coef(inputs.kl_coef, config.kl_coef, DEFAULT_KL_COEF if inputs.ref_log_probs is not None else 0.0)
    kl = _divergence(inputs, config, log_probs, ratio, kl_coef)
    if kl is not None:
        term, spread["kl"] = kl
        shares["kl_penalty"] = kl_coef * (term * weights).sum()
        loss = loss + shares["kl_penalty"]

    entropy_coef = _coef(inputs.entropy_coef, config.entropy_coef, 0.0)
    own_ratio = ratio if config.ratio_level == "step" else bounded_exp(step_log_ratio)
    spread["entropy"] = _entropy(inputs, config, log_probs, own_ratio, entropy_coef)
    if entropy_coef > 0:
        entropy_weights = weights
        if inputs.entropy_weights is not None:
            entropy_weights = inputs.entropy_weights.to(log_probs.dtype)
        shares["entropy_bonus"] = entropy_coef * (spread["entropy"] * entropy_weights).sum()
        loss = loss - shares["entropy_bonus"]

    if inputs.returns is not None and inputs.values is not None:
        error = _value_error(inputs.values, inputs.old_values, inputs.returns, mask, config.value_clip)
        shares["value_loss"] = config.value_coef * (error * weights).sum()
        loss = loss + shares["value_loss"]

    if correction is not None:
        spread["sampler_ratio"] = torch.where(mask, correction, 0.0)
    with torch.no_grad():
        moved = log_probs.exp() - sampled_log_probs(inputs, log_probs).exp() if config.surrogate == "dppo_tv" else None
        metrics = objective_metrics(
            shares={**shares, "total_loss": loss},
            spread=spread,
            ratio=None if inputs.old_log_probs is None else ratio,
            log_ratio=log_ratio,
            step_log_ratio=step_log_ratio,
            moved=moved,
            advantages=advantages,
            mask=mask,
            counted=counted,
            config=config,
        )
    return ObjectiveOutput(loss=loss, metrics=metrics)


def _surrogate(
    inputs: ObjectiveInputs,
    config: ObjectiveConfig,
    log_probs: Float[Tensor, "N T"],
    step_log_ratio: Float[Tensor, "N T"],
    log_ratio: Float[Tensor, "N #T"],
    ratio: Float[Tensor, "N #T"],
    advantages: Float[Tensor, "N #T"],
    correction: Float[Tensor, "N #T"] | None,
) -> Float[Tensor, "N #T"]:
    """The chosen policy loss per step."""
    match config.surrogate:
        case "clip" | "clip_cov":
            if inputs.old_log_probs is None:
                return ratio * -advantages
            return clipped_surrogate(
                ratio,
                advantages,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                delta=config.delta,
                dual_clip=config.dual_clip,
            )
        case "none":
            return reinforce_surrogate(log_probs, advantages)
        case "cispo":
            return cispo_surrogate(ratio, log_probs, advantages, clip_low=config.clip_low, clip_high=config.clip_high)
        case "sapo":
            return sapo_surrogate(
                ratio,
                advantages,
                temperature_pos=config.sapo_temperature_pos,
                temperature_neg=config.sapo_temperature_neg,
            )
        case "gmpo":
            return gmpo_surrogate(
                step_log_ratio, advantages, inputs.mask, clip_low=config.clip_low, clip_high=config.clip_high
            )
        case "vespo":
            return vespo_surrogate(
                _log_row_weight(step_log_ratio, correction, inputs.mask),
                log_probs,
                advantages,
                k_pos=config.vespo_k_pos,
                lambda_pos=config.vespo_lambda_pos,
                k_neg=config.vespo_k_neg,
                lambda_neg=config.vespo_lambda_neg,
            )
        case "dro":
            return dro_surrogate(log_ratio, log_probs, advantages, beta=config.dro_beta)
        case "dppo_tv":
            _require_probabilities(log_probs)
            return dppo_tv_surrogate(
                ratio, log_probs, sampled_log_probs(inputs, log_probs), advantages, tv_limit=config.tv_limit
            )
        case "kl_cov":
            penalised = torch.zeros_like(inputs.mask) if inputs.penalised is None else inputs.penalised
            return kl_cov_surrogate(ratio, log_ratio, advantages, penalised, coef=config.cov_kl_coef)
        case _:
            assert_never(config.surrogate)


def _log_row_weight(
    step_log_ratio: Float[Tensor, "N T"], correction: Float[Tensor, "N #T"] | None, mask: Bool[Tensor, "N T"]
) -> Float[Tensor, "N 1"]:
    """VESPO's log w: from the policy that sampled to the one now, over the whole row."""
    log_weight = step_log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).sum(1, keepdim=True)
    if correction is not None:
        log_correction = correction.log().clamp(MIN_LOG_VESPO_WEIGHT, MAX_LOG_RATIO)
        if correction.shape[1] > 1:
            log_correction = torch.where(mask, log_correction, 0.0)
        log_weight = log_weight + log_correction.sum(1, keepdim=True)
    return log_weight.clamp(MIN_LOG_VESPO_WEIGHT, MAX_LOG_RATIO)


def _counted_steps(
    inputs: ObjectiveInputs, config: ObjectiveConfig, log_probs: Tensor, advantages: Tensor
) -> Bool[Tensor, "N T"] | None:
    """The steps whose surrogate counts; None: all."""
    counted = inputs.keep
    if config.off_policy_threshold is not None:
        sampled = inputs.behaviour_log_probs
        if sampled is None:
            sampled = sampled_log_probs(inputs, log_probs)
        near = on_policy_rows(log_probs, sampled, advantages, inputs.mask, config.off_policy_threshold)
        counted = near.expand_as(inputs.mask) if counted is None else counted & near
    return counted


def sampled_log_probs(inputs: ObjectiveInputs, log_probs: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """What the steps were sampled with: behaviour log-probs where they are known, else those before any update."""
    old = log_probs.detach() if inputs.old_log_probs is None else on_mask(inputs.old_log_probs, inputs.mask)
    if inputs.behaviour_log_probs is None:
        return old
    behaviour = on_mask(inputs.behaviour_log_probs, inputs.mask)
    return torch.where(behaviour.isnan(), old, behaviour).to(log_probs.dtype)


def _sampler_correction(
    inputs: ObjectiveInputs, config: ObjectiveConfig, log_probs: Tensor
) -> Float[Tensor, "N #T"] | None:
    if config.sampler_correction == "none":
        return None
    if inputs.behaviour_log_probs is None:
        raise ConfigError(
            f"objective.sampler_correction={config.sampler_correction!r} needs behaviour_log_probs. Return them in "
            "SampledActions, pass them to ExperienceBatch.from_rows, or set sampler_correction='none'."
        )
    return sampler_weights(
        log_probs if inputs.old_log_probs is None else inputs.old_log_probs.to(log_probs.dtype),
        inputs.behaviour_log_probs.to(log_probs.dtype),
        inputs.mask,
        correction=config.sampler_correction,
        level=config.sampler_ratio_level,
        low=config.sampler_ratio_low,
        high=config.sampler_ratio_high,
    )


def _coef(current: float | None, configured: float | None, default: float) -> float:
    """The adaptive coefficient where there is one, else the configured one."""
    return current if current is not None else configured if configured is not None else default


def _divergence(
    inputs: ObjectiveInputs, config: ObjectiveConfig, log_probs: Tensor, ratio: Tensor, kl_coef: float
) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"]] | None:
    """The chosen estimate of the divergence from the reference, per step, and what is reported of it; None: there is none.

    Reported is k3 (or the exact value), whatever the term: it is never negative, and can be compared between runs.
    """
    if config.kl_estimator == "exact":
        if inputs.kl is None and kl_coef > 0:
            raise ConfigError(
                f"objective.kl_coef={kl_coef} with kl_estimator='exact' needs the divergence itself, and the policy gives "
                "none. Return it in ActionScores.kl, or estimate it: kl_estimator='k3' and a reference policy."
            )
        return None if inputs.kl is None else (inputs.kl, inputs.kl)
    if inputs.ref_log_probs is None:
        if kl_coef > 0:
            raise ConfigError(
                f"objective.kl_coef={kl_coef} needs a reference. Pass reference_policy=..., or set kl_coef=0."
            )
        return None
    x = _difference(log_probs, inputs.ref_log_probs, inputs.mask)
    term = estimate_kl(config.kl_estimator, x, ratio)
    return term, term if config.kl_estimator == "k3" else kl_k3(x.detach())


def _entropy(
    inputs: ObjectiveInputs, config: ObjectiveConfig, log_probs: Tensor, ratio: Tensor, entropy_coef: float
) -> Float[Tensor, "N T"]:
    """The entropy per step: exact where that is wanted and known, else the estimate, which without a bonus is a metric only."""
    match config.entropy_estimator:
        case "exact":
            if inputs.entropy is not None:
                return inputs.entropy
            if entropy_coef > 0:
                raise ConfigError(
                    f"objective.entropy_coef={entropy_coef} needs an exact entropy, and the policy gives none. "
                    "Return it in ActionScores.entropy, or set entropy_estimator='score_function'."
                )
            if inputs.old_log_probs is None:
                return -log_probs.detach()
            return score_function_entropy(log_probs.detach(), ratio.detach())
        case "score_function":
            return score_function_entropy(log_probs, ratio)
        case _:
            assert_never(config.entropy_estimator)


def _value_error(
    values: Tensor, old_values: Tensor | None, returns: Tensor, mask: Tensor, clip: float | None
) -> Float[Tensor, "N T"]:
    """Squared error of a critic; the larger of it and the one its value may move to, where that is bounded.

    e = max((v - R)^2, (v_old + clip(v - v_old, -c, c) - R)^2)

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 9; the clip is that of its reference implementation.
    """
    returns = on_mask(returns, mask).to(values.dtype)
    error = (values - returns).square()
    if clip is None or old_values is None:
        return error
    old = on_mask(old_values, mask).to(values.dtype)
    return torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns).square())


def _require_probabilities(log_probs: Tensor) -> None:
    if bool((log_probs > 1e-5).any()):
        raise ContractError(
            f"objective.surrogate='dppo_tv' compares probabilities, and a log-prob of {float(log_probs.max()):.3g} is that "
            "of a density. Use surrogate='clip' with continuous actions."
        )


def _difference(log_probs: Tensor, others: Tensor, mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """log_probs - others, 0 off the mask as `log_probs` is."""
    return log_probs - on_mask(others, mask).to(log_probs.dtype)

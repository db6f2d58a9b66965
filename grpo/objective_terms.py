"""The terms of the loss: each choice of the settings, as a loss per step with its slopes."""

from typing import assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .divergence import MAX_LOG_RATIO, estimate_kl, kl_k3, score_function_entropy
from .errors import ConfigError, ContractError
from .masking import raised
from .objective_steps import Steps
from .off_policy import on_policy_rows, sampler_weights
from .step_loss import StepLoss
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


def surrogate(steps: Steps, correction: Float[Tensor, "N #T"] | None) -> StepLoss:
    """The chosen policy loss."""
    config, advantages = steps.config, steps.advantages
    match config.surrogate:
        case "clip" | "clip_cov":
            if steps.inputs.old_log_probs is None:  # the ratio is 1, inside every bound
                return StepLoss(-advantages, by_log_ratio=-advantages)
            return clipped_surrogate(
                steps.ratio.value,
                advantages,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                delta=config.delta,
                dual_clip=config.dual_clip,
            )
        case "none":
            return reinforce_surrogate(steps.log_probs, advantages)
        case "cispo":
            return cispo_surrogate(
                steps.ratio.value,
                steps.log_probs,
                advantages,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
            )
        case "sapo":
            return sapo_surrogate(
                steps.ratio.value,
                advantages,
                temperature_pos=config.sapo_temperature_pos,
                temperature_neg=config.sapo_temperature_neg,
            )
        case "gmpo":
            return gmpo_surrogate(
                steps.step_log_ratio, advantages, steps.mask, clip_low=config.clip_low, clip_high=config.clip_high
            )
        case "vespo":
            return vespo_surrogate(
                _log_row_weight(steps, correction),
                steps.log_probs,
                advantages,
                k_pos=config.vespo_k_pos,
                lambda_pos=config.vespo_lambda_pos,
                k_neg=config.vespo_k_neg,
                lambda_neg=config.vespo_lambda_neg,
            )
        case "dro":
            return dro_surrogate(steps.log_ratio, steps.log_probs, advantages, beta=config.dro_beta)
        case "dppo_tv":
            _require_probabilities(steps.log_probs)
            return dppo_tv_surrogate(
                steps.ratio.value, steps.log_probs, steps.sampled_log_probs, advantages, tv_limit=config.tv_limit
            )
        case "kl_cov":
            penalised = steps.inputs.penalised
            penalised = torch.zeros_like(steps.mask) if penalised is None else penalised
            return kl_cov_surrogate(steps.ratio.value, steps.log_ratio, advantages, penalised, coef=config.cov_kl_coef)
        case _:
            assert_never(config.surrogate)


def _log_row_weight(steps: Steps, correction: Float[Tensor, "N #T"] | None) -> Float[Tensor, "N 1"]:
    """VESPO's log w: from the policy that sampled to the one now, over the whole row."""
    log_weight = steps.row_log_ratio
    if correction is not None:
        log_correction = correction.log().clamp(MIN_LOG_VESPO_WEIGHT, MAX_LOG_RATIO)
        if correction.shape[1] > 1:
            log_correction = steps.on_mask(log_correction)
        log_weight = log_weight + log_correction.sum(1, keepdim=True)
    return log_weight.clamp(MIN_LOG_VESPO_WEIGHT, MAX_LOG_RATIO)


def _require_probabilities(log_probs: Tensor) -> None:
    if bool((log_probs > 1e-5).any()):
        raise ContractError(
            f"objective.surrogate='dppo_tv' compares probabilities, and a log-prob of {float(log_probs.max()):.3g} is that "
            "of a density. Use surrogate='clip' with continuous actions."
        )


def counted_steps(steps: Steps) -> Bool[Tensor, "N T"] | None:
    """The steps whose surrogate counts; None: all."""
    counted, threshold = steps.inputs.keep, steps.config.off_policy_threshold
    if threshold is None:
        return counted
    sampled = steps.inputs.behaviour_log_probs
    sampled = steps.sampled_log_probs if sampled is None else sampled.detach()
    near = on_policy_rows(steps.log_probs, sampled, steps.advantages, steps.mask, threshold)
    return near.expand_as(steps.mask) if counted is None else counted & near


def sampler_correction(steps: Steps) -> Float[Tensor, "N #T"] | None:
    """The importance weights from the sampler; None: there is nothing to correct for."""
    config, inputs = steps.config, steps.inputs
    if config.sampler_correction == "none":
        return None
    if inputs.behaviour_log_probs is None:
        raise ConfigError(
            f"objective.sampler_correction={config.sampler_correction!r} needs behaviour_log_probs. Return them in "
            "SampledActions, pass them to ExperienceBatch.from_rows, or set sampler_correction='none'."
        )
    old = steps.log_probs if inputs.old_log_probs is None else inputs.old_log_probs
    return sampler_weights(
        old.to(steps.dtype),
        inputs.behaviour_log_probs.to(steps.dtype),
        steps.mask,
        correction=config.sampler_correction,
        level=config.sampler_ratio_level,
        low=config.sampler_ratio_low,
        high=config.sampler_ratio_high,
    )


def divergence(steps: Steps, kl_coef: float) -> tuple[StepLoss, Float[Tensor, "N T"]] | None:
    """The chosen estimate of the divergence from the reference, and what is reported of it; None: there is none.

    Reported is k3 (or the exact value), whatever the term: it is never negative, and can be compared between runs.
    """
    inputs, estimator = steps.inputs, steps.config.kl_estimator
    if estimator == "exact":
        if inputs.kl is not None:
            exact = steps.on_mask(raised(inputs.kl))
            return StepLoss(exact), exact
        if kl_coef > 0:
            raise ConfigError(
                f"objective.kl_coef={kl_coef} with kl_estimator='exact' needs the divergence itself, and the policy gives "
                "none. Return it in ActionScores.kl, or estimate it: kl_estimator='k3' and a reference policy."
            )
        return None
    if inputs.ref_log_probs is None:
        if kl_coef > 0:
            raise ConfigError(
                f"objective.kl_coef={kl_coef} needs a reference. Pass reference_policy=..., or set kl_coef=0."
            )
        return None
    x = steps.less(inputs.ref_log_probs)
    term = estimate_kl(estimator, x, steps.ratio.value)
    return term, term.loss if estimator == "k3" else kl_k3(x).loss


def entropy(steps: Steps, entropy_coef: float) -> StepLoss:
    """The entropy: exact where that is wanted and known, else the estimate, which without a bonus is a metric only."""
    match steps.config.entropy_estimator:
        case "exact":
            if steps.inputs.entropy is not None:
                return StepLoss(steps.on_mask(raised(steps.inputs.entropy)))
            if entropy_coef > 0:
                raise ConfigError(
                    f"objective.entropy_coef={entropy_coef} needs an exact entropy, and the policy gives none. "
                    "Return it in ActionScores.entropy (some policies do on request: exact_entropy=True), or set "
                    "entropy_estimator='score_function'."
                )
        case "score_function":
            pass
        case _:
            assert_never(steps.config.entropy_estimator)
    if steps.inputs.old_log_probs is None:  # the ratio is 1
        return StepLoss(-steps.log_probs, by_ratio=-steps.log_probs if entropy_coef > 0 else None)
    return score_function_entropy(steps.log_probs, steps.step_ratio.value)


def value_error(steps: Steps) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"]] | None:
    """Squared error of a critic, and its slope in the values; None: there is no critic.

    e = (v - R)^2, of slope 2 (v - R), or where the distance c that a value may move is bounded
    e = max((v - R)^2, (v_old + clip(v - v_old, -c, c) - R)^2), of slope 0 where the second is larger and its clip has moved v

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 9; the clip is that of its reference implementation.
    """
    inputs, clip = steps.inputs, steps.config.value_clip
    if inputs.returns is None or inputs.values is None:
        return None
    values = steps.on_mask(raised(inputs.values))
    off = values - steps.on_mask(raised(inputs.returns)).to(values.dtype)
    error, slope = off.square(), 2.0 * off
    if clip is None or inputs.old_values is None:
        return error, slope
    moved = values - steps.on_mask(raised(inputs.old_values)).to(values.dtype)
    bounded_error = (off + (moved.clamp(-clip, clip) - moved)).square()
    return torch.maximum(error, bounded_error), torch.where((bounded_error > error) & (moved.abs() > clip), 0.0, slope)

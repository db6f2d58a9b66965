"""TRL's settings by our names, and the same loss from both sides."""

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from torch import Tensor

from grpo import Mask, ObjectiveConfig, ObjectiveInputs, Truncate, grpo_objective, step_weights
from grpo._objective.ratios import RatioLevel
from grpo._objective.sampler import SamplerCorrection
from grpo._objective.selection import kept_by_entropy
from grpo._objective.weights import Aggregation
from grpo.surrogates import Cispo, Clip, Sapo, Surrogate, Vespo
from tests.support import trl_code
from tests.support.peer_cases import Case, assert_equal_losses
from tests.support.trl_code import LossType, TRLSettings

LOSS_TYPES: tuple[LossType, ...] = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")

AGGREGATIONS: dict[LossType, Aggregation] = {
    "grpo": "row_mean",
    "sapo": "row_mean",
    "bnpo": "step_mean",
    "dapo": "step_mean",
    "cispo": "step_mean",
    "vespo": "step_mean",
    "dr_grpo": "fixed_length",
    "luspo": "row_sum",
}
RATIO_LEVELS: dict[str, RatioLevel] = {"token": "step", "sequence": "row"}


def random_settings(choose: random.Random, loss_type: LossType, level: trl_code.RatioLevel) -> TRLSettings:
    """Every number that the loss type reads, and the divergence and the entropy bonus on or off.

    SAPO's and VESPO's are numbers that float32 holds: TRL picks them with `torch.where`, which rounds to the default dtype.
    """
    settings = TRLSettings(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=choose.choice([0.0003, 0.2, 0.4]),
        epsilon_high=choose.choice([0.0004, 0.28, 1.0]),
        beta=choose.choice([0.0, 0.04, 1.0]),
        use_bias_correction_kl=choose.random() < 0.5,
        entropy_coef=choose.choice([0.0, 0.01, 0.5]),
        max_completion_length=choose.randint(1, 20),
    )
    match loss_type:
        case "cispo":
            return replace(settings, epsilon_high=choose.choice([1.0, 1.2, 5.0]))
        case "sapo":
            return replace(
                settings,
                sapo_temperature_pos=choose.choice([0.25, 1.0, 5.0]),
                sapo_temperature_neg=choose.choice([0.5, 1.0625, 8.0]),
            )
        case "vespo":
            return replace(
                settings,
                vespo_k_pos=choose.choice([0.5, 2.0]),
                vespo_lambda_pos=choose.choice([1.0, 3.0]),
                vespo_k_neg=choose.choice([1.0, 3.0]),
                vespo_lambda_neg=choose.choice([0.5, 2.0]),
            )
        case _:
            beyond = choose.choice([None, 0.05, 0.5, 3.0])  # delta below the clip bound would be one more clip bound
            return replace(settings, delta=None if beyond is None else 1.0 + settings.epsilon_high + beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class VespoBesideRowRatios(Vespo):
    """VESPO where TRL's ratio is that of the row. VESPO reads no such ratio, but the bias-corrected divergence does."""

    level: ClassVar[RatioLevel] = "row"


def our_surrogate(settings: TRLSettings) -> Surrogate:
    """The loss type's surrogate. TRL's epsilon_high of cispo is the bound itself, and there is no lower one."""
    level = RATIO_LEVELS[settings.importance_sampling_level]
    match settings.loss_type:
        case "cispo":
            return Cispo(low=1.0, high=settings.epsilon_high - 1.0, level=level)
        case "sapo":
            return Sapo(
                temperature_pos=settings.sapo_temperature_pos,
                temperature_neg=settings.sapo_temperature_neg,
                level=level,
            )
        case "vespo":
            kind = VespoBesideRowRatios if level == "row" else Vespo
            return kind(
                k_pos=settings.vespo_k_pos,
                lambda_pos=settings.vespo_lambda_pos,
                k_neg=settings.vespo_k_neg,
                lambda_neg=settings.vespo_lambda_neg,
            )
        case _:
            return Clip(low=settings.epsilon_low, high=settings.epsilon_high, delta=settings.delta, level=level)


def our_correction(settings: TRLSettings) -> SamplerCorrection | None:
    """The correction for vLLM's log-probs."""
    if not (settings.use_vllm and settings.vllm_importance_sampling_correction):
        return None
    level, _, kind = settings.vllm_importance_sampling_mode.partition("_")
    return {"truncate": Truncate, "mask": Mask}[kind](
        low=settings.vllm_importance_sampling_clip_min,
        high=settings.vllm_importance_sampling_clip_max,
        level=RATIO_LEVELS[level],
    )


@cache
def our_config(settings: TRLSettings) -> ObjectiveConfig:
    """The settings by our names."""
    aggregation = AGGREGATIONS[settings.loss_type]
    return ObjectiveConfig(
        surrogate=our_surrogate(settings),
        sampler_correction=our_correction(settings),
        top_entropy_fraction=settings.top_entropy_quantile,
        off_policy_threshold=settings.off_policy_mask_threshold,
        kl_coef=settings.beta,
        kl_estimator="k3_weighted" if settings.use_bias_correction_kl else "k3",
        entropy_coef=settings.entropy_coef,
        aggregation=aggregation,
        fixed_length=settings.max_completion_length if aggregation == "fixed_length" else None,
    )


def our_weights(mask: Tensor, settings: TRLSettings) -> Tensor:
    """The loss type's normaliser as weights."""
    config = our_config(settings)
    return step_weights(mask, config.aggregation, fixed_length=config.fixed_length)


def our_loss(case: Case, log_probs: Tensor, entropy: Tensor, settings: TRLSettings) -> Tensor:
    """`grpo_objective`, with the choices that a trainer makes once per update: weights, and the steps of top entropy.

    TRL's entropy bonus is the mean over the steps that it acts on, whatever the loss type.
    """
    config = our_config(settings)
    keep = kept_by_entropy(case.mask, case.entropy, config.top_entropy_fraction)
    inputs = ObjectiveInputs(
        log_probs=log_probs,
        old_log_probs=case.old_log_probs,
        advantages=case.advantages,
        mask=case.mask,
        weights=our_weights(case.mask, settings),
        entropy=entropy,
        entropy_weights=step_weights(case.mask if keep is None else keep, "step_mean"),
        ref_log_probs=case.ref_log_probs,
        behaviour_log_probs=case.behaviour_log_probs if settings.use_vllm else None,
        keep=keep if case.seed % 2 else None,  # left out, it is chosen from the rows at hand: the same ones here
    )
    return grpo_objective(inputs, config).loss


def their_loss(case: Case, log_probs: Tensor, entropy: Tensor, settings: TRLSettings) -> Tensor:
    """TRL's `_compute_loss` on the same tensors."""
    inputs = trl_code.loss_inputs(
        case.mask, case.advantages, case.old_log_probs, ref_per_token_logps=case.ref_log_probs
    )
    return trl_code.loss(inputs, log_probs, entropy, settings)


def assert_same(ours: Tensor, theirs: Tensor, case: Case, settings: TRLSettings, *leaves: Tensor) -> None:
    """Equal losses, and equal gradients with respect to log-probs and entropy."""
    named = dict(zip(("log_probs", "entropy"), leaves, strict=True))
    formula = f"{settings.loss_type} by {settings.importance_sampling_level}"
    assert_equal_losses(formula, ours, theirs, named, f"seed {case.seed}, {settings}")

"""Losses and gradients against `GRPOTrainer._compute_loss` of TRL, called without a model (see `trl_code`)."""

import itertools
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, get_args

import pytest
import torch
from torch import Tensor

from grpo import (
    EntropyControl,
    GRPOConfig,
    Mask,
    ObjectiveConfig,
    ObjectiveInputs,
    Truncate,
    grpo_objective,
    step_weights,
)
from grpo._objective.ratios import RatioLevel
from grpo._objective.sampler import SamplerCorrection
from grpo._objective.selection import kept_by_entropy, top_entropy_steps
from grpo._objective.weights import Aggregation
from grpo._updating.coefficients import Coefficients
from grpo.surrogates import Cispo, Clip, Sapo, Surrogate, Vespo
from tests.support import trl_code
from tests.support.peer_cases import TOLERANCE, Case, assert_equal, assert_equal_losses, draws, random_case
from tests.support.trl_code import LossType, TRLSettings

LOSS_TYPES: tuple[LossType, ...] = get_args(LossType)
LEVELS: tuple[trl_code.RatioLevel, ...] = ("token", "sequence")
MODES: tuple[trl_code.SamplerMode, ...] = get_args(trl_code.SamplerMode)
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
    level, prefix = RATIO_LEVELS[settings.importance_sampling_level], f"{settings.loss_type}_"
    own = {name.removeprefix(prefix): value for name, value in vars(settings).items() if name.startswith(prefix)}
    match settings.loss_type:
        case "cispo":
            return Cispo(low=1.0, high=settings.epsilon_high - 1.0, level=level)
        case "sapo":
            return Sapo(**own, level=level)
        case "vespo":
            return (VespoBesideRowRatios if level == "row" else Vespo)(**own)
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


def leaves_of(case: Case) -> tuple[Tensor, Tensor]:
    return case.log_probs.clone().requires_grad_(), case.entropy.clone().requires_grad_()


def test_surrogate_kl_and_entropy_bonus_equal_trls(subtests: pytest.Subtests) -> None:
    for loss_type, level in itertools.product(LOSS_TYPES, LEVELS):
        with subtests.test(loss_type=loss_type, level=level):
            for seed, choose, generator in draws(1, 50):
                case, settings = random_case(seed, choose, generator), random_settings(choose, loss_type, level)
                leaves = leaves_of(case)
                assert_same(
                    our_loss(case, *leaves, settings), their_loss(case, *leaves, settings), case, settings, *leaves
                )


@pytest.mark.slow
def test_the_top_entropy_steps_include_those_of_trl_and_the_quantile_itself(subtests: pytest.Subtests) -> None:
    """Every number of steps up to 60, with and without ties, so that the quantile falls on a step as well as between two.

    Where it falls on a step, that step is kept: the quantile is its entropy. TRL finds the place in float32, and loses the
    step where (1 - fraction) (count - 1) is rounded up.
    """
    for percent, dtype in itertools.product(range(5, 100, 5), (torch.float32, torch.float64)):
        with subtests.test(percent=percent, dtype=dtype):
            fraction = percent / 100
            trainer = trl_code.trainer(TRLSettings())
            for count in range(1, 61):
                generator = torch.Generator().manual_seed(count)
                mask = torch.zeros(3, count, dtype=torch.bool)
                mask.view(-1)[torch.randperm(3 * count, generator=generator)[:count]] = True
                for number in (
                    torch.rand(3, count, generator=generator),
                    torch.randint(4, (3, count), generator=generator) / 4,
                ):
                    entropy = number.to(dtype)
                    ours = top_entropy_steps(entropy[mask], fraction)
                    theirs = trainer.get_high_entropy_mask(entropy, mask.long(), 1 - fraction)[mask]
                    place, between = divmod((100 - percent) * (count - 1), 100)
                    expected = theirs if between else entropy[mask] >= entropy[mask].sort().values[place]
                    case = f"fraction {fraction} of {count} steps, entropies {entropy[mask].tolist()}"
                    assert_equal("the steps of highest entropy", ours, expected, case)
                    assert_equal("the steps that TRL keeps", ours & theirs, theirs, case)


PAIRS = [(kind, mode) for kind in LOSS_TYPES for mode in MODES if kind != "vespo" or mode.startswith("token")]


def generated(case: Case, settings: TRLSettings) -> tuple[Case, dict[str, Tensor]]:
    """The loss inputs that TRL's trainer makes of rewards and sampler log-probs, and the case with its advantages."""
    rewards = case.advantages.reshape(len(case.mask), -1).sum(1, keepdim=True)
    rollouts = trl_code.Rollouts(
        mask=case.mask,
        # without a pass of its own for old log-probs, the trainer would have the policy's present ones
        old_log_probs=case.log_probs if case.old_log_probs is None else case.old_log_probs,
        ref_log_probs=case.ref_log_probs,
        behaviour_log_probs=case.behaviour_log_probs,
        rewards=rewards,
        reward_weights=torch.ones(1, dtype=torch.float64),
    )
    inputs = trl_code.advantages_and_ratios(rollouts, settings)
    return replace(case, advantages=inputs["advantages"]), inputs


def with_sampler(settings: TRLSettings, choose: random.Random, mode: trl_code.SamplerMode) -> TRLSettings:
    bounds = [(None, 1.1), (None, 3.0), (0.5, None), (0.9, 2.0)]
    if mode.endswith("mask"):
        bounds.append((None, None))  # to truncate, TRL needs a bound
    low, high = choose.choice(bounds)
    return replace(
        settings,
        use_vllm=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
        num_generations=2,
    )


@pytest.mark.slow
def test_the_loss_with_all_terms_selections_and_corrections_equals_trls(subtests: pytest.Subtests) -> None:
    """All terms and selections together. Half of the cases correct for a sampler, whose log-probs the off-policy mask then
    looks at. Entropies repeat in half of the cases: ties are kept."""
    for loss_type, level in itertools.product(LOSS_TYPES, LEVELS):
        with subtests.test(loss_type=loss_type, level=level):
            for seed, choose, generator in draws(5, 40):
                settings = replace(
                    random_settings(choose, loss_type, level),
                    top_entropy_quantile=choose.choice([0.1, 0.2, 0.5, 0.8, 1.0]),
                    off_policy_mask_threshold=choose.choice([None, 0.0, 0.05, 0.5]),
                )
                case = random_case(seed, choose, generator, num_rows=2 * choose.randint(1, 3))
                if choose.random() < 0.5:
                    case = replace(case, entropy=case.entropy.mul(4).round().div(4))
                leaves = leaves_of(case)
                if choose.random() < 0.5:
                    mode = choose.choice([mode for kind, mode in PAIRS if kind == loss_type])
                    settings = with_sampler(settings, choose, mode)
                    case, inputs = generated(case, settings)
                    theirs = trl_code.loss(inputs, *leaves, settings)
                else:
                    theirs = their_loss(case, *leaves, settings)
                assert_same(our_loss(case, *leaves, settings), theirs, case, settings, *leaves)


def assert_numbers(formula: str, ours: float, theirs: float, case: str) -> None:
    pair = torch.tensor([ours, theirs], dtype=torch.float64)
    assert_equal(formula, *pair, case, rtol=TOLERANCE, atol=1e-15)


def test_the_adaptive_entropy_coefficient_equals_trls() -> None:
    """The coefficient, and whether it acts, update after update.

    Not for the first: before anything is measured, TRL leaves the bonus out, and we apply the configured coefficient.
    """
    for seed, choose, generator in draws(9, 50):
        case = random_case(seed, choose, generator)
        if not case.mask.any():
            continue
        control = EntropyControl(
            target=choose.choice([0.5, 0.8]), delta=choose.choice([0.005, 0.3]), coef_min=0.01, coef_max=0.4
        )
        settings = TRLSettings(
            use_adaptive_entropy=True,
            entropy_coef=0.1,
            entropy_target=control.target,
            entropy_coef_delta=control.delta,
            entropy_coef_min=control.coef_min,
            entropy_coef_max=control.coef_max,
        )
        trainer = trl_code.updating_trainer(settings)
        config = GRPOConfig(entropy_control=control, objective=ObjectiveConfig(entropy_coef=0.1))
        ours = Coefficients(config, kl_coef=0.0)
        inputs = trl_code.loss_inputs(case.mask, torch.zeros_like(case.advantages), case.old_log_probs)
        for update in range(8):
            entropy = torch.rand(case.mask.shape, generator=generator, dtype=torch.float64) + choose.choice([0.0, 0.3])
            mean_entropy, where = float(entropy[case.mask].mean()), f"seed {seed}, update {update}, {control}"
            bonus = -float(trl_code.next_loss(trainer, inputs, case.log_probs, entropy))  # all that is left of the loss
            if update > 0:
                assert_numbers("the entropy bonus", ours.entropy_coef * mean_entropy, bonus, where)
            ours.follow({"entropy": (mean_entropy, 0.0)})
            assert_numbers("the entropy coefficient", ours.state_dict()["entropy"], trainer.entropy_coef, where)

"""Losses and gradients against `GRPOTrainer._compute_loss` of TRL, called without a model (see `trl_code`)."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo import EntropyControl, GRPOConfig, ObjectiveConfig
from grpo._objective.sampler import near_policy_rows
from grpo._objective.selection import top_entropy_steps
from grpo._updating.coefficients import Coefficients
from tests.support import trl_code
from tests.support.peer_cases import TOLERANCE, Case, assert_equal, draws, random_case
from tests.support.trl_code import RatioLevel, TRLSettings
from tests.support.trl_mapping import LOSS_TYPES, assert_same, our_loss, random_settings, their_loss

LEVELS: tuple[RatioLevel, ...] = ("token", "sequence")


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
def test_the_loss_over_selected_steps_and_rows_equals_trls(subtests: pytest.Subtests) -> None:
    """Top-entropy steps and the off-policy mask, which leave the divergence alone. Entropies repeat: ties are kept."""
    for loss_type, level in itertools.product(LOSS_TYPES, LEVELS):
        with subtests.test(loss_type=loss_type, level=level):
            for seed, choose, generator in draws(2, 25):
                case = random_case(seed, choose, generator)
                if choose.random() < 0.5:
                    case = replace(case, entropy=case.entropy.mul(4).round().div(4))
                settings = replace(
                    random_settings(choose, loss_type, level),
                    top_entropy_quantile=choose.choice([0.1, 0.2, 0.5, 0.8, 1.0]),
                    off_policy_mask_threshold=choose.choice([None, 0.0, 0.05, 0.5]),
                )
                leaves = leaves_of(case)
                assert_same(
                    our_loss(case, *leaves, settings), their_loss(case, *leaves, settings), case, settings, *leaves
                )


def test_one_update_equals_the_sum_of_trls_micro_batches(subtests: pytest.Subtests) -> None:
    """One update of ours is the sum of TRL's micro-batches of equal size.

    Not bnpo: TRL divides by the number of steps in the micro-batch, so that its sum depends on the split.
    """
    for loss_type, level in itertools.product([kind for kind in LOSS_TYPES if kind != "bnpo"], LEVELS):
        with subtests.test(loss_type=loss_type, level=level):
            for seed, choose, generator in draws(3, 15):
                count, size = choose.choice([2, 3]), choose.randint(1, 3)
                case = random_case(seed, choose, generator, num_rows=count * size)
                settings = replace(
                    random_settings(choose, loss_type, level), entropy_coef=0.0
                )  # a mean per micro-batch
                split = replace(settings, current_gradient_accumulation_steps=count, steps_per_generation=count)
                leaves = leaves_of(case)
                inputs = trl_code.loss_inputs(
                    case.mask, case.advantages, case.old_log_probs, ref_per_token_logps=case.ref_log_probs
                )
                num_items = inputs.pop("num_items_in_batch")
                theirs = sum(
                    trl_code.loss(
                        {**{name: values[rows] for name, values in inputs.items()}, "num_items_in_batch": num_items},
                        *(leaf[rows] for leaf in leaves),
                        split,
                    )
                    for rows in (slice(start, start + size) for start in range(0, count * size, size))
                )
                assert_same(our_loss(case, *leaves, settings), theirs, case, settings, *leaves)


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


def test_the_rows_near_the_policy_equal_trls() -> None:
    for seed, choose, generator in draws(8, 300):
        case = random_case(0, choose, generator)
        advantages = case.advantages.unsqueeze(1) if case.advantages.dim() == 1 else case.advantages
        threshold = choose.choice([0.0, 0.05, 0.5])
        theirs = trl_code.their_class().get_off_policy_mask(
            advantages, case.log_probs, case.behaviour_log_probs, case.mask.long(), threshold
        )
        ours = near_policy_rows(case.log_probs, case.behaviour_log_probs, advantages, case.mask, threshold)
        assert_equal("rows near the policy", ours, theirs.bool(), f"seed {seed}, threshold {threshold}")


MODES: tuple[trl_code.SamplerMode, ...] = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
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
    """All terms, selections and corrections together; the off-policy mask then looks at the sampler's log-probs."""
    for loss_type in LOSS_TYPES:
        with subtests.test(loss_type=loss_type):
            for seed, choose, generator in draws(5, 40):
                mode = choose.choice([mode for kind, mode in PAIRS if kind == loss_type])
                settings = replace(
                    with_sampler(random_settings(choose, loss_type, choose.choice(LEVELS)), choose, mode),
                    top_entropy_quantile=choose.choice([0.2, 0.5, 0.8, 1.0]),
                    off_policy_mask_threshold=choose.choice([None, 0.0, 0.1]),
                )
                case, inputs = generated(
                    random_case(seed, choose, generator, num_rows=2 * choose.randint(1, 3)), settings
                )
                leaves = leaves_of(case)
                theirs = trl_code.loss(inputs, *leaves, settings)
                assert_same(our_loss(case, *leaves, settings), theirs, case, settings, *leaves)


def assert_numbers(formula: str, ours: float, theirs: float, case: str) -> None:
    pair = torch.tensor([ours, theirs], dtype=torch.float64)
    assert_equal(formula, *pair, case, allowed=max(TOLERANCE * abs(theirs), 1e-15))


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

"""Distillation against TRL's own losses, where the two mean the same: values and gradients of the student's logits.

TRL's `beta` 1 is KL(student || teacher) per token, summed and divided by the number of tokens: `kl_estimator="exact"` with
`aggregation="step_mean"`. Its other divergences (the forward KL and mixtures) have no counterpart here.
"""

import importlib
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import ObjectiveInputs, grpo_objective, presets, step_weights
from grpo.distillation import exact_kl
from grpo.distillation.exact import with_rest

pytest.importorskip("trl", minversion="1.16", reason='needs TRL: pip install -e ".[bench]"')

NUM_ROWS, NUM_STEPS, NUM_CHOICES = 5, 7, 30


def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a student, with gradient, and of a teacher; and a mask with rows of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_ROWS, NUM_STEPS, NUM_CHOICES)
    student, teacher = (2 * torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    lengths = torch.randint(1, NUM_STEPS + 1, (NUM_ROWS, 1), generator=generator)
    return student.requires_grad_(), teacher, torch.arange(NUM_STEPS) < lengths


def our_loss(student: Tensor, mask: Tensor, kl: Tensor) -> Tensor:
    """The loss of the preset with an exact KL. Rewards are 0, and so are advantages."""
    log_probs = student.log_softmax(-1)[..., 0]
    config = replace(presets.on_policy_distillation().objective, kl_estimator="exact")
    inputs = ObjectiveInputs(
        log_probs=log_probs,
        old_log_probs=None,
        advantages=torch.zeros(NUM_ROWS, dtype=torch.float64),
        mask=mask,
        weights=step_weights(mask, config.aggregation),
        kl=kl,
    )
    return grpo_objective(inputs, config).loss


def imported(module: str, name: str) -> Any:
    with warnings.catch_warnings():  # what its dependencies deprecate is not ours to fix
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(module), name)


def assert_same(ours: Tensor, theirs: Tensor, student: Tensor) -> None:
    torch.testing.assert_close(ours, theirs)
    slopes = [torch.autograd.grad(loss, student, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*slopes)
    assert bool(slopes[0].any())


@pytest.mark.parametrize("seed", range(5))
def test_the_exact_loss_equals_the_generalized_jsd_loss_of_gkd_at_beta_1(seed: int) -> None:
    trainer = imported("trl.experimental.gkd.gkd_trainer", "GKDTrainer")
    student, teacher, mask = draw(seed)
    labels = torch.where(mask, 0, -100)
    ours = our_loss(student, mask, exact_kl(student.log_softmax(-1), teacher.log_softmax(-1)))
    assert_same(ours, trainer.generalized_jsd_loss(student, teacher, labels=labels, beta=1), student)


@pytest.mark.parametrize("seed", range(5))
def test_the_joined_rest_equals_the_tail_bucket(seed: int) -> None:
    """Over the teacher's choices here, and over the student's in TRL: both functions get the same choices."""
    loss = imported("trl.experimental.sdpo.loss_utils", "compute_topk_self_distillation_loss")
    student, teacher, mask = draw(seed)
    options = {"distillation_topk": 6, "distillation_alpha": 1.0, "distillation_add_tail": True}
    theirs = (loss(student, teacher, **options) * mask).sum() / mask.sum()
    chosen = student.topk(6, dim=-1).indices
    kl = exact_kl(*(with_rest(logits.log_softmax(-1), chosen) for logits in (student, teacher)))
    assert_same(our_loss(student, mask, kl), theirs, student)


@pytest.mark.parametrize("seed", range(5))
def test_k2_has_the_gradient_of_the_sampled_token_loss(seed: int) -> None:
    """sg(x) log pi has another value than x^2 / 2, and the same gradient, x grad log pi."""
    loss = imported("trl.experimental.sdpo.loss_utils", "compute_sampled_token_self_distillation_loss")
    student, teacher, mask = draw(seed)
    tokens = torch.randint(NUM_CHOICES, mask.shape, generator=torch.Generator().manual_seed(seed))
    theirs = (loss(student, teacher, tokens, distillation_alpha=1.0) * mask).sum() / mask.sum()
    at = tokens.unsqueeze(-1)
    log_probs, its = (logits.log_softmax(-1).gather(-1, at).squeeze(-1) for logits in (student, teacher))
    config = presets.on_policy_distillation().objective
    inputs = ObjectiveInputs(
        log_probs=log_probs,
        old_log_probs=None,
        ref_log_probs=its,
        advantages=torch.zeros(NUM_ROWS, dtype=torch.float64),
        mask=mask,
        weights=step_weights(mask, config.aggregation),
    )
    ours = grpo_objective(inputs, config).loss
    torch.testing.assert_close(*(torch.autograd.grad(each, student)[0] for each in (ours, theirs)))

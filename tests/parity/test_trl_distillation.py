"""Distillation against TRL's own losses, where the two mean the same: values and gradients of the student's logits.

TRL's `beta` 1 is KL(student || teacher) per token, summed and divided by the number of tokens: `kl_estimator="exact"` with
`aggregation="step_mean"`. Its other divergences (the forward KL and mixtures) have no counterpart here.
"""

from dataclasses import replace

import pytest
from torch import Tensor

from grpo import grpo_objective, presets
from grpo.distillation import exact_kl
from grpo.distillation.exact import with_rest
from tests.support.peer_cases import Logits
from tests.support.trl_code import imported


def our_loss(drawn: Logits, kl: Tensor) -> Tensor:
    """The loss of the preset with an exact KL. Rewards are 0, and so are advantages."""
    config = replace(presets.on_policy_distillation().objective, kl_estimator="exact")
    return grpo_objective(drawn.inputs(config.aggregation, old_log_probs=None, kl=kl), config).loss


@pytest.mark.parametrize("seed", range(5))
def test_the_exact_loss_equals_the_generalized_jsd_loss_of_gkd_at_beta_1(seed: int) -> None:
    trainer, drawn = imported("experimental.gkd.gkd_trainer", "GKDTrainer"), Logits(seed)
    theirs = trainer.generalized_jsd_loss(drawn.student, drawn.teacher, labels=drawn.labels, beta=1)
    drawn.assert_same(our_loss(drawn, drawn.exact_kl()), theirs)


@pytest.mark.parametrize("seed", range(5))
def test_the_joined_rest_equals_the_tail_bucket(seed: int) -> None:
    """Over the teacher's choices here, and over the student's in TRL: both functions get the same choices."""
    loss = imported("experimental.sdpo.loss_utils", "compute_topk_self_distillation_loss")
    drawn = Logits(seed)
    options = {"distillation_topk": 6, "distillation_alpha": 1.0, "distillation_add_tail": True}
    theirs = (loss(drawn.student, drawn.teacher, **options) * drawn.mask).sum() / drawn.mask.sum()
    chosen = drawn.student.topk(6, dim=-1).indices
    kl = exact_kl(*(with_rest(logits.log_softmax(-1), chosen) for logits in (drawn.student, drawn.teacher)))
    drawn.assert_same(our_loss(drawn, kl), theirs)


@pytest.mark.parametrize("seed", range(5))
def test_k2_has_the_gradient_of_the_sampled_token_loss(seed: int) -> None:
    """sg(x) log pi has another value than x^2 / 2, and the same gradient, x grad log pi."""
    loss = imported("experimental.sdpo.loss_utils", "compute_sampled_token_self_distillation_loss")
    drawn, config = Logits(seed), presets.on_policy_distillation().objective
    theirs = (loss(drawn.student, drawn.teacher, drawn.tokens, distillation_alpha=1.0) * drawn.mask).sum()
    ours = grpo_objective(drawn.inputs(config.aggregation, old_log_probs=None), config).loss
    drawn.assert_same_slopes(ours, theirs / drawn.mask.sum())

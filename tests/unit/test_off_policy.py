"""Importance weights between sampler and trainer: by hand, and the gradient they restore, by enumeration."""

import math

import pytest
import torch
from torch import Tensor

from grpo import (
    ConfigError,
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    ObjectiveConfig,
    ObjectiveInputs,
    grpo_objective,
    sampler_weights,
)
from tests.policies import TablePolicy

OLD = torch.tensor([[0.8, 0.1, 0.5, 0.3]], dtype=torch.float64).log()
BEHAVIOUR = torch.tensor([[0.2, 0.2, 0.5, math.nan]], dtype=torch.float64).log()  # ratios 4, 1/2, 1, unscored
EVERYWHERE = torch.ones(1, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("correction", "low", "high", "expected"),
    [
        ("none", None, 3.0, [1, 1, 1, 1]),
        ("truncate", None, None, [4, 0.5, 1, 1]),
        ("truncate", None, 3.0, [3, 0.5, 1, 1]),
        ("truncate", 0.75, 3.0, [3, 0.75, 1, 1]),
        ("mask", None, 3.0, [0, 0.5, 1, 1]),
        ("mask", 0.75, None, [4, 0, 1, 1]),
        ("mask", 0.75, 3.0, [0, 0, 1, 1]),
    ],
)
def test_weights_by_hand(correction, low, high, expected) -> None:
    weights = sampler_weights(OLD, BEHAVIOUR, EVERYWHERE, correction=correction, low=low, high=high)
    torch.testing.assert_close(weights, torch.tensor([expected], dtype=torch.float64))


def test_what_is_off_the_mask_is_never_used() -> None:
    mask = torch.tensor([[True, False, False, True]])
    old, behaviour = OLD.clone(), BEHAVIOUR.clone()
    old[0, 1], behaviour[0, 2] = math.nan, -math.inf
    weights = sampler_weights(old, behaviour, mask, correction="truncate", high=None)
    assert weights[0, 1:].tolist() == [1, 1, 1]
    assert weights[0, 0].item() == pytest.approx(4)


def loss_gradient(logits: Tensor, behaviour: Tensor, advantages: Tensor, config: ObjectiveConfig) -> Tensor:
    """Of the expected loss when every action is drawn with its behaviour probability: weights are those probabilities."""
    leaf = logits.clone().requires_grad_()
    mask = torch.ones(len(logits), 1, dtype=torch.bool)
    inputs = ObjectiveInputs(
        log_probs=leaf.log_softmax(0).unsqueeze(1),
        old_log_probs=None,
        advantages=advantages,
        mask=mask,
        weights=behaviour.unsqueeze(1),
        behaviour_log_probs=behaviour.log().unsqueeze(1),
    )
    return torch.autograd.grad(grpo_objective(inputs, config).loss, leaf)[0]


def test_without_bounds_the_expected_gradient_is_the_policys_own() -> None:
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64)
    behaviour = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    own = loss_gradient(logits, logits.softmax(0), advantages, ObjectiveConfig())
    corrected = ObjectiveConfig(sampler_correction="truncate", sampler_ratio_high=None)
    torch.testing.assert_close(loss_gradient(logits, behaviour, advantages, corrected), own, rtol=1e-12, atol=0)
    uncorrected = loss_gradient(logits, behaviour, advantages, ObjectiveConfig())
    assert (uncorrected - own).abs().max() > 0.1


def test_the_divergence_is_not_weighed() -> None:
    ref = torch.tensor([[-1.0]], dtype=torch.float64)
    inputs = ObjectiveInputs(
        log_probs=torch.tensor([[-2.0]], dtype=torch.float64),
        old_log_probs=torch.tensor([[-2.0]], dtype=torch.float64),
        advantages=torch.tensor([1.0], dtype=torch.float64),
        mask=torch.ones(1, 1, dtype=torch.bool),
        weights=torch.ones(1, 1, dtype=torch.float64),
        ref_log_probs=ref,
        behaviour_log_probs=torch.tensor([[-2.0 - math.log(2)]], dtype=torch.float64),
    )
    output = grpo_objective(inputs, ObjectiveConfig(kl_coef=1.0, kl_estimator="k2", sampler_correction="truncate"))
    assert output.metrics["policy_loss"][1].item() == pytest.approx(-2.0)  # ratio 1, weight 2, A = 1
    assert output.metrics["kl_penalty"][1].item() == pytest.approx(0.5)  # (-2 + 1)^2 / 2
    assert output.metrics["sampler_ratio"].tolist() == pytest.approx([1, 2, 4])


def test_rollouts_from_elsewhere_are_corrected_by_the_trainer() -> None:
    """Two actions of a uniform policy, drawn with 1/4 and 3/4: weights 2 and 2/3, advantages 1/2 and -1/2."""
    policy = TablePolicy().double()
    config = GRPOConfig(
        group_size=2,
        max_grad_norm=None,
        objective=ObjectiveConfig(sampler_correction="truncate", sampler_ratio_high=None),
    )
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=lambda s, a: [0.0] * len(s), optimizer=optimizer)
    behaviour = torch.tensor([0.25, 0.75], dtype=torch.float64).log()
    metrics = trainer.update(ExperienceBatch.from_rows(["a", "a"], [0, 1], [1.0, 0.0], [0, 0], behaviour))
    # gradient of -1/2 [2 (1/2) log p0 - 2/3 (1/2) log p1] in logit 0: -1/2 [1/2 + 1/6] = -1/3
    assert policy.logits[0].tolist() == pytest.approx([1 / 3, -1 / 3])
    assert metrics["train/sampler_ratio_mean"] == pytest.approx((2 + 2 / 3) / 2)


def test_a_correction_needs_what_the_sampler_thought() -> None:
    inputs = ObjectiveInputs(
        log_probs=torch.zeros(1, 1),
        old_log_probs=None,
        advantages=torch.ones(1),
        mask=torch.ones(1, 1, dtype=torch.bool),
        weights=torch.ones(1, 1),
    )
    with pytest.raises(ConfigError, match=r"sampler_correction='mask' needs behaviour_log_probs"):
        grpo_objective(inputs, ObjectiveConfig(sampler_correction="mask"))


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampler_ratio_low=4\.0 must not exceed sampler_ratio_high=3\.0"):
        ObjectiveConfig(sampler_ratio_low=4.0)

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
from grpo.off_policy import on_policy_rows
from tests.policies import TablePolicy
from tests.support import loss_and_gradient

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


# the row's ratio is 4 * 1/2 * 1, the unscored step counting 1: 2
@pytest.mark.parametrize(
    ("correction", "low", "high", "expected"),
    [
        ("none", None, 1.5, 1.0),
        ("truncate", None, None, 2.0),
        ("truncate", None, 1.5, 1.5),
        ("truncate", 2.5, 3.0, 2.5),
        ("mask", None, 1.5, 0.0),
        ("mask", 2.5, None, 0.0),
        ("mask", 1.5, 3.0, 2.0),
    ],
)
def test_weights_of_rows_by_hand(correction, low, high, expected) -> None:
    weights = sampler_weights(OLD, BEHAVIOUR, EVERYWHERE, correction=correction, level="row", low=low, high=high)
    assert weights.shape == (1, 1)
    assert weights.item() == pytest.approx(expected, rel=1e-14)


def test_a_rows_weight_is_over_its_valid_steps() -> None:
    mask = torch.tensor([[True, False, True, True], [False, False, False, False]])
    old, behaviour = OLD.repeat(2, 1), BEHAVIOUR.repeat(2, 1)
    old[:, 1] = math.nan
    weights = sampler_weights(old, behaviour, mask, correction="truncate", level="row")
    assert weights.squeeze(1).tolist() == pytest.approx([4.0, 1.0])


@pytest.mark.parametrize("level", ["step", "row"])
def test_no_weight_overflows(level) -> None:
    old, behaviour = torch.tensor([[-1.0], [-900.0]]), torch.tensor([[-900.0], [-1.0]])
    everywhere = torch.ones(2, 1, dtype=torch.bool)
    weights = sampler_weights(old, behaviour, everywhere, correction="truncate", level=level)
    assert weights.squeeze(1).tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_weights_of_rows_make_two_steps_exact_where_weights_of_steps_do_not() -> None:
    """Rows of two independent decisions, all four of them, each weighed with its probability under the sampler."""
    logits = torch.tensor([[0.3, -1.0], [0.8, 0.1]], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([[0.2, 0.8], [0.7, 0.3]], dtype=torch.float64)
    choices = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    advantages = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)

    def of_choices(table: Tensor) -> Tensor:
        return torch.stack([table[0][choices[:, 0]], table[1][choices[:, 1]]], dim=1)

    def gradient(sampled: Tensor, **settings) -> Tensor:
        inputs = ObjectiveInputs(
            log_probs=of_choices(logits.log_softmax(1)),
            old_log_probs=None,
            advantages=advantages,
            mask=torch.ones(4, 2, dtype=torch.bool),
            weights=of_choices(sampled).prod(1, keepdim=True).expand(4, 2),
            behaviour_log_probs=of_choices(sampled).log(),
        )
        return torch.autograd.grad(grpo_objective(inputs, ObjectiveConfig(**settings)).loss, logits)[0]

    unbounded = {"sampler_correction": "truncate", "sampler_ratio_high": None}
    own = gradient(logits.detach().softmax(1))
    exact = gradient(behaviour, sampler_ratio_level="row", **unbounded)
    torch.testing.assert_close(exact, own, rtol=1e-12, atol=1e-15)
    assert (gradient(behaviour, sampler_ratio_level="step", **unbounded) - own).abs().max() > 0.01


# Rows of two steps; how much less likely each step has become: means .3, .3, .1, and (.6 + 0)/2 = .3 with one unscored
NOW = torch.tensor([[-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0]], dtype=torch.float64)
SAMPLED = torch.tensor([[-0.9, -1.5], [-0.9, -1.5], [-0.9, -1.9], [-0.4, math.nan]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("threshold", "near"),
    [(0.35, [True, True, True, True]), (0.2, [True, False, True, False]), (0.05, [True, False, False, False])],
)
def test_bad_rows_that_have_moved_away_are_left_out(threshold, near) -> None:
    advantages = torch.tensor([[1.0], [-1.0], [-1.0], [-1.0]], dtype=torch.float64)
    everywhere = torch.ones(4, 2, dtype=torch.bool)
    assert on_policy_rows(NOW, SAMPLED, advantages, everywhere, threshold).squeeze(1).tolist() == near


def test_rows_at_the_threshold_and_with_no_advantage_stay() -> None:
    # mean (1/4 + 1/2)/2 = 3/8, exactly
    now, sampled = torch.tensor([[-1.0, -2.0]] * 2), torch.tensor([[-0.75, -1.5]] * 2)
    everywhere = torch.ones(2, 2, dtype=torch.bool)
    bad, good = on_policy_rows(now, sampled, torch.tensor([[-1.0], [0.0]]), everywhere, 0.375).squeeze(1).tolist()
    assert bad
    assert good
    assert on_policy_rows(now, sampled, torch.tensor([[-1.0], [0.0]]), everywhere, 0.374).tolist() == [[False], [True]]


def test_the_distance_of_a_row_is_over_its_valid_steps() -> None:
    mask = torch.tensor([[True, False], [False, True], [False, False], [True, True]])
    advantages = torch.full((4, 1), -1.0, dtype=torch.float64)
    now, sampled = NOW.clone(), SAMPLED.clone()
    now[0, 1], sampled[1, 0] = math.nan, math.inf
    # .1;  .5;  no step: 0;  .3
    near = on_policy_rows(now, sampled, advantages, mask, 0.2)
    assert near.squeeze(1).tolist() == [True, False, True, False]


def test_a_row_that_nobody_scored_is_not_taken_to_be_far() -> None:
    unscored = torch.full((1, 2), math.nan, dtype=torch.float64)
    everywhere = torch.ones(1, 2, dtype=torch.bool)
    assert on_policy_rows(NOW[:1], unscored, torch.tensor([[-1.0]]).double(), everywhere, 0.0).item()


def test_advantages_per_step_leave_single_steps_out() -> None:
    advantages = torch.tensor([[1.0, -1.0], [-1.0, 0.0]], dtype=torch.float64)
    everywhere = torch.ones(2, 2, dtype=torch.bool)
    near = on_policy_rows(NOW[:2], SAMPLED[:2], advantages, everywhere, 0.2)
    assert near.tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize("sampled_as", ["old", "behaviour"])
def test_a_row_that_is_left_out_has_no_gradient(sampled_as) -> None:
    """The distance is to what sampled, where that is known, and to the old policy elsewhere (NaN)."""
    # rows 1 and 3 are bad and .3 off; the ratio's bounds are out of the way. With `behaviour`, old is the policy now.
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    scored = SAMPLED.nan_to_num(-2.0)
    others = {"old": {"old_log_probs": scored}, "behaviour": {"old_log_probs": NOW, "behaviour_log_probs": SAMPLED}}
    config = ObjectiveConfig(off_policy_threshold=0.2, clip_low=1.0, clip_high=9.0)
    loss, gradient = loss_and_gradient(NOW, advantages, config, **others[sampled_as])
    ratios = (NOW - scored).exp() if sampled_as == "old" else torch.ones(4, 2, dtype=torch.float64)
    expected = -ratios * advantages.unsqueeze(1) * torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=0)
    assert loss.item() == pytest.approx(expected.sum().item(), rel=1e-14)

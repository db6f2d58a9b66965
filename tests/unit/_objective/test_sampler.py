"""Importance weights between sampler and policy by hand: of steps and rows, in the loss, and through the trainer."""

import math

import pytest
import torch

from grpo import (
    ConfigError,
    ContractError,
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    KPop,
    Mask,
    ObjectiveConfig,
    ObjectiveInputs,
    Truncate,
    grpo_objective,
)
from grpo._objective.sampler import near_policy_rows, require_order, sampler_divergence
from grpo.surrogates import Clip
from tests.support.objective_inputs import as_users_run_it, loss_and_gradient
from tests.support.policies import TablePolicy

OLD = torch.tensor([[0.8, 0.1, 0.5, 0.3]], dtype=torch.float64).log()
BEHAVIOUR = torch.tensor([[0.2, 0.2, 0.5, math.nan]], dtype=torch.float64).log()  # ratios 4, 1/2, 1, unscored
EVERYWHERE = torch.ones(1, 4, dtype=torch.bool)


def test_the_defaults_bound_the_weight_of_a_step_by_3() -> None:
    for kind in (Truncate, Mask):
        assert kind().to_dict() == {"low": None, "high": 3.0, "level": "step"}


def test_step_weights_equal_hand_worked_values(subtests: pytest.Subtests) -> None:
    for correction, expected in [
        (Truncate(high=None), [4, 0.5, 1, 1]),
        (Truncate(), [3, 0.5, 1, 1]),
        (Truncate(low=0.75), [3, 0.75, 1, 1]),
        (Truncate(low=0.75, high=None), [4, 0.75, 1, 1]),
        (Truncate(low=2.0, high=2.0), [2, 2, 2, 2]),
        (Mask(high=None), [4, 0.5, 1, 1]),
        (Mask(), [0, 0.5, 1, 1]),
        (Mask(low=0.75, high=None), [4, 0, 1, 1]),
        (Mask(low=0.75), [0, 0, 1, 1]),
        (Mask(low=1.0, high=1.0), [0, 0, 1, 1]),  # a weight at its bound counts
        # .8 against .2: .8 log 4 + .2 log .25 = .83 in both directions; .1 against .2: .0367 and .0444
        (KPop(), [0, 0.5, 1, 1]),
        (KPop(threshold=0.84), [4, 0.5, 1, 1]),
        (KPop(threshold=0.0445), [0, 0.5, 1, 1]),
        (KPop(threshold=0.04), [0, 0, 1, 1]),  # one of the two directions is beyond the threshold
    ]:
        with subtests.test(correction=correction, expected=expected):
            weights = correction(OLD, BEHAVIOUR, EVERYWHERE)
            torch.testing.assert_close(weights, torch.tensor([expected], dtype=torch.float64), rtol=1e-14, atol=0)


def test_weights_carry_no_gradient(subtests: pytest.Subtests) -> None:
    for level in ["step", "row"]:
        with subtests.test(level=level):
            old = OLD.clone().requires_grad_()
            for correction in (Truncate(level=level), Mask(level=level)):
                assert not correction(old, BEHAVIOUR, EVERYWHERE).requires_grad


def test_masked_log_probs_do_not_change_the_weights(subtests: pytest.Subtests) -> None:
    for correction in [Truncate(high=None), Mask(high=None)]:
        with subtests.test(correction=correction):
            mask = torch.tensor([[True, False, False, True]])
            old, behaviour = OLD.clone(), BEHAVIOUR.clone()
            old[0, 1], behaviour[0, 2] = math.nan, -math.inf
            weights = correction(old, behaviour, mask)
            assert weights[0, 1:].tolist() == [1, 1, 1]
            assert weights[0, 0].item() == pytest.approx(4)


def test_sampler_weights_do_not_multiply_the_kl() -> None:
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


def test_the_trainer_corrects_rollouts_of_another_sampler() -> None:
    """Two actions of a uniform policy, drawn with 1/4 and 3/4: weights 2 and 2/3, advantages 1/2 and -1/2."""
    policy = TablePolicy().double()
    config = GRPOConfig(
        group_size=2,
        max_grad_norm=None,
        objective=ObjectiveConfig(sampler_correction=Truncate(high=None)),
    )
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=lambda s, a: [0.0] * len(s), optimizer=optimizer)
    behaviour = torch.tensor([0.25, 0.75], dtype=torch.float64).log()
    metrics = trainer.update(ExperienceBatch.from_rows(["a", "a"], [0, 1], [1.0, 0.0], [0, 0], behaviour))
    # gradient of -1/2 [2 (1/2) log p0 - 2/3 (1/2) log p1] in logit 0: -1/2 [1/2 + 1/6] = -1/3
    assert policy.logits[0].tolist() == pytest.approx([1 / 3, -1 / 3])
    assert metrics["train/sampler_ratio_mean"] == pytest.approx((2 + 2 / 3) / 2)


def test_bounds_are_compared_only_if_both_are_given() -> None:
    for low, high in ((None, None), (None, 1.0), (1.0, None), (1.0, 1.0), (0.5, 1.0), (0.0, 0.0)):
        require_order("low", low, "high", high)
    for low, high in ((1.0, 0.5), (1.0, 0.0)):
        with pytest.raises(ConfigError, match=rf"^low={low} must not exceed high={high}\.$"):
            require_order("low", low, "high", high)


def test_settings_outside_their_ranges_are_refused(subtests: pytest.Subtests) -> None:
    for kind in [Truncate, Mask]:
        with subtests.test(kind=kind):
            assert kind(low=0.0, high=1e-9).low == 0
            for name, value in (("low", -1e-9), ("high", 0.0), ("level", "group")):
                with as_users_run_it(), pytest.raises(ConfigError, match=rf"{kind.__name__}\.{name}"):
                    kind(**{name: value})


# the row's ratio is 4 * 1/2 * 1, the unscored step counting 1: 2
def test_row_weights_equal_hand_worked_values(subtests: pytest.Subtests) -> None:
    for correction, expected in [
        (Truncate(level="row", high=None), 2.0),
        (Truncate(level="row", high=1.5), 1.5),
        (Truncate(level="row", low=2.5), 2.5),
        (Mask(level="row", high=1.5), 0.0),
        (Mask(level="row", low=2.5, high=None), 0.0),
        (Mask(level="row", low=1.5), 2.0),
    ]:
        with subtests.test(correction=correction, expected=expected):
            weights = correction(OLD, BEHAVIOUR, EVERYWHERE)
            assert weights.shape == (1, 1)
            assert weights.item() == pytest.approx(expected, rel=1e-14)


def test_a_rows_weight_is_over_its_valid_steps() -> None:
    mask = torch.tensor([[True, False, True, True], [False, False, False, False]])
    old, behaviour = OLD.repeat(2, 1), BEHAVIOUR.repeat(2, 1)
    old[:, 1] = math.nan
    for correction in (Truncate(level="row", high=None), Mask(level="row", high=None)):
        assert correction(old, behaviour, mask).squeeze(1).tolist() == pytest.approx([4.0, 1.0])


def test_log_weights_are_bounded_so_that_no_weight_overflows(subtests: pytest.Subtests) -> None:
    for level in ["step", "row"]:
        with subtests.test(level=level):
            old, behaviour = torch.tensor([[-1.0], [-900.0]]), torch.tensor([[-900.0], [-1.0]])
            everywhere = torch.ones(2, 1, dtype=torch.bool)
            weights = Truncate(level=level, high=None)(old, behaviour, everywhere)
            assert weights.squeeze(1).tolist() == pytest.approx([math.exp(20), math.exp(-20)])


# behaviour - old over the scored steps: -log 4, log 2, 0
def test_the_sampler_divergence_equals_hand_worked_values() -> None:
    gap, scored = sampler_divergence(OLD.float().requires_grad_(), BEHAVIOUR.float(), EVERYWHERE)
    assert gap[scored].tolist() == pytest.approx([-math.log(4), math.log(2), 0], rel=1e-6, abs=1e-9)
    assert not gap.requires_grad
    mask = torch.tensor([[True, False, False, False]])
    assert sampler_divergence(OLD, BEHAVIOUR, mask)[1].tolist() == mask.tolist()


# Rows of two steps; how much less likely each step has become: means .3, .3, .1, and (.6 + 0)/2 = .3 with one unscored
NOW = torch.tensor([[-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0]], dtype=torch.float64)
SAMPLED = torch.tensor([[-0.9, -1.5], [-0.9, -1.5], [-0.9, -1.9], [-0.4, math.nan]], dtype=torch.float64)


def test_negative_rows_beyond_the_divergence_threshold_are_left_out(subtests: pytest.Subtests) -> None:
    for threshold, near in [
        (0.35, [True, True, True, True]),
        (0.2, [True, False, True, False]),
        (0.05, [True, False, False, False]),
    ]:
        with subtests.test(threshold=threshold, near=near):
            advantages = torch.tensor([[1.0], [-1.0], [-1.0], [-1.0]], dtype=torch.float64)
            everywhere = torch.ones(4, 2, dtype=torch.bool)
            assert near_policy_rows(NOW, SAMPLED, advantages, everywhere, threshold).squeeze(1).tolist() == near


def test_rows_at_the_threshold_or_without_an_advantage_are_kept() -> None:
    # mean (1/4 + 1/2)/2 = 3/8, exactly
    now, sampled = torch.tensor([[-1.0, -2.0]] * 2), torch.tensor([[-0.75, -1.5]] * 2)
    everywhere = torch.ones(2, 2, dtype=torch.bool)
    bad, good = near_policy_rows(now, sampled, torch.tensor([[-1.0], [0.0]]), everywhere, 0.375).squeeze(1).tolist()
    assert bad
    assert good
    assert near_policy_rows(now, sampled, torch.tensor([[-1.0], [0.0]]), everywhere, 0.374).tolist() == [
        [False],
        [True],
    ]


def test_the_distance_of_a_row_is_over_its_valid_steps() -> None:
    mask = torch.tensor([[True, False], [False, True], [False, False], [True, True]])
    advantages = torch.full((4, 1), -1.0, dtype=torch.float64)
    now, sampled = NOW.clone(), SAMPLED.clone()
    now[0, 1], sampled[1, 0] = math.nan, math.inf
    # .1;  .5;  no step: 0;  .3
    near = near_policy_rows(now, sampled, advantages, mask, 0.2)
    assert near.squeeze(1).tolist() == [True, False, True, False]


def test_a_row_without_scored_steps_is_kept() -> None:
    unscored = torch.full((1, 2), math.nan, dtype=torch.float64)
    everywhere = torch.ones(1, 2, dtype=torch.bool)
    assert near_policy_rows(NOW[:1], unscored, torch.tensor([[-1.0]]).double(), everywhere, 0.0).item()


def test_advantages_per_step_leave_single_steps_out() -> None:
    advantages = torch.tensor([[1.0, -1.0], [-1.0, 0.0]], dtype=torch.float64)
    everywhere = torch.ones(2, 2, dtype=torch.bool)
    near = near_policy_rows(NOW[:2], SAMPLED[:2], advantages, everywhere, 0.2)
    assert near.tolist() == [[True, False], [False, True]]


def test_a_row_that_is_left_out_has_no_gradient(subtests: pytest.Subtests) -> None:
    """The distance is to what sampled, where that is known, and to the old policy elsewhere (NaN)."""
    for sampled_as in ["old", "behaviour"]:
        with subtests.test(sampled_as=sampled_as):
            # rows 1 and 3 are bad and .3 off; the ratio's bounds are out of the way. With `behaviour`, old is the policy now.
            advantages = torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
            scored = SAMPLED.nan_to_num(-2.0)
            others = {
                "old": {"old_log_probs": scored},
                "behaviour": {"old_log_probs": NOW, "behaviour_log_probs": SAMPLED},
            }
            config = ObjectiveConfig(surrogate=Clip(low=1.0, high=9.0), off_policy_threshold=0.2)
            loss, gradient = loss_and_gradient(NOW, advantages, config, **others[sampled_as])
            ratios = (NOW - scored).exp() if sampled_as == "old" else torch.ones(4, 2, dtype=torch.float64)
            expected = -ratios * advantages.unsqueeze(1) * torch.tensor([[1.0], [0.0], [1.0], [0.0]])
            torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=0)
            assert loss.item() == pytest.approx(expected.sum().item(), rel=1e-14)


def test_kpops_bound_on_the_ratio_is_wide_for_rare_actions_and_narrow_for_likely_ones() -> None:
    """A rare action may be five times as likely: D(.01, .002) = .0081. Of a likely one, .9 for .6 is too much: .2263."""
    old = torch.tensor([[0.01, 0.9]], dtype=torch.float64).log()
    behaviour = torch.tensor([[0.002, 0.6]], dtype=torch.float64).log()
    weights = KPop()(old, behaviour, torch.ones(1, 2, dtype=torch.bool))
    assert weights.tolist() == [[pytest.approx(5.0), 0.0]]


def test_kpop_is_finite_for_certain_and_for_impossible_actions() -> None:
    old = torch.tensor([[0.0, 0.0, -300.0, -1e-9]], requires_grad=True)
    behaviour = torch.tensor([[0.0, -300.0, 0.0, 0.0]])
    weights = KPop()(old, behaviour, torch.ones(1, 4, dtype=torch.bool))
    assert weights.tolist() == [[1.0, 0.0, 0.0, pytest.approx(1.0)]]
    assert not weights.requires_grad


def test_kpop_is_for_probabilities() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ContractError, match=r"KPop needs log-probs of probabilities, at most 0; got 0.5"):
        KPop()(torch.tensor([[0.5]]), torch.tensor([[-0.1]]), mask)
    outside = torch.tensor([[0.5]]), torch.tensor([[-0.1]]), ~mask
    assert KPop()(*outside).tolist() == [[1.0]]

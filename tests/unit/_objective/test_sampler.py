"""Importance weights between sampler and policy by hand: of steps and rows, in the loss, and through the trainer."""

import math

import pytest
import torch

from grpo import ConfigError, ContractError, KPop, Mask, ObjectiveConfig, Truncate, grpo_objective
from grpo._objective.sampler import near_policy_rows, require_order, sampler_divergence
from grpo.surrogates import Clip
from tests.support.objective_inputs import double, loss_and_gradient, objective_inputs

OLD = double([[0.8, 0.1, 0.5, 0.3]]).log()
BEHAVIOUR = double([[0.2, 0.2, 0.5, math.nan]]).log()  # ratios 4, 1/2, 1, unscored
EVERYWHERE = torch.ones(1, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
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
    ],
)
def test_step_weights_equal_hand_worked_values(correction, expected):
    weights = correction(OLD.clone().requires_grad_(), BEHAVIOUR, EVERYWHERE)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, double([expected]), rtol=1e-14, atol=0)


@pytest.mark.parametrize("correction", [Truncate(high=None), Mask(high=None)])
def test_masked_log_probs_do_not_change_the_weights(correction):
    mask = torch.tensor([[True, False, False, True]])
    old, behaviour = OLD.clone(), BEHAVIOUR.clone()
    old[0, 1], behaviour[0, 2] = math.nan, -math.inf
    weights = correction(old, behaviour, mask)
    assert (weights[0, 1:].tolist(), weights[0, 0].item()) == ([1, 1, 1], pytest.approx(4))


def test_sampler_weights_do_not_multiply_the_kl() -> None:
    log_probs = double([[-2.0]])
    others = {"ref_log_probs": double([[-1.0]]), "behaviour_log_probs": double([[-2.0 - math.log(2)]])}
    inputs = objective_inputs(log_probs, double([1.0]), old_log_probs=log_probs, **others)
    config = ObjectiveConfig(kl_coef=1.0, kl_estimator="k2", sampler_correction="truncate")
    metrics = grpo_objective(inputs, config).metrics
    assert metrics["policy_loss"][1].item() == pytest.approx(-2.0)  # ratio 1, weight 2, A = 1
    assert metrics["kl_penalty"][1].item() == pytest.approx(0.5)  # (-2 + 1)^2 / 2
    assert metrics["sampler_ratio"].tolist() == pytest.approx([1, 2, 4])


def test_bounds_are_compared_only_if_both_are_given() -> None:
    for low, high in ((None, None), (None, 1.0), (1.0, None), (1.0, 1.0), (0.5, 1.0), (0.0, 0.0)):
        require_order("low", low, "high", high)
    for low, high in ((1.0, 0.5), (1.0, 0.0)):
        with pytest.raises(ConfigError, match=rf"^low={low} must not exceed high={high}\.$"):
            require_order("low", low, "high", high)


# the row's ratio is 4 * 1/2 * 1, the unscored step counting 1: 2
@pytest.mark.parametrize(("correction", "expected"), [
    (Truncate(level="row", high=None), 2.0), (Truncate(level="row", high=1.5), 1.5),
    (Truncate(level="row", low=2.5), 2.5), (Mask(level="row", high=1.5), 0.0),
    (Mask(level="row", low=2.5, high=None), 0.0), (Mask(level="row", low=1.5), 2.0),
])  # fmt: skip
def test_row_weights_equal_hand_worked_values(correction, expected):
    weights = correction(OLD.clone().requires_grad_(), BEHAVIOUR, EVERYWHERE)
    assert (weights.shape, weights.item()) == ((1, 1), pytest.approx(expected, rel=1e-14))
    assert not weights.requires_grad


def test_a_rows_weight_is_over_its_valid_steps() -> None:
    mask = torch.tensor([[True, False, True, True], [False, False, False, False]])
    old, behaviour = OLD.repeat(2, 1), BEHAVIOUR.repeat(2, 1)
    old[:, 1] = math.nan
    for correction in (Truncate(level="row", high=None), Mask(level="row", high=None)):
        assert correction(old, behaviour, mask).squeeze(1).tolist() == pytest.approx([4.0, 1.0])


@pytest.mark.parametrize("level", ["step", "row"])
def test_log_weights_are_bounded_so_that_no_weight_overflows(level):
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
NOW = double([[-1.0, -2.0]] * 4)
SAMPLED = double([[-0.9, -1.5], [-0.9, -1.5], [-0.9, -1.9], [-0.4, math.nan]])
BAD = double([[-1.0]] * 4)


@pytest.mark.parametrize(
    ("threshold", "advantages", "near"),
    [
        (0.35, [1.0, -1.0, -1.0, -1.0], [True, True, True, True]),
        (0.2, [1.0, -1.0, -1.0, -1.0], [True, False, True, False]),
        (0.05, [1.0, -1.0, -1.0, -1.0], [True, False, False, False]),
        (0.05, [0.0, -1.0, 0.0, 0.0], [True, False, True, True]),
    ],
)
def test_negative_rows_beyond_the_divergence_threshold_are_left_out(threshold, advantages, near):
    found = near_policy_rows(NOW, SAMPLED, double(advantages).unsqueeze(1), torch.ones(4, 2).bool(), threshold)
    assert found.squeeze(1).tolist() == near


@pytest.mark.parametrize(("threshold", "near"), [(0.375, True), (0.374, False)])
def test_a_row_at_the_threshold_is_kept(threshold, near):
    # mean (1/4 + 1/2)/2 = 3/8, exactly
    now, sampled, everywhere = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-0.75, -1.5]]), torch.ones(1, 2).bool()
    assert near_policy_rows(now, sampled, torch.tensor([[-1.0]]), everywhere, threshold).item() is near


def test_the_distance_of_a_row_is_over_its_valid_and_scored_steps() -> None:
    mask = torch.tensor([[True, False], [False, True], [False, False], [True, True]])
    now, sampled = NOW.clone(), SAMPLED.clone()
    now[0, 1], sampled[1, 0] = math.nan, math.inf
    # .1;  .5;  no step: 0;  .3
    assert near_policy_rows(now, sampled, BAD, mask, 0.2).squeeze(1).tolist() == [True, False, True, False]
    unscored = torch.full((4, 2), math.nan, dtype=torch.float64)
    assert near_policy_rows(NOW, unscored, BAD, torch.ones(4, 2).bool(), 0.0).all()


def test_advantages_per_step_leave_single_steps_out() -> None:
    advantages = double([[1.0, -1.0], [-1.0, 0.0]])
    near = near_policy_rows(NOW[:2], SAMPLED[:2], advantages, torch.ones(2, 2).bool(), 0.2)
    assert near.tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize("sampled_as", ["old", "behaviour"])
def test_a_row_that_is_left_out_has_no_gradient(sampled_as):
    """The distance is to what sampled, where that is known, and to the old policy elsewhere (NaN)."""
    # rows 1 and 3 are bad and .3 off; the ratio's bounds are out of the way. With `behaviour`, old is the policy now.
    advantages, scored = double([1.0, -1.0, -1.0, -1.0]), SAMPLED.nan_to_num(-2.0)
    others = {"old": {"old_log_probs": scored}, "behaviour": {"old_log_probs": NOW, "behaviour_log_probs": SAMPLED}}
    config = ObjectiveConfig(surrogate=Clip(low=1.0, high=9.0), off_policy_threshold=0.2)
    loss, gradient = loss_and_gradient(NOW, advantages, config, **others[sampled_as])
    ratios = (NOW - scored).exp() if sampled_as == "old" else torch.ones(4, 2, dtype=torch.float64)
    expected = -ratios * advantages.unsqueeze(1) * double([[1.0], [0.0], [1.0], [0.0]])
    torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=0)
    assert loss.item() == pytest.approx(expected.sum().item(), rel=1e-14)


def test_kpops_bound_on_the_ratio_is_wide_for_rare_actions_and_narrow_for_likely_ones() -> None:
    """A rare action may be five times as likely: D(.01, .002) = .0081. Of a likely one, .9 for .6 is too much: .2263."""
    weights = KPop()(double([[0.01, 0.9]]).log(), double([[0.002, 0.6]]).log(), torch.ones(1, 2, dtype=torch.bool))
    assert weights.tolist() == [[pytest.approx(5.0), 0.0]]


@pytest.mark.parametrize(("p", "q", "threshold", "expected"), [
    (0.2, 0.1, 0.04, 0.0), (0.1, 0.2, 0.04, 0.0), (0.2, 0.1, 0.0445, 2.0), (0.001, 0.0001, 0.001, 0.0),
    (0.001, 0.0001, 0.002, 10.0), (1e-7, 1e-8, 1e-12, 10.0), (1 - 1e-8, 1 - 1e-7, 1e-12, 1.0),
    (1e-5, 1e-6, 1e-6, 0.0), (1 - 1e-6, 1 - 1e-5, 1e-6, 0.0),
])  # fmt: skip
def test_kpop_looks_in_both_directions_and_bounds_probabilities_by_a_millionth(p, q, threshold, expected):
    """D(.2, .1) = .0444 and D(.1, .2) = .0367: one of them is beyond .04, whichever is the policy's. D(.001, .0001) = .0014.
    Probabilities below 1e-6, or beyond 1 - 1e-6, are equal."""
    found = KPop(threshold=threshold)(double([[p]]).log(), double([[q]]).log(), torch.ones(1, 1, dtype=torch.bool))
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_kpop_is_for_probabilities_also_of_certain_and_of_impossible_actions():
    old = torch.tensor([[0.0, 0.0, -300.0, -1e-9]], requires_grad=True)
    behaviour = torch.tensor([[0.0, -300.0, 0.0, 0.0]])
    weights = KPop()(old, behaviour, torch.ones(1, 4, dtype=torch.bool))
    assert weights.tolist() == [[1.0, 0.0, 0.0, pytest.approx(1.0)]]
    assert not weights.requires_grad
    above, mask = (torch.tensor([[0.5]]), torch.tensor([[-0.1]])), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ContractError, match=r"KPop needs log-probs of probabilities, at most 0; got 0.5"):
        KPop()(*above, mask)
    assert KPop()(*above, ~mask).tolist() == [[1.0]]

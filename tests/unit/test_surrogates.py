"""Every surrogate, value and slope, at ratio 1, inside and outside its bounds: by hand, and against autograd of its formula."""

import math

import pytest
import torch
from torch import Tensor

from grpo import (
    ObjectiveConfig,
    cispo_surrogate,
    clipped_surrogate,
    dppo_tv_surrogate,
    dro_surrogate,
    gmpo_surrogate,
    grpo_objective,
    kl_cov_surrogate,
    reinforce_surrogate,
    sapo_surrogate,
    vespo_surrogate,
)
from grpo.surrogates import clip_bounds
from tests.support import loss_and_gradient, objective_inputs


def double(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def value_and_slope(ratio: float, advantage: float, clip_low: float, clip_high: float) -> tuple[float, float]:
    """One step's loss and its slope in the ratio."""
    return loss_and_slope(clipped_surrogate, ratio, advantage, clip_low=clip_low, clip_high=clip_high)


def loss_and_slope(formula, ratio: float, advantage: float, **options) -> tuple[float, float]:
    """One step's loss and its slope in the ratio, which is the only one it has."""
    step = formula(double([[ratio]]), double([[advantage]]), **options)
    assert step._replace(loss=None, by_ratio=None) == (None,) * len(step)
    return step.loss.item(), step.by_ratio.item()


# loss = -min(rho A, clip(rho, 1 - low, 1 + high) A); inside, or where the min takes the unclipped arm, d loss / d rho = -A
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.0),  # inside
        (0.9, 2.0, -1.8, -2.0),
        (1.1, -2.0, 2.2, 2.0),
        (0.9, -2.0, 1.8, 2.0),
        (1.5, 2.0, -2.4, 0.0),  # good and already more likely: -min(3, 2.4), no more push
        (0.5, 2.0, -1.0, -2.0),  # good but less likely: -min(1, 1.6), pull back
        (1.5, -2.0, 3.0, 2.0),  # bad and more likely: -min(-3, -2.4), pull back
        (0.5, -2.0, 1.6, 0.0),  # bad and already less likely: -min(-1, -1.6), no more push
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_symmetric_bounds(ratio, advantage, loss, gradient):
    assert value_and_slope(ratio, advantage, 0.2, 0.2) == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.25, 1.0, -1.25, -1.0),  # beyond 1.2, inside 1.28
        (1.30, 1.0, -1.28, 0.0),
        (1.30, -1.0, 1.30, 1.0),
        (0.85, -1.0, 0.85, 1.0),
        (0.75, -1.0, 0.80, 0.0),  # beyond 0.8; would be inside 1 - 0.28
        (0.75, 1.0, -0.75, -1.0),
    ],
)
def test_a_higher_upper_bound(ratio, advantage, loss, gradient):
    assert value_and_slope(ratio, advantage, 0.2, 0.28) == pytest.approx((loss, gradient))


@pytest.mark.parametrize("ratio", [1e-6, 0.01, 0.5, 0.99])
def test_clip_low_of_one_is_no_lower_bound(ratio):
    # -min(-rho, -clip(rho, 0, 1.2)) = rho
    assert value_and_slope(ratio, -1.0, 1.0, 0.2) == pytest.approx((ratio, 1.0))


def test_clip_low_of_one_leaves_the_upper_bound():
    assert value_and_slope(1.5, 1.0, 1.0, 0.2) == pytest.approx((-1.2, 0.0))


@pytest.mark.parametrize(("ratio", "advantage"), [(1.01, 1.0), (0.99, -1.0)])
def test_bounds_of_zero_stop_at_one(ratio, advantage):
    assert value_and_slope(ratio, advantage, 0.0, 0.0) == pytest.approx((-advantage, 0.0))


def test_one_advantage_per_row_counts_for_all_its_steps():
    ratio = torch.tensor([[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]])
    step = clipped_surrogate(ratio, torch.tensor([[1.0], [-1.0]]), clip_low=0.25, clip_high=0.25)
    assert step.loss.tolist() == [[-0.5, -1.0, -1.25], [0.75, 1.0, 1.5]]
    assert step.by_ratio.tolist() == [[-1.0, -1.0, 0.0], [0.0, 1.0, 1.0]]


def test_one_ratio_per_row_meets_advantages_per_step():
    # .5 A: -min(.5, .75), -min(-.5, -.75)
    step = clipped_surrogate(torch.tensor([[0.5]]), torch.tensor([[1.0, -1.0]]), clip_low=0.25, clip_high=0.25)
    assert step.loss.tolist() == [[-0.5, 0.75]]
    assert step.by_ratio.tolist() == [[-1.0, 0.0]]


def test_advantages_per_step_count_step_by_step():
    ratio, advantages = torch.tensor([[0.5, 1.0, 1.5]]), torch.tensor([[-4.0, 3.0, 2.0]])
    # -min(-2, -3) = 3;  -3;  -min(3, 2.5)
    step = clipped_surrogate(ratio, advantages, clip_low=0.25, clip_high=0.25)
    assert step.loss.tolist() == [[3.0, -3.0, -2.5]]
    assert step.by_ratio.tolist() == [[0.0, -3.0, 0.0]]


RATIOS = torch.linspace(0.00317, 6.00317, 2001, dtype=torch.float64).unsqueeze(1)  # meets no bound exactly
ADVANTAGES = torch.tensor([[-3.0, -1.0, -0.25, 0.0, 0.25, 1.0, 3.0]], dtype=torch.float64)


def by_definition(ratio, advantages, clip_low, clip_high, delta, dual_clip):
    """PPO's minimum, INTELLECT-2's bound on its unclipped arm, and the maximum of the dual clip (arXiv:1912.09729, eq. 5)."""
    unclipped = ratio if delta is None else ratio.clamp(max=delta)
    value = torch.minimum(unclipped * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        value = torch.where(advantages < 0, torch.maximum(value, dual_clip * advantages), value)
    return -value


@pytest.mark.parametrize(
    ("delta", "dual_clip"), [(None, None), (4.0, None), (None, 3.0), (4.0, 3.0), (2.0, 5.0), (None, 1.1)]
)
@pytest.mark.parametrize(("clip_low", "clip_high"), [(0.2, 0.2), (0.2, 0.28), (1.0, 0.5), (0.0, 0.0)])
def test_one_clamp_is_the_minimum_and_maximum_of_the_papers(clip_low, clip_high, delta, dual_clip):
    bounds = {"clip_low": clip_low, "clip_high": clip_high, "delta": delta, "dual_clip": dual_clip}
    ratio = RATIOS.expand(-1, ADVANTAGES.shape[1]).clone().requires_grad_()
    expected = by_definition(ratio, ADVANTAGES.expand_as(ratio), **bounds)
    (expected_slope,) = torch.autograd.grad(expected.sum(), ratio)
    step = clipped_surrogate(ratio.detach(), ADVANTAGES.expand_as(ratio), **bounds)
    torch.testing.assert_close(step.loss, expected.detach(), rtol=1e-15, atol=0)
    torch.testing.assert_close(step.by_ratio, expected_slope, rtol=1e-15, atol=0)


# bounds .8 and 1.2 beside them
@pytest.mark.parametrize(
    ("ratio", "advantage", "bounds", "loss", "slope"),
    [
        (3.9, -2.0, {"delta": 4.0}, 7.8, 2.0),  # -min(3.9 (-2), 1.2 (-2))
        (5.0, -2.0, {"delta": 4.0}, 8.0, 0.0),  # -min(4 (-2), 1.2 (-2)): no more pull back
        (5.0, 2.0, {"delta": 4.0}, -2.4, 0.0),  # where A > 0 the clip stands below delta
        (1.1, 2.0, {"delta": 4.0}, -2.2, -2.0),
        (0.5, -2.0, {"delta": 4.0}, 1.6, 0.0),
        (2.9, -2.0, {"dual_clip": 3.0}, 5.8, 2.0),
        (5.0, -2.0, {"dual_clip": 3.0}, 6.0, 0.0),  # -max(5 (-2), 3 (-2))
        (5.0, 2.0, {"dual_clip": 3.0}, -2.4, 0.0),
        (0.5, -2.0, {"dual_clip": 3.0}, 1.6, 0.0),
        (3.5, -2.0, {"delta": 4.0, "dual_clip": 3.0}, 6.0, 0.0),  # the nearer of the two
        (3.5, -2.0, {"delta": 3.0, "dual_clip": 4.0}, 6.0, 0.0),
        (1.15, -2.0, {"dual_clip": 1.1}, 2.2, 0.0),  # c may lie inside the clip
        (5.0, 0.0, {"delta": 4.0, "dual_clip": 3.0}, 0.0, 0.0),
    ],
)
def test_bounds_for_what_is_bad_and_has_become_more_likely(ratio, advantage, bounds, loss, slope):
    found = loss_and_slope(clipped_surrogate, ratio, advantage, clip_low=0.2, clip_high=0.2, **bounds)
    assert found == pytest.approx((loss, slope), rel=1e-15)


def test_bounds_are_not_rounded_to_float32():
    assert loss_and_slope(clipped_surrogate, 9.0, 1.0, clip_low=0.2, clip_high=0.28)[0] == -1.28
    assert loss_and_slope(clipped_surrogate, 9.0, -1.0, clip_low=0.2, clip_high=0.28, delta=4.1)[0] == 4.1
    assert loss_and_slope(clipped_surrogate, 0.1, -1.0, clip_low=0.3, clip_high=0.28)[0] == 1 - 0.3


def test_reinforce_by_hand():
    # -A log pi; slope -A
    step = reinforce_surrogate(double([[-1.0, -0.5]]), double([[2.0, -4.0]]))
    assert step.loss.tolist() == [[2.0, -2.0]]
    assert step.by_log_prob.tolist() == [[-2.0, 4.0]]
    assert step.by_ratio is step.by_log_ratio is None


def test_cispo_bounds_the_weight_and_never_stops_the_gradient():
    # bounds 1 - .5 and 1 + 4: weights .5, 1, 3, 5; log pi = -1
    ratio, log_probs = double([[0.1, 1.0, 3.0, 9.0]]), torch.full((1, 4), -1.0, dtype=torch.float64)
    for advantage in (2.0, -2.0):
        step = cispo_surrogate(ratio, log_probs, double([[advantage]]), clip_low=0.5, clip_high=4.0)
        expected = [weight * advantage for weight in (0.5, 1.0, 3.0, 5.0)]
        assert step.loss[0].tolist() == expected
        assert step.by_log_prob[0].tolist() == [-e for e in expected]
        assert step.by_ratio is step.by_log_ratio is None


def test_cispo_without_a_lower_bound():
    step = cispo_surrogate(double([[0.01]]), double([[-1.0]]), double([[1.0]]), clip_low=1.0, clip_high=4.0)
    assert step.loss.item() == 0.01
    assert step.by_log_prob.item() == -0.01


# sigmoid(log 3) = 3/4: the gradient's factor 4 s (1 - s) is 3/4; at 1 it is 1 and the value 2 A / tau
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -(4 / 0.5) * 0.5 * 2, -2.0),
        (1 + math.log(3) / 0.5, 2.0, -(4 / 0.5) * 0.75 * 2, -1.5),
        (1 - math.log(3) / 0.5, 2.0, -(4 / 0.5) * 0.25 * 2, -1.5),
        (1.0, -2.0, (4 / 2) * 0.5 * 2, 2.0),
        (1 + math.log(3) / 2, -2.0, (4 / 2) * 0.75 * 2, 1.5),
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_sapo_by_hand(ratio, advantage, loss, slope):
    found = loss_and_slope(sapo_surrogate, ratio, advantage, temperature_pos=0.5, temperature_neg=2.0)
    assert found == pytest.approx((loss, slope), rel=1e-14)


def test_sapos_slope_is_that_of_the_plain_ratio_times_a_squared_hyperbolic_secant():
    ratio = RATIOS.expand(-1, 2).clone().requires_grad_()
    tau, advantages = double([[1.0, 1.05]]), double([[1.5, -1.5]])
    step = sapo_surrogate(ratio.detach(), advantages.expand_as(ratio), temperature_pos=1.0, temperature_neg=1.05)
    by_definition = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
    torch.testing.assert_close(step.loss, by_definition.detach(), rtol=1e-13, atol=0)
    (by_autograd,) = torch.autograd.grad(by_definition.sum(), ratio)
    torch.testing.assert_close(step.by_ratio, by_autograd, rtol=1e-12, atol=0)
    expected = [
        [-1.5 / math.cosh(1.0 * (rho - 1) / 2) ** 2, 1.5 / math.cosh(1.05 * (rho - 1) / 2) ** 2]
        for rho in RATIOS.squeeze(1).tolist()
    ]
    torch.testing.assert_close(step.by_ratio, double(expected), rtol=1e-12, atol=0)


# Bounds 1/2 and 2. x = log 8, a hole, -log 4.
#   A = 1:   c = log 2 (bounded), -log 4;  mean -(log 2)/2: loss -1/sqrt 2
#   A = -1:  c = log 8, -log 2 (bounded);  mean log 2: loss 2
# The gradient of the sum over the row's two steps: 2 l / 2 where x is not bounded, 0 where it is.
@pytest.mark.parametrize(
    ("advantage", "loss", "gradient"),
    [(1.0, -math.sqrt(0.5), [0, 0, -math.sqrt(0.5)]), (-1.0, 2.0, [2, 0, 0]), (0.0, 0.0, [0, 0, 0])],
)
def test_gmpo_by_hand(advantage, loss, gradient):
    mask = torch.tensor([[True, False, True]])
    x = double([[math.log(8), 0.0, -math.log(4)]])
    step = gmpo_surrogate(x, double([[advantage]]), mask, clip_low=0.5, clip_high=1.0)
    losses, slopes = (values.expand_as(x)[mask] for values in (step.loss, step.by_row_mean))
    assert losses.tolist() == pytest.approx([loss, loss], rel=1e-14)
    assert (slopes.sum() / 2 * step.free)[0].tolist() == pytest.approx(gradient, rel=1e-14)


def test_gmpo_bounds_each_step_by_the_sign_of_its_own_advantage():
    # x = log 8 with A = 1: log 2;  x = -log 4 with A = -1: -log 2;  mean 0, and nothing is left to move
    x, everywhere = double([[math.log(8), -math.log(4)]]), torch.ones(1, 2, dtype=torch.bool)
    step = gmpo_surrogate(x, double([[1.0, -1.0]]), everywhere, clip_low=0.5, clip_high=1.0)
    assert step.loss[0].tolist() == pytest.approx([-1.0, 1.0], rel=1e-14)
    assert step.by_row_mean[0].tolist() == pytest.approx([-1.0, 1.0], rel=1e-14)
    assert step.free.tolist() == [[0.0, 0.0]]


def test_gmpo_without_a_lower_bound_and_without_steps():
    x, advantages = double([[-9.0], [0.0]]), double([[-1.0], [-1.0]])
    step = gmpo_surrogate(x, advantages, torch.tensor([[True], [False]]), clip_low=1.0, clip_high=0.2)
    assert step.loss.squeeze(1).tolist() == pytest.approx([math.exp(-9), 1.0])
    assert step.free.squeeze(1).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("advantage", [0.0, -1.0])
def test_gmpo_stays_finite_where_a_step_was_all_but_impossible(advantage):
    # exp(99.9) overflows float32; the other surrogates bound the log-ratio by 20 before exp
    loss, gradient = loss_and_gradient(
        torch.tensor([[-0.1]]),
        torch.tensor([advantage]),
        ObjectiveConfig(surrogate="gmpo"),
        old_log_probs=torch.tensor([[-100.0]]),
    )
    assert loss.isfinite()
    assert gradient.isfinite().all()


# phi(w) = w^k exp(lambda (1 - w)); A >= 0: k 2, lambda 3;  A < 0: k 3, lambda 2
PHI = [
    (2.0, 1.5, 4 * math.exp(-3)),
    (0.5, 1.5, 0.25 * math.exp(1.5)),
    (1.0, 1.5, 1.0),
    (2.0, -1.5, 8 * math.exp(-2)),
    (0.5, -1.5, 0.125 * math.exp(1)),
    (1.0, -1.5, 1.0),
    (1e-12, 1.5, 1e-16 * math.exp(3)),  # w is at least 1e-8
]
VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}


@pytest.mark.parametrize(("weight", "advantage", "phi"), PHI)
def test_vespo_by_hand(weight, advantage, phi):
    step = vespo_surrogate(double([[math.log(weight)]]), double([[-2.0, -0.5]]), double([[advantage]]), **VESPO)
    assert step.loss[0].tolist() == pytest.approx([2 * phi * advantage, 0.5 * phi * advantage], rel=1e-7)
    assert step.by_log_prob.expand(1, 2)[0].tolist() == pytest.approx([-phi * advantage] * 2, rel=1e-7)
    assert step.by_ratio is step.by_log_ratio is None


def test_vespo_takes_the_product_over_the_row_and_the_sampler_into_its_weight():
    # ratios 2 and 3/2 over the row's two valid steps, and 1/2 from the sampler to the old policy: w = 3/2.
    # phi = 9/4 exp(-3/2); the gradient is -phi A, with no second factor for the sampler
    log_2, log_3_2 = math.log(2), math.log(1.5)
    _, gradient = loss_and_gradient(
        double([[-1.0, math.nan, -1.0]]),
        double([1.0]),
        ObjectiveConfig(surrogate="vespo", sampler_correction="truncate"),
        old_log_probs=double([[-1.0 - log_2, math.nan, -1.0 - log_3_2]]),
        behaviour_log_probs=double([[-1.0 - log_2 + log_2, math.nan, -1.0 - log_3_2]]),
        mask=torch.tensor([[True, False, True]]),
        weights=double([[1.0, 0.0, 1.0]]),
    )
    phi = 2.25 * math.exp(-1.5)
    assert gradient[0].tolist() == pytest.approx([-phi, 0, -phi], rel=1e-13)


def test_vespo_leaves_rows_out_that_the_sampler_correction_leaves_out():
    # behaviour e^-9, old e^-1: ratio e^8 > 3, weight 0, taken as 1e-8: phi = e^3 1e-16
    _, gradient = loss_and_gradient(
        double([[-1.0]]),
        double([1.0]),
        ObjectiveConfig(surrogate="vespo", sampler_correction="mask"),
        behaviour_log_probs=double([[-9.0]]),
    )
    assert abs(gradient.item()) < 1e-12


def test_dro_by_hand():
    # -A log pi + beta/2 x^2: 3 + .25 * .04 = 3.01;  -.5 + .25 * .01 = -.4975;  slopes -A and beta x
    step = dro_surrogate(double([[0.2, -0.1]]), double([[-1.0, -0.5]]), double([[3.0, -1.0]]), beta=0.5)
    assert step.loss[0].tolist() == pytest.approx([3.01, -0.4975], rel=1e-14)
    assert step.by_log_prob[0].tolist() == [-3, 1]
    assert step.by_log_ratio[0].tolist() == pytest.approx([0.5 * 0.2, -0.5 * 0.1], rel=1e-14)


def test_dro_over_the_whole_row():
    # x = .2, .1, sum .3; weights 1/2, 1/2, so the square counts once: gradient -A/2 + beta .3
    _, gradient = loss_and_gradient(
        double([[-1.0, -0.5]]),
        double([2.0]),
        ObjectiveConfig(surrogate="dro", dro_beta=0.4, ratio_level="row_sum"),
        old_log_probs=double([[-1.2, -0.6]]),
        weights=double([[0.5, 0.5]]),
    )
    assert gradient[0].tolist() == pytest.approx([-1 + 0.4 * 0.3] * 2, rel=1e-13)


# limit .2 on |pi - mu|
@pytest.mark.parametrize(
    ("pi", "mu", "advantage", "stopped"),
    [
        (0.6, 0.3, 2.0, True),  # + .3, pushed up
        (0.45, 0.3, 2.0, False),  # + .15
        (0.1, 0.4, 2.0, False),  # - .3, but pushed up
        (0.1, 0.4, -2.0, True),  # - .3, pushed down
        (0.25, 0.4, -2.0, False),
        (0.6, 0.3, -2.0, False),  # + .3, but pushed down
        (0.02, 0.001, 2.0, False),  # ratio 20, and yet it has hardly moved
        (0.6, 0.3, 0.0, False),
    ],
)
def test_dppo_stops_where_the_probability_has_moved_too_far(pi, mu, advantage, stopped):
    log_probs, sampled = double([[math.log(pi)]]), double([[math.log(mu)]])
    step = dppo_tv_surrogate((log_probs - sampled).exp(), log_probs, sampled, double([[advantage]]), tv_limit=0.2)
    assert step.loss.item() == pytest.approx(0.0 if stopped else -pi / mu * advantage, rel=1e-14)
    # d (-rho A) / d rho = -A; the test of the distance has no slope
    assert step.by_ratio.item() == (0.0 if stopped else -advantage)
    assert step.by_log_prob is step.by_log_ratio is None


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_dppo_is_the_mask_of_its_paper_on_a_grid(advantage):
    # eq. 12: 0 where (A > 0, rho > 1, |pi - mu| > limit) or (A < 0, rho < 1, |pi - mu| > limit)
    grid = torch.linspace(0.013, 0.987, 75, dtype=torch.float64)
    pi, mu = grid.unsqueeze(1).expand(75, 75), grid.unsqueeze(0).expand(75, 75)
    ratio = pi / mu
    step = dppo_tv_surrogate(ratio, pi.log(), mu.log(), torch.full((75, 1), advantage).double(), tv_limit=0.2)
    stopped = (ratio > 1 if advantage > 0 else ratio < 1) & ((pi - mu).abs() > 0.2)
    torch.testing.assert_close(step.loss, torch.where(stopped, 0.0, -ratio * advantage))
    assert torch.equal(step.by_ratio, torch.where(stopped, 0.0, -advantage).double())


def test_kl_cov_pulls_back_the_chosen_steps_only():
    # x = log 2, log 2, -log 2, 0: ratios 2, 2, 1/2, 1; A = 1, coef .5; the second is not chosen
    log_2 = math.log(2)
    x = double([[log_2, log_2, -log_2, 0.0]])
    chosen = torch.tensor([[True, False, True, True]])
    step = kl_cov_surrogate(x.exp(), x, double([[1.0]]), chosen, coef=0.5)
    assert step.loss[0].tolist() == pytest.approx([-2 + log_2 / 2, -2, -0.5 + log_2 / 2, -1], rel=1e-14)
    # -A in rho, coef sign(x) in x: together -rho A + coef sign(x)
    assert step.by_log_ratio[0].tolist() == [0.5, 0, -0.5, 0]
    whole = step.by_ratio * x.exp() + step.by_log_ratio
    assert whole[0].tolist() == pytest.approx([-1.5, -2, -1, -1], rel=1e-14)


SURROGATES = ["clip", "none", "cispo", "sapo", "gmpo", "vespo", "dro", "dppo_tv", "kl_cov", "clip_cov"]


@pytest.mark.parametrize("old", ["none", "equal"])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_at_ratio_one_every_surrogate_has_the_reinforce_gradient(surrogate, old):
    log_probs = double([[-0.1, -2.3, -1.0], [-1.7, -0.4, -0.9], [-0.3, -0.2, -0.1]])
    mask = torch.tensor([[True, True, True], [True, False, True], [True, False, False]])
    weights = torch.where(mask, double([[0.5], [0.25], [2.0]]), 0.0)
    advantages = double([1.5, -0.5, 0.25])
    chosen = {"keep": mask} if surrogate == "clip_cov" else {"penalised": mask} if surrogate == "kl_cov" else {}
    bounds = {"delta": 4.0, "dual_clip": 3.0} if surrogate in ("clip", "clip_cov") else {}
    config = ObjectiveConfig(surrogate=surrogate, **bounds)
    _, gradient = loss_and_gradient(
        log_probs,
        advantages,
        config,
        old_log_probs=log_probs if old == "equal" else None,
        mask=mask,
        weights=weights,
        **chosen,
    )
    torch.testing.assert_close(gradient, -weights * advantages.unsqueeze(1), rtol=1e-14, atol=0)


# One step of ratio 4 and one of ratio 1/4, A either sign, weight 1, log pi = -1. Gradients with respect to log pi; that of
# -rho A is -rho A. SAPO's factor at 4 is sech^2(tau 3/2), at 1/4 sech^2(tau 3/8), with tau 1 or 1.05.
BEYOND = {
    "clip": {(4, 1): 0, (4, -1): 4, (0.25, 1): -0.25, (0.25, -1): 0},
    "clip_cov": {(4, 1): 0, (4, -1): 4, (0.25, 1): -0.25, (0.25, -1): 0},
    "none": {(4, 1): -1, (4, -1): 1, (0.25, 1): -1, (0.25, -1): 1},
    "cispo": {(4, 1): -1.2, (4, -1): 1.2, (0.25, 1): -0.8, (0.25, -1): 0.8},
    "sapo": {
        (4, 1): -4 / math.cosh(1.5) ** 2,
        (4, -1): 4 / math.cosh(1.05 * 1.5) ** 2,
        (0.25, 1): -0.25 / math.cosh(0.375) ** 2,
        (0.25, -1): 0.25 / math.cosh(1.05 * 0.375) ** 2,
    },
    "gmpo": {(4, 1): 0, (4, -1): 4, (0.25, 1): -0.25, (0.25, -1): 0},
    "vespo": {
        (4, 1): -16 * math.exp(-9),
        (4, -1): 64 * math.exp(-6),
        (0.25, 1): -math.exp(2.25) / 16,
        (0.25, -1): math.exp(1.5) / 64,
    },
    "dro": {  # -A + .05 log rho
        (4, 1): -1 + 0.05 * math.log(4),
        (4, -1): 1 + 0.05 * math.log(4),
        (0.25, 1): -1 - 0.05 * math.log(4),
        (0.25, -1): 1 - 0.05 * math.log(4),
    },
    # pi = .368: mu = .092 (moved by .276), or with ratio 1/2 mu = .736 (moved by -.368)
    "dppo_tv": {(4, 1): 0, (4, -1): 4, (0.5, 1): -0.5, (0.5, -1): 0},
    "kl_cov": {(4, 1): -4 + 1, (4, -1): 4 + 1, (0.25, 1): -0.25 - 1, (0.25, -1): 0.25 - 1},
}


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_gradients_beyond_the_bounds(surrogate):
    one = torch.ones(1, 1, dtype=torch.bool)
    chosen = {"keep": one} if surrogate == "clip_cov" else {"penalised": one} if surrogate == "kl_cov" else {}
    for (ratio, advantage), expected in BEYOND[surrogate].items():
        _, gradient = loss_and_gradient(
            double([[-1.0]]),
            double([advantage]),
            ObjectiveConfig(surrogate=surrogate),
            old_log_probs=double([[-1.0 - math.log(ratio)]]),
            **chosen,
        )
        assert gradient.item() == pytest.approx(expected, rel=1e-12, abs=1e-15), (ratio, advantage)


def test_bounds_of_the_ratio_by_the_sign_of_the_advantage():
    lowest, highest = clip_bounds(double([[1.0, -1.0, 0.0]]), 0.2, 0.3)
    assert lowest.tolist() == [[-math.inf, 0.8, -math.inf]]
    assert highest.tolist() == [[1.3, math.inf, math.inf]]


@pytest.mark.parametrize("surrogate", ["clip", "sapo", "gmpo", "dro", "dppo_tv", "kl_cov", "none"])
def test_gradients_agree_with_finite_differences(surrogate):
    """Where nothing is detached; away from bounds, which finite differences would straddle."""
    generator = torch.Generator().manual_seed(1)
    log_probs = -0.1 - torch.rand(4, 3, generator=generator, dtype=torch.float64)
    old = log_probs + 0.5 * torch.rand(4, 3, generator=generator, dtype=torch.float64) - 0.25
    advantages = double([1.5, -0.7, 0.3, -2.0])
    mask = torch.tensor([[True, True, True], [True, False, True], [True, False, False], [True, True, True]])
    config = ObjectiveConfig(surrogate=surrogate, tv_limit=0.15)
    chosen = {"penalised": mask} if surrogate == "kl_cov" else {}

    def loss(leaf):
        inputs = objective_inputs(
            leaf, advantages, old_log_probs=old, mask=mask, weights=torch.where(mask, 0.5, 0.0).double(), **chosen
        )
        return grpo_objective(inputs, config).loss

    assert torch.autograd.gradcheck(loss, log_probs.requires_grad_())

"""Every surrogate called on `Steps`: its value and its gradient by hand, at ratio 1, inside its bounds and beyond them."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import Mask, ObjectiveInputs, Truncate
from grpo.surrogates import (
    Cispo,
    Clip,
    ClipCov,
    Dppo,
    Dro,
    Gmpo,
    KlCov,
    Reinforce,
    Sapo,
    Steps,
    Surrogate,
    Vespo,
)
from tests.support.objective_inputs import double, objective_inputs


def rows_of(ratio: Any, advantages: Any, log_probs: float = -1.0, **others: Any) -> ObjectiveInputs:
    """Rows with the given ratios [N, T]."""
    ratio = torch.as_tensor(ratio, dtype=torch.float64)
    now = torch.full_like(ratio, log_probs)
    advantages = torch.as_tensor(advantages, dtype=torch.float64)
    return objective_inputs(now.requires_grad_(), advantages, old_log_probs=now.detach() - ratio.log(), **others)


def losses_and_slopes(surrogate: Surrogate, rows: ObjectiveInputs, correction: Any = None) -> tuple[Tensor, Tensor]:
    """The losses as the surrogate returns them, and the slope of the sum of all [N, T] losses in each log-prob."""
    losses = surrogate(Steps(rows, correction))
    (slopes,) = torch.autograd.grad(losses.expand(rows.mask.shape).sum(), rows.log_probs)
    return losses.detach(), slopes


def loss_and_slope(surrogate: Surrogate, ratio: float, advantage: float) -> tuple[float, float]:
    """One step's loss and its slope in the ratio: its slope in the log-prob, divided by the ratio."""
    loss, slope = losses_and_slopes(surrogate, rows_of([[ratio]], [[advantage]], log_probs=0.0))
    return loss.item(), slope.item() / ratio


# loss = -min(rho A, clip(rho, 1 - low, 1 + high) A). Inside, or where the min takes the unclipped side, d loss / d rho = -A.
def test_clip_with_symmetric_bounds_equals_the_hand_worked_loss_and_slope(subtests):
    for ratio, advantage, loss, slope in [
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
    ]:
        with subtests.test(ratio=ratio, advantage=advantage, loss=loss, slope=slope):
            assert loss_and_slope(Clip(low=0.2, high=0.2), ratio, advantage) == pytest.approx((loss, slope), rel=1e-14)


def test_clip_with_a_higher_upper_bound_equals_the_hand_worked_loss_and_slope(subtests):
    for ratio, advantage, loss, slope in [
        (1.25, 1.0, -1.25, -1.0),  # beyond 1.2, inside 1.28
        (1.30, 1.0, -1.28, 0.0),
        (1.30, -1.0, 1.30, 1.0),
        (0.85, -1.0, 0.85, 1.0),
        (0.75, -1.0, 0.80, 0.0),  # beyond 0.8, inside 1 - 0.28
        (0.75, 1.0, -0.75, -1.0),
    ]:
        with subtests.test(ratio=ratio, advantage=advantage, loss=loss, slope=slope):
            assert loss_and_slope(Clip(low=0.2, high=0.28), ratio, advantage) == pytest.approx((loss, slope), rel=1e-14)


def test_clip_low_of_one_is_no_lower_bound(subtests):
    for ratio in [1e-6, 0.01, 0.5, 0.99]:
        with subtests.test(ratio=ratio):
            # -min(-rho, -clip(rho, 0, 1.2)) = rho
            assert loss_and_slope(Clip(low=1.0), ratio, -1.0) == pytest.approx((ratio, 1.0), rel=1e-13)


def test_clip_low_of_one_keeps_the_upper_bound():
    assert loss_and_slope(Clip(low=1.0), 1.5, 1.0) == pytest.approx((-1.2, 0.0))


def test_clip_bounds_of_zero_stop_at_one(subtests):
    for ratio, advantage in [(1.01, 1.0), (0.99, -1.0)]:
        with subtests.test(ratio=ratio, advantage=advantage):
            assert loss_and_slope(Clip(low=0.0, high=0.0), ratio, advantage) == pytest.approx((-advantage, 0.0))


def test_clip_uses_one_advantage_per_row_for_all_steps_of_the_row():
    rows = rows_of([[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]], [1.0, -1.0])
    losses, slopes = losses_and_slopes(Clip(low=0.25, high=0.25), rows)
    assert losses.tolist() == [pytest.approx([-0.5, -1.0, -1.25]), pytest.approx([0.75, 1.0, 1.5])]
    # -rho A, 0 past the bound
    assert slopes.tolist() == [pytest.approx([-0.5, -1.0, 0.0]), pytest.approx([0.0, 1.0, 1.5])]


def test_clip_at_row_level_with_step_advantages_equals_hand_worked_values():
    # .5 A: -min(.5, .75), -min(-.5, -.75). Only the first step has a slope: -.5, on the mean of two log-ratios
    losses, slopes = losses_and_slopes(Clip(low=0.25, high=0.25, level="row"), rows_of([[1.0, 0.25]], [[1.0, -1.0]]))
    assert losses.tolist() == [pytest.approx([-0.5, 0.75])]
    assert slopes.tolist() == [pytest.approx([-0.25, -0.25])]


def test_clip_with_advantages_per_step_equals_hand_worked_values():
    # -min(-2, -3) = 3;  -3;  -min(3, 2.5)
    losses, slopes = losses_and_slopes(Clip(low=0.25, high=0.25), rows_of([[0.5, 1.0, 1.5]], [[-4.0, 3.0, 2.0]]))
    assert losses.tolist() == [pytest.approx([3.0, -3.0, -2.5])]
    assert slopes.tolist() == [pytest.approx([0.0, -3.0, 0.0])]


RATIOS = torch.linspace(0.00317, 6.00317, 2001, dtype=torch.float64).unsqueeze(1)  # no ratio is exactly at a bound
ADVANTAGES = double([[-3.0, -1.0, -0.25, 0.0, 0.25, 1.0, 3.0]])


def test_the_papers_min_and_max_forms_of_clip_equal_one_clamp(subtests):
    """Where A > 0 the ratio has one bound, above; where A < 0 it has one below, and the nearer of delta and dual above."""
    for (low, high), (delta, dual) in product(
        [(0.2, 0.2), (0.2, 0.28), (1.0, 0.5), (0.0, 0.0)],
        [(None, None), (4.0, None), (None, 3.0), (4.0, 3.0), (2.0, 5.0), (None, 1.1)],
    ):
        with subtests.test(low=low, high=high, delta=delta, dual=dual):
            nearer = min(delta or math.inf, dual or math.inf)
            lowest = double([[1 - low if a < 0 else -math.inf for a in ADVANTAGES[0]]])
            highest = double([[nearer if a < 0 else 1 + high for a in ADVANTAGES[0]]])
            rows = rows_of(RATIOS.expand(-1, 7), ADVANTAGES.expand(2001, 7), log_probs=0.0)
            rho = Steps(rows).ratio().detach()
            losses, slopes = losses_and_slopes(Clip(low=low, high=high, delta=delta, dual=dual), rows)
            inside = (rho > lowest) & (rho < highest)
            torch.testing.assert_close(losses, -rho.clamp(lowest, highest) * ADVANTAGES, rtol=1e-14, atol=0)
            torch.testing.assert_close(slopes, torch.where(inside, -rho * ADVANTAGES, 0.0), rtol=1e-14, atol=0)


# beside bounds of .8 and 1.2
def test_delta_and_dual_bound_bad_actions_that_became_more_likely(subtests):
    for ratio, advantage, bounds, loss, slope in [
        (3.9, -2.0, {"delta": 4.0}, 7.8, 2.0),  # -min(3.9 (-2), 1.2 (-2))
        (5.0, -2.0, {"delta": 4.0}, 8.0, 0.0),  # -min(4 (-2), 1.2 (-2)): no more pull back
        (5.0, 2.0, {"delta": 4.0}, -2.4, 0.0),  # where A > 0 the clip is below delta
        (1.1, 2.0, {"delta": 4.0}, -2.2, -2.0),
        (0.5, -2.0, {"delta": 4.0}, 1.6, 0.0),
        (2.9, -2.0, {"dual": 3.0}, 5.8, 2.0),
        (5.0, -2.0, {"dual": 3.0}, 6.0, 0.0),  # -max(5 (-2), 3 (-2))
        (5.0, 2.0, {"dual": 3.0}, -2.4, 0.0),
        (0.5, -2.0, {"dual": 3.0}, 1.6, 0.0),
        (3.5, -2.0, {"delta": 4.0, "dual": 3.0}, 6.0, 0.0),  # the nearer of the two
        (3.5, -2.0, {"delta": 3.0, "dual": 4.0}, 6.0, 0.0),
        (1.15, -2.0, {"dual": 1.1}, 2.2, 0.0),  # dual may lie inside the clip
        (5.0, 0.0, {"delta": 4.0, "dual": 3.0}, 0.0, 0.0),
    ]:
        with subtests.test(ratio=ratio, advantage=advantage, bounds=bounds, loss=loss, slope=slope):
            found = loss_and_slope(Clip(low=0.2, high=0.2, **bounds), ratio, advantage)
            assert found == pytest.approx((loss, slope), rel=1e-14)


def test_bounds_are_not_rounded_to_float32():
    assert loss_and_slope(Clip(low=0.2, high=0.28), 9.0, 1.0)[0] == -1.28
    assert loss_and_slope(Clip(low=0.2, high=0.28, delta=4.1), 9.0, -1.0)[0] == 4.1
    assert loss_and_slope(Clip(low=0.3, high=0.28), 0.1, -1.0)[0] == 1 - 0.3


def test_reinforce_equals_the_hand_worked_loss_and_gradient():
    # -A log pi = .5 * 2, .5 * -4; slope -A at any ratio
    losses, slopes = losses_and_slopes(Reinforce(), rows_of([[3.0, 0.2]], [[2.0, -4.0]], log_probs=-0.5))
    assert losses.tolist() == [[1.0, -2.0]]
    assert slopes.tolist() == [[-2.0, 4.0]]


def test_cispo_bounds_the_weight_and_never_stops_the_gradient(subtests):
    for advantage in [2.0, -2.0]:
        with subtests.test(advantage=advantage):
            # bounds 1 - .5 and 1 + 4: weights .5, 1, 3, 5; log pi = -1
            losses, slopes = losses_and_slopes(Cispo(low=0.5, high=4.0), rows_of([[0.1, 1.0, 3.0, 9.0]], [advantage]))
            expected = [weight * advantage for weight in (0.5, 1.0, 3.0, 5.0)]
            assert losses[0].tolist() == pytest.approx(expected, rel=1e-14)
            assert slopes[0].tolist() == pytest.approx([-e for e in expected], rel=1e-14)


def test_cispo_without_a_lower_bound_keeps_small_weights():
    losses, slopes = losses_and_slopes(Cispo(low=1.0, high=4.0), rows_of([[0.01]], [1.0]))
    assert (losses.item(), slopes.item()) == pytest.approx((0.01, -0.01), rel=1e-13)


# sigmoid(log 3) = 3/4: the slope's factor 4 s (1 - s) is 3/4. At ratio 1 the factor is 1 and the value 2 A / tau.
def test_sapo_equals_the_hand_worked_loss_and_slope(subtests):
    for ratio, advantage, loss, slope in [
        (1.0, 2.0, -(4 / 0.5) * 0.5 * 2, -2.0),
        (1 + math.log(3) / 0.5, 2.0, -(4 / 0.5) * 0.75 * 2, -1.5),
        (1.0, -2.0, (4 / 2) * 0.5 * 2, 2.0),
        (1 + math.log(3) / 2, -2.0, (4 / 2) * 0.75 * 2, 1.5),
        (1 - math.log(3) / 2, -2.0, (4 / 2) * 0.25 * 2, 1.5),
        (1.0, 0.0, 0.0, 0.0),
    ]:
        with subtests.test(ratio=ratio, advantage=advantage, loss=loss, slope=slope):
            found = loss_and_slope(Sapo(temperature_pos=0.5, temperature_neg=2.0), ratio, advantage)
            assert found == pytest.approx((loss, slope), rel=1e-14)


def test_the_slope_of_sapo_is_the_ratio_times_a_squared_hyperbolic_secant():
    rows = rows_of(RATIOS.expand(-1, 2), double([[1.5, -1.5]]).expand(2001, 2), log_probs=0.0)
    losses, slopes = losses_and_slopes(Sapo(), rows)
    expected_losses, expected_slopes = [], []
    for rho in Steps(rows).ratio()[:, 0].tolist():
        gates = [4 / tau / (1 + math.exp(-tau * (rho - 1))) for tau in (1.0, 1.05)]
        factors = [rho / math.cosh(tau * (rho - 1) / 2) ** 2 for tau in (1.0, 1.05)]
        expected_losses.append([-1.5 * gates[0], 1.5 * gates[1]])
        expected_slopes.append([-1.5 * factors[0], 1.5 * factors[1]])
    torch.testing.assert_close(losses, double(expected_losses), rtol=1e-13, atol=0)
    torch.testing.assert_close(slopes, double(expected_slopes), rtol=1e-12, atol=0)


# Bounds 1/2 and 2. x = log 8, a hole, -log 4.
#   A = 1:   c = log 2 (bounded), -log 4;  mean -(log 2)/2: loss -1/sqrt 2
#   A = -1:  c = log 8, -log 2 (bounded);  mean log 2: loss 2
# The gradient of the sum over the row's two steps: 2 l / 2 where x is not bounded, 0 where it is.
def test_gmpo_equals_the_hand_worked_loss_and_gradient(subtests):
    for advantage, loss, gradient in [
        (1.0, -math.sqrt(0.5), [0, 0, -math.sqrt(0.5)]),
        (-1.0, 2.0, [2, 0, 0]),
        (0.0, 0.0, [0, 0, 0]),
    ]:
        with subtests.test(advantage=advantage, loss=loss, gradient=gradient):
            mask = torch.tensor([[True, False, True]])
            rows = rows_of([[8.0, math.nan, 0.25]], [advantage], mask=mask)
            losses = Gmpo(low=0.5, high=1.0)(Steps(rows))
            assert losses.tolist() == [[pytest.approx(loss, rel=1e-14)]]
            (slopes,) = torch.autograd.grad(losses.expand(1, 3)[mask].sum(), rows.log_probs)
            assert slopes[0].tolist() == pytest.approx(gradient, rel=1e-14)


def test_gmpo_bounds_each_step_by_the_sign_of_its_own_advantage():
    # x = log 8 with A = 1: log 2;  x = -log 4 with A = -1: -log 2;  mean 0, and neither step can move it
    losses, slopes = losses_and_slopes(Gmpo(low=0.5, high=1.0), rows_of([[8.0, 0.25]], [[1.0, -1.0]]))
    assert losses[0].tolist() == pytest.approx([-1.0, 1.0], rel=1e-14)
    assert slopes.tolist() == [[0.0, 0.0]]


def test_gmpo_bounds_a_step_without_an_advantage_below_only():
    # A = 0: x = log 8 stays, x = log 1/8 becomes log 1/2.  Means (log 8 + 0)/2 and (log 1/2 + 0)/2
    losses, _ = losses_and_slopes(
        Gmpo(low=0.5, high=1.0), rows_of([[8.0, 1.0], [0.125, 1.0]], [[0.0, 1.0], [0.0, 1.0]])
    )
    assert losses[:, 1].tolist() == pytest.approx([-math.sqrt(8), -math.sqrt(0.5)], rel=1e-14)


def test_gmpo_without_a_lower_bound_or_steps_equals_hand_worked_values():
    rows = rows_of([[math.exp(-9)], [1.0]], [-1.0, -1.0], mask=torch.tensor([[True], [False]]))
    losses, slopes = losses_and_slopes(Gmpo(low=1.0, high=0.2), rows)
    assert losses.squeeze(1).tolist() == pytest.approx([math.exp(-9), 1.0])
    assert slopes.squeeze(1).tolist() == pytest.approx([math.exp(-9), 0.0])


def test_gmpo_stays_finite_if_a_step_was_nearly_impossible():
    # x = 99.9: exp overflows float32, so the mean is bounded by 20, where the gradient stops
    log_probs = torch.tensor([[-0.1]], requires_grad=True)
    rows = objective_inputs(log_probs, torch.tensor([-1.0]), old_log_probs=torch.tensor([[-100.0]]))
    loss, slope = losses_and_slopes(Gmpo(), rows)
    assert loss.item() == pytest.approx(math.exp(20))
    assert slope.item() == 0


# phi(w) = w^k exp(lambda (1 - w)); A >= 0: k 2, lambda 3;  A < 0: k 3, lambda 2
def test_vespo_equals_the_hand_worked_loss_and_gradient(subtests):
    for weight, advantage, phi in [
        (2.0, 1.5, 4 * math.exp(-3)),
        (0.5, 1.5, 0.25 * math.exp(1.5)),
        (1.0, 1.5, 1.0),
        (2.0, -1.5, 8 * math.exp(-2)),
        (0.5, -1.5, 0.125 * math.exp(1)),
        (1.0, -1.5, 1.0),
        (1e-12, 1.5, 1e-16 * math.exp(3)),  # w is at least 1e-8
    ]:
        with subtests.test(weight=weight, advantage=advantage, phi=phi):
            vespo = Vespo(k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0)
            log_probs = double([[-2.0, -0.5]]).requires_grad_()
            old = log_probs.detach() - double([[math.log(weight) / 4, 3 * math.log(weight) / 4]])
            rows = objective_inputs(log_probs, double([advantage]), old_log_probs=old)
            losses, slopes = losses_and_slopes(vespo, rows)
            assert losses[0].tolist() == pytest.approx([2 * phi * advantage, 0.5 * phi * advantage], rel=1e-7)
            assert slopes[0].tolist() == pytest.approx([-phi * advantage] * 2, rel=1e-7)


def vespo_slopes(x: list, u: Any = None, **others: Any) -> list[float]:
    """The slopes of VESPO for one row of A = 1 with log-ratios x, under sampler weights u: -phi(w), at each step."""
    correction = None if u is None else lambda old, behaviour, mask: double(u)
    rows = rows_of(double([x]).exp(), [1.0], behaviour_log_probs=-torch.ones(1, len(x)), **others)
    slopes: list[float] = losses_and_slopes(Vespo(), rows, correction)[1][0].tolist()
    return slopes


def test_vespo_clamps_each_log_ratio_and_then_their_sum():
    # 20 - 20 = 0, where 25 - 22 = 3 would be: phi(1) = 1
    assert vespo_slopes([25.0, -22.0]) == [-1.0, -1.0]
    assert vespo_slopes([22.0, -25.0]) == [-1.0, -1.0]
    # beyond e^20 phi is 0, and no NaN
    assert vespo_slopes([20.0] * 50) == [0.0] * 50


def test_vespo_multiplies_weights_of_steps_and_takes_the_weight_of_a_row_once():
    # ratios 2, 3/2, so w = 3 before the correction; u = 1/2 and 1: w = 3/2;  u = 1/2 for the row: w = 3/2 as well
    x, phi = [math.log(2), math.log(1.5)], 2.25 * math.exp(-1.5)
    assert vespo_slopes(x, u=[[0.5, 1.0]]) == pytest.approx([-phi, -phi], rel=1e-13)
    assert vespo_slopes(x, u=[[0.5]]) == pytest.approx([-phi, -phi], rel=1e-13)
    # a weight outside the mask does not count
    one_step = {"mask": torch.tensor([[True, False]])}
    assert vespo_slopes([math.log(3), 0.0], u=[[0.5, 9.0]], **one_step) == pytest.approx([-phi, 0], rel=1e-13)


def test_vespo_bounds_sampler_weights_before_they_meet_the_ratio():
    # a weight of 0 counts as 1e-8: 1e8 x 1e-8 = 1.  A weight of e^25 counts as e^20: e^-20 x e^20 = 1
    assert vespo_slopes([math.log(1e4)] * 2, u=[[0.0, 1.0]]) == pytest.approx([-1.0, -1.0], rel=1e-6)
    assert vespo_slopes([-10.0, -10.0], u=[[math.exp(25.0)]]) == pytest.approx([-1.0, -1.0], rel=1e-12)


# ratios 1/2 and 3 from the sampler to the old policy, bounded by 1.2: 1/2 x 1.2 per step, 3/2 -> 1.2 per row
def test_vespo_under_truncate_equals_the_hand_worked_gradient_at_each_level(subtests):
    for level, u in [("step", 0.6), ("row", 1.2)]:
        with subtests.test(level=level, u=u):
            x, ratios = [0.1, 0.3], double([[0.5, 3.0]])
            rows = rows_of(double([x]).exp(), [1.0], behaviour_log_probs=-1.0 - double([x]) - ratios.log())
            w = math.exp(0.4) * u
            _, slopes = losses_and_slopes(Vespo(), rows, Truncate(high=1.2, level=level))
            assert slopes[0].tolist() == pytest.approx([-(w**2) * math.exp(3 * (1 - w))] * 2, rel=1e-12)


def test_vespo_leaves_out_the_rows_that_mask_leaves_out():
    # behaviour e^-9, old e^-1: ratio e^8 > 3, weight 0, taken as 1e-8: phi = 1e-16 e^3
    rows = rows_of([[1.0]], [1.0], behaviour_log_probs=double([[-9.0]]))
    _, slopes = losses_and_slopes(Vespo(), rows, Mask())
    assert slopes.item() == pytest.approx(-1e-16 * math.exp(3), rel=1e-7)


def test_dro_equals_the_hand_worked_loss_and_gradient():
    # -A log pi + beta/2 x^2: 1.5 + .25 * .04 = 1.51;  -.5 + .25 * .01 = -.4975;  slopes -A + beta x
    rows = rows_of(double([[0.2, -0.1]]).exp(), [[3.0, -1.0]], log_probs=-0.5)
    losses, slopes = losses_and_slopes(Dro(beta=0.5), rows)
    assert losses[0].tolist() == pytest.approx([1.51, -0.4975], rel=1e-14)
    assert slopes[0].tolist() == pytest.approx([-3 + 0.5 * 0.2, 1 - 0.5 * 0.1], rel=1e-14)


def test_dro_at_row_sum_level_equals_the_hand_worked_gradient():
    # x = .2, .1, sum .3, squared once for each of the two steps: slope -A + 2 beta .3
    _, slopes = losses_and_slopes(Dro(beta=0.4, level="row_sum"), rows_of(double([[0.2, 0.1]]).exp(), [2.0]))
    assert slopes[0].tolist() == pytest.approx([-2 + 2 * 0.4 * 0.3] * 2, rel=1e-13)


# limit .2 on |pi - mu|
def test_dppo_stops_a_step_whose_probability_moved_too_far(subtests):
    for (pi, mu, advantage, stopped), sampled_as in product(
        [
            (0.6, 0.3, 2.0, True),  # + .3, pushed up
            (0.45, 0.3, 2.0, False),  # + .15
            (0.1, 0.4, 2.0, False),  # - .3, but pushed up
            (0.1, 0.4, -2.0, True),  # - .3, pushed down
            (0.25, 0.4, -2.0, False),
            (0.6, 0.3, -2.0, False),  # + .3, but pushed down
            (0.02, 0.001, 2.0, False),  # ratio 20, but the probability has hardly moved
            (0.6, 0.3, 0.0, False),
        ],
        ["old", "behaviour"],
    ):
        with subtests.test(pi=pi, mu=mu, advantage=advantage, stopped=stopped, sampled_as=sampled_as):
            log_probs, sampled = double([[math.log(pi)]]).requires_grad_(), double([[math.log(mu)]])
            # the ratio is to the old policy, the distance to what sampled
            others = {"old": {"old_log_probs": sampled}, "behaviour": {"behaviour_log_probs": sampled}}[sampled_as]
            rows = objective_inputs(log_probs, double([advantage]), **others)
            loss, slope = losses_and_slopes(Dppo(tv_limit=0.2), rows)
            ratio = pi / mu if sampled_as == "old" else 1.0
            assert loss.item() == pytest.approx(0.0 if stopped else -ratio * advantage, rel=1e-14)
            assert slope.item() == pytest.approx(0.0 if stopped else -ratio * advantage, rel=1e-14)


def test_dppo_counts_a_step_at_its_limit():
    # 1/2 - 1/4 and 1/4 - 1/2 are 1/4, exactly
    up = Steps(rows_of([[2.0]], [1.0], log_probs=math.log(0.5)))
    down = Steps(rows_of([[0.5]], [-1.0], log_probs=math.log(0.25)))
    assert Dppo(tv_limit=0.25)(up).item() == pytest.approx(-2)
    assert Dppo(tv_limit=0.25)(down).item() == pytest.approx(0.5)
    assert Dppo(tv_limit=0.2499)(up).item() == Dppo(tv_limit=0.2499)(down).item() == 0


def test_dppo_is_the_mask_of_its_paper_on_a_grid(subtests):
    for advantage in [1.0, -1.0]:
        with subtests.test(advantage=advantage):
            # eq. 12: 0 where (A > 0, rho > 1, |pi - mu| > limit) or (A < 0, rho < 1, |pi - mu| > limit)
            grid = torch.linspace(0.013, 0.987, 75, dtype=torch.float64)
            pi, mu = grid.unsqueeze(1).expand(75, 75), grid.unsqueeze(0).expand(75, 75)
            log_probs = pi.log().requires_grad_()
            rows = objective_inputs(log_probs, torch.full((75,), advantage).double(), old_log_probs=mu.log())
            losses, slopes = losses_and_slopes(Dppo(tv_limit=0.2), rows)
            stopped = (pi / mu > 1 if advantage > 0 else pi / mu < 1) & ((pi - mu).abs() > 0.2)
            torch.testing.assert_close(losses, torch.where(stopped, 0.0, -pi / mu * advantage))
            torch.testing.assert_close(slopes, torch.where(stopped, 0.0, -pi / mu * advantage))


def test_kl_cov_pulls_back_the_selected_steps_only():
    # ratios 2, 2, 1/2, 1; A = 1, coef .5; the second is not selected. Slopes -rho A + coef sign(log rho)
    selected = torch.tensor([[True, False, True, True]])
    losses, slopes = losses_and_slopes(KlCov(coef=0.5), rows_of([[2.0, 2.0, 0.5, 1.0]], [1.0], selected=selected))
    log_2 = math.log(2)
    assert losses[0].tolist() == pytest.approx([-2 + log_2 / 2, -2, -0.5 + log_2 / 2, -1], rel=1e-14)
    assert slopes[0].tolist() == pytest.approx([-1.5, -2, -1, -1], rel=1e-14)


def test_kl_cov_treats_a_log_ratio_of_a_millionth_as_rounding(subtests):
    for moved, pull in [(1.1e-6, 1.0), (-1.1e-6, -1.0), (0.9e-6, 0.0), (-0.9e-6, 0.0), (0.0, 0.0)]:
        with subtests.test(moved=moved, pull=pull):
            log_probs = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
            selected = torch.tensor([[True]])
            rows = objective_inputs(log_probs, double([0.0]), old_log_probs=double([[-moved]]), selected=selected)
            loss, slope = losses_and_slopes(KlCov(), rows)
            assert (loss.item(), slope.item()) == (pull * moved, pull)


def test_clip_cov_equals_clip_except_on_the_selected_steps():
    # bounds 1/2 and 2.5, A = 1 -> -min(rho, 2.5);  A = -1 -> max(rho, 1/2)
    selected = torch.tensor([[True, False, False, True], [True, False, False, False]])
    rows = rows_of([[0.2, 0.2, 3.0, 3.0]] * 2, [1.0, -1.0], selected=selected)
    losses, slopes = losses_and_slopes(ClipCov(low=0.5, high=1.5), rows)
    assert losses.tolist() == [pytest.approx([0, -0.2, -2.5, 0]), pytest.approx([0, 0.5, 3, 3])]
    assert slopes.tolist() == [pytest.approx([0, -0.2, 0, 0]), pytest.approx([0, 0, 3, 3])]

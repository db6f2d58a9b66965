"""Every surrogate called on `Steps`: its value and its gradient by hand, at ratio 1, inside its bounds and beyond them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import Mask, ObjectiveInputs, Truncate
from grpo.surrogates import Cispo, Clip, ClipCov, Dppo, Dro, Gmpo, KlCov, Reinforce, Sapo, Steps, Surrogate, Vespo
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


LOG2 = math.log(2)
SELECTED = torch.tensor([[True, False, False, True], [True, False, False, False]])


@pytest.mark.parametrize(("surrogate", "ratios", "advantages", "others", "losses", "slopes"), [
    # one advantage per row counts at each step: -rho A, 0 past the bound
    (Clip(low=0.25, high=0.25), [[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]], [1.0, -1.0], {},
     [[-0.5, -1.0, -1.25], [0.75, 1.0, 1.5]], [[-0.5, -1.0, 0.0], [0.0, 1.0, 1.5]]),
    # .5 A: -min(.5, .75), -min(-.5, -.75). Only the first step has a slope: -.5, on the mean of two log-ratios
    (Clip(low=0.25, high=0.25, level="row"), [[1.0, 0.25]], [[1.0, -1.0]], {}, [[-0.5, 0.75]], [[-0.25, -0.25]]),
    # -min(-2, -3) = 3;  -3;  -min(3, 2.5)
    (Clip(low=0.25, high=0.25), [[0.5, 1.0, 1.5]], [[-4.0, 3.0, 2.0]], {}, [[3.0, -3.0, -2.5]], [[0.0, -3.0, 0.0]]),
    # the bounds are 1 - .25 and 1 + .5. A < 0: delta bounds the ratio of 4, and dual the loss: the nearer, 2 or 1.75
    (Clip(low=0.25, high=0.5), [[0.5, 1.4, 1.6]], [1.0], {}, [[-0.5, -1.4, -1.5]], [[-0.5, -1.4, 0.0]]),
    (Clip(low=0.25, high=0.5, delta=2.0), [[0.5, 1.9, 4.0]], [-1.0], {}, [[0.75, 1.9, 2.0]], [[0.0, 1.9, 0.0]]),
    (Clip(low=0.25, high=0.5, delta=2.0, dual=3.0), [[0.5, 1.9, 4.0]], [-1.0], {}, [[0.75, 1.9, 2.0]], [[0.0, 1.9, 0.0]]),
    (Clip(low=0.25, high=0.5, dual=1.75), [[0.5, 1.7, 4.0]], [-1.0], {}, [[0.75, 1.7, 1.75]], [[0.0, 1.7, 0.0]]),
    (Clip(low=0.25, high=0.5, delta=2.0, dual=1.75), [[0.5, 1.7, 4.0]], [-1.0], {}, [[0.75, 1.7, 1.75]], [[0.0, 1.7, 0.0]]),
    (Clip(low=0.25, high=0.5, delta=2.0, dual=1.75), [[0.5, 1.7, 4.0]], [2.0], {}, [[-1.0, -3.0, -3.0]], [[-1.0, 0.0, 0.0]]),
    # -A log pi = .5 * 2, .5 * -4; slope -A at any ratio
    (Reinforce(), [[3.0, 0.2]], [[2.0, -4.0]], {"log_probs": -0.5}, [[1.0, -2.0]], [[-2.0, 4.0]]),
    # bounds 1 - .5 and 1 + 4: weights .5, 1, 3, 5; log pi = -1: the gradient never stops
    (Cispo(low=0.5, high=4.0), [[0.1, 1.0, 3.0, 9.0]], [2.0], {}, [[1.0, 2.0, 6.0, 10.0]], [[-1.0, -2.0, -6.0, -10.0]]),
    (Cispo(low=0.5, high=4.0), [[0.1, 1.0, 3.0, 9.0]], [-2.0], {}, [[-1.0, -2.0, -6.0, -10.0]], [[1.0, 2.0, 6.0, 10.0]]),
    (Cispo(low=1.0, high=4.0), [[0.01]], [1.0], {}, [[0.01]], [[-0.01]]),  # without a lower bound
    # x = log 8 with A = 1: log 2;  x = -log 4 with A = -1: -log 2;  mean 0, and neither step can move it
    (Gmpo(low=0.5, high=1.0), [[8.0, 0.25]], [[1.0, -1.0]], {}, [[-1.0, 1.0]], [[0.0, 0.0]]),
    (Gmpo(low=1.0, high=0.2), [[math.exp(-9)], [1.0]], [-1.0, -1.0], {"mask": torch.tensor([[True], [False]])},
     [[math.exp(-9)], [1.0]], [[math.exp(-9)], [0.0]]),  # without a lower bound, and without a step
    # -A log pi + beta/2 x^2: 1.5 + .25 * .04 = 1.51;  -.5 + .25 * .01 = -.4975;  slopes -A + beta x
    (Dro(beta=0.5), double([[0.2, -0.1]]).exp(), [[3.0, -1.0]], {"log_probs": -0.5},
     [[1.51, -0.4975]], [[-3 + 0.5 * 0.2, 1 - 0.5 * 0.1]]),
    # x = .2, .1, sum .3, squared once for each of the two steps: 2 + .4 / 2 * .09, slope -A + 2 beta .3
    (Dro(beta=0.4, level="row_sum"), double([[0.2, 0.1]]).exp(), [2.0], {}, [[2.018, 2.018]], [[-2 + 2 * 0.4 * 0.3] * 2]),
    # ratios 2, 2, 1/2, 1; A = 1, coef .5; the second is not selected. Slopes -rho A + coef sign(log rho)
    (KlCov(coef=0.5), [[2.0, 2.0, 0.5, 1.0]], [1.0], {"selected": torch.tensor([[True, False, True, True]])},
     [[-2 + LOG2 / 2, -2, -0.5 + LOG2 / 2, -1]], [[-1.5, -2, -1, -1]]),
    # except on the selected steps, bounds 1/2 and 2.5, A = 1 -> -min(rho, 2.5);  A = -1 -> max(rho, 1/2)
    (ClipCov(low=0.5, high=1.5), [[0.2, 0.2, 3.0, 3.0]] * 2, [1.0, -1.0], {"selected": SELECTED},
     [[0, -0.2, -2.5, 0], [0, 0.5, 3, 3]], [[0, -0.2, 0, 0], [0, 0, 3, 3]]),
])  # fmt: skip
def test_losses_and_slopes_of_rows_equal_hand_worked_values(surrogate, ratios, advantages, others, losses, slopes):
    found, gradient = losses_and_slopes(surrogate, rows_of(ratios, advantages, **others))
    torch.testing.assert_close(found, double(losses), rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(gradient, double(slopes), rtol=1e-14, atol=1e-15)


# sigmoid(log 3) = 3/4: the slope's factor 4 s (1 - s) is 3/4. At ratio 1 the factor is 1 and the value 2 A / tau.
@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope"), [
    (1.0, 2.0, -(4 / 0.5) * 0.5 * 2, -2.0),
    (1 + math.log(3) / 0.5, 2.0, -(4 / 0.5) * 0.75 * 2, -1.5),
    (1.0, -2.0, (4 / 2) * 0.5 * 2, 2.0),
    (1 + math.log(3) / 2, -2.0, (4 / 2) * 0.75 * 2, 1.5),
    (1 - math.log(3) / 2, -2.0, (4 / 2) * 0.25 * 2, 1.5),
    (1.0, 0.0, 0.0, 0.0),
])  # fmt: skip
def test_sapo_equals_the_hand_worked_loss_and_slope(ratio, advantage, loss, slope):
    found = loss_and_slope(Sapo(temperature_pos=0.5, temperature_neg=2.0), ratio, advantage)
    assert found == pytest.approx((loss, slope), rel=1e-14)


# Bounds 1/2 and 2. x = log 8, a hole, -log 4.
#   A = 1:   c = log 2 (bounded), -log 4;  mean -(log 2)/2: loss -1/sqrt 2
#   A = -1:  c = log 8, -log 2 (bounded);  mean log 2: loss 2
# The gradient of the sum over the row's two steps: 2 l / 2 where x is not bounded, 0 where it is.
@pytest.mark.parametrize(("advantage", "loss", "gradient"), [
    (1.0, -math.sqrt(0.5), [0, 0, -math.sqrt(0.5)]),
    (-1.0, 2.0, [2, 0, 0]),
    (0.0, 0.0, [0, 0, 0]),
])  # fmt: skip
def test_gmpo_equals_the_hand_worked_loss_and_gradient(advantage, loss, gradient):
    mask = torch.tensor([[True, False, True]])
    rows = rows_of([[8.0, math.nan, 0.25]], [advantage], mask=mask)
    losses = Gmpo(low=0.5, high=1.0)(Steps(rows))
    assert losses.tolist() == [[pytest.approx(loss, rel=1e-14)]]
    (slopes,) = torch.autograd.grad(losses.expand(1, 3)[mask].sum(), rows.log_probs)
    assert slopes[0].tolist() == pytest.approx(gradient, rel=1e-14)


def test_gmpo_bounds_a_step_without_an_advantage_below_only():
    # A = 0: x = log 8 stays, x = log 1/8 becomes log 1/2.  Means (log 8 + 0)/2 and (log 1/2 + 0)/2
    rows = rows_of([[8.0, 1.0], [0.125, 1.0]], [[0.0, 1.0], [0.0, 1.0]])
    losses, _ = losses_and_slopes(Gmpo(low=0.5, high=1.0), rows)
    assert losses[:, 1].tolist() == pytest.approx([-math.sqrt(8), -math.sqrt(0.5)], rel=1e-14)


def test_gmpo_stays_finite_if_a_step_was_nearly_impossible():
    # x = 99.9: exp overflows float32, so the mean is bounded by 20, where the gradient stops
    log_probs = torch.tensor([[-0.1]], requires_grad=True)
    rows = objective_inputs(log_probs, torch.tensor([-1.0]), old_log_probs=torch.tensor([[-100.0]]))
    loss, slope = losses_and_slopes(Gmpo(), rows)
    assert loss.item() == pytest.approx(math.exp(20))
    assert slope.item() == 0


# phi(w) = w^k exp(lambda (1 - w)); A >= 0: k 2, lambda 3;  A < 0: k 3, lambda 2
@pytest.mark.parametrize(("weight", "advantage", "phi"), [
    (2.0, 1.5, 4 * math.exp(-3)),
    (0.5, 1.5, 0.25 * math.exp(1.5)),
    (1.0, 1.5, 1.0),
    (2.0, -1.5, 8 * math.exp(-2)),
    (0.5, -1.5, 0.125 * math.exp(1)),
    (1.0, -1.5, 1.0),
    (1e-12, 1.5, 1e-16 * math.exp(3)),  # w is at least 1e-8
])  # fmt: skip
def test_vespo_equals_the_hand_worked_loss_and_gradient(weight, advantage, phi):
    vespo = Vespo(k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0)
    log_probs = double([[-2.0, -0.5]]).requires_grad_()
    old = log_probs.detach() - double([[math.log(weight) / 4, 3 * math.log(weight) / 4]])
    rows = objective_inputs(log_probs, double([advantage]), old_log_probs=old)
    losses, slopes = losses_and_slopes(vespo, rows)
    assert losses[0].tolist() == pytest.approx([2 * phi * advantage, 0.5 * phi * advantage], rel=1e-7)
    assert slopes[0].tolist() == pytest.approx([-phi * advantage] * 2, rel=1e-7)


def weighted_by(*u: float) -> Any:
    """A sampler correction with these weights."""
    return lambda old, behaviour, mask: double([u])


def phi(w: float) -> float:
    """The kernel where A >= 0."""
    return w**2 * math.exp(3 * (1 - w))


# ratios 2, 3/2, so w = 3 before the correction; u = 1/2 and 1: w = 3/2;  u = 1/2 for the row: w = 3/2 as well
RATIOS_OF_3 = [LOG2, math.log(1.5)]
# ratios 1/2 and 3 from the sampler to the old policy, bounded by 1.2: 1/2 x 1.2 per step, 3/2 -> 1.2 per row
MOVED, SAMPLED = [0.1, 0.3], {"behaviour_log_probs": -1.0 - double([[0.1, 0.3]]) - double([[0.5, 3.0]]).log()}


@pytest.mark.parametrize(("x", "correction", "others", "slopes", "rel"), [
    # each log-ratio is clamped, and then their sum: 20 - 20 = 0, where 25 - 22 = 3 would be: phi(1) = 1
    ([25.0, -22.0], None, {}, [-1.0, -1.0], 0.0),
    ([22.0, -25.0], None, {}, [-1.0, -1.0], 0.0),
    ([20.0] * 50, None, {}, [0.0] * 50, 0.0),  # beyond e^20 phi is 0, and no NaN
    (RATIOS_OF_3, weighted_by(0.5, 1.0), {}, [-phi(1.5)] * 2, 1e-13),
    (RATIOS_OF_3, weighted_by(0.5), {}, [-phi(1.5)] * 2, 1e-13),
    ([math.log(3), 0.0], weighted_by(0.5, 9.0), {"mask": torch.tensor([[True, False]])}, [-phi(1.5), 0], 1e-13),  # 9 is masked
    ([math.log(1e4)] * 2, weighted_by(0.0, 1.0), {}, [-1.0, -1.0], 1e-6),  # a weight of 0 counts as 1e-8: 1e8 x 1e-8 = 1
    ([-10.0, -10.0], weighted_by(math.exp(25.0)), {}, [-1.0, -1.0], 1e-12),  # and e^25 counts as e^20: e^-20 x e^20 = 1
    (MOVED, Truncate(high=1.2), SAMPLED, [-phi(0.6 * math.exp(0.4))] * 2, 1e-12),
    (MOVED, Truncate(high=1.2, level="row"), SAMPLED, [-phi(1.2 * math.exp(0.4))] * 2, 1e-12),
    # behaviour e^-9, old e^-1: ratio e^8 > 3, weight 0, taken as 1e-8: phi = 1e-16 e^3
    ([0.0], Mask(), {"behaviour_log_probs": double([[-9.0]])}, [-1e-16 * math.exp(3)], 1e-7),
])  # fmt: skip
def test_vespo_multiplies_bounded_ratios_and_sampler_weights(x, correction, others, slopes, rel):
    """The slopes of one row of A = 1 with log-ratios x under a sampler correction: -phi(w), at each step."""
    rows = rows_of(double([x]).exp(), [1.0], **{"behaviour_log_probs": -torch.ones(1, len(x)), **others})
    found = losses_and_slopes(Vespo(), rows, correction)[1][0].tolist()
    assert found == (pytest.approx(slopes, rel=rel) if rel else slopes)


# limit .2 on |pi - mu|
@pytest.mark.parametrize("sampled_as", ["old_log_probs", "behaviour_log_probs"])
@pytest.mark.parametrize(("pi", "mu", "advantage", "stopped"), [
    (0.6, 0.3, 2.0, True),  # + .3, pushed up
    (0.45, 0.3, 2.0, False),  # + .15
    (0.1, 0.4, 2.0, False),  # - .3, but pushed up
    (0.1, 0.4, -2.0, True),  # - .3, pushed down
    (0.25, 0.4, -2.0, False),
    (0.6, 0.3, -2.0, False),  # + .3, but pushed down
    (0.02, 0.001, 2.0, False),  # ratio 20, but the probability has hardly moved
    (0.6, 0.3, 0.0, False),
])  # fmt: skip
def test_dppo_stops_a_step_whose_probability_moved_too_far(pi, mu, advantage, stopped, sampled_as):
    log_probs, sampled = double([[math.log(pi)]]).requires_grad_(), double([[math.log(mu)]])
    # the ratio is to the old policy, the distance to what sampled
    rows = objective_inputs(log_probs, double([advantage]), **{sampled_as: sampled})
    loss, slope = losses_and_slopes(Dppo(tv_limit=0.2), rows)
    ratio = pi / mu if sampled_as == "old_log_probs" else 1.0
    assert loss.item() == pytest.approx(0.0 if stopped else -ratio * advantage, rel=1e-14)
    assert slope.item() == pytest.approx(0.0 if stopped else -ratio * advantage, rel=1e-14)


def test_dppo_counts_a_step_at_its_limit():
    # 1/2 - 1/4 and 1/4 - 1/2 are 1/4, exactly
    up = Steps(rows_of([[2.0]], [1.0], log_probs=math.log(0.5)))
    down = Steps(rows_of([[0.5]], [-1.0], log_probs=math.log(0.25)))
    assert Dppo(tv_limit=0.25)(up).item() == pytest.approx(-2)
    assert Dppo(tv_limit=0.25)(down).item() == pytest.approx(0.5)
    assert Dppo(tv_limit=0.2499)(up).item() == Dppo(tv_limit=0.2499)(down).item() == 0


@pytest.mark.parametrize(("moved", "pull"), [(1.1e-6, 1.0), (-1.1e-6, -1.0), (0.9e-6, 0.0), (-0.9e-6, 0.0), (0.0, 0.0)])
def test_kl_cov_treats_a_log_ratio_of_a_millionth_as_rounding(moved, pull):
    log_probs = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    selected = torch.tensor([[True]])
    rows = objective_inputs(log_probs, double([0.0]), old_log_probs=double([[-moved]]), selected=selected)
    loss, slope = losses_and_slopes(KlCov(), rows)
    assert (loss.item(), slope.item()) == (pull * moved, pull)

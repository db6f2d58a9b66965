"""KL and entropy estimates: their values and slopes by hand, and their gradients in expectation by enumeration."""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from grpo import divergence
from grpo.divergence import SampledKL, estimate_kl, kl_k3, kl_k3_weighted, score_function_entropy
from tests.support.objective_inputs import FourActions

LOG2 = math.log(2)
# x = log 2: pi is twice as likely as ref.  x = -log 2: half as likely.
X = torch.tensor([[LOG2, 0.0, -LOG2, 1.0]], dtype=torch.float64)
RATIO = torch.tensor([[2.0, 1.0, 0.5, 1.5]], dtype=torch.float64)
VALUES = {
    "k1": [LOG2, 0, -LOG2, 1],
    "k2": [LOG2**2 / 2, 0, LOG2**2 / 2, 0.5],
    "k3": [0.5 + LOG2 - 1, 0, 2 - LOG2 - 1, 1 / math.e],  # exp(-x) + x - 1
    "k3_weighted": [2 * (LOG2 - 0.5), 0, 0.5 * (1 - LOG2), 1.5 / math.e],
}
# in x, where rho is a constant
SLOPES = {
    "k1": [1, 1, 1, 1],
    "k2": [LOG2, 0, -LOG2, 1],
    "k3": [0.5, 0, -1, 1 - 1 / math.e],  # 1 - exp(-x)
    "k3_weighted": [2 * 0.5, 0, -0.5, 1.5 * (1 - 1 / math.e)],
}
OTHER_POLICY = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)


@pytest.mark.parametrize("estimator", get_args(SampledKL))
def test_each_kl_estimator_equals_hand_worked_values_and_gradients(estimator):
    x, ratio = X.clone().requires_grad_(), RATIO.clone().requires_grad_()
    by_itself = getattr(divergence, f"kl_{estimator}")(x, **({"ratio": ratio} if estimator == "k3_weighted" else {}))
    for estimate in (by_itself, estimate_kl(estimator, x, ratio)):
        assert estimate[0].tolist() == pytest.approx(VALUES[estimator], rel=1e-14)
        by_x, by_ratio = torch.autograd.grad(estimate.sum(), (x, ratio), allow_unused=True)
        assert by_x[0].tolist() == pytest.approx(SLOPES[estimator], rel=1e-14)
        if estimator == "k3_weighted":
            assert by_ratio[0].tolist() == pytest.approx(VALUES["k3"], rel=1e-14)
        else:
            assert by_ratio is None


def test_one_ratio_per_row_weights_every_step_of_k3():
    assert kl_k3_weighted(X, RATIO[:, :1])[0].tolist() == pytest.approx([2 * k3 for k3 in VALUES["k3"]])


def test_the_allowed_estimators_are_the_tested_ones():
    assert get_args(SampledKL) == tuple(VALUES)
    assert get_args(divergence.KLEstimator) == (*VALUES, "exact")
    assert get_args(divergence.EntropyEstimator) == ("exact", "score_function")


@pytest.mark.parametrize(("x", "value", "slope"), [
    (-20.5, math.exp(20) - 21, 0.0),  # bounded at -20, where value and slope stop
    (-19.5, math.exp(19.5) - 20.5, 1 - math.exp(19.5)),
    (19.5, math.exp(-19.5) + 18.5, 1 - math.exp(-19.5)),
    (20.5, math.exp(-20.5) + 19.5, 1 - math.exp(-20.5)),
])  # fmt: skip
def test_k3_is_constant_where_the_reference_is_far_more_likely(x, value, slope):
    leaf = torch.tensor([[x]], dtype=torch.float64, requires_grad=True)
    estimate = kl_k3(leaf)
    assert estimate.item() == pytest.approx(value, rel=1e-12)
    assert torch.autograd.grad(estimate, leaf)[0].item() == pytest.approx(slope, rel=1e-12)


@pytest.mark.parametrize("x", [1e-4, -1e-4])
def test_k3_is_accurate_near_the_reference(x):
    # x^2 / 2 = 5e-9, where exp(-x) + x - 1 in float32 is off by up to 6e-8
    assert kl_k3(torch.tensor([[x]], dtype=torch.float32)).item() == pytest.approx(5e-9, rel=0.01)


def estimate_for(estimator: str, policy: FourActions, sampler: Tensor) -> Tensor:
    """The estimate for each of the four actions, [4], with gradient."""
    log_probs = policy.log_probs()
    ratio = (log_probs - sampler.log().unsqueeze(1)).exp()
    if estimator == "entropy":
        return score_function_entropy(log_probs, ratio).squeeze(1)
    return estimate_kl(estimator, log_probs - policy.ref_log_probs(), ratio).squeeze(1)


def expected_value(estimator: str, policy: FourActions, sampler: Tensor) -> float:
    """E_{a ~ sampler}: a sum over all four actions, no sampling."""
    return (sampler * estimate_for(estimator, policy, sampler)).sum().item()


def expected_gradient(estimator: str, policy: FourActions, sampler: Tensor) -> Tensor:
    """E_{a ~ sampler} of the gradient in theta."""
    return torch.autograd.grad((sampler * estimate_for(estimator, policy, sampler)).sum(), policy.theta)[0]


def kl_to_ref(policy: FourActions) -> float:
    return sum(p * math.log(p / r) for p, r in zip(policy.probs.tolist(), policy.ref.tolist(), strict=True))


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_weighted"])
def test_k1_and_k3_are_unbiased_values_on_policy_and_weighted_k3_off_policy_too(estimator):
    policy = FourActions.example()
    for sampler in [policy.probs, *([OTHER_POLICY] if estimator == "k3_weighted" else [])]:
        assert expected_value(estimator, policy, sampler) == pytest.approx(kl_to_ref(policy), rel=1e-12)


def test_score_function_entropy_equals_hand_worked_values_and_gradients():
    # h = -rho log pi, with log pi held fixed: slope in rho -log pi, none in log pi
    log_probs = torch.tensor([[-1.0, -3.0]], dtype=torch.float64, requires_grad=True)
    ratio = torch.tensor([[1.5, 0.5]], dtype=torch.float64, requires_grad=True)
    estimate = score_function_entropy(log_probs, ratio)
    assert estimate.tolist() == [[1.5, 1.5]]
    by_log_prob, by_ratio = torch.autograd.grad(estimate.sum(), (log_probs, ratio), allow_unused=True)
    assert by_log_prob is None
    assert by_ratio.tolist() == [[1.0, 3.0]]


@pytest.mark.parametrize("off_policy", [False, True])
def test_score_function_entropy_has_the_value_and_the_gradient_of_the_entropy(off_policy):
    policy = FourActions.example()
    sampler = OTHER_POLICY if off_policy else policy.probs
    entropy = -sum(p * math.log(p) for p in policy.probs.tolist())
    assert expected_value("entropy", policy, sampler) == pytest.approx(entropy, rel=1e-12)
    expected = policy.gradient_of_entropy().tolist()
    assert expected_gradient("entropy", policy, sampler).tolist() == pytest.approx(expected, rel=1e-12)

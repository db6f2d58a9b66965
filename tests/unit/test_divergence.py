"""KL and entropy estimates: their numbers and slopes, and by enumeration the gradients that they have in expectation."""

import math

import pytest
import torch

from grpo import kl_k1, kl_k2, kl_k3, kl_k3_weighted, score_function_entropy
from grpo.divergence import estimate_kl
from grpo.step_loss import StepLoss
from tests.support import FourActions

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
# in x, and of k3_weighted in rho
SLOPES = {
    "k1": [1, 1, 1, 1],
    "k2": [LOG2, 0, -LOG2, 1],
    "k3": [0.5, 0, -1, 1 - 1 / math.e],  # 1 - exp(-x)
    "k3_weighted": [2 * 0.5, 0, -0.5, 1.5 * (1 - 1 / math.e)],
}
OTHER_POLICY = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)


def test_the_estimators_on_given_numbers():
    estimates = {"k1": kl_k1(X), "k2": kl_k2(X), "k3": kl_k3(X), "k3_weighted": kl_k3_weighted(X, RATIO)}
    for name, term in estimates.items():
        assert term.loss[0].tolist() == pytest.approx(VALUES[name])
        assert term.by_log_prob[0].tolist() == pytest.approx(SLOPES[name])
        assert (term.by_ratio is None) == (name != "k3_weighted")
    assert estimates["k3_weighted"].by_ratio[0].tolist() == pytest.approx(VALUES["k3"])


@pytest.mark.parametrize(
    ("x", "value", "slope"),
    [
        (-20.5, math.exp(20) - 21, 0.0),  # bounded at -20, where both stop
        (-19.5, math.exp(19.5) - 20.5, 1 - math.exp(19.5)),
        (19.5, math.exp(-19.5) + 18.5, 1 - math.exp(-19.5)),
        (20.5, math.exp(-20.5) + 19.5, 1 - math.exp(-20.5)),
    ],
)
def test_k3_stops_where_the_reference_is_far_ahead(x, value, slope):
    for others in ([0.0], [-99.0], []):  # whatever stands beside it
        term = kl_k3(torch.tensor([[x, *others]], dtype=torch.float64))
        assert term.loss[0, 0].item() == pytest.approx(value, rel=1e-12)
        assert term.by_log_prob[0, 0].item() == pytest.approx(slope, rel=1e-12)


@pytest.mark.parametrize("estimator", VALUES)
def test_the_choice_by_name(estimator):
    assert estimate_kl(estimator, X, RATIO).loss[0].tolist() == pytest.approx(VALUES[estimator])


def test_k3_is_never_negative():
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64).unsqueeze(0)
    assert (kl_k3(x).loss >= 0).all()


@pytest.mark.parametrize("x", [1e-4, -1e-4])
def test_k3_keeps_its_digits_near_the_reference(x):
    # x^2 / 2 = 5e-9, where exp(-x) + x - 1 in float32 is off by up to 6e-8
    assert kl_k3(torch.tensor([[x]], dtype=torch.float32)).loss.item() == pytest.approx(5e-9, rel=0.01)


def x_and_ratio(policy: FourActions, sampler: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = policy.log_probs()
    x, ratio = log_probs - policy.ref_log_probs(), (log_probs - sampler.log().unsqueeze(1)).exp()
    return x.detach(), ratio.detach()


def push(term: StepLoss, ratio: torch.Tensor) -> torch.Tensor:
    """The whole slope in the log-prob: d rho / d log pi = rho, and d x / d log pi = 1."""
    parts = [term.by_log_prob, None if term.by_ratio is None else term.by_ratio * ratio]
    return sum(part for part in parts if part is not None)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_weighted"])
def test_unbiased_as_a_number_on_policy(estimator):
    policy = FourActions.example()
    estimates = estimate_kl(estimator, *x_and_ratio(policy, policy.probs)).loss.squeeze(1)
    kl = sum(p * math.log(p / r) for p, r in zip(policy.probs.tolist(), policy.ref.tolist(), strict=True))
    assert (policy.probs * estimates).sum().item() == pytest.approx(kl, rel=1e-12)


def test_k3_weighted_is_unbiased_as_a_number_off_policy():
    policy = FourActions.example()
    estimates = kl_k3_weighted(*x_and_ratio(policy, OTHER_POLICY)).loss.squeeze(1)
    kl = sum(p * math.log(p / r) for p, r in zip(policy.probs.tolist(), policy.ref.tolist(), strict=True))
    assert (OTHER_POLICY * estimates).sum().item() == pytest.approx(kl, rel=1e-12)


def gradient(estimator: str, policy: FourActions, sampler: torch.Tensor) -> torch.Tensor:
    x, ratio = x_and_ratio(policy, sampler)
    return policy.expected_gradient(push(estimate_kl(estimator, x, ratio), ratio), sampler)


def test_the_gradient_of_k1_is_zero_in_expectation():
    policy = FourActions.example()
    assert gradient("k1", policy, policy.probs).tolist() == pytest.approx([0] * 4, abs=1e-15)


@pytest.mark.parametrize("estimator", ["k2", "k3_weighted"])
def test_the_gradient_of_k2_and_k3_weighted_is_that_of_kl_to_the_reference(estimator):
    policy = FourActions.example()
    expected = policy.gradient_of_kl_to_ref().tolist()
    assert gradient(estimator, policy, policy.probs).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_gradient_of_k3_weighted_is_right_off_policy_too():
    policy = FourActions.example()
    expected = policy.gradient_of_kl_to_ref().tolist()
    assert gradient("k3_weighted", policy, OTHER_POLICY).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_gradient_of_k3_is_that_of_kl_from_the_reference():
    policy = FourActions.example()
    expected = policy.gradient_of_kl_from_ref().tolist()
    assert gradient("k3", policy, policy.probs).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("off_policy", [False, True])
def test_score_function_entropy_has_the_value_and_the_gradient_of_the_entropy(off_policy):
    policy = FourActions.example()
    sampler = OTHER_POLICY if off_policy else policy.probs
    _, ratio = x_and_ratio(policy, sampler)
    estimates = score_function_entropy(policy.log_probs().detach(), ratio)
    entropy = -sum(p * math.log(p) for p in policy.probs.tolist())
    assert (sampler * estimates.loss.squeeze(1)).sum().item() == pytest.approx(entropy, rel=1e-12)
    expected = policy.gradient_of_entropy().tolist()
    assert policy.expected_gradient(push(estimates, ratio), sampler).tolist() == pytest.approx(expected, rel=1e-12)


def test_minus_log_prob_has_no_gradient_in_expectation():
    policy = FourActions.example()
    assert policy.expected_gradient(-torch.ones(4, 1).double(), policy.probs).tolist() == pytest.approx(
        [0] * 4, abs=1e-15
    )


def test_the_closed_forms_themselves_agree_with_differences():
    policy = FourActions.example()

    def divergences(theta: torch.Tensor) -> tuple[float, float, float]:
        weights = [math.exp(t) for t in theta.tolist()]
        pi, ref = [w / sum(weights) for w in weights], policy.ref.tolist()
        return (
            sum(p * math.log(p / r) for p, r in zip(pi, ref, strict=True)),
            sum(r * math.log(r / p) for p, r in zip(pi, ref, strict=True)),
            -sum(p * math.log(p) for p in pi),
        )

    forms = policy.gradient_of_kl_to_ref(), policy.gradient_of_kl_from_ref(), policy.gradient_of_entropy()
    step = 1e-6
    for k in range(4):
        move = torch.zeros(4, dtype=torch.float64)
        move[k] = step
        above, below = divergences(policy.theta.detach() + move), divergences(policy.theta.detach() - move)
        slopes = [(a - b) / (2 * step) for a, b in zip(above, below, strict=True)]
        assert slopes == pytest.approx([form[k].item() for form in forms], abs=1e-8)

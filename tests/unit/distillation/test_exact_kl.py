"""The exact KL to a teacher: values and gradients worked out by hand, and what joining choices does to them."""

import math

import pytest
import torch

from grpo.distillation import exact_kl
from grpo.divergence import kl_k2
from grpo.errors import ConfigError, ContractError
from tests.support.objective_inputs import as_users_run_it

PI = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
TEACHER = torch.tensor([0.1, 0.8, 0.1], dtype=torch.float64)


def test_the_value_of_three_choices_worked_out_by_hand() -> None:
    """.5 log 5 + .25 log(5/16) + .25 log 2.5 = .8047 - .2908 + .2291 = .7430."""
    expected = 0.5 * math.log(5) + 0.25 * math.log(0.3125) + 0.25 * math.log(2.5)
    assert exact_kl(PI.log(), TEACHER.log()).item() == pytest.approx(expected)
    assert expected == pytest.approx(0.7430, abs=1e-4)


def test_the_gradient_worked_out_by_hand() -> None:
    """dKL / dlogit_a = pi_a (log(pi_a / teacher_a) - KL): .5 (1.6094 - .7430) = .4332 for the first choice."""
    logits = PI.log().requires_grad_()
    exact_kl(logits.log_softmax(0), TEACHER.log()).backward()
    kl = 0.5 * math.log(5) + 0.25 * math.log(0.3125) + 0.25 * math.log(2.5)
    expected = [p * (math.log(p / q) - kl) for p, q in zip(PI.tolist(), TEACHER.tolist(), strict=True)]
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx(expected)
    assert expected[0] == pytest.approx(0.4332, abs=1e-4)


def test_the_gradient_is_the_expected_gradient_of_k2() -> None:
    """The sum over the choices of pi(a) times the gradient of k2 at a."""
    logits = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    teacher = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log_softmax(0)
    (exact,) = torch.autograd.grad(exact_kl(logits.log_softmax(0), teacher), logits)
    log_probs = logits.log_softmax(0)
    k2 = kl_k2((log_probs - teacher).unsqueeze(0)).squeeze(0)
    (sampled,) = torch.autograd.grad((log_probs.exp().detach() * k2).sum(), logits)
    torch.testing.assert_close(sampled, exact)


def test_the_likeliest_choices_of_the_teacher_and_one_term_for_the_rest() -> None:
    """top=1 keeps the second choice, .25 against .8; the rest has .75 and .2: .25 log(.3125) + .75 log 3.75 = .7005."""
    expected = 0.25 * math.log(0.3125) + 0.75 * math.log(3.75)
    assert exact_kl(PI.log(), TEACHER.log(), top=1).item() == pytest.approx(expected)
    assert expected == pytest.approx(0.7005, abs=1e-4)


def test_the_gradient_of_the_joined_choices_is_shared_in_proportion_to_their_probabilities() -> None:
    """The two joined choices have .5 and .25 of the rest's .75, and get 2/3 and 1/3 of its gradient."""
    logits = PI.log().requires_grad_()
    exact_kl(logits.log_softmax(0), TEACHER.log(), top=1).backward()
    kl = 0.25 * math.log(0.3125) + 0.75 * math.log(3.75)
    rest = 0.75 * (math.log(3.75) - kl)
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([rest * 2 / 3, 0.25 * (math.log(0.3125) - kl), rest / 3])


def test_more_choices_bring_the_sum_nearer_to_the_exact_kl_from_below() -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = (3 * torch.randn(5, 4, 40, dtype=torch.float64, generator=generator)).log_softmax(-1)
    teacher = (3 * torch.randn(5, 4, 40, dtype=torch.float64, generator=generator)).log_softmax(-1)
    exact = exact_kl(log_probs, teacher)
    values = [exact_kl(log_probs, teacher, top=top) for top in (1, 2, 5, 10, 20, 39)]
    assert exact.shape == (5, 4)
    for fewer, more in zip(values, [*values[1:], exact], strict=True):
        assert bool((fewer <= more + 1e-12).all())
    torch.testing.assert_close(values[-1], exact)  # the rest is one choice, so nothing is joined
    assert torch.equal(exact_kl(log_probs, teacher, top=40), exact)
    assert torch.equal(exact_kl(log_probs, teacher, top=1000), exact)


@pytest.mark.parametrize("top", [None, 1, 2])
def test_a_choice_that_neither_can_take_adds_nothing_and_has_no_gradient(top: int | None) -> None:
    logits = torch.tensor([0.0, 1.0, -torch.inf], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([1.0, 0.0, -torch.inf], dtype=torch.float64)
    kl = exact_kl(logits.log_softmax(0), teacher.log_softmax(0), top=top)
    kl.backward()
    assert kl.item() == pytest.approx(exact_kl(logits[:2].log_softmax(0), teacher[:2].log_softmax(0)).item())
    assert logits.grad is not None
    assert logits.grad[2] == 0
    assert bool(logits.grad.isfinite().all())


def test_no_gradient_reaches_the_teacher() -> None:
    logits, teacher = PI.log().requires_grad_(), TEACHER.log().requires_grad_()
    exact_kl(logits.log_softmax(0), teacher.log_softmax(0), top=2).backward()
    assert teacher.grad is None


def test_wrong_arguments_are_refused() -> None:
    with (
        as_users_run_it(),
        pytest.raises(ContractError, match=r"exact_kl: log_probs and teacher_log_probs must have one shape"),
    ):
        exact_kl(PI.log(), TEACHER[:2].log())
    with pytest.raises(ConfigError, match=r"exact_kl: top must be >= 1; got 0"):
        exact_kl(PI.log(), TEACHER.log(), top=0)

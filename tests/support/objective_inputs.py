"""What the tests of the objective share: small inputs, a loss with its gradient, and a policy that can be enumerated."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jaxtyping
import torch
from torch import Tensor

from grpo import ObjectiveConfig, ObjectiveInputs, grpo_objective
from grpo.surrogates import SURROGATES

WITHOUT_LEVEL = [name for name, kind in SURROGATES.items() if "level" not in kind().to_dict()]
"""Names of the surrogates that have no setting `level`."""


def double(values: Any) -> Tensor:
    """Numbers in float64."""
    return torch.tensor(values, dtype=torch.float64)


def objective_inputs(log_probs: Tensor, advantages: Tensor, **others: Any) -> ObjectiveInputs:
    """Inputs with every step valid, valid steps of weight 1, and the current policy as the old one, unless told otherwise."""
    mask = others.get("mask", torch.ones(log_probs.shape, dtype=torch.bool))
    defaults: dict[str, Any] = {"old_log_probs": None, "mask": mask, "weights": mask.double()}
    return ObjectiveInputs(log_probs=log_probs, advantages=advantages, **{**defaults, **others})


def loss_and_gradient(
    log_probs: Tensor, advantages: Tensor, config: ObjectiveConfig, **others: Any
) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient with respect to `log_probs`."""
    leaf = log_probs.detach().clone().requires_grad_()
    loss = grpo_objective(objective_inputs(leaf, advantages, **others), config).loss
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@dataclass(frozen=True)
class FourActions:
    """A softmax policy over four actions, with closed forms to hold estimates against.

    With pi = softmax(theta): d log pi_a / d theta_k = [a = k] - pi_k, from which the gradients below follow.
    """

    theta: Tensor
    ref: Tensor

    @classmethod
    def example(cls) -> "FourActions":
        theta = torch.tensor([0.3, -0.8, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
        return cls(theta, torch.tensor([0.4, 0.1, 0.2, 0.3], dtype=torch.float64))

    @property
    def probs(self) -> Tensor:
        return self.theta.detach().exp() / self.theta.detach().exp().sum()

    def log_probs(self) -> Tensor:
        """log pi of every action, one row each, with gradient."""
        return self.theta.log_softmax(0).unsqueeze(1)

    def ref_log_probs(self) -> Tensor:
        return self.ref.log().unsqueeze(1)

    def expected_gradient(self, slope: Tensor, sampler: Tensor) -> Tensor:
        """E_{a ~ sampler} of `slope[a]` grad log pi(a): a sum over all four, no sampling."""
        (gradient,) = torch.autograd.grad((sampler * (slope * self.log_probs()).squeeze(1)).sum(), self.theta)
        return gradient

    def gradient_of_kl_to_ref(self) -> Tensor:
        """d KL(pi || ref) / d theta_k = pi_k (x_k - KL), with x = log(pi / ref)."""
        x = (self.probs / self.ref).log()
        return self.probs * (x - (self.probs * x).sum())

    def gradient_of_kl_from_ref(self) -> Tensor:
        """d KL(ref || pi) / d theta_k = pi_k - ref_k."""
        return self.probs - self.ref

    def gradient_of_entropy(self) -> Tensor:
        """d H / d theta_k = -pi_k (log pi_k + H)."""
        log_probs = self.probs.log()
        return -self.probs * (log_probs - (self.probs * log_probs).sum())


@contextmanager
def as_users_run_it() -> Iterator[None]:
    """Without the type checks that pytest's jaxtyping hook puts before every call into grpo: users have none.

    Functions within functions are not wrapped either, each time they are defined, which takes longer than all the rest.
    """
    wrap = jaxtyping.jaxtyped
    jaxtyping.config.update("jaxtyping_disable", True)
    jaxtyping.jaxtyped = lambda **_: lambda function: function
    try:
        yield
    finally:
        jaxtyping.jaxtyped = wrap
        jaxtyping.config.update("jaxtyping_disable", False)

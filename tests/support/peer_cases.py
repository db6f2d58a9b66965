"""Random batches for the parity tests, and a comparison of losses and gradients."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo import ObjectiveInputs, step_weights
from grpo.distillation import exact_kl

TOLERANCE = 1e-9
"""Largest relative error in float64, of losses and of gradients."""

SMALLEST = 1e-6
"""Losses that cancel to less than this are compared absolutely."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One update's tensors, [N, T] each: ragged rows with holes, some without any step."""

    seed: int
    log_probs: Tensor
    old_log_probs: Tensor | None
    ref_log_probs: Tensor
    behaviour_log_probs: Tensor
    """NaN here and there."""
    entropy: Tensor
    """Numbers that float32 holds: TRL takes their quantile in float32."""
    advantages: Tensor
    """[N] or [N, T]."""
    mask: Tensor


def draws(seed: int, count: int) -> Iterator[tuple[int, random.Random, torch.Generator]]:
    """`count` reproducible sources of randomness: a seed, and two generators that start from it."""
    for number in range(seed * 100_000, seed * 100_000 + count):
        yield number, random.Random(number), torch.Generator().manual_seed(number)


def random_case(seed: int, choose: random.Random, generator: torch.Generator, *, num_rows: int | None = None) -> Case:
    """Ratios on both sides of every bound: the policy has moved by 0.02 to 5 per step, but by less than 20, our bound."""
    count, width = num_rows or choose.randint(1, 6), choose.randint(1, 6)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    log_probs = -normal(count, width).abs()
    moved = choose.choice([0.02, 0.3, 1.0, 5.0]) * normal(count, width)
    old = None if choose.random() < 0.2 else log_probs + moved.clamp(-19.0, 19.0)
    behaviour = (log_probs if old is None else old) + choose.choice([0.02, 0.3, 1.0]) * normal(count, width)
    unscored = torch.rand(count, width, generator=generator) < choose.choice([0.0, 0.2])
    advantages = normal(count) if choose.random() < 0.6 else normal(count, width)
    advantages[torch.rand(advantages.shape, generator=generator) < 0.1] = 0.0
    return Case(
        seed=seed,
        log_probs=log_probs,
        old_log_probs=old,
        ref_log_probs=log_probs + choose.choice([0.05, 0.5]) * normal(count, width),
        behaviour_log_probs=behaviour.masked_fill(unscored, torch.nan),
        entropy=normal(count, width).abs().float().double(),
        advantages=advantages,
        mask=torch.rand(count, width, generator=generator) < choose.choice([0.4, 0.8, 1.0]),
    )


def assert_equal(
    formula: str, ours: Tensor, theirs: Tensor, case: object, *, rtol: float = 0.0, atol: float | None = None
) -> None:
    """Two sides of one formula are equal and finite. A failure says the formula, and the case: the seed and the settings.

    `atol` is `TOLERANCE` times the largest entry unless it is given.
    """
    ours, theirs = (values.detach().double().cpu() for values in (ours, theirs))
    assert theirs.isfinite().all(), f"{formula}: theirs is {theirs}; case: {case}"
    if atol is None:
        atol = TOLERANCE * max([SMALLEST, *theirs.abs().flatten().tolist()])
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, msg=lambda text: f"{formula}: {text}\ncase: {case}")


def assert_equal_losses(formula: str, ours: Tensor, theirs: Tensor, leaves: Mapping[str, Tensor], case: object) -> None:
    """Equal losses, and equal gradients with respect to every leaf, by name."""
    assert_equal(f"{formula}, loss", ours, theirs, case)
    gradients = (
        torch.autograd.grad(loss, tuple(leaves.values()), retain_graph=True, materialize_grads=True)
        for loss in (ours, theirs)
    )
    for name, mine, other in zip(leaves, *gradients, strict=True):
        assert_equal(f"{formula}, gradient in {name}", mine, other, case)


class Logits:
    """Rows of different lengths: logits with gradient, those of a teacher, tokens, and log-probs at sampling."""

    NUM_ROWS, NUM_STEPS, NUM_CHOICES = 5, 7, 12

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (self.NUM_ROWS, self.NUM_STEPS, self.NUM_CHOICES)
        self.student, self.teacher = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
        self.student.requires_grad_()
        self.tokens = torch.randint(self.NUM_CHOICES, shape[:2], generator=generator)
        lengths = torch.randint(1, self.NUM_STEPS + 1, (self.NUM_ROWS, 1), generator=generator)
        self.mask = torch.arange(self.NUM_STEPS) < lengths
        self.labels = torch.where(self.mask, self.tokens, -100)
        self.log_probs, self.ref_log_probs = map(self.of_tokens, (self.student, self.teacher))
        self.old_log_probs = self.log_probs.detach() + torch.randn(shape[:2], dtype=torch.float64, generator=generator)

    def of_tokens(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)

    def exact_kl(self) -> Tensor:
        return exact_kl(self.student.log_softmax(-1), self.teacher.log_softmax(-1))

    def inputs(self, aggregation: Any, **others: Any) -> ObjectiveInputs:
        given = {
            "advantages": torch.zeros(self.NUM_ROWS, dtype=torch.float64),
            "old_log_probs": self.old_log_probs,
            **others,
        }
        nan = {name: torch.where(self.mask, getattr(self, name), torch.nan) for name in ("log_probs", "ref_log_probs")}
        return ObjectiveInputs(mask=self.mask, weights=step_weights(self.mask, aggregation), **nan | given)

    def assert_same(self, ours: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(ours, theirs)
        self.assert_same_slopes(ours, theirs)

    def assert_same_slopes(self, ours: Tensor, theirs: Tensor, **tolerance: float) -> None:
        slopes = [torch.autograd.grad(loss, self.student, retain_graph=True)[0] for loss in (ours, theirs)]
        torch.testing.assert_close(*slopes, **tolerance)
        assert bool(slopes[0].any())

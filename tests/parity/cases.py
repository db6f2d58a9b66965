"""Random batches for the parity tests, and how equal two results are."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest of their numbers."""
    ours, theirs = ours.detach(), theirs.detach()
    assert ours.isfinite().all()
    assert theirs.isfinite().all()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=SMALLEST))

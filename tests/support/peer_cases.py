"""Random batches for the parity tests, and a comparison that shows both values where they differ."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 1e-9
"""Largest relative error in float64, of losses and of gradients."""

SMALLEST = 1e-6
"""Losses that cancel to less than this are compared absolutely."""

SHOWN = 8
"""Entries that a failure shows, those of largest difference first."""


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
    formula: str, ours: Tensor, theirs: Tensor, case: object, *, allowed: Tensor | float | None = None
) -> None:
    """Two sides of one formula are equal; where they differ, the failure shows both values side by side.

    Args:
        formula: What was computed, in words.
        ours: Our value.
        theirs: The other library's value.
        case: The seed and the settings, for the failure.
        allowed: Largest absolute difference, for all entries or for each. None: `TOLERANCE` times their largest entry.
    """
    ours, theirs = ours.detach(), theirs.detach()
    assert ours.shape == theirs.shape, (
        f"{formula}: ours is {list(ours.shape)}, theirs {list(theirs.shape)}; case: {case}"
    )
    if not ours.numel():
        return
    ours, theirs = ours.double().cpu(), theirs.double().cpu()
    if allowed is None:
        allowed = TOLERANCE * float(theirs.abs().max().clamp(min=SMALLEST))
    error = (ours - theirs).abs()
    wrong = ~(error <= allowed) | ~error.isfinite()
    if not wrong.any():
        return
    worst = error.nan_to_num(torch.inf).masked_fill(~wrong, -1.0).flatten().argsort(descending=True)[: int(wrong.sum())]
    lines = [f"{'entry':<12}{'ours':<24}theirs"]
    for place in worst[:SHOWN].tolist():
        entry = [int(index) for index in torch.unravel_index(torch.tensor(place), ours.shape)]
        lines.append(f"{entry!s:<12}{ours.flatten()[place].item():<24.15g}{theirs.flatten()[place].item():.15g}")
    raise AssertionError(
        f"{formula}: {len(worst)} of {ours.numel()} entries differ, by up to {float(error[wrong].max()):.3g}.\n  "
        + "\n  ".join(lines)
        + f"\n  case: {case}"
    )


def assert_equal_losses(formula: str, ours: Tensor, theirs: Tensor, leaves: Mapping[str, Tensor], case: object) -> None:
    """Equal losses, and equal gradients with respect to every leaf, by name."""
    assert_equal(f"{formula}, loss", ours, theirs, case)
    gradients = (
        torch.autograd.grad(loss, tuple(leaves.values()), retain_graph=True, materialize_grads=True)
        for loss in (ours, theirs)
    )
    for name, mine, other in zip(leaves, *gradients, strict=True):
        assert_equal(f"{formula}, gradient in {name}", mine, other, case)

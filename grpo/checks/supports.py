"""Supports of real numbers that are no box, as far as samples show them: where a line through a sample may run.

Lines run parallel to the axes, unless all samples lie in a plane, like the points of a simplex and symmetric matrices. Then
lines run in the plane. Points of a line count only if they have what all samples have: numbers of at least 0 in a plane,
an order, or a positive definite matrix. Numbers whose density repeats after 2 pi are angles, and their lines go round once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Condition = Callable[[Tensor], Tensor]
"""Maps points [M, D] to bool [M]: whether something holds for them."""

EXACT = 1e-4
"""Sizes up to this one, relative to a standard deviation, count as rounding."""
CURVED = (
    "The numbers of all samples satisfy an equation, like those of unit vectors and rotations. A straight line through a "
    "sample leaves such a support, so the density cannot be integrated."
)


@dataclass(frozen=True, slots=True)
class Support:
    """Lines through samples."""

    directions: Float[Tensor, "K D"]
    """The directions of lines."""
    places: Float[Tensor, "N K"]
    """Where each sample stands on its lines."""
    conditions: list[Condition] = field(default_factory=list)
    """What holds for all samples."""

    def contains(self, points: Float[Tensor, "M D"]) -> Bool[Tensor, " M"]:
        """Whether points have what all samples have."""
        inside = torch.ones(len(points), dtype=torch.bool)
        for holds in self.conditions:
            inside &= holds(points)
        return inside


def support_of(values: Float[Tensor, "N D"]) -> Support | None:
    """The support of the samples, whose numbers all vary. None: it is curved, so no line stays inside."""
    count, width = values.shape
    orders: list[Condition] = [
        lambda points: (points.diff(dim=1) >= 0).all(1),
        lambda points: (points.diff(dim=1) <= 0).all(1),
    ]
    conditions = [holds for holds in orders if width > 1 and bool(holds(values).all())]
    if count < 4 * width:
        return Support(torch.eye(width, dtype=values.dtype), values, conditions)
    scale = values.std(0)
    white = (values - values.mean(0)) / scale
    sizes, basis = torch.linalg.eigh(white.T @ white / count)
    kept = sizes > EXACT**2
    places = white @ basis[:, kept]
    if _has_equation(places / sizes[kept].sqrt()):
        return None
    if bool(kept.all()):
        return Support(torch.eye(width, dtype=values.dtype), values, conditions)
    if bool((values >= 0).all()):
        conditions.append(lambda points: (points >= 0).all(1))
    if _are_symmetric(values) and bool(_is_positive_definite(values).all()):
        conditions.append(_is_positive_definite)
    return Support((basis[:, kept] * scale.unsqueeze(1)).T, places, conditions)


def angles_start(
    values: Float[Tensor, " N"], density: Callable[[Tensor], Tensor], own: Float[Tensor, " M"]
) -> float | None:
    """Where angles begin: at -pi or 0. None: the numbers are no angles.

    Args:
        values: One number of each sample.
        density: Maps what is added to this number to the densities of some samples.
        own: The densities of these samples.
    """
    starts = [
        start
        for start in (-math.pi, 0.0)
        if bool(((values >= start - EXACT) & (values <= start + 2 * math.pi + EXACT)).all())
    ]
    if not starts or bool((own == own[0]).all()):
        return None
    try:
        turned = [density(torch.tensor(turn)) for turn in (-2 * math.pi, 2 * math.pi)]
    except Exception:  # recovery: the policy refuses other numbers, so they are no angles
        return None
    return starts[0] if all(bool(((each - own).abs() <= 1e-3 * own).all()) for each in turned) else None


def _has_equation(white: Tensor) -> bool:
    """Whether a polynomial of degree 2 is 0 at all samples."""
    rows, columns = torch.triu_indices(white.shape[1], white.shape[1])
    if 4 * (len(rows) + white.shape[1]) > len(white):
        return False  # too few samples to tell
    terms = torch.cat([white, white[:, rows] * white[:, columns]], 1)
    terms = (terms - terms.mean(0)) / terms.std(0)
    return bool(torch.linalg.eigvalsh(terms.T @ terms / len(terms))[0] < EXACT**2)


def _are_symmetric(values: Tensor) -> bool:
    side = math.isqrt(values.shape[1])
    if side < 2 or side**2 != values.shape[1]:
        return False
    matrices = values.unflatten(1, (side, side))
    return bool((matrices - matrices.mT).abs().amax() <= EXACT * matrices.abs().amax())


def _is_positive_definite(points: Tensor) -> Tensor:
    side = math.isqrt(points.shape[1])
    matrices = points.unflatten(1, (side, side))
    margin = EXACT * matrices.diagonal(dim1=1, dim2=2).mean(1)  # the policy may compute with fewer digits
    shifted = matrices - margin.abs()[:, None, None] * torch.eye(side, dtype=points.dtype)
    is_definite: Tensor = torch.linalg.cholesky_ex(shifted).info == 0
    return is_definite

"""A finding: one thing that a run's numbers say."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["good", "note", "problem"]

PATIENCE = 10
"""Number of consecutive logged iterations that must show a sign."""

LATE = 0.1
"""Fraction of the run, at its end, that tells how it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that the numbers say."""

    kind: Kind
    """`problem`: look at it. `note`: good to know. `good`: as it should be."""
    title: str
    """The finding in a few words."""
    text: str
    """The numbers behind it, and what to do."""

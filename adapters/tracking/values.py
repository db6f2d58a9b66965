"""Settings, histograms and tables in the forms that trackers take."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from grpo import Samples
from grpo.arguments import flattened

Row: TypeAlias = Mapping[str, str | float | None]
"""One row of a table of samples: a value per column."""

NUM_BINS = 32
"""Number of bins of a histogram."""


def flat(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Settings by their full name, `config.objective.kl_coef`. A list becomes JSON, and None becomes "None"."""
    plain = (bool, int, float, str)
    return {
        name: value if isinstance(value, plain) else "None" if value is None else json.dumps(value)
        for name, value in flattened(settings).items()
    }


def table(samples: Samples) -> list[dict[str, str | float | None]]:
    """`samples.table()`, with `?` for halves of surrogate pairs, which have no encoding."""
    return [
        {
            name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
            for name, value in row.items()
        }
        for row in samples.table()
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histogram:
    """How many of the finite values lie in each bin."""

    values: np.ndarray
    """[N] the finite values, float64."""
    counts: np.ndarray
    """[K] number of values in each bin."""
    edges: np.ndarray
    """[K + 1] edges of the bins."""


def histograms(samples: Samples) -> Iterator[tuple[str, Histogram]]:
    """The histograms of rewards and advantages, with their names: `train/rewards`. One without a finite value is left out."""
    for name, values in (("rewards", samples.rewards), ("advantages", samples.advantages)):
        histogram = None if values is None else histogram_of(values)
        if histogram is not None:
            yield f"{samples.kind}/{name}", histogram


def histogram_of(values: Tensor) -> Histogram | None:
    """The histogram of the finite values of a tensor on any device. None if there is no such value."""
    finite = values.detach().double().cpu().numpy()
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return None
    counts, edges = np.histogram(finite, bins=NUM_BINS)
    return Histogram(values=finite, counts=counts, edges=edges)


def markdown_table(rows: Sequence[Row]) -> str:
    """A markdown table. Special characters in texts are escaped, so that a text is shown as it is."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0])] + [[_cell(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: str | float | None) -> str:
    if isinstance(value, str):
        plain = value.replace("&", "&amp;").replace("<", "&lt;")
        return re.sub(r"([\\`*_{}\[\]>#|])", r"\\\1", plain).replace("\n", "<br>")
    return "" if value is None else f"{value:.6g}"

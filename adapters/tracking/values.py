"""Settings, histograms and tables in the forms that trackers take."""

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from io import BytesIO
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from torch import Tensor

from grpo import Samples
from grpo.arguments import flattened

Row: TypeAlias = Mapping[str, str | float | None]
"""One row of a table of samples: a value per column."""

PICTURE = "data:image/png;base64,"
"""How links with the data of a picture begin. A page shows no others."""
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


@runtime_checkable
class HasSmallCopy(Protocol):
    """A part of a state or of an action that can be shown as a picture, such as a `Picture` of `adapters.llm`."""

    def small_picture(self) -> str:
        """A link with the data of a small copy, `data:image/png;base64,...`."""
        ...


def small_copies(value: Any) -> list[str]:
    """Small copies of the pictures in a state or an action, in order. A picture that occurs again is left out."""
    return [*dict.fromkeys(picture.small_picture() for picture in _pictures(value))]


def rows_of(samples: Samples, num_states: int = 2, num_actions: int = 2) -> list[int]:
    """Which rows `samples.table(num_states, num_actions)` has."""
    numbered = replace(samples, states=range(len(samples.rewards)))  # its states say it
    return [int(str(row["state"])) for row in numbered.table(num_states, num_actions)]


def pictures_of(samples: Samples) -> list[tuple[str, bytes]]:
    """Small copies of the pictures in the rows of `samples.table()`, each once: a name, `train/pictures/1`, and a PNG file."""
    rows = rows_of(samples)
    links = small_copies([(samples.states[row], samples.actions[row]) for row in rows])
    files = [base64.b64decode(link.removeprefix(PICTURE)) for link in links]
    return [(f"{samples.kind}/pictures/{number}", file) for number, file in enumerate(files, 1)]


def image_of(file: bytes) -> Any:
    """A PNG file as a PIL image. There are no such files without Pillow."""
    return import_module("PIL.Image").open(BytesIO(file))


def _pictures(value: Any) -> Iterator[HasSmallCopy]:
    parts: Sequence[Any] = ()
    if isinstance(value, HasSmallCopy):
        yield value
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = value
    elif is_dataclass(value):
        parts = [getattr(value, each.name) for each in fields(value)]
    for part in parts:
        yield from _pictures(part)


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

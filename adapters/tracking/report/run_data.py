"""Read what a run has left in its folder: metrics, samples, settings and a comparison."""

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from adapters.tracking.run_folder import COMPARISON, METRICS, SAMPLES, SETTINGS
from grpo.errors import ConfigError
from grpo.evaluation import ComparisonReport

from .series import share_of

TABLES_PER_KIND = 3
"""Number of sample tables to show of training and of evaluations, each."""

EVALUATIONS = ("eval/avg_reward", "eval/return")
"""Metrics of evaluations: of `trainer.evaluate`, and of `train_control`."""

LARGEST = 1e100
"""Size above which a number counts as infinite, so that sums and squares stay finite."""

PHASES = ("sample", "reward", "score", "update")
"""The phases of an iteration whose times are measured, as in `time/NAME`."""

SMALL_REST = 0.02
"""Part of an iteration below which the time that no phase has is left out."""

HOW = "Pass sinks=[RunFolder(folder)] to trainer.train, and give its folder to the report."


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """The samples of one iteration or of one evaluation."""

    iteration: int
    """Number of the iteration, from 1."""
    kind: str
    """`train` or `eval`."""
    rows: list[dict[str, Any]]
    """One dict per row, with the columns of `Samples.table`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the run: the first one, or a resume."""

    iteration: int
    """Number of the first iteration after the start."""
    settings: Mapping[str, Any]
    """What `train` was called with, as plain values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What the files of one run say."""

    name: str
    """The name of the folder."""
    iterations: Float64[np.ndarray, " I"]
    """Numbers of the logged iterations, ascending."""
    metrics: Mapping[str, Float64[np.ndarray, " I"]]
    """Each metric at each logged iteration. NaN: it was not measured there, or was not finite, or was above 1e100."""
    eval_rows: Mapping[int, int] = field(default_factory=dict)
    """The number of rows of the evaluation after an iteration."""
    tables: tuple[SampleTable, ...] = ()
    """Sample tables from the beginning, the middle and the end of the run."""
    starts: tuple[Start, ...] = ()
    """The starts of the run. Empty: the folder has no settings."""
    comparison: ComparisonReport | None = None
    """The comparison of the policies before and after training."""
    comparison_is_older: bool = False
    """Whether the run went on after the comparison was written."""
    num_bad_lines: int = 0
    """Number of lines that could not be read."""

    def of(self, name: str) -> Float64[np.ndarray, " I"]:
        """A metric at each logged iteration. NaN everywhere if it was never measured."""
        found = self.metrics.get(name)
        return np.full(len(self.iterations), math.nan) if found is None else found

    def has(self, name: str) -> bool:
        """Whether a metric was measured at least once."""
        return bool(np.isfinite(self.of(name)).any())

    @property
    def evaluation(self) -> str | None:
        """The metric of the evaluations. None: there was no evaluation."""
        return next((name for name in EVALUATIONS if self.has(name)), None)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the first start."""
        return self.starts[0].settings if self.starts else {}


def phase_times(run: RunData) -> dict[str, float]:
    """The mean seconds of each phase of an iteration, and of what no phase has as `other`. Empty: no time was measured."""
    means = {name: share_of(run.of(f"time/{name}")) for name in PHASES}
    measured = {name: value for name, value in means.items() if value > 0}
    rest = share_of(run.of("time/iteration")) - sum(measured.values())
    return {**measured, "other": rest} if measured and rest > SMALL_REST * sum(measured.values()) else measured


def read_run(folder: str | Path, comparison: ComparisonReport | None = None) -> RunData:
    """Read a run's folder.

    Args:
        folder: The folder that a `RunFolder` wrote to. Only `metrics.jsonl` must exist.
        comparison: Replaces the folder's `comparison.json`.

    Raises:
        ConfigError: The folder is missing, has no metrics, or has a file that cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "a file" if folder.exists() else "missing"
        raise ConfigError(f"A report needs the folder of a run; {folder} is {what}. {HOW}")
    if not (folder / METRICS).is_file():
        names = sorted(path.name for path in folder.iterdir())
        content = f"has {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}" if names else "is empty"
        raise ConfigError(f"A report needs {METRICS} in the folder of a run; {folder} {content}. {HOW}")
    iterations, metrics, num_bad = _read_metrics(folder / METRICS)
    index, num_bad_samples = _index_of_samples(folder / SAMPLES)
    saved = folder / COMPARISON
    is_older = saved.exists() and saved.stat().st_mtime < (folder / METRICS).stat().st_mtime
    return RunData(
        name=folder.resolve().name,
        iterations=iterations,
        metrics=metrics,
        eval_rows={place.iteration: place.num_rows for place in index if place.kind == "eval" and place.num_rows},
        tables=_read_tables(folder / SAMPLES, index),
        starts=_read_starts(folder / SETTINGS),
        comparison=_read_comparison(saved) if comparison is None else comparison,
        comparison_is_older=comparison is None and is_older,
        num_bad_lines=num_bad + num_bad_samples,
    )


def _read_metrics(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray], int]:
    """Read one array per metric. An iteration that occurs twice counts as its last line says."""
    iterations, num_bad = array("d"), 0
    columns: dict[str, array[float]] = {}
    for _, values in _lines(path):
        if values is None or not _is_count(values.get("iteration")):
            num_bad += 1
            continue
        for name, value in values.items():
            if name not in columns and _is_number(value):
                columns[name] = array("d", [math.nan]) * len(iterations)
        iterations.append(values["iteration"])
        for name, column in columns.items():
            measured: Any = values.get(name)
            is_finite = _is_number(measured) and abs(measured) <= LARGEST
            column.append(float(measured) if is_finite else math.nan)
    columns.pop("iteration", None)
    if not iterations:
        raise ConfigError(
            f"A report needs at least one iteration; {path} has {num_bad} lines, and none of them can be read. If the run was "
            "stopped before its first iteration, start it again. Otherwise the file is damaged, or another program wrote it."
        )
    numbers = np.array(iterations)
    _, last_first = np.unique(numbers[::-1], return_index=True)  # the last line of each iteration, in their order
    places = len(numbers) - 1 - last_first
    return numbers[places], {name: np.array(column)[places] for name, column in columns.items()}, num_bad


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**53


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The lines of a file of JSON objects, each with its offset. None: the line is damaged or unfinished."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        offset = 0
        for line in file:
            yield offset, _object(line)
            offset += len(line)


def _object(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line. None: the line is damaged, unfinished, or another JSON value; the caller counts it."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # recovery: the caller counts the line
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    iteration: int
    kind: str
    num_rows: int
    offset: int


def _index_of_samples(path: Path) -> tuple[list[_Place], int]:
    """Where the tables are in the file, so that only the shown tables are kept in memory."""
    places, num_bad = list[_Place](), 0
    for offset, values in _lines(path):
        found = values or {}
        kind, rows = found.get("kind"), found.get("samples")
        if not _is_count(found.get("iteration")) or kind not in ("train", "eval") or not isinstance(rows, list):
            num_bad += 1
            continue
        num_rows = found["rows"] if _is_count(found.get("rows")) else 0
        places.append(_Place(iteration=found["iteration"], kind=kind, num_rows=num_rows, offset=offset))
    return places, num_bad


def _read_tables(path: Path, index: list[_Place]) -> tuple[SampleTable, ...]:
    """Read tables from the beginning, the middle and the end of the run."""
    chosen = [
        of_kind[place]
        for kind in ("eval", "train")
        if (of_kind := [place for place in index if place.kind == kind])
        for place in dict.fromkeys(np.linspace(0, len(of_kind) - 1, TABLES_PER_KIND).round().astype(int).tolist())
    ]
    tables = []
    for place in chosen:
        with path.open("rb") as file:
            file.seek(place.offset)
            rows = [row for row in json.loads(file.readline())["samples"] if isinstance(row, dict)]
        tables.append(SampleTable(iteration=place.iteration, kind=place.kind, rows=rows))
    return tuple(tables)


def _read_starts(path: Path) -> tuple[Start, ...]:
    if not path.is_file():
        return ()
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
        return tuple(Start(iteration=int(one["iteration"]), settings=dict(one["settings"])) for one in starts)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"A report needs {SETTINGS} as RunFolder writes it; {path} cannot be read ({type(error).__name__}: {error}). "
            "Delete this file to get the report without settings."
        ) from error


def _read_comparison(path: Path) -> ComparisonReport | None:
    if not path.is_file():
        return None
    try:
        return ComparisonReport.from_json(path.read_text(encoding="utf-8"))
    except (ConfigError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"A report needs {COMPARISON} as ComparisonReport.to_json writes it; {path} cannot be read. {error} Write the file "
            "again, or delete it to get the report without the comparison."
        ) from error

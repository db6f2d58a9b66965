"""A folder that keeps what a run did: settings, metrics and samples. `write_report` turns it into a page."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo.arguments import require_count
from grpo.errors import ConfigError
from grpo.sinks import JSONLSink, Samples, continue_lines, replace_text

from .values import rows_of, small_copies

METRICS, SAMPLES, SETTINGS = "metrics.jsonl", "samples.jsonl", "settings.json"
"""The files that a `RunFolder` writes."""

COMPARISON, REPORT = "comparison.json", "report.html"
"""Files about a run that others write into its folder: `ComparisonReport.to_json` and `write_report`."""


class RunFolder:
    """A sink that writes a run into a folder, as text that people and programs can read.

    - `metrics.jsonl`: one JSON object per iteration with its number, and its metrics.
    - `samples.jsonl`: the first rows of an iteration or evaluation, with its number, its kind, and the number of its rows.
      `pictures` has small copies of the pictures of a row's state and action, which have a method `small_picture`.
    - `settings.json`: the settings of each start of the run.

    A run that is resumed continues the files: lines of iterations that are made again are removed first, and so is a line that
    a killed process has not finished. A new run, whose first iteration is 1, moves the files of an earlier run to the folder
    `earlier-1`, `earlier-2` and so on, of which a report can be made, too.

    Args:
        folder: The folder. It is created with the first line.
        log_every: Iterations between two lines in `train`. Larger: smaller files. Iterations with an evaluation and the last
            one are always written.
        num_states: Number of states in each table of samples.
        num_actions: Number of actions of each of these states.

    Raises:
        ConfigError: `folder` is a file, or a count is below 1.

    Example:
        >>> trainer.train(states, num_iterations=100, sinks=[RunFolder("run")])  # doctest: +SKIP
        >>> write_report("run")  # doctest: +SKIP
        PosixPath('run/report.html')
    """

    def __init__(self, folder: str | Path, *, log_every: int = 1, num_states: int = 2, num_actions: int = 2) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(
                f"RunFolder needs a folder; {self.folder} is a file. Pass another path, or move the file."
            )
        self.log_every = require_count("RunFolder.log_every", log_every)
        self.num_states = require_count("RunFolder.num_states", num_states)
        self.num_actions = require_count("RunFolder.num_actions", num_actions)
        self._metrics, self._samples = JSONLSink(self.folder / METRICS), JSONLSink(self.folder / SAMPLES)
        self._is_open = False

    def start(self, settings: Mapping[str, Any], iteration: int) -> None:
        """Continue the folder's run with `iteration`, or begin a new run if it is 1. Write the settings."""
        self._open(iteration)
        path = self.folder / SETTINGS
        earlier = [one for place, one in enumerate(_starts(path)) if place == 0 or one["iteration"] < iteration]
        starts = [*earlier, {"iteration": iteration, "settings": _strict(settings)}]
        # a process that is killed here leaves the old file or the new one, never half a file
        replace_text(path, json.dumps({"starts": starts}, indent=2, allow_nan=False) + "\n")

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Append the metrics of an iteration."""
        if not self._is_open:
            self._open(iteration)
        self._metrics.log(metrics, iteration)

    def log_samples(self, samples: Samples, iteration: int) -> None:
        """Append a table of samples of an iteration, or of the evaluation after it."""
        if not self._is_open:
            self._open(iteration)
        rows: list[dict[str, Any]] = [*samples.table(self.num_states, self.num_actions)]
        for row, number in zip(rows, rows_of(samples, self.num_states, self.num_actions), strict=True):
            if copies := small_copies([samples.states[number], samples.actions[number]]):
                row["pictures"] = copies
        line = {"iteration": iteration, "kind": samples.kind, "rows": len(samples.rewards), "samples": rows}
        self._samples.write(line, iteration)

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._samples.close()
        self._is_open = False

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, iteration: int) -> None:
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        if iteration <= 1:
            _move_earlier_run(self.folder)
        for name in (METRICS, SAMPLES):
            continue_lines(self.folder / name, iteration)
        self._is_open = True


def _move_earlier_run(folder: Path) -> None:
    """Move the files of an earlier run to a folder of its own."""
    names = [name for name in (METRICS, SAMPLES, SETTINGS, COMPARISON, REPORT) if (folder / name).exists()]
    if not names:
        return
    numbered = (folder / f"earlier-{number}" for number in range(1, 1_000_000))
    earlier = next(other for other in numbered if not other.exists())
    earlier.mkdir()
    for name in names:
        (folder / name).rename(earlier / name)


def _starts(path: Path) -> list[dict[str, Any]]:
    """The starts in a file of settings. A file that cannot be read has none, so that it is written anew."""
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
        return [{"iteration": int(one["iteration"]), "settings": one["settings"]} for one in starts]
    except (FileNotFoundError, ValueError, TypeError, KeyError):  # recovery: a run goes on without its old settings
        return []


def _strict(value: Any) -> Any:
    """Plain values with infinity and NaN as text, because JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {str(name): _strict(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

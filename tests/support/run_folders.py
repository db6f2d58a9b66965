"""Hand-made runs: as arrays for the rules of a diagnosis, and as the files of a folder for a report."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adapters.tracking.report.run_data import RunData, Start
from grpo import GRPOConfig

NUM_ITERATIONS = 100
"""Number of iterations of a hand-made run."""


def ramp(first: float, last: float, num_iterations: int = NUM_ITERATIONS) -> np.ndarray:
    """A straight line with a little noise: +-0.01 in turn."""
    noise = 0.01 * (-1.0) ** np.arange(num_iterations)
    return np.linspace(first, last, num_iterations) + noise


def constant(value: float, num_iterations: int = NUM_ITERATIONS) -> np.ndarray:
    return np.full(num_iterations, value)


def run_of(metrics: Mapping[str, Any] | None = None, **others: Any) -> RunData:
    """A run with these metrics, one array or number each, in iterations 1, 2, ..."""
    given = {name: np.atleast_1d(np.asarray(values, dtype=float)) for name, values in (metrics or {}).items()}
    length = max([len(values) for values in given.values() if len(values) > 1], default=NUM_ITERATIONS)
    arrays = {name: values if len(values) > 1 else constant(values[0], length) for name, values in given.items()}
    return RunData(name="run", iterations=np.arange(1.0, length + 1), metrics=arrays, **others)


def healthy(**changed: Any) -> RunData:
    """A run that learns and shows no problem, with some metrics changed. "/" is written as "__"."""
    metrics: dict[str, Any] = {
        "rewards/mean": ramp(0.2, 0.8),
        "group_stats/zero_variance_fraction": 0.2,
        "train/num_updates": 4.0,
        "train/skipped_updates": 0.0,
        "train/clip_fraction": 0.05,
        "train/kl_coef": 0.04,
        "train/kl_mean": 0.01,
        "train/entropy": 1.0,
        "train/ratio_mean": 1.0,
        "train/sampler_divergence": 0.001,
        "time/iteration": 1.0,
        "time/sample": 0.4,
        "time/reward": 0.1,
        "time/score": 0.1,
        "time/update": 0.4,
    }
    return run_of({**metrics, **{name.replace("__", "/"): values for name, values in changed.items()}})


def settings(num_iterations: int = NUM_ITERATIONS, **config: Any) -> dict[str, Any]:
    """What a sink's `start` receives."""
    return {
        "config": GRPOConfig(**config).to_dict(),
        "policy": "TablePolicy",
        "reward_model": "right",
        "num_iterations": num_iterations,
        "versions": {"torch": "2.13.0"},
    }


def start_of(num_iterations: int) -> Start:
    return Start(iteration=1, settings=settings(num_iterations))


def sample(**columns: Any) -> dict[str, Any]:
    """One row of a table of samples."""
    return {"state": "2 + 2?", "action": "4", "reward": 1.0, "advantage": 0.5, "steps": 1.0, **columns}


def write_run(
    folder: Path, lines: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]] = (), **starts: Any
) -> Path:
    """Write the files of a run. `starts` has the settings of a single start at iteration 1."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("metrics.jsonl", lines), ("samples.jsonl", samples)):
        if rows:
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if starts:
        content = {"starts": [{"iteration": 1, "settings": starts["settings"]}]}
        (folder / "settings.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def lines_of(run: RunData) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl` that hold a run's metrics."""
    return [
        {"iteration": int(number), **{name: float(values[place]) for name, values in run.metrics.items()}}
        for place, number in enumerate(run.iterations)
    ]

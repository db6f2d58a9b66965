"""A plot of any run's metrics. Requires matplotlib (`pip install ".[tracking]"`)."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adapters.plots import label_ends, pyplot, saved
from grpo.errors import ConfigError

TRAINING, EVALUATION = "#1f6fb4", "#d1495b"
"""One colour for what training measures, and one for evaluations."""

PANELS = {
    "Reward": ("rewards/mean", "eval/avg_reward"),
    "KL to the reference": ("train/kl_mean",),
    "Entropy": ("train/entropy",),
    "Fraction of steps that are clipped": ("train/clip_fraction",),
    "Fraction of groups with equal rewards": ("group_stats/zero_variance_fraction",),
    "Gradient norm": ("train/grad_norm",),
    "Decisions per row": ("steps/mean", "eval/steps_mean"),
    "Seconds per iteration": ("time/iteration",),
}
"""The title of each panel, and the metrics that it shows. A panel is left out if its metrics are absent or never
change."""


def plot_history(history: Sequence[Mapping[str, float]], path: str | Path | None = None) -> Any:
    """Plot the metrics of a run of any domain: reward, evaluation, KL, entropy, clipping, dead groups, gradient, time.

    Args:
        history: What `train` returns and `trainer.history` holds: one dict of metrics per iteration, counted from 1. Or the
            lines of a `JSONLSink`, which have the number of the iteration and all iterations of a resumed run:
            `[json.loads(line) for line in open("metrics.jsonl")]`.
        path: The picture to write, such as "run.png"; its folder is created. None: only return the figure.

    Returns:
        The matplotlib figure.

    Raises:
        ConfigError: The history is empty.
        ImportError: Matplotlib is not installed.

    Example:
        >>> history = trainer.train(states, num_iterations=100)  # doctest: +SKIP
        >>> plot_history(history, "run.png")  # doctest: +SKIP
    """
    if not history:
        raise ConfigError("plot_history needs at least one iteration; the history is empty. Train first.")
    plt = pyplot()
    iterations = np.array([metrics.get("iteration", place) for place, metrics in enumerate(history, start=1)])
    shown = {title: lines for title, names in PANELS.items() if (lines := _lines_of(history, names))}
    num_columns = min(len(shown), 3)
    num_rows = math.ceil(len(shown) / num_columns)
    figure, axes = plt.subplots(
        num_rows, num_columns, figsize=(4.2 * num_columns, 2.7 * num_rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(shown) :]:
        axis.remove()
    for axis, (title, lines) in zip(axes.flat, shown.items(), strict=False):
        if title == "Reward":
            _fill_quartiles(axis, iterations, history)
        ends: dict[str, tuple[float, str]] = {}
        for name, values in lines.items():
            known = np.flatnonzero(np.isfinite(values))
            if not len(known):
                continue
            is_evaluation = name.startswith("eval/")
            colour = EVALUATION if is_evaluation else TRAINING
            marker = "o" if is_evaluation or len(known) == 1 else None  # a line through one point is not seen
            axis.plot(iterations[known], values[known], color=colour, linewidth=1.6, marker=marker, markersize=3)
            kind = "" if len(lines) == 1 else "evaluation " if is_evaluation else "training "
            ends[f"{kind}{values[known[-1]]:.3g}"] = (float(values[known[-1]]), colour)
        label_ends(axis, ends, iterations[-1])
        axis.set_title(title, loc="left", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("iteration", fontsize=9)
    return saved(figure, path)


def _lines_of(history: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, np.ndarray]:
    """The values of each metric, [S], NaN where it was not measured. Metrics that never change are left out, but rewards."""
    lines = {name: np.array([_known(metrics, name) for metrics in history]) for name in names}
    return {name: values for name, values in lines.items() if name == "rewards/mean" or _changes(values)}


def _known(metrics: Mapping[str, float], name: str) -> float:
    """A metric, or NaN if it is missing. A file has None in place of NaN."""
    value = metrics.get(name)
    return math.nan if value is None else float(value)


def _changes(values: np.ndarray) -> bool:
    known = values[np.isfinite(values)]
    return bool((known != known[:1]).any())


def _fill_quartiles(axis: Any, iterations: np.ndarray, history: Sequence[Mapping[str, float]]) -> None:
    """Shade the middle half of the rewards of each iteration."""
    low, high = ([_known(metrics, name) for metrics in history] for name in ("rewards/q25", "rewards/q75"))
    axis.fill_between(iterations, low, high, color=TRAINING, alpha=0.15, linewidth=0)

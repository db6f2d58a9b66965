"""Learning curves. Needs matplotlib (`pip install ".[tracking]"`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adapters.plots import pyplot, saved

from .runs import LearningCurve


def plot_learning_curves(
    curves: Mapping[str, Sequence[LearningCurve]],
    path: str | Path | None,
    *,
    title: str,
    threshold: float | None = None,
) -> Any:
    """Plot return against steps: the median over runs, and the quartiles if there are several runs.

    Args:
        curves: Runs by name. The runs of a name differ in their seed.
        path: PNG file to write. Its folder is created. None creates a pyplot figure, which a notebook shows and the caller
            closes.
        title: Title of the plot.
        threshold: Return to mark with a line.

    Returns:
        The matplotlib figure.
    """
    figure = pyplot().figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for name, runs in curves.items():
        steps = np.unique(np.concatenate([run.steps for run in runs]))
        returns = np.stack([np.interp(steps, run.steps, run.returns) for run in runs])
        (line,) = axis.plot(steps, np.median(returns, axis=0), label=name)
        if len(runs) > 1:
            low, high = np.quantile(returns, (0.25, 0.75), axis=0)
            axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    if threshold is not None:
        axis.axhline(threshold, color="grey", linestyle="--", linewidth=1, label=f"learned: {threshold:g}")
    axis.set(xlabel="steps of the environment", ylabel="return, without noise", title=title)
    axis.legend(loc="lower right")
    return saved(figure, path)

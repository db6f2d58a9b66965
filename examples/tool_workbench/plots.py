"""Plots of tool choices. Requires matplotlib (`pip install ".[notebooks]"`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from adapters.tools import ToolReport


def plot_confusion(
    reports: Mapping[str, ToolReport], path: str | Path | None, *, of: Literal["tool", "category"] = "tool"
) -> Any:
    """Plot confusion matrices, one panel per report. Each row is normalised to shares.

    Args:
        reports: Reports by title, all over the same catalogue.
        path: PNG file to write; its folder is created. None creates a pyplot figure, which shows in a notebook and which the
            caller closes.
        of: Whether rows and columns are tools or their categories.

    Returns:
        The matplotlib figure.
    """
    first = next(iter(reports.values()))
    shown = _rows_with_calls([report.confusion_matrix(of) for report in reports.values()])
    names = np.array(first.tools if of == "tool" else first.categories)[shown]
    side = 2.2 + 0.2 * len(names)
    figure = _figure(path, (side * len(reports), side))
    axes = figure.subplots(1, len(reports), squeeze=False, sharey=True)
    shares: Any = None
    for axis, (title, report) in zip(axes[0], reports.items(), strict=True):
        counts = report.confusion_matrix(of)[np.ix_(shown, shown)]
        shares = axis.imshow(counts / np.maximum(counts.sum(1, keepdims=True), 1), vmin=0, vmax=1, cmap="Blues")
        axis.set_title(f"{title}: {report.overall.right_tool:.0%} right")
        axis.set_xticks(range(len(names)), names, rotation=90)
        axis.set_yticks(range(len(names)), names)
        axis.tick_params(labelsize=7)
        axis.set_xlabel("called")
    axes[0, 0].set_ylabel("right")
    figure.colorbar(shares, ax=axes[0], label="share of the tasks of a row", shrink=0.6)
    return _written(figure, path)


def plot_accuracy(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], path: str | Path | None) -> Any:
    """Plot accuracy against the number of calls.

    Args:
        curves: Pairs (calls, accuracies) by name.
        path: PNG file to write, or None for a pyplot figure, as in `plot_confusion`.

    Returns:
        The matplotlib figure.
    """
    figure = _figure(path, (7, 4))
    axis = figure.subplots()
    for name, (calls, shares) in curves.items():
        axis.plot(calls, shares, label=name)
    axis.set(xlabel="calls of tools", ylabel="share of held-out tasks", ylim=(0, 1.02))
    axis.legend(loc="lower right")
    return _written(figure, path)


def _rows_with_calls(matrices: Sequence[np.ndarray]) -> np.ndarray:
    """Indices of the tools that were right or called at least once. The other rows and columns are empty."""
    total = np.sum(matrices, axis=0)
    return np.flatnonzero(total.sum(0) + total.sum(1))


def _figure(path: str | Path | None, size: tuple[float, float]) -> Any:
    if path is None:
        from matplotlib import pyplot

        return pyplot.figure(figsize=size, layout="constrained")
    from matplotlib.figure import Figure  # needs no window and no backend

    return Figure(figsize=size, layout="constrained")


def _written(figure: Any, path: str | Path | None) -> Any:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    return figure

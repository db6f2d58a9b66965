"""Plots of runs on the dynamic bandit. Requires matplotlib (`pip install "model-agnostic-grpo[tracking]"`).

One colour has one meaning: each arm has its own, and so has each of two settings that are compared.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from adapters.plots import label_ends, pyplot, saved

from .metrics import best_arm_probability, segment_starts

ARM_COLOURS = ("#1f6fb4", "#c8a93a", "#6aa272", "#d1495b", "#9184c2")
"""One colour per arm."""
RUN_COLOURS = ("#a0a0a0", "#202020")
"""One colour per run: the first run is the weaker one."""
REGIME_NAMES = {0: "all alike", 1: "arm 3 best", 2: "all alike", 3: "arm 0 best"}
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 18,
    "legend.frameon": False,
}
"""Settings of matplotlib for all plots."""


class PlottedRun(Protocol):
    """The data of a run that is plotted: S steps, K arms."""

    @property
    def name(self) -> str:
        """Name beside its lines."""
        ...

    @property
    def rewards(self) -> np.ndarray:
        """Mean reward of each step, [S]."""
        ...

    @property
    def probabilities(self) -> np.ndarray:
        """Arm probabilities before each step and after the last step, [S + 1, K]."""
        ...

    @property
    def losses(self) -> np.ndarray | None:
        """Loss of each step, [S]. None if the run has no losses."""
        ...


def plot_dynamic_runs(
    runs: Sequence[PlottedRun], path: str | Path | None, regimes: np.ndarray, means: np.ndarray
) -> Any:
    """Plot the arm probabilities of two runs, and below them their rewards, probabilities of the best arm, and losses.

    Args:
        runs: Two runs, the weaker one first.
        path: PNG file to write; its folder is created. None only returns the figure.
        regimes: [S], the regime of each step.
        means: [S, K], expected rewards.

    Returns:
        The matplotlib figure.
    """
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(12, 6.6), layout="constrained")
        above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1), hspace=0.06)
        for axis, run in zip(above.subplots(1, 2, sharey=True), runs, strict=True):
            plot_arm_probabilities(axis, run.probabilities[:-1], regimes, title=f"{run.name}: probability of each arm")
        by_reward, by_best, by_loss = below.subplots(1, 3)
        structured = np.isin(regimes, (1, 3))
        by_reward.plot(means.max(1), color="#d1495b", linewidth=1.3, linestyle=":", drawstyle="steps-post")
        best = [best_arm_probability(run.probabilities[:-1], means) for run in runs]
        _plot_lines(by_reward, {run.name: run.rewards for run in runs}, "Reward (dotted: what the best arm pays)")
        _plot_lines(
            by_best,
            {run.name: np.where(structured, one, np.nan) for run, one in zip(runs, best, strict=True)},
            "Probability of the best arm",
        )
        _plot_lines(
            by_loss,
            {run.name: run.losses for run in runs if run.losses is not None},
            "Loss (it does not show progress)",
        )
        by_best.set_ylim(0, 1.02)
        for axis in (by_reward, by_best, by_loss):
            mark_regimes(axis, regimes, named=False)
            axis.set_xlabel("step")
    return saved(figure, path)


def plot_arm_probabilities(axis: Any, probabilities: np.ndarray, regimes: np.ndarray, *, title: str) -> None:
    """Plot one line per arm: the probabilities with which the policy pulled in each step.

    Args:
        axis: Where to plot.
        probabilities: [S, K] of one run, or [R, S, K] of several: their median, with a band from 10 % to 90 %.
        regimes: [S], the regime of each step.
        title: The title.
    """
    runs = probabilities if probabilities.ndim == 3 else probabilities[None]
    low, middle, high = np.quantile(runs, (0.1, 0.5, 0.9), axis=0)
    for arm in range(runs.shape[-1]):
        colour = ARM_COLOURS[arm % len(ARM_COLOURS)]
        axis.plot(middle[:, arm], color=colour, linewidth=2)
        if len(runs) > 1:
            axis.fill_between(np.arange(len(middle)), low[:, arm], high[:, arm], color=colour, alpha=0.18, linewidth=0)
    axis.set_ylim(0, 1.02)
    axis.set_title(title)
    axis.set_xlabel("step")
    ends = {f"arm {arm}": (middle[-1, arm], ARM_COLOURS[arm % len(ARM_COLOURS)]) for arm in range(runs.shape[-1])}
    label_ends(axis, ends, len(middle))
    mark_regimes(axis, regimes)


def mark_regimes(axis: Any, regimes: np.ndarray, *, named: bool = True) -> None:
    """Mark the borders of the regimes. Regimes with a best arm are shaded.

    Args:
        axis: Where to plot. Its x axis counts steps.
        regimes: [S], the regime of each step.
        named: Whether to write the regimes' names above.
    """
    starts = segment_starts(regimes)
    for start, stop in zip(starts, [*starts[1:], len(regimes)], strict=True):
        if start:
            axis.axvline(start, color="#999999", linewidth=0.7, linestyle=(0, (4, 3)), zorder=0.5)
        if regimes[start] in (1, 3):
            axis.axvspan(start, stop, color="#f1ede2", zorder=0)
        if named:
            middle, name = (start + stop) / 2, REGIME_NAMES[int(regimes[start])]
            height = axis.get_xaxis_transform()
            axis.text(middle, 1.02, name, transform=height, ha="center", fontsize=9, color="#555555")
    axis.set_xlim(0, len(regimes))


def _plot_lines(axis: Any, lines: Mapping[str, np.ndarray], title: str) -> None:
    """Plot one line per run, with its name at its last known value."""
    ends: dict[str, tuple[float, str]] = {}
    stop = 0
    for (name, values), colour in zip(lines.items(), RUN_COLOURS, strict=False):
        axis.plot(values, color=colour, linewidth=1.8)
        known = values[~np.isnan(values)]
        ends[name], stop = (float(known[-1]), colour), max(stop, len(values))
    axis.set_title(title)
    label_ends(axis, ends, stop, distance=0.09)

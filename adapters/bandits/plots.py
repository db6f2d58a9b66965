"""Plots of runs on bandits whose best arm changes. Requires matplotlib (the extra `tracking`).

One colour has one meaning: each arm has its own, and so has each of two settings that are compared. What a picture says about
the best arm is read from the expected rewards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adapters.plots import label_ends, pyplot, saved

from .metrics import best_arm_probability, is_best, segment_starts

ARM_COLOURS = ("#1f6fb4", "#c8a93a", "#6aa272", "#d1495b", "#9184c2")
"""One colour per arm, if there are at most five. `arm_colours` has them for any number."""
RUN_COLOURS = ("#a0a0a0", "#202020")
"""One colour per run: the first run is the weaker one."""
SHORTEST_NAMED = 0.08
"""The shortest regime with room for its name, as a fraction of all steps."""
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 18,
    "legend.frameon": False,
}
"""Settings of matplotlib for all plots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Record of one strategy: its rewards and probabilities in each of S steps, with K arms."""

    name: str
    """Name beside its lines."""
    rewards: np.ndarray
    """[S] mean reward of each step's pulls."""
    probabilities: np.ndarray
    """[S + 1, K] probabilities of the arms in each step, and after the last step. Classic strategies record fractions
    of pulls instead."""
    losses: np.ndarray | None = None
    """[S] loss of each step. None if the strategy is not trained by gradients."""


def plot_dynamic_runs(runs: Sequence[Run], path: str | Path | None, means: np.ndarray) -> Any:
    """Plot the arm probabilities of two runs, and below them their rewards, probabilities of the best arm, and losses.

    Args:
        runs: Two runs, the weaker one first.
        path: PNG file to write; its folder is created. None only returns the figure.
        means: [S, K], expected rewards.

    Returns:
        The matplotlib figure.
    """
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(12, 6.6), layout="constrained")
        above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1), hspace=0.06)
        for axis, run in zip(above.subplots(1, 2, sharey=True), runs, strict=True):
            plot_arm_probabilities(axis, run.probabilities[:-1], means, title=f"{run.name}: probability of each arm")
        by_reward, by_best, by_loss = below.subplots(1, 3)
        structured = ~is_best(means).all(axis=1)
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
            mark_regimes(axis, means, named=False)
            axis.set_xlabel("step")
    return saved(figure, path)


def plot_arm_probabilities(axis: Any, probabilities: np.ndarray, means: np.ndarray, *, title: str) -> None:
    """Plot one line per arm: the probabilities with which the policy pulled in each step.

    Args:
        axis: Where to plot.
        probabilities: [S, K] of one run, or [R, S, K] of several: their median, with a band from 10 % to 90 %.
        means: [S, K], expected rewards.
        title: The title.
    """
    runs = probabilities if probabilities.ndim == 3 else probabilities[None]
    low, middle, high = np.quantile(runs, (0.1, 0.5, 0.9), axis=0)
    colours = arm_colours(runs.shape[-1])
    for arm, colour in enumerate(colours):
        axis.plot(middle[:, arm], color=colour, linewidth=2)
        if len(runs) > 1:
            axis.fill_between(np.arange(len(middle)), low[:, arm], high[:, arm], color=colour, alpha=0.18, linewidth=0)
    axis.set_ylim(0, 1.02)
    axis.set_title(title)
    axis.set_xlabel("step")
    ends = {f"arm {arm}": (middle[-1, arm], colour) for arm, colour in enumerate(colours)}
    label_ends(axis, ends, len(middle))
    mark_regimes(axis, means)


def arm_colours(num_arms: int) -> list[Any]:
    """A colour for each arm: those of `ARM_COLOURS`, or as many others where five are not enough."""
    if num_arms <= len(ARM_COLOURS):
        return list(ARM_COLOURS[:num_arms])
    return list(pyplot().get_cmap("turbo")(np.linspace(0.05, 0.95, num_arms)))


def mark_regimes(axis: Any, means: np.ndarray, *, named: bool = True) -> None:
    """Mark the steps in which other arms become the best. Regimes in which some arms are better than others are shaded.

    Args:
        axis: Where to plot. Its x axis counts steps.
        means: [S, K], expected rewards.
        named: Whether to write above which arm is the best. Regimes that are too short for a name have none.
    """
    best = is_best(means)
    starts = segment_starts(np.unique(best, axis=0, return_inverse=True)[1])
    for start, stop in zip(starts, [*starts[1:], len(means)], strict=True):
        if start:
            axis.axvline(start, color="#999999", linewidth=0.7, linestyle=(0, (4, 3)), zorder=0.5)
        if not best[start].all():
            axis.axvspan(start, stop, color="#f1ede2", zorder=0)
        if named and stop - start >= SHORTEST_NAMED * len(means):
            middle = (start + stop) / 2
            arms = ", ".join(f"arm {arm}" for arm in np.flatnonzero(best[start]))
            which = "all alike" if best[start].all() else f"{arms} best"
            height = axis.get_xaxis_transform()
            axis.text(middle, 1.02, which, transform=height, ha="center", fontsize=9, color="#555555")
    axis.set_xlim(0, len(means))


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

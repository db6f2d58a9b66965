"""Plots of runs on the dynamic bandit. Requires matplotlib (`pip install "model-agnostic-grpo[notebooks]"`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .metrics import best_arm_probability, segment_starts

REGIME_NAMES = {0: "all alike", 1: "arm 3 best", 2: "all alike", 3: "arm 0 best"}


class PlottedRun(Protocol):
    """The data of a run that is plotted: S steps, K arms."""

    @property
    def name(self) -> str:
        """Name in the legend."""
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
    """Plot the reward, each run's arm probabilities, the probability of the best arm, and the loss.

    Args:
        runs: The runs. Each run gets a line or a panel.
        path: PNG file to write; its folder is created. None only returns the figure.
        regimes: [S], the regime of each step.
        means: [S, K], expected rewards.

    Returns:
        The matplotlib figure.
    """
    plt = _pyplot()
    panels = [f"probabilities {i}" for i in range(len(runs))]
    figure, axes = plt.subplots(
        len(panels) + 3, 1, figsize=(9, 2.3 * (len(panels) + 3)), sharex=True, layout="constrained"
    )
    for axis, run in zip(axes, runs, strict=False):
        plot_arm_probabilities(axis, run)
    by_name = dict(zip(("rewards", "best", "loss"), axes[len(panels) :], strict=True))
    structured = np.isin(regimes, (1, 3))
    for run in runs:
        by_name["rewards"].plot(run.rewards, label=run.name)
        best = best_arm_probability(run.probabilities[:-1], means)
        by_name["best"].plot(np.where(structured, best, np.nan), label=run.name)
        if run.losses is not None:
            by_name["loss"].plot(run.losses, label=run.name)
    by_name["rewards"].plot(
        means.max(1), color="black", linewidth=0.8, linestyle="--", drawstyle="steps-post", label="best"
    )
    by_name["rewards"].set_ylabel("reward")
    by_name["best"].set_ylabel("P(best arm)")
    by_name["best"].set_ylim(0, 1)
    by_name["loss"].set_ylabel("loss")
    by_name["loss"].set_xlabel("step of the environment")
    for axis in by_name.values():
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    for axis in axes:
        _mark_regimes(axis, regimes, named=axis is axes[0])
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return figure


def plot_arm_probabilities(axis: Any, run: PlottedRun) -> None:
    """Plot one line per arm: the probabilities with which the policy pulled in each step."""
    acting = run.probabilities[:-1]
    for arm in range(acting.shape[1]):
        axis.plot(acting[:, arm], label=f"arm {arm}")
    axis.set_ylabel(f"{run.name}\nprobability")
    axis.set_ylim(0, 1)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")


def _mark_regimes(axis: Any, regimes: np.ndarray, *, named: bool) -> None:
    starts = segment_starts(regimes)
    for start, stop in zip(starts, [*starts[1:], len(regimes)], strict=True):
        axis.axvline(start, color="grey", linewidth=0.6)
        if regimes[start] in (1, 3):
            axis.axvspan(start, stop, color="tab:green", alpha=0.07)
        if named:
            middle, name = (start + stop) / 2, REGIME_NAMES[int(regimes[start])]
            axis.text(middle, 1.03, name, transform=axis.get_xaxis_transform(), ha="center", fontsize="small")


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('Plots need matplotlib: pip install "model-agnostic-grpo[notebooks]"') from error
    return plt

"""`plot_history`: which panels it draws, and that their lines are the metrics."""

import math
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

from adapters.tracking import plot_history
from grpo import ConfigError

matplotlib.use("Agg")

HISTORY = [
    {"rewards/mean": 0.0, "rewards/q25": 0.0, "rewards/q75": 0.5, "train/entropy": 1.0, "train/kl_mean": 0.0},
    {"rewards/mean": 0.5, "rewards/q25": 0.25, "rewards/q75": 0.75, "train/kl_mean": 0.0, "eval/avg_reward": 0.75},
    {"rewards/mean": 0.5, "rewards/q25": 0.5, "rewards/q75": 0.5, "train/entropy": 0.5, "eval/avg_reward": 0.25},
]


def panels_of(figure: plt.Figure) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Title -> label at the line's end -> (iterations, values)."""
    return {
        axis.get_title(loc="left"): {
            text.get_text(): (line.get_xdata().tolist(), line.get_ydata().tolist())
            for text in axis.texts
            for line in axis.lines
            if line.get_color() == text.get_color()
        }
        for axis in figure.axes
    }


def test_each_panel_shows_the_metrics_that_were_measured() -> None:
    figure = plot_history(HISTORY)
    panels = panels_of(figure)
    plt.close(figure)
    assert panels == {
        "Reward": {"evaluation 0.25": ([2, 3], [0.75, 0.25]), "training 0.5": ([1, 2, 3], [0.0, 0.5, 0.5])},
        "Entropy": {"0.5": ([1, 3], [1.0, 0.5])},  # not measured in the second iteration; the KL never changes
    }


def test_lines_of_a_file_are_drawn_at_their_iterations() -> None:
    lines = [
        {"iteration": 10 * n, "rewards/mean": float(n), "train/entropy": None if n == 2 else 1.0 / n} for n in (1, 2, 3)
    ]
    figure = plot_history(lines)
    panels = panels_of(figure)
    plt.close(figure)
    assert panels == {"Reward": {"3": ([10, 20, 30], [1, 2, 3])}, "Entropy": {"0.333": ([10, 30], [1.0, 1 / 3])}}


def test_one_iteration_and_rewards_that_are_never_finite_are_plotted(tmp_path: Path) -> None:
    for history in ([{"rewards/mean": 1.0}], [{"rewards/mean": math.nan}] * 3):
        path = tmp_path / "new" / "history.png"
        before = plt.get_fignums()
        plot_history(history, path)
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert plt.get_fignums() == before
        path.unlink()


def test_an_empty_history_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"plot_history needs at least one iteration; the history is empty"):
        plot_history([])

"""A run's folder: what it holds, how a resumed run continues it, and what becomes of an earlier run."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from adapters.llm import Picture
from adapters.tracking import RunFolder, plot_history, write_report
from grpo import ConfigError
from grpo.sinks import Samples
from tests.support.tracked_runs import STATES, samples, trainer


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def iterations(path: Path) -> list[int]:
    return [line["iteration"] for line in lines(path)]


def test_a_run_leaves_metrics_samples_and_settings(tmp_path: Path) -> None:
    """Of every third iteration, of those with an evaluation, and of the last."""
    sink = RunFolder(tmp_path / "run", num_states=1, num_actions=3, log_every=3)
    history = trainer().train(STATES, num_iterations=5, eval_states=STATES, eval_every=2, sinks=[sink], progress=False)
    sink.close()
    metrics, tables = lines(tmp_path / "run/metrics.jsonl"), lines(tmp_path / "run/samples.jsonl")
    assert metrics == [{"iteration": number, **history[number - 1]} for number in (2, 3, 4, 5)]
    kinds = [(2, "train"), (2, "eval"), (3, "train"), (4, "train"), (4, "eval"), (5, "train"), (5, "eval")]
    assert [(one["iteration"], one["kind"]) for one in tables] == kinds
    assert [(one["rows"], len(one["samples"])) for one in tables] == [(8, 3)] * 7
    assert {row["state"] for row in tables[0]["samples"]} == {"0"}
    (start,) = json.loads((tmp_path / "run/settings.json").read_text())["starts"]
    assert start["iteration"] == 1
    assert start["settings"]["config"] == trainer().config.to_dict()
    assert (start["settings"]["policy"], start["settings"]["num_iterations"]) == ("SoftmaxPolicy", 5)


def test_a_resumed_run_repeats_no_line(tmp_path: Path) -> None:
    """Lines 4 to 6 are from weights that are gone. They go at the start, and not with the next line."""
    first, second = RunFolder(tmp_path), RunFolder(tmp_path, log_every=5)
    first.start({"seed": 0}, 1)
    for iteration in range(1, 7):
        first.log({"rewards/mean": 0.0}, iteration)
        first.log_samples(samples(), iteration)
    first.close()
    second.start({"seed": 0}, 4)
    assert iterations(tmp_path / "metrics.jsonl") == iterations(tmp_path / "samples.jsonl") == [1, 2, 3]
    second.log({"rewards/mean": 1.0}, 5)
    second.log_samples(samples(), 5)
    second.close()
    found = [(line["iteration"], line["rewards/mean"]) for line in lines(tmp_path / "metrics.jsonl")]
    assert found == [(1, 0.0), (2, 0.0), (3, 0.0), (5, 1.0)]
    assert iterations(tmp_path / "samples.jsonl") == [1, 2, 3, 5]
    assert not list(tmp_path.glob("earlier-*"))


def test_settings_of_every_start_are_kept(tmp_path: Path) -> None:
    def start(iteration: int, seed: int) -> None:
        with RunFolder(tmp_path) as sink:
            sink.start({"seed": seed}, iteration)

    for iteration, seed in [(1, 0), (11, 1), (31, 2), (21, 3)]:  # from 31 on nothing is kept after the last start
        start(iteration, seed)
    starts = json.loads((tmp_path / "settings.json").read_text())["starts"]
    assert [(one["iteration"], one["settings"]["seed"]) for one in starts] == [(1, 0), (11, 1), (21, 3)]
    (tmp_path / "settings.json").write_text("{", encoding="utf-8")
    start(41, 4)
    starts = json.loads((tmp_path / "settings.json").read_text())["starts"]
    assert [one["iteration"] for one in starts] == [41]


def test_settings_are_strict_json(tmp_path: Path) -> None:
    RunFolder(tmp_path).start({"high": math.inf, "list": (1, math.nan)}, 1)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads((tmp_path / "settings.json").read_text(), parse_constant=refuse)
    assert found["starts"][0]["settings"] == {"high": "inf", "list": [1, "nan"]}


def test_a_new_run_moves_an_earlier_run_aside(tmp_path: Path) -> None:
    for rewards in (0.0, 1.0, 2.0):
        with RunFolder(tmp_path) as sink:
            sink.start({"rewards": rewards}, 1)
            sink.log({"rewards/mean": rewards}, 1)
            sink.log_samples(samples(), 1)
        for name in ("comparison.json", "report.html"):
            (tmp_path / name).write_text(str(rewards), encoding="utf-8")
    names = {"metrics.jsonl", "samples.jsonl", "settings.json", "comparison.json", "report.html"}
    for folder, rewards in [("earlier-1", 0.0), ("earlier-2", 1.0), (".", 2.0)]:
        found = tmp_path / folder
        assert {path.name for path in found.iterdir() if path.is_file()} == names
        assert [line["rewards/mean"] for line in lines(found / "metrics.jsonl")] == [rewards]
        assert (found / "comparison.json").read_text() == str(rewards)


def test_nothing_is_written_before_the_first_line_and_a_loop_of_your_own_needs_no_start(tmp_path: Path) -> None:
    RunFolder(tmp_path / "unused").close()
    assert not (tmp_path / "unused").exists()
    with RunFolder(tmp_path) as sink:
        sink.log({"rewards/mean": math.nan}, 1)
        sink.log_samples(samples("eval"), 1)
    assert lines(tmp_path / "metrics.jsonl") == [{"iteration": 1, "rewards/mean": None}]
    assert iterations(tmp_path / "samples.jsonl") == [1]
    assert not (tmp_path / "settings.json").exists()


def test_bad_arguments_are_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    (tmp_path / "file").write_text("")
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (tmp_path / "file", {}, r"needs a folder; .*file is a file. Pass another path"),
        (tmp_path, {"log_every": 0}, "RunFolder.log_every must be >= 1; got 0"),
        (tmp_path, {"num_states": 0}, "RunFolder.num_states must be >= 1"),
        (tmp_path, {"num_actions": -1}, "RunFolder.num_actions must be >= 1"),
    ]
    for folder, options, message in cases:
        with subtests.test(message=message), pytest.raises(ConfigError, match=message):
            RunFolder(folder, **options)


@dataclass(frozen=True)
class Said:
    """An action that has pictures in its parts, as a conversation has."""

    text: str
    shown: tuple[Any, ...] = ()


def test_a_table_has_small_copies_of_pictures_and_the_report_shows_them(tmp_path: Path) -> None:
    wide, other = Picture.of(np.zeros((8, 640, 3), np.uint8)), Picture.of(np.full((4, 4, 3), 9, np.uint8))
    rows = Samples(
        kind="train",
        states=[{"prompt": "a", "images": [wide, wide]}, {"prompt": "a", "images": [wide, wide]}, "b", "b"],
        actions=[Said("x"), Said("y", ({"image": other},)), "x", "y"],
        group_ids=torch.tensor([0, 0, 1, 1]),
        rewards=torch.ones(4),
    )
    with RunFolder(tmp_path) as sink:
        sink.log({"rewards/mean": 1.0}, 1)
        sink.log_samples(rows, 1)
    [line] = lines(tmp_path / "samples.jsonl")
    small = wide.small_picture()
    assert [row.get("pictures") for row in line["samples"]] == [[small], [small, other.link], None, None]
    assert Picture.of(small).image.size == (320, 4)
    line["samples"][2]["pictures"] = ["https://host/a.png", 7]  # nobody wrote it, and it is not shown
    (tmp_path / "samples.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert re.findall(r'<img src="([^"]*)" alt="picture">', page) == [small, small, other.link]
    assert "host/a.png" not in page
    assert ">pictures<" not in page


# --- plot_history: which panels it draws, and that their lines are the metrics


matplotlib.use("Agg")

HISTORY = [
    {"rewards/mean": 0.0, "rewards/q25": 0.0, "rewards/q75": 0.5, "train/entropy": 1.0, "train/kl_mean": 0.0},
    {"rewards/mean": 0.5, "rewards/q25": 0.25, "rewards/q75": 0.75, "train/kl_mean": 0.0, "eval/avg_reward": 0.75},
    {"rewards/mean": 0.5, "rewards/q25": 0.5, "rewards/q75": 0.5, "train/entropy": 0.5, "eval/avg_reward": 0.25},
]


def panels_of(history: Any) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Title -> label at the line's end -> (iterations, values)."""
    figure = plot_history(history)
    plt.close(figure)
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
    assert panels_of(HISTORY) == {
        "Reward": {"evaluation 0.25": ([2, 3], [0.75, 0.25]), "training 0.5": ([1, 2, 3], [0.0, 0.5, 0.5])},
        "Entropy": {"0.5": ([1, 3], [1.0, 0.5])},  # not measured in the second iteration; the KL never changes
    }


def test_lines_of_a_file_are_drawn_at_their_iterations() -> None:
    lines = [
        {"iteration": 10 * n, "rewards/mean": float(n), "train/entropy": None if n == 2 else 1.0 / n} for n in (1, 2, 3)
    ]
    assert panels_of(lines) == {
        "Reward": {"3": ([10, 20, 30], [1, 2, 3])},
        "Entropy": {"0.333": ([10, 30], [1.0, 1 / 3])},
    }


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

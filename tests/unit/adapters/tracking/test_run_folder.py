"""A run's folder: what it holds, how a resumed run continues it, and what becomes of an earlier run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.bandits import SoftmaxPolicy
from adapters.tracking import RunFolder
from grpo import ConfigError, GRPOConfig, GRPOTrainer
from grpo.sinks import Samples

STATES = [0, 1]


def right(states: Any, actions: Any) -> torch.Tensor:
    return (torch.as_tensor(actions) == torch.as_tensor(states)).float()


def trainer() -> GRPOTrainer:
    policy = SoftmaxPolicy(num_actions=4, num_states=2)
    return GRPOTrainer(config=GRPOConfig(seed=0, learning_rate=0.1), policy=policy, reward_model=right)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def iterations(path: Path) -> list[int]:
    return [line["iteration"] for line in lines(path)]


def samples(kind: Any = "train", reward: float = 1.0) -> Samples:
    """Two states with three actions each."""
    return Samples(
        kind=kind,
        states=["a", "a", "a", "b", "b", "b"],
        actions=["x", "y", "z", "x", "y", "z"],
        group_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
        rewards=torch.full((6,), reward),
    )


def test_a_run_leaves_metrics_samples_and_settings(tmp_path: Path) -> None:
    sink = RunFolder(tmp_path / "run", num_states=1, num_actions=3)
    history = trainer().train(STATES, num_iterations=4, eval_states=STATES, eval_every=2, sinks=[sink], progress=False)
    sink.close()
    metrics, tables = lines(tmp_path / "run/metrics.jsonl"), lines(tmp_path / "run/samples.jsonl")
    assert [line.pop("iteration") for line in metrics] == [1, 2, 3, 4]
    assert metrics == history
    assert [(one["iteration"], one["kind"], one["rows"], len(one["samples"])) for one in tables] == [
        (1, "train", 16, 3),
        (2, "train", 16, 3),
        (2, "eval", 16, 3),
        (3, "train", 16, 3),
        (4, "train", 16, 3),
        (4, "eval", 16, 3),
    ]
    assert {row["state"] for row in tables[0]["samples"]} == {"0"}
    (start,) = json.loads((tmp_path / "run/settings.json").read_text())["starts"]
    assert start["iteration"] == 1
    assert start["settings"]["config"] == trainer().config.to_dict()
    assert (start["settings"]["policy"], start["settings"]["num_iterations"]) == ("SoftmaxPolicy", 4)


def test_log_every_leaves_out_iterations_but_neither_evaluations_nor_the_last(tmp_path: Path) -> None:
    with RunFolder(tmp_path, log_every=4) as sink:
        trainer().train(STATES, num_iterations=9, eval_states=STATES, eval_every=6, sinks=[sink], progress=False)
    assert iterations(tmp_path / "metrics.jsonl") == [4, 6, 8, 9]


def test_a_resumed_run_repeats_no_line(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.start({"seed": 0}, 1)
    for iteration in range(1, 7):
        first.log({"rewards/mean": 0.0}, iteration)
        first.log_samples(samples(reward=0.0), iteration)
    first.close()
    second.start({"seed": 0}, 4)
    second.log({"rewards/mean": 1.0}, 4)
    second.log_samples(samples(), 4)
    second.close()
    assert [(line["iteration"], line["rewards/mean"]) for line in lines(tmp_path / "metrics.jsonl")] == [
        (1, 0.0),
        (2, 0.0),
        (3, 0.0),
        (4, 1.0),
    ]
    assert iterations(tmp_path / "samples.jsonl") == [1, 2, 3, 4]
    assert not list(tmp_path.glob("earlier-*"))


def test_the_lines_of_repeated_iterations_go_at_the_start_and_not_with_the_next_line(tmp_path: Path) -> None:
    """With log_every=10, the next line is that of iteration 10. Lines 4 to 9 are from weights that are gone."""
    with RunFolder(tmp_path) as first:
        for iteration in range(1, 10):
            first.log({}, iteration)
    second = RunFolder(tmp_path, log_every=10)
    second.start({}, 4)
    assert iterations(tmp_path / "metrics.jsonl") == [1, 2, 3]
    second.log({}, 10)
    second.close()
    assert iterations(tmp_path / "metrics.jsonl") == [1, 2, 3, 10]


def test_the_half_line_of_a_killed_process_is_dropped(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text('{"iteration": 1}\n{"iteration": 2, "rewa', encoding="utf-8")
    sink = RunFolder(tmp_path)
    sink.start({}, 3)
    sink.log({}, 3)
    sink.log_samples(samples(), 3)
    sink.close()
    assert iterations(tmp_path / "metrics.jsonl") == iterations(tmp_path / "samples.jsonl") == [1, 3]


def test_settings_of_every_start_are_kept(tmp_path: Path) -> None:
    def start(iteration: int, seed: int) -> None:
        sink = RunFolder(tmp_path)
        sink.start({"seed": seed}, iteration)
        sink.close()

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


def test_a_stopped_run_continues_its_folder_through_the_trainer(tmp_path: Path) -> None:
    def train(num_iterations: int) -> None:
        with RunFolder(tmp_path / "run") as sink:
            trainer().train(
                STATES,
                num_iterations=num_iterations,
                sinks=[sink],
                checkpoint_dir=tmp_path / "checkpoints",
                checkpoint_every=2,
                resume="auto",
                progress=False,
            )

    train(2)
    train(5)
    assert iterations(tmp_path / "run/metrics.jsonl") == [1, 2, 3, 4, 5]
    assert iterations(tmp_path / "run/samples.jsonl") == [1, 2, 3, 4, 5]
    starts = json.loads((tmp_path / "run/settings.json").read_text())["starts"]
    assert [(one["iteration"], one["settings"]["num_iterations"]) for one in starts] == [(1, 2), (3, 5)]


def test_a_loop_of_your_own_needs_no_start(tmp_path: Path) -> None:
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


def test_nothing_is_written_before_the_run_starts(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").close()
    assert not (tmp_path / "run").exists()

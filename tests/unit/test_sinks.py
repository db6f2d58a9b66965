"""What a run records: the lines of a file, which iterations sinks record, tables of samples, and statistics of metrics."""

import json
import math
import re
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo import ConfigError, GRPOConfig, GRPOTrainer, GRPOWarning, JSONLSink, MetricSink, Samples
from grpo._objective.metrics import Measured, all_moments
from grpo.metrics import Meter, reward_statistics
from grpo.sinks import LONGEST_TEXT, GuardedSinks, as_text, continue_lines, replace_text
from tests.support.policies import TablePolicy
from tests.support.trainers import by_hand


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def iterations_of(path: Path) -> list[int]:
    return [line["iteration"] for line in lines_of(path)]


def trainer_of(**config: Any) -> GRPOTrainer:
    return GRPOTrainer(
        config=GRPOConfig(group_size=2, seed=0, **config),
        policy=TablePolicy(),
        reward_model=lambda states, actions: [float(action) for action in actions],
    )


def train(trainer: GRPOTrainer, num_iterations: int, *sinks: Any, **options: Any) -> list[dict[str, float]]:
    return trainer.train(["a", "b"], num_iterations=num_iterations, sinks=[*sinks], progress=False, **options)


class Recorder:
    """Records everything that a sink is given."""

    def __init__(self, log_every: int = 1) -> None:
        self.log_every = log_every
        self.started: list[tuple[Any, int]] = []
        self.iterations: list[int] = []
        self.samples: list[tuple[int, Samples]] = []

    def start(self, settings: Any, iteration: int) -> None:
        self.started.append((settings, iteration))

    def log(self, metrics: Any, iteration: int) -> None:
        self.iterations.append(iteration)

    def log_samples(self, samples: Samples, iteration: int) -> None:
        self.samples.append((iteration, samples))

    def close(self) -> None: ...


def test_a_resumed_run_continues_its_file_and_repeats_no_iteration(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    trainer = trainer_of()
    with JSONLSink(path) as sink:
        for total in (2, 3):  # a second call with the same sink appends
            train(trainer, total, sink)
    assert iterations_of(path) == [1, 2, 3]
    trainer.save_checkpoint(tmp_path / "three")
    with JSONLSink(path) as sink:  # the run goes on, and is lost after iteration 5
        for iteration in (4, 5):
            sink.log({"rewards/mean": 9.0}, iteration)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"iteration": 6, "rew')
    resumed = trainer_of()
    resumed.load_checkpoint(tmp_path / "three")
    with JSONLSink(path) as sink:
        train(resumed, 6, sink)
    assert iterations_of(path) == [1, 2, 3, 4, 5, 6]
    assert 9.0 not in [line["rewards/mean"] for line in lines_of(path)]


def test_a_sink_writes_one_line_per_iteration_at_once_and_appends_to_an_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "on the way" / "metrics.jsonl"
    with JSONLSink(path) as sink:
        assert isinstance(sink, MetricSink)
        sink.log({"rewards/mean": 0.5, "train/kl_mean": 0.1}, iteration=1)
        assert lines_of(path) == [{"iteration": 1, "rewards/mean": 0.5, "train/kl_mean": 0.1}]
    with JSONLSink(str(path)) as sink:
        sink.log({"rewards/mean": 0.75}, iteration=2)
    assert path.read_text() == (
        '{"iteration": 1, "rewards/mean": 0.5, "train/kl_mean": 0.1}\n{"iteration": 2, "rewards/mean": 0.75}\n'
    )


def test_no_name_can_break_a_line_or_reach_a_terminal(tmp_path: Path) -> None:
    control = [chr(c) for c in range(0x2100) if unicodedata.category(chr(c)) in ("Cc", "Zl", "Zp")]
    forged = ['"}\n{"iteration": 9, "forged": 1', "\\n", "\x1b[2J", "naïve ✓"]
    metrics = {name: float(n) for n, name in enumerate([*(f"a{character}b" for character in control), *forged])}
    with JSONLSink(tmp_path / "metrics.jsonl") as sink:
        sink.log(metrics, iteration=1)
        sink.log({"a": 1.0}, iteration=2)
    written = sink.path.read_bytes()
    assert written.count(b"\n") == 2
    assert all(0x20 <= byte < 0x7F for byte in written.replace(b"\n", b""))
    assert lines_of(sink.path) == [{"iteration": 1, **metrics}, {"iteration": 2, "a": 1.0}]


def test_a_new_run_keeps_the_lines_of_earlier_runs_under_numbered_names(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for run in (1.0, 2.0, 3.0):
        with JSONLSink(path) as sink:
            sink.log({"run": run}, 1)
    assert [lines_of(tmp_path / f"metrics.jsonl{end}")[0]["run"] for end in (".1", ".2", "")] == [1.0, 2.0, 3.0]


def test_a_sink_that_goes_back_replaces_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JSONLSink(path) as sink:
        for iteration, value in [(1, 0.0), (2, 0.0), (3, 0.0), (2, 5.0)]:
            sink.log({"value": value}, iteration)
    assert [(line["iteration"], line["value"]) for line in lines_of(path)] == [(1, 0.0), (2, 5.0)]


def test_lines_without_an_iteration_are_removed_at_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    others = ["[]", '{"x": 1}', '{"iteration": "2"}', "nonsense", "[" * 100_000]
    path.write_text("\n".join(['{"iteration": 1}', *others, '{"iteration": 2}', '{"iteration": 3}', ""]))
    continue_lines(path, 3)
    assert path.read_text() == '{"iteration": 1}\n{"iteration": 2}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_is_made_with_the_first_line_and_not_before(tmp_path: Path) -> None:
    sink = JSONLSink(tmp_path / "new" / "metrics.jsonl")
    assert list(tmp_path.iterdir()) == []
    sink.close()
    sink.log({"x": math.inf, "y": -math.inf, "z": math.nan}, 1)
    sink.close()
    assert lines_of(sink.path) == [{"iteration": 1, "x": None, "y": None, "z": None}], "JSON has no such numbers"


def test_log_every_counts_iterations_and_adds_evaluations_and_the_last() -> None:
    every, seldom = Recorder(), Recorder(log_every=4)
    train(trainer_of(), 10, every, seldom, eval_states=["a"], eval_every=3)
    assert every.iterations == list(range(1, 11))
    assert seldom.iterations == [3, 4, 6, 8, 9, 10]
    assert [iteration for iteration, _ in seldom.samples] == [3, 3, 4, 6, 6, 8, 9, 9, 10, 10]
    with pytest.raises(ConfigError, match=r"Recorder.log_every must be >= 1; got 0"):
        train(trainer_of(), 1, Recorder(log_every=0))


def test_a_sink_is_told_the_settings_and_the_first_iteration(tmp_path: Path) -> None:
    sink, trainer, resumed = Recorder(), trainer_of(), trainer_of()
    train(trainer, 2, sink)
    resumed.load_checkpoint(trainer.save_checkpoint(tmp_path / "two"))
    train(resumed, 5, sink)
    (first, one), (second, three) = sink.started
    assert (one, three) == (1, 3)
    assert (first["num_iterations"], second["num_iterations"]) == (2, 5)
    assert first["policy"] == "TablePolicy"
    assert json.loads(json.dumps(first["config"])) == trainer.config.to_dict()
    assert first["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("method", ["start", "log", "log_samples"])
def test_a_sink_that_raises_is_reported_and_switched_off_and_the_run_goes_on(method: str) -> None:
    calls: list[str] = []

    def fails(*_: Any) -> None:
        calls.append(method)
        raise OSError("no space left on device")

    broken, sound = Recorder(), Recorder()
    setattr(broken, method, fails)
    said = rf"Recorder.{method} raised OSError in iteration 1: no space left on device\. The sink is switched off"
    with pytest.warns(GRPOWarning, match=said):
        assert len(train(trainer_of(), 3, broken, sound)) == 3
    assert calls == [method]
    assert sound.iterations == [1, 2, 3]
    assert broken.iterations == ([1] if method == "log_samples" else [])
    assert broken.samples == []


def test_an_attribute_with_the_name_of_an_optional_method_is_the_sinks_own() -> None:
    iterations: list[int] = []
    sink = SimpleNamespace(
        log=lambda _, iteration: iterations.append(iteration), close=print, log_samples=None, start=12.5
    )
    train(trainer_of(), 2, sink)
    assert iterations == [1, 2]


def test_an_interrupt_in_a_sink_is_not_a_failure_of_the_sink() -> None:
    def interrupts(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GuardedSinks([SimpleNamespace(log=interrupts, close=print)]).log({}, 1)


def test_samples_have_the_rows_of_the_iteration_with_their_advantages() -> None:
    """Rewards 0 1 | 1 1 in groups of two: advantages are reward - mean, -.5 .5 | 0 0."""
    sink = Recorder()
    trainer, _ = by_hand(
        policy=TablePolicy(script=[[0, 1], [1, 1]]), rewards=lambda s, actions: [float(a) for a in actions]
    )
    trainer.train(["a", "b"], num_iterations=1, eval_states=["b", "a"], sinks=[sink], progress=False)
    (_, samples), (_, evaluated) = sink.samples
    assert (samples.kind, evaluated.kind) == ("train", "eval")
    assert list(samples.states) == ["a", "a", "b", "b"]
    assert samples.group_ids.tolist() == [0, 0, 1, 1]
    assert samples.rewards.tolist() == [0, 1, 1, 1]
    assert samples.advantages.tolist() == [-0.5, 0.5, 0, 0]
    assert samples.num_steps.tolist() == [1, 1, 1, 1]
    assert evaluated.advantages is None
    assert list(evaluated.states) == ["b", "b", "a", "a"]
    assert trainer.samples is None


def test_no_rows_are_kept_if_no_sink_records_them() -> None:
    kept: list[Any] = []
    trainer = trainer_of()
    train(trainer, 2, SimpleNamespace(log=lambda metrics, iteration: kept.append(trainer.samples), close=print))
    assert kept == [None, None]


def samples_of(**fields: Any) -> Samples:
    """Three groups of three, two and three rows."""
    given = {
        "kind": "train", "states": list("aaabbccc"), "actions": torch.arange(16).view(8, 2),
        "group_ids": torch.tensor([5, 5, 5, 2, 2, 9, 9, 9]), "rewards": torch.arange(8.0),
    }  # fmt: skip
    return Samples(**(given | fields))


def test_a_table_has_the_first_rows_of_the_first_groups() -> None:
    parts = {"right": torch.tensor([1.0, math.nan, 0, 0, 0, 0, 0, 0])}
    samples = samples_of(reward_components=parts, advantages=-torch.arange(8.0), num_steps=torch.arange(8))
    table = samples.table(num_states=2, num_actions=2)
    assert [row["state"] for row in table] == ["a", "a", "b", "b"]
    assert [row["action"] for row in table] == ["[0, 1]", "[2, 3]", "[6, 7]", "[8, 9]"]
    assert table[1] == {
        "state": "a", "action": "[2, 3]", "reward": 1.0, "reward/right": None, "advantage": -1.0, "steps": 1.0,
    }  # fmt: skip
    assert len(samples_of().table(num_states=9, num_actions=9)) == 8
    assert samples_of().table(num_states=1, num_actions=1)[0]["advantage"] is None
    # rows of a group that are not adjacent
    table = samples_of(group_ids=torch.tensor([1, 2, 1, 2, 1, 2, 1, 2])).table(num_states=2, num_actions=2)
    assert [row["reward"] for row in table] == [0, 2, 1, 3]


def test_a_long_text_is_cut_in_the_middle() -> None:
    text = as_text("a" * LONGEST_TEXT + "middle" + "z" * LONGEST_TEXT)
    assert text.startswith("a" * (LONGEST_TEXT // 2) + " [... ")
    assert text.endswith(" more ...] " + "z" * (LONGEST_TEXT // 2))
    assert "2,006" in text
    assert as_text("a" * LONGEST_TEXT) == "a" * LONGEST_TEXT


def test_an_array_with_many_numbers_is_named_by_its_shape_and_a_checksum() -> None:
    black, white = np.zeros((20, 20, 3), np.uint8), np.full((20, 20, 3), 255, np.uint8)
    texts = [as_text({"image": picture}) for picture in (black, black.copy(), white)]
    assert texts[0] == texts[1] != texts[2]
    assert all(re.fullmatch(r"\{'image': 'uint8 \[20, 20, 3\] [0-9a-f]{8}'\}", text) for text in texts)
    assert as_text(torch.zeros(1001)).startswith("torch.float32 [1001] ")
    assert as_text(np.zeros(1000, np.uint8)).startswith("[0, 0, 0")


def test_floats_have_three_digits_wherever_they_are() -> None:
    state = {
        "a": torch.tensor([0.123456, 12345.678]),
        "b": (-1 / 3, 1e-7 / 3, [float("inf"), 0.0]),
        "c": np.float32(2.71828),
    }
    assert as_text(state) == "{'a': [0.123, 12346.0], 'b': (-0.333, 3.33e-08, [inf, 0.0]), 'c': 2.72}"
    assert as_text([1, True, None, "0.123456"]) == "[1, True, None, '0.123456']"


def test_unfinished_files_follow_no_link(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "metrics.jsonl"
    for write in (lambda: replace_text(path, "new"), lambda: continue_lines(path, 2)):
        victim.write_text("mine")
        path.write_text('{"iteration": 1}\n')
        path.with_name("metrics.jsonl.new").symlink_to(victim)
        write()
        assert victim.read_text() == "mine"
        assert not path.is_symlink()
        assert path.read_text() in ("new", '{"iteration": 1}\n')
        assert {entry.name for entry in tmp_path.iterdir()} == {"victim", "metrics.jsonl"}


# Streaming statistics, by hand and against numpy


def row(count: float, total: float, squares: float) -> torch.Tensor:
    return torch.tensor([count, total, squares], dtype=torch.float64)


def measured(num_steps: int) -> Measured:
    return Measured(terms={}, per_step={"ratio": 2.0}, mask=torch.ones(1, num_steps, dtype=torch.bool))


@pytest.mark.parametrize(("added", "num_updates", "expected"), [
    # values 1, 2 | 6: mean 3, mean of squares 41/3, variance 41/3 - 9 = 14/3
    ([{"ratio": row(2, 3, 5)}, {"ratio": row(1, 6, 36)}], 1, {"ratio": (3, math.sqrt(14 / 3))}),
    # shares of two updates of two micro-batches each are summed: (.5 + .25 + 1 + 2.25)/2
    ([{"loss": row(0, share, 0)} for share in (0.5, 0.25, 1.0, 2.25)], 2, {"loss": (2.0, 0.0)}),
    ([{"loss": row(0, 0.5, 0)}], 0, {"loss": (0.5, 0.0)}),
    # a metric is averaged over the micro-batches that report it
    ([{"ratio": row(1, 2, 4), "kl": row(2, 1, 0.5)}, {"ratio": row(1, 4, 16)}], 1, {"ratio": (3.0, 1.0), "kl": (0.5, 0.0)}),
    # ten times .1: squares 10 * .01, and rounding may leave the variance just below 0
    ([{"ratio": row(10, 0.1 * 10, math.nextafter(0.1, 0))}], 1, {"ratio": (0.1, 0.0)}),
])  # fmt: skip
def test_a_meter_reports_mean_and_deviation_over_micro_batches_and_sums_shares(added, num_updates, expected):
    meter = Meter()
    for metrics in added:
        meter.add(metrics)
    assert meter.report(num_updates=num_updates) == {
        n: pytest.approx(found, rel=1e-12) for n, found in expected.items()
    }


def test_a_meter_averages_plain_numbers():
    meter = Meter()
    meter.add_value("grad_norm", 1.0)
    meter.add_value("grad_norm", 4.0)
    assert meter.report(num_updates=7) == {"grad_norm": (2.5, 0.0)}


def test_a_meter_computes_metrics_of_small_micro_batches_together_when_they_are_read(monkeypatch):
    """Metrics of more than 4,096 steps are computed at once."""
    sizes = []
    monkeypatch.setattr("grpo.metrics.all_moments", lambda added: (sizes.append(len(added)), all_moments(added))[1])
    meter = Meter()
    for num_steps in (1, 3, 4_096):
        meter.add(measured(num_steps))
    assert sizes == []
    meter.add(measured(4_097))
    assert sizes == [1]
    assert meter.report(num_updates=1) == {"ratio": (2.0, 0.0)}
    assert sizes == [1, 4]


@pytest.mark.parametrize("empty", [lambda meter: meter.report(num_updates=1), Meter.clear])
def test_a_meter_is_empty_after_a_report_and_when_it_is_cleared(empty):
    meter = Meter()
    meter.add({"ratio": row(1, 2, 4)})
    meter.add_value("grad_norm", 1.0)
    empty(meter)
    assert meter.report(num_updates=1) == {}
    meter.add({"ratio": row(1, 5, 25)})
    assert meter.report(num_updates=1) == {"ratio": (5.0, 0.0)}


def test_a_restored_meter_has_forgotten_what_was_added_since_its_restore_point():
    meter = Meter()
    meter.add({"ratio": row(1, 2, 4)})
    meter.add_value("grad_norm", 1.0)
    restore = meter.restore_point()
    for _ in range(2):  # a point can be restored more than once
        meter.add({"ratio": row(1, 9, 81), "kl": row(1, 5, 25)})
        meter.add_value("grad_norm", 7.0)
        meter.add_value("learning_rate", 7.0)
        restore()
    assert meter.report(num_updates=1) == {"ratio": (2.0, 0.0), "grad_norm": (1.0, 0.0)}


def test_a_meter_sums_the_totals_of_all_ranks():
    # ratio: 1, 2 | 6 as above; loss: (.5 + .25 + 1)/2 updates; "there": only the other rank has it
    meter = Meter()
    meter.add({"ratio": row(2, 3, 5), "loss": row(0, 0.5, 0)})
    meter.add({"loss": row(0, 0.25, 0)})
    meter.add_value("grad_norm", 4.0)
    own = meter.totals()
    assert own == {"ratio": (2, 3, 5), "loss": (0, 0.75, 0)}
    other = {"ratio": (1, 6, 36), "loss": (0, 1.0, 0), "there": (1, 7, 49)}
    assert meter.report(num_updates=2, of_ranks=[own, other]) == {
        "ratio": (pytest.approx(3), pytest.approx(math.sqrt(14 / 3))),
        "loss": (0.875, 0.0),
        "there": (7.0, 0.0),
        "grad_norm": (4.0, 0.0),
    }


def test_a_meter_reports_nan_for_metrics_that_were_not_measured():
    meter = Meter()
    meter.add({"kl": row(math.nan, math.nan, math.nan), "ratio": row(1, 2, 4)})
    meter.add({"kl": row(0, math.nan, 0), "ratio": row(1, 2, 4)})
    found = meter.report(num_updates=1)
    assert math.isnan(found["kl"][0])
    assert found["ratio"] == (2.0, 0.0)


def test_reward_statistics_equal_hand_worked_values():
    # sorted 0 1 3 4 7: mean 3; squared distances 9 + 4 + 0 + 1 + 16 = 30, over 4; quartiles at places 1, 2, 3
    names = ("mean", "std", "max", "min", "median", "q25", "q75")
    statistics = reward_statistics(torch.tensor([3.0, 7.0, 0.0, 4.0, 1.0]))
    assert set(statistics) == {f"rewards/{name}" for name in names}
    assert [statistics[f"rewards/{name}"] for name in names] == pytest.approx([3, math.sqrt(7.5), 7, 0, 3, 1, 4])
    statistics = reward_statistics(torch.tensor([0.5]))
    assert statistics.pop("rewards/std") == 0
    assert set(statistics.values()) == {0.5}

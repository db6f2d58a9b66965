"""Streaming statistics by hand and against numpy, and the lines a JSONL file gets."""

import json
import math
import unicodedata

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo import JSONLSink, MetricSink
from grpo.metrics import Meter, reward_statistics


def row(count: float, total: float, squares: float) -> torch.Tensor:
    return torch.tensor([count, total, squares], dtype=torch.float64)


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_meter_reports_mean_and_deviation_over_micro_batches():
    # values 1, 2 | 6: mean 3, mean of squares 41/3, variance 41/3 - 9 = 14/3
    meter = Meter()
    meter.add({"ratio": row(2, 3, 5)})
    meter.add({"ratio": row(1, 6, 36)})
    assert meter.report(num_updates=1) == {"ratio": (pytest.approx(3), pytest.approx(math.sqrt(14 / 3)))}


def test_a_meter_sums_shares_and_averages_them_over_updates():
    # two updates of two micro-batches each: (.5 + .25 + 1 + 2.25)/2
    meter = Meter()
    for share in (0.5, 0.25, 1.0, 2.25):
        meter.add({"loss": row(0, share, 0)})
    assert meter.report(num_updates=2) == {"loss": (2.0, 0.0)}


def test_a_metric_is_averaged_over_the_micro_batches_that_report_it():
    meter = Meter()
    meter.add({"ratio": row(1, 2, 4), "kl": row(2, 1, 0.5)})
    meter.add({"ratio": row(1, 4, 16)})
    assert meter.report(num_updates=1) == {"ratio": (3.0, pytest.approx(1.0)), "kl": (0.5, 0.0)}


def test_a_meter_averages_plain_numbers():
    meter = Meter()
    meter.add_value("grad_norm", 1.0)
    meter.add_value("grad_norm", 4.0)
    assert meter.report(num_updates=7) == {"grad_norm": (2.5, 0.0)}


def test_a_meter_is_empty_after_a_report():
    meter = Meter()
    meter.add({"ratio": row(1, 2, 4)})
    meter.add_value("grad_norm", 1.0)
    meter.report(num_updates=1)
    assert meter.report(num_updates=1) == {}
    meter.add({"ratio": row(1, 5, 25)})
    assert meter.report(num_updates=1) == {"ratio": (5.0, 0.0)}


def test_a_cleared_meter_is_empty():
    meter = Meter()
    meter.add({"ratio": row(1, 2, 4)})
    meter.add_value("grad_norm", 1.0)
    meter.clear()
    assert meter.report(num_updates=1) == {}


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


def test_a_meter_without_updates_reports_shares_undivided():
    meter = Meter()
    meter.add({"loss": row(0, 0.5, 0)})
    assert meter.report(num_updates=0) == {"loss": (0.5, 0.0)}


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


def test_the_deviation_of_a_meter_is_never_the_root_of_a_negative_number():
    # ten times .1: squares 10 * .01, and rounding may leave the variance just below 0
    meter = Meter()
    meter.add({"ratio": row(10, 0.1 * 10, math.nextafter(0.1, 0))})
    mean, deviation = meter.report(num_updates=1)["ratio"]
    assert mean == pytest.approx(0.1)
    assert deviation == 0


def test_reward_statistics_equal_hand_worked_values():
    # sorted 0 1 3 4 7: mean 3; squared distances 9 + 4 + 0 + 1 + 16 = 30, over 4; quartiles at places 1, 2, 3
    assert reward_statistics(torch.tensor([3.0, 7.0, 0.0, 4.0, 1.0])) == {
        "rewards/mean": pytest.approx(3),
        "rewards/std": pytest.approx(math.sqrt(7.5)),
        "rewards/max": 7,
        "rewards/min": 0,
        "rewards/median": 3,
        "rewards/q25": 1,
        "rewards/q75": 4,
    }


def test_reward_statistics_of_one_row_have_std_0():
    statistics = reward_statistics(torch.tensor([0.5]))
    assert statistics.pop("rewards/std") == 0
    assert set(statistics.values()) == {0.5}


@settings(max_examples=60)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40))
def test_reward_statistics_equal_numpys(rewards):
    q25, median, q75 = np.quantile(rewards, [0.25, 0.5, 0.75])
    expected = {
        "mean": np.mean(rewards), "std": np.std(rewards, ddof=1), "max": max(rewards), "min": min(rewards),
        "median": median, "q25": q25, "q75": q75,
    }  # fmt: skip
    statistics = reward_statistics(torch.tensor(rewards, dtype=torch.float64))
    assert statistics == {f"rewards/{name}": pytest.approx(v, rel=1e-9, abs=1e-9) for name, v in expected.items()}


def test_a_sink_writes_one_line_per_iteration(tmp_path):
    path = tmp_path / "made" / "on the way" / "metrics.jsonl"
    with JSONLSink(path) as sink:
        assert isinstance(sink, MetricSink)
        sink.log({"rewards/mean": 0.5, "train/kl_mean": 0.1}, iteration=1)
        sink.log({"rewards/mean": 0.75}, iteration=2)
    assert path.read_text() == (
        '{"iteration": 1, "rewards/mean": 0.5, "train/kl_mean": 0.1}\n{"iteration": 2, "rewards/mean": 0.75}\n'
    )


def test_a_sink_appends_to_an_existing_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for iteration in (1, 2):
        with JSONLSink(str(path)) as sink:
            sink.log({"a": float(iteration)}, iteration=iteration)
    assert read_jsonl(path) == [{"iteration": 1, "a": 1.0}, {"iteration": 2, "a": 2.0}]


def test_a_line_is_on_disk_before_the_sink_is_closed(tmp_path):
    with JSONLSink(tmp_path / "metrics.jsonl") as sink:
        sink.log({"a": 1.0}, iteration=1)
        assert read_jsonl(sink.path) == [{"iteration": 1, "a": 1.0}]


def test_values_that_json_cannot_hold_become_null(subtests, tmp_path):
    for value in [math.nan, math.inf, -math.inf]:
        with subtests.test(value=value):
            with JSONLSink(tmp_path / f"{value}.jsonl") as sink:
                sink.log({"a": value, "b": 1.0}, iteration=1)
            assert json.loads(sink.path.read_text(), parse_constant=pytest.fail) == {
                "iteration": 1,
                "a": None,
                "b": 1.0,
            }


def test_no_name_can_break_a_line_or_reach_a_terminal(tmp_path):
    control = [chr(c) for c in range(0x2100) if unicodedata.category(chr(c)) in ("Cc", "Zl", "Zp")]
    names = [f"a{character}b" for character in control] + [
        '"}\n{"iteration": 9, "forged": 1',
        "\\n",
        "\x1b[2J",
        "naïve ✓",
    ]
    with JSONLSink(tmp_path / "metrics.jsonl") as sink:
        sink.log({name: float(n) for n, name in enumerate(names)}, iteration=1)
        sink.log({"a": 1.0}, iteration=2)
    written = sink.path.read_bytes()
    assert written.count(b"\n") == 2
    assert all(0x20 <= byte < 0x7F for byte in written.replace(b"\n", b""))
    assert read_jsonl(sink.path) == [
        {"iteration": 1, **{name: float(n) for n, name in enumerate(names)}}, {"iteration": 2, "a": 1.0},
    ]  # fmt: skip

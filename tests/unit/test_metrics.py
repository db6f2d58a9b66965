"""Streaming statistics, by hand and against numpy."""

import math

import pytest
import torch

from grpo._objective.metrics import Measured, all_moments
from grpo.metrics import Meter, reward_statistics


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

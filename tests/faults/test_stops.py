"""Runs of 30 iterations of every adapter, stopped at every update and in every collection, end like unbroken runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapter_runs import RUNS
from tests.support.checkpoint_runs import CASES, built
from tests.support.stopped_runs import Build, Unbroken, by_exception, by_signal

pytestmark = [
    pytest.mark.usefixtures("without_type_checks"),
    pytest.mark.faults,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:.*the first ratio is not 1:grpo.errors.GRPOWarning"),
    pytest.mark.filterwarnings("ignore:.*so there is nothing left to do:grpo.errors.GRPOWarning"),
]
WAYS = [by_exception, by_signal]


def quiet(build: Build) -> Build:
    def built_quietly(seed: int) -> Any:
        trainer, states, options = build(seed)
        return trainer, states, {"progress": False, **options}

    return built_quietly


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_30_iterations_survives_a_stop_at_every_update(
    name: str, subtests: pytest.Subtests, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Each process makes one update, or one collection, and is stopped."""
    unbroken, num_stops = Unbroken(quiet(RUNS[name]), num_iterations=30), list[int]()
    for phase in ("reward", "score", "loss", "step", "callback"):
        for stop in WAYS:
            with subtests.test(phase=phase, stop=stop.__name__):
                stops = unbroken.assert_same_after_stops_everywhere(tmp_path / f"{phase} {stop.__name__}", phase, stop)
                num_stops.append(stops)
                assert stops >= unbroken.counts[phase] // 2
    record_property(name, f"{sum(num_stops)} stops in {len(num_stops)} chains")


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_run_survives_a_stop_at_every_call(
    case: str, subtests: pytest.Subtests, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    unbroken = Unbroken(lambda seed: built(case, seed), num_iterations=4)
    record_property(case, f"{sum(unbroken.counts.values())} stops")
    for phase, num_calls in unbroken.counts.items():
        for at in range(1, num_calls + 1):
            stop = WAYS[at % 2]
            with subtests.test(phase=phase, at=at, stop=stop.__name__):
                unbroken.assert_same_after_a_stop(tmp_path / f"{phase} {at}", phase, at, stop)

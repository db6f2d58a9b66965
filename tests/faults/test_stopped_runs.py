"""Runs that are stopped or killed again and again end like unbroken runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_killed_runs import assert_nothing_is_lost
from tests.integration.test_runs_on_ranks import assert_same_ends, run_on_ranks
from tests.support.adapter_runs import RUNS
from tests.support.checkpoint_runs import CASES, built
from tests.support.launches import printed_by
from tests.support.stopped_runs import Build, Unbroken, by_exception, by_signal

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:.*the first ratio is not 1:grpo.errors.GRPOWarning"),
    pytest.mark.filterwarnings("ignore:.*so there is nothing left to do:grpo.errors.GRPOWarning"),
]
Record = Callable[[str, object], None]
WAYS = [by_exception, by_signal]


def quiet(build: Build) -> Build:
    def built_quietly(seed: int) -> Any:
        trainer, states, options = build(seed)
        return trainer, states, {"progress": False, **options}

    return built_quietly


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_30_iterations_survives_a_stop_at_every_update(
    name: str, subtests: pytest.Subtests, tmp_path: Path, record_property: Record
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


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_run_survives_a_stop_at_every_call(
    case: str, subtests: pytest.Subtests, tmp_path: Path, record_property: Record
) -> None:
    unbroken = Unbroken(lambda seed: built(case, seed), num_iterations=4)
    record_property(case, f"{sum(unbroken.counts.values())} stops")
    for phase, num_calls in unbroken.counts.items():
        for at in range(1, num_calls + 1):
            stop = WAYS[at % 2]
            with subtests.test(phase=phase, at=at, stop=stop.__name__):
                unbroken.assert_same_after_a_stop(tmp_path / f"{phase} {at}", phase, at, stop)


def test_a_run_stopped_at_every_call_on_one_rank_continues_on_both(
    subtests: pytest.Subtests, tmp_path: Path, record_property: Record
) -> None:
    ranks = run_on_ranks("stops", tmp_path, 30, "reward", "score", "loss", "step", "callback")
    num_stops = [found["stops"] for name, found in ranks[0].items() if name != "unbroken"]
    record_property("one run on two ranks", f"{sum(num_stops)} stops in {len(num_stops)} chains")
    assert_same_ends(ranks, subtests)


def test_after_100_kills_both_ranks_load_the_same_newest_checkpoint(tmp_path: Path, record_property: Record) -> None:
    counts = run_on_ranks("kills", tmp_path, 100, 1, 30)
    record_property("runs that ended", counts["runs"])
    assert counts["killed"] == 100
    assert (counts["older"], counts["mixed"], counts["unnamed"]) == (0, 0, 0)
    assert counts["runs"] >= 1


def test_500_kills_lose_nothing(tmp_path: Path, record_property: Record) -> None:
    counts = assert_nothing_is_lost(tmp_path, 500, 0, seed=1)
    record_property("runs that ended", counts["kills"]["runs"])


def test_200_signals_lose_nothing(tmp_path: Path, record_property: Record) -> None:
    counts = assert_nothing_is_lost(tmp_path, 0, 200, seed=1)
    record_property("the longest end", f"{counts['signals']['longest']:.2f} s")


def test_100_runs_with_random_latencies_kills_and_signals_end_with_the_weights_of_one_thread(tmp_path: Path) -> None:
    printed = printed_by("-m", "tests.support.ahead_runs", tmp_path, 100, 0, seconds=3600)
    counts = json.loads(printed.splitlines()[-1])
    assert counts["runs"] == 100
    assert counts["other weights"] == 0
    assert counts["stops"] >= 200
    assert counts["ends"] >= 9  # the lag, and the settings, decide the weights

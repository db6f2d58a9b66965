"""Runs with `iterations_ahead` that are stopped again and again end with the weights of an unbroken run in one thread."""

import json
from pathlib import Path

import pytest

from tests.support.launches import printed_by

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]


def test_100_runs_with_random_latencies_kills_and_signals_end_with_the_weights_of_one_thread(tmp_path: Path) -> None:
    printed = printed_by("-m", "tests.support.ahead_runs", tmp_path, 100, 0, seconds=3600)
    counts = json.loads(printed.splitlines()[-1])
    assert counts["runs"] == 100
    assert counts["other weights"] == 0
    assert counts["stops"] >= 200
    assert counts["ends"] >= 9  # the lag, and the settings, decide the weights

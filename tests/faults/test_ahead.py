"""Runs with `iterations_ahead` that are stopped again and again end with the weights of an unbroken run in one thread."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]


def test_100_runs_with_random_latencies_kills_and_signals_end_with_the_weights_of_one_thread(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.ahead_runs", str(tmp_path), "100", "0"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=3600, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["runs"] == 100
    assert counts["other weights"] == 0
    assert counts["stops"] >= 200
    assert counts["ends"] >= 9  # the lag, and the settings, decide the weights

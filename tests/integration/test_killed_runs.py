"""A run whose process is killed, or stopped by signals, at random times loses nothing that was saved and ends the same."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def counts_of(kind: str, folder: Path, num_times: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.support.killed_runs", kind, str(folder), str(num_times), "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    counts: dict[str, Any] = json.loads(done.stdout)
    return counts


def test_a_killed_run_continues_from_the_newest_checkpoint(tmp_path: Path) -> None:
    counts = counts_of("kills", tmp_path, 10)
    assert (counts["killed"], counts["older"], counts["mixed"]) == (10, 0, 0)


def test_a_run_that_signals_stop_continues_to_the_same_end(tmp_path: Path) -> None:
    counts = counts_of("signals", tmp_path, 10)
    assert (counts["signals"], counts["exit codes"]) == (10, 10)
    assert (counts["older"], counts["different ends"]) == (0, 0)
    assert counts["longest"] < 25

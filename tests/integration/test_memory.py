"""The memory of a run does not grow with its iterations."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def growth_of(name: str, num_iterations: int, folder: Path) -> float:
    """MB that the second half of a run adds."""
    command = [sys.executable, "-m", "tests.support.memory_growth", name, str(num_iterations), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return float(done.stdout)


@pytest.mark.slow
def test_the_second_half_of_a_run_needs_no_more_memory(tmp_path: Path) -> None:
    assert growth_of("control", 200, tmp_path / "run") <= 5.0

"""Benchmarks run, and what they compare is the same. How fast is for a person to read, not for a test."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.overhead import check_same

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("by_group", [False, True])
def test_the_hand_written_loop_does_the_same_mathematics(by_group: bool) -> None:
    assert check_same(by_group) < 1e-9


def test_the_overhead_benchmark_prints_a_ratio_for_each_size() -> None:
    command = [sys.executable, "-W", "error", "-m", "benchmarks.overhead", "--rows", "64", "128", "--repeats", "3"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.count("ratio") == 4
    assert printed.count("state once per group") == 2

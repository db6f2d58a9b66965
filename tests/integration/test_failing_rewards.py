"""Runs in which one call of the reward in five raises, hangs or returns rubbish."""

from pathlib import Path

import pytest

from tests.support.reward_faults import children, run_with_faults

CASES = {
    "plain, raise": {"timeout": 0.25, "is_async": False, "on_failure": "raise", "num_iterations": 8},
    "plain, drop": {"timeout": 0.25, "is_async": False, "on_failure": "drop", "num_iterations": 8},
    "awaited, raise": {"timeout": 0.1, "is_async": True, "on_failure": "raise", "num_iterations": 15},
    "awaited, drop": {"timeout": 0.1, "is_async": True, "on_failure": "drop", "num_iterations": 15},
}


@pytest.mark.slow
def test_every_failure_of_a_run_is_counted_once_and_no_process_is_left(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    before = children()
    for name, case in CASES.items():
        with subtests.test(case=name):
            (folder := tmp_path / name).mkdir()
            run = run_with_faults(folder, seed=6, **case)
            assert run.reported == run.expected
            assert (run.num_raised > 0) == (case["on_failure"] == "raise")
            assert (run.expected["rows/dropped"] > 0) == (case["on_failure"] == "drop")
            assert all(run.num_faults.values()), run.num_faults
            assert children() == before

"""500 kills and 200 signals at random times of a run."""

from pathlib import Path

import pytest

from tests.integration.test_killed_runs import counts_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]


def test_500_kills_lose_nothing_that_was_saved(tmp_path: Path) -> None:
    counts = counts_of("kills", tmp_path, 500)
    assert (counts["killed"], counts["older"], counts["mixed"]) == (500, 0, 0)
    assert counts["runs"] > 5


def test_200_signals_leave_a_checkpoint_each(tmp_path: Path) -> None:
    counts = counts_of("signals", tmp_path, 200)
    assert (counts["signals"], counts["exit codes"]) == (200, 200)
    assert (counts["older"], counts["different ends"]) == (0, 0)
    assert counts["longest"] < 25
    assert counts["runs"] > 3

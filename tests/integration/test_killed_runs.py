"""A run whose process is killed, or stopped by signals, at random times loses nothing that was saved and ends the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launches import printed_by


def assert_nothing_is_lost(folder: Path, num_kills: int, num_signals: int, seed: int) -> dict[str, Any]:
    counts: dict[str, Any] = json.loads(
        printed_by("-m", "tests.support.killed_runs", folder, num_kills, num_signals, seed)
    )
    kills, signals = counts["kills"], counts["signals"]
    assert (kills["killed"], kills["older"], kills["mixed"]) == (num_kills, 0, 0)
    assert (signals["signals"], signals["wrong codes"]) == (num_signals, [])
    assert (signals["older"], signals["different ends"]) == (0, 0)
    assert signals["longest"] < 25
    return counts


@pytest.mark.slow
def test_killed_and_stopped_runs_continue_from_their_newest_checkpoint(tmp_path: Path) -> None:
    assert_nothing_is_lost(tmp_path, 8, 8, seed=2)

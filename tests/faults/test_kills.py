"""500 kills and 200 signals at random times of a run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.test_killed_runs import assert_nothing_is_lost

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]


def test_500_kills_lose_nothing(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    counts = assert_nothing_is_lost(tmp_path, 500, 0, seed=1)
    record_property("runs that ended", counts["kills"]["runs"])


def test_200_signals_lose_nothing(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    counts = assert_nothing_is_lost(tmp_path, 0, 200, seed=1)
    record_property("the longest end", f"{counts['signals']['longest']:.2f} s")

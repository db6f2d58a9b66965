"""500 kills and 200 signals at random times of a run."""

from pathlib import Path

import pytest

from tests.integration.test_killed_runs import assert_nothing_is_lost

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]


def test_500_kills_and_200_signals_lose_nothing(tmp_path: Path) -> None:
    assert_nothing_is_lost(tmp_path, 500, 200, seed=1)

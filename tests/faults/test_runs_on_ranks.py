"""Two ranks: stops at every update of 30 iterations, and 100 kills."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.test_runs_on_ranks import assert_same_ends, run_on_ranks

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]


def test_a_run_stopped_at_every_call_on_one_rank_continues_on_both(
    subtests: pytest.Subtests, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    ranks = run_on_ranks("stops", tmp_path, 30, "reward", "score", "loss", "step", "callback")
    num_stops = [found["stops"] for name, found in ranks[0].items() if name != "unbroken"]
    record_property("one run on two ranks", f"{sum(num_stops)} stops in {len(num_stops)} chains")
    assert_same_ends(ranks, subtests)


def test_after_100_kills_both_ranks_load_the_same_newest_checkpoint(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    counts = run_on_ranks("kills", tmp_path, 100, 1, 30)
    record_property("runs that ended", counts["runs"])
    assert counts["killed"] == 100
    assert (counts["older"], counts["mixed"], counts["unnamed"]) == (0, 0, 0)
    assert counts["runs"] >= 1

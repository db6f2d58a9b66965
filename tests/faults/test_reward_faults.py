"""1,000 iterations in which one call of the reward in five raises, hangs or returns rubbish."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.reward_faults import children, run_with_faults

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]  # 490 s of an idle machine


@pytest.mark.parametrize("on_failure", ["raise", "drop"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_thousand_iterations_count_every_failure_and_leave_no_process(
    is_async: bool, on_failure: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    before, threads = children(), threading.active_count()
    run = run_with_faults(tmp_path, num_iterations=1000, timeout=0.5, is_async=is_async, on_failure=on_failure)
    record_property(
        f"on_failure={on_failure}, {'async' if is_async else 'sync'}", f"{sum(run.num_faults.values())} faults"
    )
    assert run.reported == run.expected
    assert (run.num_raised > 10) == (on_failure == "raise")
    assert (run.expected["rows/dropped"] > 10) == (on_failure == "drop")
    assert min(run.num_faults.values()) > 50
    assert children() == before
    assert threading.active_count() <= threads + 1  # the event loop's

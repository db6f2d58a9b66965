"""The memory of long runs of every adapter does not grow."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.test_memory import growth_of
from tests.support.adapter_runs import RUNS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("name", RUNS)
def test_the_second_500_iterations_need_at_most_5_mb_more(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    growth = growth_of(name, 1000, tmp_path / "run")
    record_property(name, f"{growth:+.1f} MB")
    assert growth <= 5.0

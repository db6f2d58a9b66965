"""The memory of a run does not grow with its iterations."""

from pathlib import Path

import pytest

from tests.support.launches import printed_by


def growth_of(name: str, num_iterations: int, folder: Path) -> float:
    """MB that the second half of a run adds."""
    return float(printed_by("-m", "tests.support.memory_growth", name, num_iterations, folder))


@pytest.mark.slow
def test_the_second_half_of_a_run_needs_no_more_memory(tmp_path: Path) -> None:
    assert growth_of("control", 200, tmp_path / "run") <= 5.0

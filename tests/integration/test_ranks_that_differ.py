"""Ranks that differ in a setting, a function, a weight or a buffer do not train apart in silence. A launch plays many cases."""

from pathlib import Path

import pytest
import torch

from tests.support.launches import run_with_children
from tests.support.ranks_that_differ import CASES

pytestmark = pytest.mark.slow


def test_no_difference_between_two_ranks_trains_on_or_is_saved(tmp_path: Path, subtests: pytest.Subtests) -> None:
    arguments = "-m", "tests.support.ranks_that_differ", str(tmp_path)
    run_with_children(*arguments, output=tmp_path / "output", seconds=600)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    for engine in ("Replicated", "Sharded"):  # ranks that hold other rows of equal weights are equal
        assert first.pop(f"equal, {engine}") == second.pop(f"equal, {engine}") == "nothing was raised"
        assert len(written_to(tmp_path / f"equal, {engine}")) == 3
    assert first.keys() == CASES.keys()
    assert len(first) >= 30
    for name, case in CASES.items():
        with subtests.test(name=name):
            assert first[name] == second[name]
            assert first[name].startswith(("ConfigError: ", "RankError: "))
            assert case.word in first[name]
            assert "rank 1" in first[name]
            assert written_to(tmp_path / name) == []
    assert list(tmp_path.glob(".*.tmp")) == []


def written_to(checkpoints: Path) -> list[str]:
    """The names of checkpoints, or of the files of one, and of what a save has left behind, without the lock of a run."""
    return [path.name for path in checkpoints.glob("*") if path.name != ".lock"]

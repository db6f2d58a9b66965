"""Ranks that differ in a setting, a function, a weight or a buffer do not train apart in silence. One launch plays all."""

from pathlib import Path

import pytest
import torch

from tests.support.launches import run_with_children
from tests.support.ranks_that_differ import CASES

pytestmark = pytest.mark.slow


def test_no_difference_between_two_ranks_trains_on(tmp_path: Path, subtests: pytest.Subtests) -> None:
    run_with_children("-m", "tests.support.ranks_that_differ", str(tmp_path), output=tmp_path / "output", seconds=200)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert first.pop("equal") == second.pop("equal") == "nothing was raised"
    assert first.keys() == CASES.keys()
    assert len(first) >= 30
    for name, case in CASES.items():
        with subtests.test(name=name):
            assert first[name] == second[name]
            assert first[name].startswith(("ConfigError: ", "RankError: "))
            assert case.word in first[name]
            assert "rank 1" in first[name]

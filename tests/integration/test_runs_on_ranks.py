"""A run on two ranks that is stopped on one rank, or killed, continues on both ranks as if nothing had stopped it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launches import printed_by


def run_on_ranks(*arguments: Any, engine: str = "Replicated", **variables: str) -> Any:
    return json.loads(printed_by("-m", "tests.support.runs_on_ranks", *arguments, ENGINE_OF_RANKS=engine, **variables))


def assert_same_ends(ranks: list[dict[str, Any]], subtests: pytest.Subtests, num_stops: int = 2) -> None:
    for name in ranks[0].keys() - {"unbroken"}:
        for rank, found in enumerate(ranks):
            with subtests.test(name=name, rank=rank):
                assert found[name]["end"] == found["unbroken"]["end"]
                assert found[name]["stops"] >= num_stops
                assert found[name]["errors"] == ["TrainingInterrupted" if "signal" in name else "RankError"]
                assert str(found[name]["metrics"]) == str(found["unbroken"]["metrics"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["Replicated", "Sharded"])
def test_a_run_stopped_on_one_rank_continues_on_both(engine: str, subtests: pytest.Subtests, tmp_path: Path) -> None:
    assert_same_ends(run_on_ranks("stops", tmp_path, 3, "reward", "loss", engine=engine), subtests)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", ["1", "4"])
def test_iterations_ahead_end_on_both_ranks_as_in_one_thread_and_after_stops(
    ahead: str, subtests: pytest.Subtests, tmp_path: Path
) -> None:
    (tmp_path / "in order").mkdir()
    expected = run_on_ranks("stops", tmp_path / "in order", 4, ITERATIONS_AHEAD=ahead, GRPO_AHEAD_IN_ORDER="1")
    found = run_on_ranks("stops", tmp_path, 4, "reward", "loss", ITERATIONS_AHEAD=ahead)
    assert_same_ends(found, subtests, num_stops=1)  # a resumed run has some rewards, and asks for fewer
    for rank in range(2):
        assert found[rank]["unbroken"] == expected[rank]["unbroken"]


@pytest.mark.slow
def test_after_kills_both_ranks_load_the_same_newest_checkpoint(tmp_path: Path) -> None:
    counts = run_on_ranks("kills", tmp_path, 2, 1, 10)
    assert {name: counts[name] for name in ("killed", "older", "mixed", "unnamed")} == {
        "killed": 2,
        "older": 0,
        "mixed": 0,
        "unnamed": 0,
    }

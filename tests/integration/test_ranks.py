"""Two processes that share the rows of an update make the same update as one process with all rows.

One launch runs `on_each_rank.py` on both ranks; the tests look at what it wrote. A rank that waits for ever fails the launch.
"""

from typing import Any

import pytest
import torch

from grpo.checkpoint import read_checkpoint
from grpo.engine import OneProcess
from tests.support import on_each_rank
from tests.support.configs import EVERY, Rows, update
from tests.support.launches import run_with_children
from tests.support.on_each_rank import DIFFERENT, IDLE, PATTERNS

pytestmark = [
    pytest.mark.usefixtures("without_type_checks"),
    pytest.mark.filterwarnings("ignore:objective.kl_estimator='k1'"),
    pytest.mark.slow,
]
SECONDS = 240
"""Many times what the launch takes, and less than the time limit of a test."""
COUNTED = ["rows/skipped_zero_advantage", "rows/dropped", "rows/replayed"]
"""Counts of rows, of which every rank has its own; they have a test of theirs."""


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in COUNTED and not name.startswith("time/")}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    launch = "-m", "tests.support.on_each_rank", str(folder)
    run_with_children(*launch, output=folder / "output", seconds=SECONDS)
    results = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for rank, result in enumerate(results):
        result["checkpoints"] = (folder / f"checkpoints{rank}.txt").read_text(), folder / "checkpoints"
    return results


def assert_equal_to_one_process(done: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    alone = update(EVERY[name], Rows.example(dtype))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert len(done["gradients"]) == len(alone.gradients) == 2
    for together, single in zip(done["gradients"], alone.gradients, strict=True):
        assert (together - single).norm() <= tolerance * single.norm()
    assert (done["weights"] - alone.weights).norm() <= tolerance
    for metric, value in comparable(alone.metrics).items():
        assert done["metrics"][metric] == pytest.approx(value, rel=tolerance, abs=1e-6, nan_ok=True), metric


def assert_equal_on_both(ranks: list[dict[str, Any]], *path: Any) -> None:
    """To the last bit, so that ranks never drift apart."""
    zero, one = ranks
    for key in path:
        zero, one = zero[key], one[key]
    assert torch.equal(zero["weights"], one["weights"])
    assert len(zero["gradients"]) == len(one["gradients"])
    for metric, value in comparable(zero["metrics"]).items():
        assert one["metrics"][metric] == pytest.approx(value, rel=0, abs=0, nan_ok=True), metric


def test_an_update_on_two_ranks_equals_the_update_of_one_process(ranks, subtests):
    cases = [(name, torch.float64) for name in DIFFERENT] + [(name, torch.float32) for name in PATTERNS]
    assert {(name, str(dtype).removeprefix("torch.")) for name, dtype in cases} == set(ranks[0]["updates"])
    for name, dtype in cases:
        with subtests.test(name=name, dtype=dtype):
            key = name, str(dtype).removeprefix("torch.")
            assert_equal_on_both(ranks, "updates", key)
            assert_equal_to_one_process(ranks[0]["updates"][key], name, dtype)


def test_row_counts_are_summed_over_ranks(ranks):
    # 2 rows of equal rewards and 1 alone in its group are skipped by rank 1; 1 of its rows has no reward
    for results in ranks:
        assert results["updates"]["dapo", "float64"]["metrics"]["rows/skipped_zero_advantage"] == 3
        assert results["dropped"]["rows/dropped"] == 1
        assert results["dropped"]["rewards/mean"] == pytest.approx(1.5)  # 0, 1, 2, 3 and 1, 2, 1.5


def test_a_rank_whose_advantages_are_all_0_still_takes_part_in_updates(ranks, subtests):
    for name in IDLE:
        with subtests.test(name=name):
            assert_equal_on_both(ranks, "without an advantage", name)
            assert_equal_to_one_process(ranks[0]["without an advantage"][name], name, torch.float64)


def test_ranks_with_fewer_rows_wait_for_the_others(ranks, subtests):
    # 3 and 12 rows in updates of 4 are 1 and 3 updates per pass: 3 for both, twice
    for name in PATTERNS:
        with subtests.test(name=name):
            assert_equal_on_both(ranks, "different numbers", name)
            done = ranks[0]["different numbers"][name]
            assert len(done["gradients"]) + done["metrics"]["train/skipped_updates"] == 6
            assert len(done["gradients"]) >= 4
            assert done["weights"].isfinite().all()


def test_ranks_do_not_sample_the_same_actions(ranks):
    assert ranks[0]["samples"] != ranks[1]["samples"]


def test_a_run_on_several_ranks_writes_checkpoints_of_all_ranks(ranks):
    for results in ranks:
        message, folder = results["checkpoints"]
        assert message == "nothing was raised"
    newest = [f"iteration-{iteration:08d}" for iteration in (6, 7, 8)]
    kept = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert kept[-3:] == newest
    assert len(kept) <= 4  # and the best by its evaluations
    for name, iteration in zip(newest, (6, 7, 8), strict=True):
        assert read_checkpoint(folder / name)["parts"]["counters"]["iteration"] == iteration
        assert [(folder / name / f"rank-{rank}").is_dir() for rank in range(3)] == [True, True, False]


def test_train_divides_the_states_among_the_ranks(ranks):
    alone = on_each_rank.run(OneProcess())
    assert [len(states) for states in alone["seen"]] == [10, 10, 10]
    for drawn, first, second in zip(alone["seen"], ranks[0]["run"]["seen"], ranks[1]["run"]["seen"], strict=True):
        assert first + second == drawn
        assert (len(first), len(second)) == (6, 4)  # 3 and 2 states, two actions each
    assert torch.equal(ranks[0]["run"]["weights"], ranks[1]["run"]["weights"])
    assert not torch.equal(ranks[0]["run"]["weights"], ranks[0]["too few states"]["weights"])


def test_train_refuses_fewer_states_than_ranks(ranks):
    for results in ranks:
        assert results["too few states"]["message"].startswith(
            "ConfigError: Every one of 2 ranks needs a state; got 1."
        )

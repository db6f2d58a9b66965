"""Ranks that divide the weights of a policy make the same updates as ranks with copies of it, and as one process.

One launch runs `sharded_ranks.py`; the tests look at what each rank wrote. A rank that waits for ever fails the launch.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.engine import OneProcess
from grpo.errors import GRPOWarning
from tests.support.ahead_on_other_ranks import NUM_ITERATIONS, made
from tests.support.launches import run_with_children
from tests.support.sharded_ranks import CASES, KEPT, batches_of, trained
from tests.support.sharded_results import assert_right
from tests.support.tensor_hashes import hashes_of

SLOW, LONG = pytest.mark.slow, pytest.mark.faults
SECONDS = 600


def launched(
    folder: Path, num_ranks: int, names: Sequence[str], source: str = "-", engine: str = "sharded"
) -> list[dict[Any, Any]]:
    """What each rank wrote."""
    launch = "-m", "tests.support.sharded_ranks", str(folder), str(num_ranks), engine, source, *names
    run_with_children(*launch, output=folder / "output", seconds=SECONDS)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=LONG), pytest.param(2, marks=SLOW), pytest.param(4, marks=LONG)]
)
def test_divided_weights_make_the_updates_of_one_process(
    num_ranks: int, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    assert_right(launched(tmp_path, num_ranks, list(CASES)), list(CASES), subtests)


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=SLOW), pytest.param(2, marks=LONG), pytest.param(4, marks=LONG)]
)
def test_any_number_of_ranks_loads_the_weights_and_moments_of_two_ranks(
    num_ranks: int, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    source, target = tmp_path / "two", tmp_path / "others"
    source.mkdir()
    target.mkdir()
    written = launched(source, 2, KEPT)
    ranks = launched(target, num_ranks, KEPT, str(source))
    for name in KEPT:
        with subtests.test(name=name):
            for found in ranks:
                assert found[name, "loaded"]["hashes"] == written[0][name, "saved"]
                assert found[name, "loaded"]["num_distinct"] == num_ranks
                assert found[name, "loaded"]["norm"] == ranks[0][name, "loaded"]["norm"]
                assert len(found[name, "loaded"]["said"]) == (num_ranks != 2)
    if num_ranks == 4:
        (said,) = ranks[0][KEPT[0], "loaded"]["said"]
        assert "the ranks from 2 on have new random generators and no replayed rows" in said


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sharded", "replicated"])
def test_a_run_goes_from_two_ranks_to_one_plain_process_and_to_four_ranks(engine: str, tmp_path: Path) -> None:
    """The plain process makes an update, and writes whole tensors, of which ranks that divide them read their rows."""
    name, two, one, four = KEPT[0], *(tmp_path / name for name in ("two", "one", "four"))
    for folder in (two, one, four):
        folder.mkdir()
    written = launched(two, 2, [name], engine=engine)
    trainer, _ = trained(CASES[name], OneProcess(), 0)
    with pytest.warns(GRPOWarning, match="was written by 2 ranks, and 1 load it"):
        trainer.load_checkpoint(two / name)
    assert hashes_of(trainer) == written[0][name, "saved"]
    trainer.update(*batches_of(CASES[name], trainer.policy, 0, 1))
    updated = hashes_of(trainer)
    assert not set(updated.values()) & set(written[0][name, "saved"].values())
    trainer.save_checkpoint(one / name)
    ranks = [found[name, "loaded"] for found in launched(four, 4, [name], str(one), engine)]
    for found in ranks:
        assert (found["hashes"], found["iteration"]) == (updated, trainer.iteration)
        assert (found["num_distinct"], found["norm"]) == (4, ranks[0]["norm"])
    (said,) = ranks[0]["said"]
    assert "was written by 1 ranks, and 4 load it" in said


@pytest.mark.slow
def test_four_ranks_sample_again_what_two_had_sampled_ahead_and_no_state_is_lost_or_doubled(tmp_path: Path) -> None:
    for num_ranks, last in ((2, 3), (4, NUM_ITERATIONS)):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        launch += ["-m", "tests.support.ahead_on_other_ranks", str(tmp_path), str(last)]
        run_with_children(*launch, output=tmp_path / "output", seconds=SECONDS)
    four = [json.loads((tmp_path / f"rank-{rank}-of-4.json").read_text()) for rank in range(4)]
    for rank in four:
        (said,) = rank["said"]
        assert "2 iterations that were sampled ahead (8 rows per rank) are sampled again." in said
    unbroken: list[list[int]] = []
    made(OneProcess(), unbroken).train(list(range(16)), num_iterations=NUM_ITERATIONS, progress=False)
    found = [sorted(itertools.chain(*shares)) for shares in zip(*(rank["states"] for rank in four), strict=True)]
    assert found == [sorted(states) for states in unbroken[3:]]


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_was_killed_and_ends_with_the_weights_of_an_unbroken_run(
    tmp_path: Path,
) -> None:
    found = {}
    for name, kill_at in (("unbroken", 0), ("killed", 4)):
        (tmp_path / name).mkdir()
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
        launch += ["--monitor-interval", "0.2", "--standalone", "-m", "tests.support.restarted_run"]
        # a restart that shares the launcher's store would find the keys of the first start
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        output = tmp_path / name / "output"
        run_with_children(*launch, str(tmp_path / name), str(kill_at), output=output, seconds=SECONDS, **own_store)
        found[name] = json.loads((tmp_path / name / "hashes.json").read_text())
    assert found["killed"]["hashes"] == found["unbroken"]["hashes"]
    assert (found["unbroken"]["restarts"], found["killed"]["restarts"]) == (0, 1)

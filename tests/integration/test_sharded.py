"""Ranks that divide the weights of a policy make the same updates as ranks with copies of it, and as one process.

One launch runs `sharded_ranks.py`; the tests look at what each rank wrote. A rank that waits for ever fails the launch.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import load_weights
from grpo.distributed import OneProcess
from tests.support.layered import Layered
from tests.support.sharded_ranks import CASES, KEPT, NUM_UPDATES, ONLY_ON_RANKS, loaded, result_of
from tests.support.tensor_hashes import hash_of

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
ROOT = Path(__file__).parents[2]
SECONDS = 200
WEIGHTS, NORMS = 5e-5, 1e-5
"""Largest differences after the updates, in float32."""
DAILY = ["module, a rank without rows", "module, sampling", "moving reference"]
"""Cases that need no language model. The slow tests have all."""


def launched(folder: Path, num_ranks: int, names: Sequence[str], source: str = "-") -> list[dict[Any, Any]]:
    """What each rank wrote."""
    launch = [sys.executable, "-m", "tests.support.sharded_ranks", str(folder), str(num_ranks), source, *names]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            launch, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the ranks too
                process.wait()
    said = (folder / "output").read_text()[-6000:]
    assert code == 0, f"exit code {code} (None: the ranks wait for one another)\n{said}"
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(num_ranks)]


@cache
def in_one_process(name: str) -> dict[str, Any]:
    return result_of(CASES[name], OneProcess())


def assert_equal(found: dict[str, Any], expected: dict[str, Any], *, metrics: bool) -> None:
    assert "error" not in found, found["error"]
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        assert found["weights"][name].shape == value.shape
        assert (found["weights"][name] - value).abs().max() <= WEIGHTS, name
    for got, wanted in zip(found["metrics"], expected["metrics"], strict=True):
        assert got.get("train/grad_norm") == pytest.approx(wanted.get("train/grad_norm"), rel=NORMS)
        if metrics:
            assert got.keys() == wanted.keys()
            for name, number in wanted.items():
                assert got[name] == pytest.approx(number, rel=1e-3, abs=1e-4, nan_ok=True), name


def assert_right(ranks: list[dict[Any, Any]], names: Sequence[str], subtests: pytest.Subtests) -> None:
    for name in names:
        with subtests.test(name=name, num_ranks=len(ranks)):
            for found in ranks:
                assert "error" not in found[name, "replicated"], found[name, "replicated"]["error"]
                assert_equal(found[name, "sharded"], found[name, "replicated"], metrics=True)
                assert str(found[name, "sharded"]["weights"]) == str(ranks[0][name, "sharded"]["weights"])
                is_model = "module" not in name and "moving" not in name  # the tiny module has layers of 7 rows
                share = found[name, "sharded"]["bytes"] / found[name, "replicated"]["bytes"]
                assert share <= (1.1 if is_model else 1.4) / len(ranks), share
            if name not in ONLY_ON_RANKS:
                assert_equal(ranks[0][name, "sharded"], in_one_process(name), metrics=False)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[Any, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, launched(folder, 2, DAILY)


def test_two_ranks_with_divided_weights_make_the_updates_of_one_process(
    two_ranks: tuple[Path, list[dict[Any, Any]]], subtests: pytest.Subtests
) -> None:
    assert_right(two_ranks[1], DAILY, subtests)


def test_one_process_loads_the_weights_and_moments_of_two_ranks(two_ranks: tuple[Path, list[dict[Any, Any]]]) -> None:
    folder, (first, second) = two_ranks
    found = loaded(CASES[DAILY[0]], OneProcess(), folder / DAILY[0])
    assert found["hashes"] == first[DAILY[0], "saved"] == second[DAILY[0], "saved"]
    assert found["iteration"] == NUM_UPDATES
    (said,) = found["said"]
    assert said.startswith(
        f"{folder / DAILY[0]} was written by 2 ranks, and 1 load it. Exact: weights, optimizer, learning"
    )
    assert "states of policy and reward model of the ranks from 1 on are left out" in said
    policy = Layered()
    load_weights(folder / DAILY[0], policy)
    of_weights = {name: hash_of(value) for name, value in policy.get_parameters().items()}
    assert of_weights.items() <= found["hashes"].items()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_divided_weights_make_the_updates_of_one_process(
    num_ranks: int, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    assert_right(launched(tmp_path, num_ranks, list(CASES)), list(CASES), subtests)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
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
def test_torchrun_restarts_a_run_whose_rank_was_killed_and_ends_with_the_weights_of_an_unbroken_run(
    tmp_path: Path,
) -> None:
    found = {}
    for name, kill_at in (("unbroken", 0), ("killed", 4)):
        (tmp_path / name).mkdir()
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
        launch += ["--monitor-interval", "0.2", "--standalone", "-m", "tests.support.restarted_run"]
        # a restart that shares the launcher's store would find the keys of the first start
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = [*launch, str(tmp_path / name), str(kill_at)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found[name] = json.loads((tmp_path / name / "hashes.json").read_text())
    assert found["killed"]["hashes"] == found["unbroken"]["hashes"]
    assert (found["unbroken"]["restarts"], found["killed"]["restarts"]) == (0, 1)

"""Runs with all trackers at once: killed and resumed, on several ranks, without the network, and with nothing left over."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.tracked_process import TRACKERS
from tests.support.tracked_runs import OFFLINE, WandbFiles

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")]
ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str, under: tuple[str, ...] = ()) -> int:
    """The exit code of a process that trains."""
    environment = os.environ | OFFLINE | {"TRACKIO_DIR": str(folder / "trackio"), "PYTHONPATH": str(ROOT)}
    # another test of this process may have begun W&B's service, which would keep the id of a killed child
    environment.pop("WANDB_SERVICE", None)
    command = [*under, sys.executable, "-m", "tests.support.tracked_process", arguments[0], str(folder), *arguments[1:]]
    with (folder / "output.txt").open("a") as output:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=200)
    return done.returncode


def still_running(folder: Path) -> list[str]:
    """Commands of processes that were started with this folder in their environment or arguments, after 20 seconds at most."""
    for _ in range(40):
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, IndexError):
                continue
            if str(folder).encode() in text and state != "Z":
                found.append((process / "cmdline").read_text().replace("\0", " "))
        if not found:
            break
        time.sleep(0.5)
    return found


def steps_in_tensorboard(folder: Path) -> list[int]:
    events = EventAccumulator(str(folder / "run"), size_guidance={"scalars": 0}).Reload()
    return [one.step for one in events.Scalars("rewards/mean")]


def steps_in_mlflow(folder: Path) -> list[int]:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("grpo").experiment_id])
    return [one.step for one in client.get_metric_history(found.info.run_id, "rewards/mean")]


def steps_in_trackio(folder: Path) -> list[int]:
    with sqlite3.connect(folder / "trackio" / "grpo.db") as database:
        rows = database.execute("SELECT run_id, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({run_id for run_id, _, _ in rows}) == 1
    return [step for _, step, metrics in rows if "rewards/mean" in json.loads(metrics)]


def steps_in_wandb(folder: Path) -> list[int]:
    files = WandbFiles(folder / "run")
    assert len({one.run_id for one in files.runs()}) == 1
    return [row["_step"] for rows in files.history() for row in rows if "rewards/mean" in row]


STEPS: dict[str, Callable[[Path], list[int]]] = {
    "mlflow": steps_in_mlflow,
    "tensorboard": steps_in_tensorboard,
    "trackio": steps_in_trackio,
    "wandb": steps_in_wandb,
}


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    assert run(folder, "train", "8", "5") == -9, (folder / "output.txt").read_text()
    assert still_running(folder) == []
    assert run(folder, "train", "8") == 0, (folder / "output.txt").read_text()
    return folder


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_killed_and_resumed_run_has_every_iteration_once(killed_and_resumed: Path, tracker: str) -> None:
    history = json.loads((killed_and_resumed / "history.json").read_text())
    assert len(history) == 5, "iterations 4 and 5 were repeated"
    assert STEPS[tracker](killed_and_resumed) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_no_process_is_left(killed_and_resumed: Path) -> None:
    assert still_running(killed_and_resumed) == []


def test_ranks_write_once_and_the_others_import_no_tracker(tmp_path: Path) -> None:
    assert run(tmp_path, "ranks") == 0, (tmp_path / "output.txt").read_text()
    assert json.loads((tmp_path / "rank0.json").read_text()) == TRACKERS
    assert json.loads((tmp_path / "rank1.json").read_text()) == []
    for tracker in TRACKERS:
        assert STEPS[tracker](tmp_path) == [1, 2, 3], tracker


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_offline_no_tracker_tries_to_reach_the_network(tmp_path: Path) -> None:
    trace = tmp_path / "connects.txt"
    calls: Any = ("strace", "-f", "-qq", "-e", "trace=connect,sendto", "-e", "signal=none", "-o", str(trace))
    assert run(tmp_path, "train", "2", under=calls) == 0, (tmp_path / "output.txt").read_text()
    addresses = re.findall(r'sin6?_addr=.*?"([^"]+)"', trace.read_text())
    assert {address for address in addresses if not address.startswith(("127.", "::1"))} == set()

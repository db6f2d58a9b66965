"""Kill processes that train and save, at random times, and look at what another process can load.

    python -m tests.support.killed_runs FOLDER NUM_KILLS NUM_SIGNALS SEED

The process imports everything once, and forks each process that trains. It prints one JSON line with counts.
"""

import json
import logging
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from grpo import GRPOConfig, GRPOTrainer, RankError, TrainingInterrupted
from grpo.checkpoint import CheckpointFolder
from tests.support.policies import VectorPolicy
from tests.support.stopped_runs import end_of

NUM_ITERATIONS = 40
LONGEST_RUN = 0.25
"""Seconds after which a process is killed at the latest, counted from its first checkpoint."""


def made(seed: int) -> tuple[GRPOTrainer, Any]:
    torch.manual_seed(seed)
    config = GRPOConfig(group_size=4, batch_size=4, num_epochs_per_update=2, num_states_per_iteration=2, seed=seed)
    states = torch.randn(5, 3, generator=torch.Generator().manual_seed(5))
    reward = lambda states, actions: [float(action == 2) + random.random() for action in actions]  # noqa: E731
    return GRPOTrainer(config=config, policy=VectorPolicy(), reward_model=reward), states


def train(folder: Path, report: int) -> None:
    """Continue the run, and write the number of each iteration that is safely saved to a pipe."""
    save = CheckpointFolder.save

    def told(self: Any, state: Any, *, iteration: int, **options: Any) -> Path:
        path = save(self, state, iteration=iteration, **options)
        os.write(report, f"{iteration}\n".encode())
        return path

    CheckpointFolder.save = told  # type: ignore[method-assign]
    trainer, states = made(1)
    warnings.filterwarnings("ignore", message=".*so there is nothing left to do")
    trainer.train(
        states,
        num_iterations=NUM_ITERATIONS,
        checkpoint_dir=folder,
        checkpoint_every=1,
        keep_last=2,
        resume="auto",
        progress=False,
    )


def in_a_child(work: Any) -> tuple[int, int]:
    """Fork, and return the child and the reading end of a pipe that it writes to. It ends with 2 after a `RankError`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            work(writing)
            code = 0
        except TrainingInterrupted as stop:
            code = stop.code
        except RankError:
            code = 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    return child, reading


def all_of(reading: int) -> bytes:
    """What a child writes to its pipe until it ends."""
    said = b""
    while more := os.read(reading, 65536):
        said += more
    os.close(reading)
    return said


def expected_states(folder: Path) -> dict[int, str]:
    """What a trainer holds after each iteration of a run that nothing kills."""
    trainer, states = made(1)
    trainer.train(
        states, num_iterations=NUM_ITERATIONS, checkpoint_dir=folder, checkpoint_every=1, keep_last=99, progress=False
    )
    found = {}
    for number in range(1, NUM_ITERATIONS + 1):
        loaded, _ = made(2)
        loaded.load_checkpoint(folder / f"iteration-{number:08d}")
        found[number] = end_of(loaded)
    return found


def stop_once(folder: Path, generator: random.Random, number: int) -> tuple[int, int, float]:
    """Send a signal to a process that trains, at a random time after its first checkpoint.

    Returns:
        The last iteration that the process knew to be saved, its exit code, and the seconds that it took to end.
    """
    child, reading = in_a_child(lambda writing: train(folder, writing))
    said = os.read(reading, 64)  # empty: the run was done
    time.sleep(LONGEST_RUN * generator.random())
    start = time.monotonic()
    os.kill(child, number)
    said += all_of(reading)
    _, status = os.waitpid(child, 0)
    return max(map(int, said.split()), default=0), os.waitstatus_to_exitcode(status), time.monotonic() - start


def kills(root: Path, num_kills: int, generator: random.Random, expected: dict[int, str]) -> dict[str, int]:
    """Kill the process of a run again and again, and compare what is loaded after each kill with a run that nothing kills."""
    folder = root / "run"
    counts = {"killed": 0, "older": 0, "mixed": 0, "runs": 0}
    newest = 0
    while counts["killed"] < num_kills:
        known, code, _ = stop_once(folder, generator, signal.SIGKILL)
        counts["killed"] += code == -signal.SIGKILL
        loaded, _ = made(3)
        loaded.load_checkpoint(folder)
        counts["older"] += loaded.iteration < max(newest, known)
        counts["mixed"] += end_of(loaded) != expected[loaded.iteration]
        newest = loaded.iteration
        if code == 0:
            shutil.rmtree(folder)
            newest, counts["runs"] = 0, counts["runs"] + 1
    return counts


def signals(root: Path, num_signals: int, generator: random.Random, expected: str) -> dict[str, Any]:
    """Stop the process of a run again and again by SIGTERM and SIGINT. Each run must end like a run that nothing stops."""
    folder = root / "run"
    counts = {"signals": 0, "older": 0, "different ends": 0, "runs": 0, "longest": 0.0}
    wrong_codes: list[str] = []
    while counts["signals"] < num_signals:
        number = generator.choice([signal.SIGTERM, signal.SIGINT])
        known, code, seconds = stop_once(folder, generator, number)
        require_only_checkpoints(folder)
        loaded, _ = made(3)
        loaded.load_checkpoint(folder)
        if code == 0:  # the run was done before the signal came
            counts["different ends"] += end_of(loaded) != expected
            shutil.rmtree(folder)
            counts["runs"] += 1
            continue
        counts["signals"] += 1
        if code != 128 + number and loaded.iteration < NUM_ITERATIONS:  # after its end, a run does not handle signals
            wrong_codes.append(f"{code} after signal {number} in iteration {loaded.iteration}")
        counts["older"] += loaded.iteration < known
        counts["longest"] = max(counts["longest"], seconds)
    return counts | {"wrong codes": wrong_codes}


def require_only_checkpoints(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert all(name.startswith("iteration-") for name in names), names


def main(root: Path, num_kills: int, num_signals: int, seed: int) -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    generator, expected = random.Random(seed), expected_states(root / "unbroken")
    counts: dict[str, Any] = {"kills": kills(root / "kills", num_kills, generator, expected)}
    counts["signals"] = signals(root / "signals", num_signals, generator, expected[NUM_ITERATIONS])
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

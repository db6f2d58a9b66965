"""Time and memory of saving and loading, compared with `safetensors.torch.save_file` and `load_file` on the same tensors.

python -m benchmarks.checkpoints

The files are written to a temporary folder; choose its disk with `TMPDIR`.
"""

import argparse
import hashlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo import GRPOConfig, GRPOTrainer
from grpo.checkpoint import CheckpointFolder, load_weights, read_checkpoint, write_checkpoint

MEGABYTES = {"bandit": 0.01, "small network": 8, "language model": 512}
REPEATS = {"bandit": 60, "small network": 30, "language model": 9}
MEMORY_MB = 512
"""Size of the checkpoint whose peak memory is measured, in a process of its own."""


def tensors_of(megabytes: float) -> dict[str, Tensor]:
    """Weights and two moments of AdamW for each, in tensors of different sizes."""
    count = max(int(megabytes * 2**20 / 4 / 3), 8)
    sizes = [count // 2, count // 4, count - count // 2 - count // 4]
    return {f"{part}.{i}": torch.randn(size) for part in ("weights", "mean", "square") for i, size in enumerate(sizes)}


def synced(path: Path) -> None:
    """Flush one file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def compare_times(folder: Path, names: list[str]) -> None:
    """Print the times of saving, of loading, and of the stall of an asynchronous save."""
    print("what                   ours           safetensors")
    for name in names:
        tensors = tensors_of(MEGABYTES[name])
        theirs, ours = folder / "theirs.safetensors", folder / "ours"

        def save_theirs(tensors: dict[str, Tensor] = tensors, theirs: Path = theirs) -> None:
            save_file(tensors, theirs)
            synced(theirs)

        def save_ours(tensors: dict[str, Tensor] = tensors, ours: Path = ours) -> None:
            write_checkpoint(ours, tensors, iteration=1)

        def read_theirs(theirs: Path = theirs) -> None:
            for value in load_file(theirs).values():
                value.clone()  # the file is mapped, and read when it is used

        def read_ours(ours: Path = ours) -> None:
            read_checkpoint(ours)

        def clean(theirs: Path = theirs, ours: Path = ours) -> None:
            theirs.unlink(missing_ok=True)
            rmtree(ours, ignore_errors=True)

        print(f"save {name:15s}", time_in_turn(save_ours, save_theirs, REPEATS[name], clean))
        save_ours()
        save_theirs()
        print(f"load {name:15s}", time_in_turn(read_ours, read_theirs, REPEATS[name], lambda: None))
        clean()
        print(f"hash {name:15s}", hash_alone(tensors))
        print(f"wait {name:15s}", stall(folder / "run", tensors, REPEATS[name]), flush=True)


def time_in_turn(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int, clean: Callable[[], object]
) -> str:
    """Time two alternatives in turn. Removing the files of the last call is not timed."""
    times: dict[Callable[[], object], list[float]] = {ours: [], theirs: []}
    for i in range(repeats + 2):
        for call in (ours, theirs) if i % 2 == 0 else (theirs, ours):
            clean()
            start = time.perf_counter()
            call()
            if i >= 2:  # the first two warm up
                times[call].append(time.perf_counter() - start)
    low, ratio, high = statistics.quantiles([a / b for a, b in zip(*times.values(), strict=True)], n=4)
    first, second = (1e3 * statistics.median(of_one) for of_one in times.values())
    return f"{first:9.2f} ms {second:9.2f} ms   ratio {ratio:.2f} (quartiles {low:.2f} to {high:.2f})"


def hash_alone(tensors: dict[str, Tensor]) -> str:
    """How long SHA-256 of the bytes takes in one thread. No save can be faster, however fast the disk is."""
    times = []
    for _ in range(7):
        start = time.perf_counter()
        sha256 = hashlib.sha256()
        for value in tensors.values():
            sha256.update(value.numpy().data)
        times.append(time.perf_counter() - start)
    return f"{1e3 * statistics.median(times):9.2f} ms"


def stall(folder: Path, tensors: dict[str, Tensor], repeats: int) -> str:
    """How long an asynchronous save keeps the caller, compared with copying the tensors."""
    saves, copies = [], []
    with CheckpointFolder(folder, 1, asynchronous=True) as run:
        for iteration in range(repeats):
            run.has(0)  # waits for the save before
            start = time.perf_counter()
            run.save(tensors, iteration=iteration, score=None)
            saves.append(time.perf_counter() - start)
            run.has(0)
            start = time.perf_counter()
            copied = {name: value.clone() for name, value in tensors.items()}
            copies.append(time.perf_counter() - start)
            del copied
    rmtree(folder)
    ours, theirs = (1e3 * statistics.median(times) for times in (saves, copies))
    return f"{ours:9.2f} ms {theirs:9.2f} ms   ratio {ours / theirs:.2f} (asynchronous save / clone of the tensors)"


class Holder:
    """A policy that holds its weights."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self.parameters = parameters

    def get_parameters(self) -> dict[str, Tensor]:
        """The weights."""
        return self.parameters


class Policy(torch.nn.Module):
    """A policy with two actions and a third of the checkpoint in weights, all of which have a gradient."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(list(tensors_of(megabytes).values())[:3])

    def get_parameters(self) -> dict[str, Tensor]:
        """The weights."""
        return dict(self.named_parameters())

    def generate_actions(self, states: list[str], num_actions_per_state: int) -> list[list[int]]:
        """Both actions in turn."""
        return [[i % 2 for i in range(num_actions_per_state)] for _ in states]

    def get_log_probabilities(self, states: list[str], actions: list[int]) -> Tensor:
        """log pi(action), with a logit that depends on all weights."""
        logit = torch.stack([weight.mean() for weight in self.weights]).sum()
        return torch.nn.functional.logsigmoid(logit * (2.0 * torch.tensor(actions) - 1))


def trainer(megabytes: float) -> GRPOTrainer:
    """A trainer with AdamW whose checkpoint has about so many megabytes."""
    return GRPOTrainer(
        config=GRPOConfig(group_size=2),
        policy=Policy(megabytes),
        reward_model=lambda _, actions: [float(action) for action in actions],
    )


def measure_trainer(which: str, folder: Path, megabytes: float) -> None:
    """Train and save in one process, or print the peak memory that loading into a new trainer adds in another one."""
    new = trainer(megabytes)
    if which == "train":
        new.step(["any"])
        new.save_checkpoint(folder / "trained")
        return
    before = peak_from_now()
    new.load_checkpoint(folder / "trained")
    print(f"{which:20s}{(peak() - before) / megabytes:5.2f} x the checkpoint's size")


def measure_memory(which: str, folder: Path) -> None:
    """Print the peak memory that one call adds, in this process alone."""
    if which in ("train", "load_checkpoint"):
        measure_trainer(which, folder, MEMORY_MB)
        return
    tensors = tensors_of(MEMORY_MB)
    state = {"parameters": {name: value for name, value in tensors.items() if name.startswith("weights")}} | tensors
    small = {"x": torch.zeros(1)}
    if which == "write":
        write_checkpoint(folder / "memory", state, iteration=1)
        return
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: write_checkpoint(folder / "ours", state, iteration=1),
        "save, safetensors": lambda: save_file(tensors, folder / "theirs.safetensors"),
        "load": lambda: read_checkpoint(folder / "memory"),
        "load_weights": lambda: load_weights(folder / "memory", Holder(state["parameters"])),
    }
    read_checkpoint(write_checkpoint(folder / "small", small, iteration=1))  # one-time allocations
    if which != "load_weights" and which.startswith("load"):
        tensors.clear()
        state.clear()
    before = peak_from_now()
    calls[which]()
    print(f"{which:20s}{(peak() - before) / MEMORY_MB:5.2f} x the checkpoint's size")


def peak_from_now() -> float:
    """Forget the peak so far, and return what is in use. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> float:
    """Peak resident memory of this process in MB. Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only small checkpoints, to see that everything runs")
    parser.add_argument(
        "--measure", nargs=2, metavar=("WHAT", "FOLDER"), help="peak memory of one call, in this process"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.measure:
        measure_memory(arguments.measure[0], Path(arguments.measure[1]))
        return
    with tempfile.TemporaryDirectory() as name:
        compare_times(Path(name), ["bandit"] if arguments.quick else list(MEGABYTES))
        if arguments.quick:
            return
        for which in ("write", "save", "save, safetensors", "load", "load_weights", "train", "load_checkpoint"):
            subprocess.run([sys.executable, "-m", "benchmarks.checkpoints", "--measure", which, name], check=True)


if __name__ == "__main__":
    main()

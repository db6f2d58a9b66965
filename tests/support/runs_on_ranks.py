"""Runs on two ranks that are stopped or killed.

    python -m tests.support.runs_on_ranks stops FOLDER NUM_ITERATIONS PHASE PHASE ...
    python -m tests.support.runs_on_ranks kills FOLDER NUM_KILLS SEED NUM_ITERATIONS

The process imports everything once, and forks the ranks. It prints one JSON line. The environment variable ENGINE_OF_RANKS
names the engine: `Replicated`, or `Sharded`.
"""

import json
import logging
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo import GRPOConfig, GRPOTrainer, RankError, TrainingInterrupted
from grpo.distributed import Replicated, Sharded
from tests.support.checkpoint_runs import certain_reward
from tests.support.killed_runs import all_of, in_a_child
from tests.support.policies import VectorPolicy
from tests.support.stopped_runs import Calls, by_exception, by_signal, end_of, without_times

NUM_RANKS = 2
AHEAD = int(os.environ.get("ITERATIONS_AHEAD", "0"))
"""`GRPOConfig.iterations_ahead` of the runs."""
LONGEST_WAIT = 20.0
"""Seconds that a rank waits for the other one."""


def slow(states: Any, actions: Any) -> list[float]:
    time.sleep(0.01 * random.SystemRandom().random())
    return certain_reward(states, actions)


def made(seed: int, engine: Any) -> tuple[GRPOTrainer, Any]:
    torch.manual_seed(1)  # ranks start from the same weights
    policy = VectorPolicy()
    with torch.no_grad():
        next(iter(policy.parameters())).mul_(seed)
    settings = {"num_epochs_per_update": 2, "num_states_per_iteration": 4, "iterations_ahead": AHEAD}
    config = GRPOConfig(group_size=4, batch_size=4, seed=seed, **settings)
    states = torch.randn(7, 3, generator=torch.Generator().manual_seed(5))
    reward: Any = lambda states, actions: [float(action == 2) + random.random() for action in actions]  # noqa: E731
    if AHEAD:
        reward = slow  # draws nothing, so it is asked for beside the updates
    return GRPOTrainer(config=config, policy=policy, reward_model=reward, engine=engine), states


def train(trainer: GRPOTrainer, states: Any, folder: Path | None, **options: Any) -> list[dict[str, float]]:
    """Train, and return the metrics of this call, also of a call that was stopped."""
    resume: Any = None if folder is None else "auto"
    options = {"checkpoint_every": 2, "progress": False, **options}
    return trainer.train(states, checkpoint_dir=folder, resume=resume, **options)


# Stops


def stopped_everywhere(
    engine: Replicated, folder: Path, num_iterations: int, phase: str, way: str, on_rank: int
) -> dict[str, Any]:
    """Stop the run at the second call of a phase on one rank, and continue it in new trainers until it is done."""
    metrics: list[dict[str, float]] = []
    kinds: set[str] = set()
    stop = {"exception": by_exception, "signal": by_signal}[way]
    for number in range(1, 10_000):
        trainer, states = made(1 + (number - 1) % 3, engine)
        calls = Calls(trainer, phase, stop, at=2 if engine.rank == on_rank else None)
        try:
            train(trainer, states, folder, num_iterations=num_iterations, callbacks=calls.callbacks)
        except (RankError, TrainingInterrupted) as error:
            kinds.add(type(error).__name__)
            metrics += trainer.history
            continue
        return {
            "end": end_of(trainer),
            "metrics": [without_times(one) for one in [*metrics, *trainer.history]],
            "stops": number - 1,
            "errors": sorted(kinds),
        }
    raise AssertionError(f"the run makes no progress: {phase} {way}")


def stops(rank: int, folder: Path, num_iterations: int, phases: Sequence[str]) -> None:
    """One rank: a run that nothing stops, and runs that are stopped on either rank, at every call of every phase."""
    engine = joined(rank, folder / "rendezvous")
    trainer, states = made(1, engine)
    history = train(trainer, states, None, num_iterations=num_iterations)
    found: dict[str, Any] = {"unbroken": {"end": end_of(trainer), "metrics": [without_times(one) for one in history]}}
    for number, phase in enumerate(phases):
        for way in ("exception", "signal"):
            name = f"{phase} {way} on rank {number % 2}"
            found[name] = stopped_everywhere(engine, folder / name, num_iterations, phase, way, number % 2)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()


# Kills


def continued(rank: int, folder: Path, rendezvous: Path, num_iterations: int, report: int) -> None:
    """One rank: load the newest checkpoint, tell what it holds, and train on."""
    engine = joined(rank, rendezvous)
    trainer, states = made(2, engine)
    if (folder / "run").exists() and any((folder / "run").glob("iteration-*")):
        trainer.load_checkpoint(folder / "run")
        said = {"iteration": trainer.iteration, "is whole": trainer.in_progress.rows is None, "end": end_of(trainer)}
        os.write(report, (json.dumps(said) + "\n").encode())
    else:
        trainer, states = made(1, engine)
    os.write(report, b"training\n")
    train(trainer, states, folder / "run", checkpoint_every=1, keep_last=2, num_iterations=num_iterations)
    os.write(report, b"done\n")


def kills(folder: Path, num_kills: int, generator: random.Random, num_iterations: int) -> dict[str, Any]:
    """Kill one rank or both at random times, and compare what both load afterwards with a run that nothing kills.

    The run goes on after each kill. After the last kill, it goes on to its end.
    """
    folder.mkdir(exist_ok=True)
    expected = launched(partial(whole_run, folder, num_iterations))
    counts = {"killed": 0, "older": 0, "mixed": 0, "runs": 0, "unnamed": 0}
    newest = 0
    while True:
        is_last = counts["killed"] == num_kills
        rendezvous = folder / f"rendezvous {counts['killed']} {time.monotonic_ns()}"
        victims = () if is_last else generator.choice([(0,), (1,), (0, 1)])
        work = partial(continued, folder=folder, rendezvous=rendezvous, num_iterations=num_iterations)
        said, codes = launched_and_killed(work, victims, 0.4 * generator.random())
        loaded = [json.loads(lines[0]) for lines in said if lines and lines[0].startswith("{")]
        if loaded:
            counts["older"] += any(one["iteration"] < newest for one in loaded)
            newest = max(one["iteration"] for one in loaded)
            for rank, one in enumerate(loaded):
                counts["mixed"] += one["iteration"] != loaded[0]["iteration"]
                if one["is whole"] and len(loaded) == NUM_RANKS:
                    counts["mixed"] += one["end"] != expected[rank][str(one["iteration"])]
        if all(code == 0 for code in codes):
            shutil.rmtree(folder / "run")
            newest, counts["runs"] = 0, counts["runs"] + 1
            if is_last:
                return counts
            continue
        assert not is_last, codes
        counts["killed"] += 1
        counts["unnamed"] += any(codes[rank] == 1 for rank in range(NUM_RANKS))  # 2: a RankError, as it must be


def whole_run(folder: Path, num_iterations: int, rank: int, report: int) -> None:
    """One rank: what it holds after each iteration of a run that nothing kills."""
    engine = joined(rank, folder / "rendezvous of the whole run")
    trainer, states = made(1, engine)
    train(trainer, states, folder / "whole", checkpoint_every=1, keep_last=99, num_iterations=num_iterations)
    found = {}
    for number in range(1, num_iterations + 1):
        trainer, _ = made(2, engine)
        trainer.load_checkpoint(folder / "whole" / f"iteration-{number:08d}")
        found[number] = end_of(trainer)
    os.write(report, json.dumps(found).encode())


def launched(work: Callable[[int, int], None]) -> list[Any]:
    """Run `work(rank, report)` in one process per rank, and return what each reported, from JSON."""
    children = [in_a_child(partial(work, rank)) for rank in range(NUM_RANKS)]
    said = [all_of(reading) for _, reading in children]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, _ in children]
    assert codes == [0] * NUM_RANKS, codes
    return [json.loads(text) for text in said]


def launched_and_killed(
    work: Callable[..., None], victims: tuple[int, ...], seconds: float
) -> tuple[list[list[str]], list[int]]:
    """Continue the run on both ranks, kill some of them, and return the lines and the exit code of each rank."""
    children = [in_a_child(lambda report, rank=rank: work(rank, report=report)) for rank in range(NUM_RANKS)]  # type: ignore[misc]
    started = [os.read(reading, 4096) for _, reading in children]  # both have begun, or loaded
    time.sleep(seconds)
    for rank in victims:
        os.kill(children[rank][0], signal.SIGKILL)
    said = [
        (first + all_of(reading)).decode().split("\n") for first, (_, reading) in zip(started, children, strict=True)
    ]
    return said, [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, _ in children]


def joined(rank: int, rendezvous: Path) -> Replicated:
    store = dist.FileStore(str(rendezvous), NUM_RANKS)
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=wait)
    return {"Replicated": Replicated, "Sharded": Sharded}[os.environ.get("ENGINE_OF_RANKS", "Replicated")](
        timeout=LONGEST_WAIT
    )


def main(kind: str, folder: Path, *arguments: str) -> None:
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore", message=".*so there is nothing left to do")
    torch.set_num_threads(1)
    if os.environ.get("ENGINE_OF_RANKS", "Replicated") == "Sharded":
        import_module("torch.distributed.fsdp")  # slow, and each rank would do it
    if kind == "kills":
        num_kills, seed, num_iterations = map(int, arguments)
        print(json.dumps(kills(folder, num_kills, random.Random(seed), num_iterations)))
        return
    children = [
        in_a_child(lambda report, rank=rank: stops(rank, folder, int(arguments[0]), arguments[1:]))  # type: ignore[misc]
        for rank in range(NUM_RANKS)
    ]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, _ in children]
    assert codes == [0] * NUM_RANKS, codes
    print(json.dumps([json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])

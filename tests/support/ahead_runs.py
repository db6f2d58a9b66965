"""Runs with `iterations_ahead` whose rewards take random times, and whose processes are killed, interrupted and continued.

    python -m tests.support.ahead_runs FOLDER NUM_RUNS SEED

The process imports everything once, and forks each process that trains. It prints one JSON line with counts.
"""

import asyncio
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grpo import GRPOConfig, GRPOTrainer, RewardConfig
from grpo._running.ahead import IN_ORDER
from tests.support.checkpoint_runs import certain_reward
from tests.support.killed_runs import all_of, in_a_child
from tests.support.policies import VectorPolicy, digest, weights_of
from tests.support.separate_sampler import Separate

NUM_ITERATIONS = 20
AHEAD = (1, 4, 16)
LONGEST_REWARD = 0.02
"""Seconds that a reward takes at most."""
LONGEST_LIFE = 0.6
"""Share of an unbroken run's time after which a process is stopped at the latest, counted from its start."""

CLOCK = random.SystemRandom()


def slow(states: Any, actions: Any) -> list[float]:
    time.sleep(LONGEST_REWARD * CLOCK.random())
    return certain_reward(states, actions)


async def awaited(states: Any, actions: Any) -> list[float]:
    await asyncio.sleep(LONGEST_REWARD * CLOCK.random())
    return certain_reward(states, actions)


def drawing(states: Any, actions: Any) -> list[float]:
    """A reward that runs in order, because it draws."""
    return [value + random.random() for value in slow(states, actions)]


def of_sequences(states: Any, actions: Any) -> list[float]:
    time.sleep(LONGEST_REWARD * CLOCK.random())
    return [float(action[0] == 1 + state % 3) for state, action in zip(states, actions, strict=True)]


class Unsteady:
    """A reward whose calls fail now and then, and succeed when they are repeated."""

    def __call__(self, states: Any, actions: Any) -> list[float]:
        if CLOCK.random() < 0.2:
            raise ConnectionError("not now")
        return slow(states, actions)


KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dropout": (slow, {}),
    "several updates, replay": (slow, {"num_epochs_per_update": 2, "batch_size": 4, "replay_iterations": 1}),
    "awaited": (awaited, {"reward": RewardConfig(timeout=60.0)}),
    "in other processes": (slow, {"reward": RewardConfig(timeout=60.0), "batch_size": 4}),
    "failing": (Unsteady(), {"reward": RewardConfig(num_retries=60, retry_delay=0.001, breaker_failures=100)}),
    "drawing": (drawing, {}),
    "sampler of its own": (of_sequences, {"num_epochs_per_update": 2}),
}
"""A reward, and settings."""


def made(kind: str, ahead: int) -> tuple[GRPOTrainer, Any]:
    reward, settings = KINDS[kind]
    torch.manual_seed(1)
    config = GRPOConfig(
        group_size=4, num_states_per_iteration=2, learning_rate=0.05, seed=1, iterations_ahead=ahead, **settings
    )
    states: Any = torch.randn(5, 3, generator=torch.Generator().manual_seed(5))
    policy: Any = VectorPolicy(dropout=0.3)
    if reward is of_sequences:
        states, policy = [0, 1, 2, 3], Separate()
        policy.before = lambda: time.sleep(LONGEST_REWARD * CLOCK.random())
    return GRPOTrainer(config=config, policy=policy, reward_model=reward), states


def end(kind: str, ahead: int, **options: Any) -> str:
    """Train, and return a digest of the weights."""
    trainer, states = made(kind, ahead)
    trainer.train(states, num_iterations=NUM_ITERATIONS, progress=False, **options)
    return digest(weights_of(trainer.policy))


def in_order(kind: str, ahead: int) -> str:
    """A digest of the weights after a run in a single thread that nothing stops."""
    os.environ[IN_ORDER] = "1"
    try:
        return end(kind, ahead)
    finally:
        del os.environ[IN_ORDER]


def stopped_again_and_again(
    folder: Path, kind: str, ahead: int, generator: random.Random, seconds: float
) -> tuple[str, int]:
    """Run in processes that are stopped at random times, before an unbroken run of so many seconds would end.

    Returns a digest of the weights, and the number of stops.
    """

    def train(report: int) -> None:
        every = {"checkpoint_every": generator.choice([1, 3])}
        try:
            found = end(kind, ahead, checkpoint_dir=folder, resume="auto", keep_last=2, **every)
        except Exception:
            traceback.print_exc()
            raise
        except KeyboardInterrupt:  # `TrainingInterrupted`, or a SIGINT before the run
            os._exit(128 + signal.SIGINT)
        os.write(report, found.encode())

    num_stops = 0
    while True:
        patience = 1.0 + num_stops / 5  # a slow machine needs longer for its first checkpoint
        lives = LONGEST_LIFE * seconds * patience * generator.random()
        number = generator.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        child, reading = in_a_child(train)
        deadline = time.monotonic() + lives
        while time.monotonic() < deadline and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.01)
        os.kill(child, number)  # a process that has ended is still there until it is waited for
        said = all_of(reading)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return said.decode(), num_stops
        if code not in (128 + signal.SIGINT, -number):
            raise RuntimeError(f"{kind}, {ahead} ahead: a process ended with {code}")
        num_stops += 1


def main(root: Path, num_runs: int, seed: int) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    generator = random.Random(seed)
    expected: dict[tuple[str, int], str] = {}
    seconds: dict[tuple[str, int], float] = {}
    counts = {"runs": 0, "stops": 0, "other weights": 0}
    for number in range(num_runs):
        ahead, kind = AHEAD[number % len(AHEAD)], [*KINDS][number // len(AHEAD) % len(KINDS)]
        if (kind, ahead) not in expected:
            start = time.monotonic()
            expected[kind, ahead] = in_order(kind, ahead)
            seconds[kind, ahead] = time.monotonic() - start
        found, num_stops = stopped_again_and_again(root / f"run {number}", kind, ahead, generator, seconds[kind, ahead])
        counts["runs"] += 1
        counts["stops"] += num_stops
        counts["other weights"] += found != expected[kind, ahead]
    counts["ends"] = len(set(expected.values()))
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

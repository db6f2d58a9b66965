"""What tests of failing rewards share: a clock that only sleeping moves, and what is left of the processes of a call."""

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from grpo import RewardConfig, RewardError
from grpo._retrying.calls import RetriedCalls
from grpo._rewarding import parts
from grpo._rewarding.calls import COUNTED, KeptRewards
from grpo.errors import DeadlineError
from tests.support.policies import TablePolicy
from tests.support.trainers import trainer_of


class FakeTime:
    """A clock that moves when someone sleeps, and when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float, *_: str) -> None:
        self.slept.append(seconds)
        self.now += seconds


def calls_of(reward: Any, time: FakeTime | None = None, **settings: Any) -> RetriedCalls:
    """Calls that wait without taking time, and have no pauses between retries unless told otherwise."""
    time = time or FakeTime()
    config = RewardConfig(**{"retry_delay": 0.0, **settings})
    return RetriedCalls(reward, config, clock=time.clock, sleep=time.sleep)


def asked(
    reward: Any, num_rows: int = 4, mask: Any = None, time: FakeTime | None = None, **settings: Any
) -> KeptRewards:
    """The rewards of rows whose states and actions are their numbers."""
    rows = list(range(num_rows))
    return calls_of(reward, time, **settings)(rows, rows, mask)


def counts(**changed: float) -> dict[str, float]:
    """The metrics of reward calls: 0, but for `dropped`, `zeroed`, `retries`, `failed_calls` and `timeouts`."""
    short = {name: name.partition("/")[2] for name in COUNTED}
    assert set(changed) <= set(short.values())
    return {name: float(changed.get(key, 0.0)) for name, key in short.items()}


def is_alive(process: int) -> bool:
    """Whether a process exists. Zombies exist."""
    return Path(f"/proc/{process}").exists()


def written(files: Iterable[Path]) -> list[int]:
    """The process ids in these files, once all of them are there."""
    files = list(files)
    eventually(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files), f"{files} are written")
    return [int(file.read_text()) for file in files]


def write_process(file: Path, process: int) -> None:
    """Write a process id so that `written` reads all of it."""
    file.write_text(f"{process}\n")


def children() -> set[int]:
    """The ids of the children of this process, zombies included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it has ended
            continue
        if int(text.rpartition(")")[2].split()[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


def eventually(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"after {seconds} s it does not hold that {what}"
        time.sleep(0.005)


FAULTS = ("raises", "hangs", "rubbish")
HANGS = object()
"""The answer of a call that is to hang."""


class FaultyReward:
    """A reward of which one call in five raises, hangs or returns rubbish. A file that all processes share counts its calls."""

    def __init__(self, file: Path, seed: int) -> None:
        self.file, self.seed = file, seed

    def __call__(self, states: Any, actions: Any) -> Any:
        answer = self.answer(actions)
        if answer is HANGS:
            time.sleep(3600)
        return answer

    def answer(self, actions: Any) -> Any:
        """The rewards, or rubbish, or `HANGS`."""
        with self.file.open("a+") as file:
            generator = random.Random(f"call {file.tell()} of {self.seed}")
            file.write("x")
        outcome = generator.choice(FAULTS) if generator.random() < 0.2 else "good"
        if outcome == "raises":
            raise ConnectionError("the judge is away")
        if outcome == "hangs":
            return HANGS
        if outcome == "rubbish":
            return generator.choice([None, "text", [0.0] * 99, ["one"] * len(actions), [[0.0]] * len(actions), 1j])
        return [random.random() for _ in actions]


def asynchronous(reward: FaultyReward) -> Callable[[Any, Any], Any]:
    """The same reward, awaited. It hangs without blocking."""

    async def judge(states: Any, actions: Any) -> Any:
        answer = reward.answer(actions)
        if answer is HANGS:
            await asyncio.sleep(3600)
        return answer

    return judge


Outcome = tuple[str, int]
"""How a call ended, and its number of rows."""


@contextmanager
def recorded(owner: Any, name: str) -> Iterator[list[Outcome]]:
    """Record how each call by a function ends, which `owner` holds. On a busy machine, a good call may end too late."""
    outcomes: list[Outcome] = []
    make_calls = getattr(owner, name)

    def recording(calls: Any, **settings: Any) -> Any:
        num_rows = len(calls[0].arguments[1])
        try:
            (answer,) = make_calls(calls, **settings)
        except Exception as error:
            outcomes.append(("hangs" if isinstance(error, DeadlineError) else "raises", num_rows))
            raise
        is_good = isinstance(answer, list) and [type(value) for value in answer] == [float] * num_rows
        outcomes.append(("good" if is_good else "rubbish", num_rows))
        return [answer]

    with patch.object(owner, name, staticmethod(recording) if isinstance(owner, type) else recording):
        yield outcomes


@dataclass(frozen=True, kw_only=True)
class FaultyRun:
    """What a run with failing rewards reported, and what happened."""

    reported: dict[str, float]
    """The sums of the metrics over all iterations."""
    expected: dict[str, float]
    """What they must be, from the calls."""
    num_raised: int
    """Number of steps that raised."""
    num_faults: dict[str, int]
    """Number of calls with each fault."""


def run_with_faults(
    folder: Path, *, num_iterations: int, timeout: float, is_async: bool, on_failure: Any, seed: int = 0
) -> FaultyRun:
    """Train, evaluate now and then, go on after steps that raise, and compare what is reported with what happened."""
    reward = FaultyReward(folder / "calls", seed)
    settings = RewardConfig(num_retries=1, retry_delay=0.0, timeout=timeout, on_failure=on_failure, breaker_failures=50)
    reported = dict.fromkeys(COUNTED, 0.0)
    num_raised = num_answered = 0
    maker = (parts, "await_all") if is_async else (RetriedCalls, "in_process")
    with recorded(*maker) as outcomes:
        model = asynchronous(reward) if is_async else reward
        trainer = trainer_of(TablePolicy(), model, reward=settings, seed=seed)  # it keeps what makes the calls
        while num_answered < num_iterations:
            try:
                if (num_answered + num_raised) % 7 == 3:
                    trainer.evaluate(["a", "b"])
                metrics = trainer.step(["a", "b"])
            except RewardError:
                num_raised += 1
                continue
            num_answered += 1
            reported = {name: value + metrics[name] for name, value in reported.items()}
    failed = [num_rows for outcome, num_rows in outcomes if outcome != "good"]
    num_faults = {fault: sum(outcome == fault for outcome, _ in outcomes) for fault in FAULTS}
    # a call for all rows that follows a failed one is its retry; two in a row are never followed by another retry
    retries, may_retry = 0, False
    for outcome, num_rows in outcomes:
        if num_rows == 8:
            retries += may_retry
            may_retry = outcome != "good" and not may_retry
    return FaultyRun(
        reported=reported,
        expected=counts(
            failed_calls=len(failed), timeouts=num_faults["hangs"], retries=retries, dropped=failed.count(1)
        ),
        num_raised=num_raised,
        num_faults=num_faults,
    )

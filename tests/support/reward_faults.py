"""What tests of failing rewards share: a clock that only sleeping moves, and what is left of the processes of a call."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from grpo import RewardConfig
from grpo._collecting.reward_calls import COUNTED, RewardCalls, Rewards


class FakeTime:
    """A clock that moves when someone sleeps, and when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def calls_of(reward: Any, time: FakeTime | None = None, **settings: Any) -> RewardCalls:
    """Calls that wait without taking time, and have no pauses between retries unless told otherwise."""
    time = time or FakeTime()
    config = RewardConfig(**{"retry_delay": 0.0, **settings})
    return RewardCalls(reward, config, clock=time.clock, sleep=time.sleep)


def asked(reward: Any, num_rows: int = 4, mask: Any = None, time: FakeTime | None = None, **settings: Any) -> Rewards:
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


def eventually(holds: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"after {seconds} s it does not hold that {what}"
        time.sleep(0.005)

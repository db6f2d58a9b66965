"""Clocks that tests move, in place of real ones, so that no test depends on how fast the machine is."""

import asyncio
import mmap
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest


class ConversationClocks:
    """Clocks of the limit `AgentPolicy(timeout=...)`. Each conversation has its own, in the order in which they begin. Branches
    share a clock. They stand still until a test moves them. A clock is read again after `timeout` real seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: list[float] = []
        monkeypatch.setattr("adapters.agents.rollouts._LoopClock", lambda: self)

    def move(self, *conversations: int) -> None:
        """Move the clocks of these conversations, or of all, by an hour."""
        for index in conversations or range(len(self.seconds)):
            self.seconds[index] += 3600

    @property
    def now(self) -> Callable[[], float]:
        """Begin another clock."""
        self.seconds.append(0.0)
        index = len(self.seconds) - 1
        return lambda: self.seconds[index]

    async def beat(self) -> None:
        """Wake the event loop, so that it sees what `skipping_clock` skips. A real clock measures here if the loop can work."""
        while True:
            await asyncio.sleep(0.05)


def skipping_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that moves `time.monotonic` of this process, and so of its event loops, by seconds."""
    real, skipped = time.monotonic, [0.0]

    def skip(seconds: float) -> None:
        skipped[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: real() + skipped[0])
    monkeypatch.setattr("grpo._rewarding.deadlines.GRACE_SECONDS", 1e9)  # late calls are cancelled, and not given up
    return skip


class CallsClock:
    """The clock of `call_in_process`. It stands still until a call moves it. Calls run in other processes, which share it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = memoryview(mmap.mmap(-1, 8)).cast("d")  # in memory that forks share
        clock = SimpleNamespace(monotonic=lambda: self._now[0], sleep=time.sleep)
        monkeypatch.setattr("grpo._processes.process.time", clock)

    def move(self, seconds: float) -> None:
        """Let a call take so many seconds."""
        self._now[0] += seconds
        time.sleep(0.3)  # the other process looks at the clock after 0.2 s

    def hang(self) -> None:
        """Never return. Hours pass, also after the other process has begun to wait for this call."""
        while True:
            self.move(3600.0)

"""Where the ranks wait, as a table in the store of the process group. Only a rank that waits long writes and reads it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_BUSY = "busy: "
"""What a rank says before the reason why it comes late."""


class Watch:
    """Tells the other ranks at which meeting this rank waits, and follows where they wait.

    A thread of its own talks to the store, because a store whose host is stopped never answers. The thread runs only while this
    rank waits, or is busy. It writes a number that grows, so that the others see that this rank is alive.

    Args:
        store: Shared by all ranks, and by nothing else.
        rank: The number of this rank.
        num_ranks: The number of ranks.
        period: Seconds between two looks at the table.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, period: float) -> None:
        self.verdict: str | None = None
        """The reason why all ranks stop, as the first rank that found it wrote it. None: there is no such reason yet."""
        self.store_failed = False
        """Whether the connection to the store is lost."""
        self.answered_at = time.monotonic()
        """When the store last answered, in seconds of the monotonic clock."""
        self._store, self._rank, self._num_ranks, self._period = store, rank, num_ranks, period
        self._seen: dict[int, tuple[str, float]] = {}
        self.busy_at: dict[int, tuple[str, float]] = {}
        """Why other ranks are busy, and when they last said so. Only what they said during the current meeting."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._meeting: int | None = None
        self._busy: tuple[str, float] | None = None
        self._num_beats = 0
        self._proposal: str | None = None
        self._has_left = False

    def wait_at(self, meeting: int) -> None:
        """Say that this rank waits at a meeting, again and again, and follow the others until `stop` is called."""
        with self._lock:
            if self._meeting != meeting:
                self._meeting, self.answered_at = meeting, time.monotonic()
                self.busy_at.clear()
            self._start()

    def stop(self) -> None:
        """The meeting took place."""
        with self._lock:
            self._meeting = None

    @contextmanager
    def busy(self, seconds: float, reason: str) -> Iterator[None]:
        """Tell the other ranks inside the block that this rank is alive and comes later, for at most so many seconds."""
        outer = self._busy
        with self._lock:
            self._busy = reason, time.monotonic() + seconds
            self._start()
        try:
            yield
        finally:
            self._busy = outer

    def propose(self, reason: str) -> None:
        """Write the reason why all ranks stop, unless another rank has written one."""
        self._proposal = reason

    def leave(self) -> None:
        """Say that this rank has read the verdict."""
        self._has_left = True

    def missing(self, meeting: int, longest_silence: float) -> list[int]:
        """The other ranks that are neither at this meeting nor busy, or have not said so for `longest_silence` seconds."""
        now, absent = time.monotonic(), []
        for rank in range(self._num_ranks):
            said, changed_at = self._seen.get(rank, ("-1", now))
            is_behind = int(said.split()[0]) < meeting and _BUSY not in said
            if rank != self._rank and (is_behind or now - changed_at > longest_silence):
                absent.append(rank)
        return absent

    def all_have_left(self, longest_silence: float) -> bool:
        """Whether this rank and all ranks that wait with it have read the verdict."""
        said = [words for words, changed_at in self._seen.values() if time.monotonic() - changed_at <= longest_silence]
        return all(words.split()[2:] == ["left"] for words in said if words.split()[0] == str(self._meeting))

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="grpo-ranks", daemon=True)
            self._thread.start()

    def _follow(self) -> None:
        pause = self._period / 50  # most meetings that take long enough to be watched begin soon
        if self._meeting is None:
            time.sleep(self._period)  # most calls that may take long do not
        while True:
            with self._lock:
                place = self._whereabouts()
                if place is None:
                    self._thread = None
                    return
            try:
                self._look(*place)
            except Exception:  # the store's host has ended; whoever waits decides what that means
                self.store_failed = True
                with self._lock:
                    self._thread = None
                return
            self.answered_at = time.monotonic()
            time.sleep(pause)
            pause = min(2 * pause, self._period)

    def _whereabouts(self) -> tuple[int, str] | None:
        """The meeting at which this rank waits, and what else it says. None: it has nothing to say."""
        if self._meeting is not None:
            return self._meeting, "left" if self._has_left else ""
        busy = self._busy
        return (-1, _BUSY + busy[0]) if busy is not None and time.monotonic() < busy[1] else None

    def _look(self, meeting: int, says: str) -> None:
        """Write where this rank is, and read where the others are."""
        self._num_beats += 1
        self._store.set(_key(self._rank), f"{meeting} {self._num_beats} {says}")
        for rank in range(self._num_ranks):
            if self._store.check([_key(rank)]):
                said = self._store.get(_key(rank)).decode()
                if said != self._seen.get(rank, ("", 0.0))[0]:
                    self._seen[rank] = said, time.monotonic()
                    if _BUSY in said:
                        self.busy_at[rank] = said.partition(_BUSY)[2], time.monotonic()
        if self.verdict is None and self._proposal is not None:
            self.verdict = self._store.compare_set("verdict", "", self._proposal).decode()
        elif self.verdict is None and self._store.check(["verdict"]):
            self.verdict = self._store.get("verdict").decode()


def _key(rank: int) -> str:
    return f"whereabouts of rank {rank}"

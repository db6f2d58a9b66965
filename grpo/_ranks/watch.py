"""Where the ranks wait, as a table in the store of the process group. Only a rank that waits long writes and reads it."""

import threading
import time
from typing import Any


class Watch:
    """Tells the other ranks at which meeting this rank waits, and follows where they wait.

    A thread of its own talks to the store, because a store whose host is stopped never answers. The thread runs only while this
    rank waits. A waiting rank writes a number that grows, so that the others see that it is alive.

    Args:
        store: shared by all ranks, and by nothing else.
        rank: the number of this rank.
        num_ranks: the number of ranks.
        period: seconds between two looks at the table.
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
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._meeting: int | None = None
        self._num_beats = 0
        self._proposal: str | None = None
        self._has_left = False

    def wait_at(self, meeting: int) -> None:
        """Say that this rank waits at a meeting, again and again, and follow the others until `stop` is called."""
        with self._lock:
            if self._meeting != meeting:
                self._meeting, self.answered_at = meeting, time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="grpo-ranks", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """The meeting took place."""
        with self._lock:
            self._meeting = None

    def propose(self, reason: str) -> None:
        """Write the reason why all ranks stop, unless another rank has written one."""
        self._proposal = reason

    def leave(self) -> None:
        """Say that this rank has read the verdict."""
        self._has_left = True

    def missing(self, meeting: int, longest_silence: float) -> list[int]:
        """The other ranks that do not wait at this meeting, or have not said so for `longest_silence` seconds."""
        now, absent = time.monotonic(), []
        for rank in range(self._num_ranks):
            said, changed_at = self._seen.get(rank, ("-1", now))
            if rank != self._rank and (int(said.split()[0]) < meeting or now - changed_at > longest_silence):
                absent.append(rank)
        return absent

    def all_have_left(self, ranks: list[int]) -> bool:
        """Whether these ranks have read the verdict."""
        return all(self._seen.get(rank, ("", 0.0))[0].endswith("left") for rank in ranks)

    def _follow(self) -> None:
        pause = self._period / 50  # most meetings that take long enough to be watched begin soon
        while True:
            with self._lock:
                meeting = self._meeting
                if meeting is None:
                    self._thread = None
                    return
            try:
                self._look(meeting)
            except Exception:  # the store's host has ended; whoever waits decides what that means
                self.store_failed = True
                with self._lock:
                    self._thread = None
                return
            self.answered_at = time.monotonic()
            time.sleep(pause)
            pause = min(2 * pause, self._period)

    def _look(self, meeting: int) -> None:
        """Write where this rank is, and read where the others are."""
        self._num_beats += 1
        self._store.set(_key(self._rank), f"{meeting} {self._num_beats}{' left' if self._has_left else ''}")
        for rank in range(self._num_ranks):
            if self._store.check([_key(rank)]):
                said = self._store.get(_key(rank)).decode()
                if said != self._seen.get(rank, ("", 0.0))[0]:
                    self._seen[rank] = said, time.monotonic()
        if self.verdict is None and self._proposal is not None:
            self.verdict = self._store.compare_set("verdict", "", self._proposal).decode()
        elif self.verdict is None and self._store.check(["verdict"]):
            self.verdict = self._store.get("verdict").decode()


def _key(rank: int) -> str:
    return f"whereabouts of rank {rank}"

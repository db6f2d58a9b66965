"""Meetings of all ranks over gloo connections of their own, with a time limit that names the ranks that do not come."""

import ctypes
import logging
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from grpo.errors import RankError

from .shared_errors import shared_by_all
from .watch import Watch

INLINE_BYTES = 1024
"""Size of the first message of a meeting. A longer message needs a second one."""

SECONDS_BETWEEN_LINES = 30.0
"""How often a rank that waits for a busy rank logs it."""

_LENGTH_BYTES = 8
_LOGGER = logging.getLogger("grpo")


class Meetings:
    """Exchanges messages and tensors of all ranks. Every rank makes the same calls in the same order.

    A rank waits in short slices, so that its signal handlers run. A rank that does not come ends the meeting on every other
    rank with the same `RankError`, which names it. After that no further meeting is possible. A rank in `busy` has
    more time.

    Args:
        store: A store that all ranks share, with keys that nothing else uses.
        rank: The number of this rank.
        num_ranks: The number of ranks.
        timeout: Seconds that a rank waits for the others at a meeting.

    Raises:
        RankError: A rank did not come to this first meeting.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, timeout: float) -> None:
        self.rank, self.num_ranks, self.timeout = rank, num_ranks, timeout
        self.broken: str | None = None
        """Why no further meeting is possible. None: meetings are possible."""
        # short, because a Python signal handler does not run while an operation waits in C++
        self._slice = min(0.25, timeout / 20)
        # the rest is for finding out who is missing, and telling the others
        self._longest_wait = timeout - 4 * self._slice
        # a waiting rank writes a sign of life in each slice, so one that is silent for so long has ended or hangs
        self._longest_silence = min(5.0, timeout / 4)
        self._watch = Watch(store, rank, num_ranks, self._slice)
        self._meeting = 0
        self._place = "Replicated()"
        self._last_seen: list[str] = []
        self._said: dict[str, float] = {}
        self._gloo: Any = None
        self._arrive()
        self._connect(store)

    def busy(self, seconds: float, reason: str) -> AbstractContextManager[None]:
        """Inside the block, at most for so many seconds, the other ranks know why this rank is late, and wait for it."""
        return self._watch.busy(seconds, reason)

    def exchange(self, place: str, value: Any) -> list[tuple[str, Any]]:
        """Send one picklable value to every rank. Return the place and the value of each rank, in rank order.

        Args:
            place: Where in the program this rank is, for messages. Later operations on tensors have the same place.
            value: The value. A small value takes one message, a larger value takes two.
        """
        self._place = place
        message = pickle.dumps((place, value))
        length = len(message).to_bytes(_LENGTH_BYTES, "little")
        first = self._gather_bytes((length + message)[:INLINE_BYTES].ljust(INLINE_BYTES, b"\0"))
        lengths = [int.from_bytes(part[:_LENGTH_BYTES], "little") for part in first]
        parts = [part[_LENGTH_BYTES:] for part in first]
        longest = max(lengths)
        if longest > INLINE_BYTES - _LENGTH_BYTES:
            parts = self._gather_bytes(message.ljust(longest, b"\0"))
        found = [pickle.loads(part[:length]) for part, length in zip(parts, lengths, strict=True)]
        self._last_seen = [where for where, _ in found]
        return found

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in rank order. All have the same shape and dtype, and are on the CPU."""
        parts = [torch.empty_like(values) for _ in range(self.num_ranks)]
        self._meet(lambda: self._gloo.allgather([parts], [values]))
        return parts

    def all_reduce(self, values: Tensor) -> None:
        """Replace the values by their sum over all ranks, in place. All have the same shape and dtype, and are on the CPU."""
        self._meet(lambda: self._gloo.allreduce([values]))

    def all_gather_into(self, gathered: Tensor, values: Tensor) -> None:
        """Fill one tensor with the tensors of all ranks, in rank order."""
        self._meet(lambda: self._gloo._allgather_base(gathered, values))

    def reduce_scatter(self, own: Tensor, values: Tensor) -> None:
        """Fill a tensor with this rank's part of the sum over all ranks. The parts are in rank order."""
        self._meet(lambda: self._gloo._reduce_scatter_base(own, values))

    def _gather_bytes(self, message: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        return [part.numpy().tobytes() for part in self.all_gather(own)]

    def _meet(self, start: Callable[[], Any]) -> None:
        """Start a collective operation and wait for its end."""
        if self.broken is not None:
            raise self._rank_error()
        self._meeting += 1
        self._said.clear()
        begun = time.monotonic()
        try:
            cause = self._outcome(start(), begun)
            if cause is None:
                return
            reason = self._who_is_missing(begun, cause)
        except BaseException as error:
            kind = type(error).__name__  # its next message would pair with a message of this meeting
            self._break(f"Rank {self.rank} left {self._place} before the other ranks, with {kind}. {_RESTART}")
            raise
        self._break(reason)
        raise self._rank_error() from cause

    def _outcome(self, work: Any, begun: float) -> Exception | None:
        """Wait for the end of an operation. Return what went wrong."""
        while True:
            try:
                work.wait(timedelta(seconds=self._slice))
                self._watch.stop()
                return None
            except RuntimeError:  # the slice is over, or the operation failed
                if work.is_completed():
                    return self._failure(work)
            self._watch.wait_at(self._meeting)
            self._say_who_is_busy(begun)
            if self._watch.verdict is not None or self._is_over(begun):
                return TimeoutError()

    def _is_over(self, begun: float) -> bool:
        """Whether some rank had all the time it may take. Where no rank is missing, the connection does not work."""
        now = time.monotonic()
        extended = [at for _, at in self._watch.busy_at.copy().values() if now - at < self._longest_wait]
        return now - begun >= self._longest_wait and (not extended or bool(self._missing(begun, is_late=True)))

    def _missing(self, begun: float, *, is_late: bool) -> list[int]:
        """The ranks that are not at the meeting. `is_late`: only those for which this rank has waited long enough."""
        missing = self._watch.missing(self._meeting, self._longest_silence)
        if not is_late:
            return missing
        latest = time.monotonic() - self._longest_wait
        return [rank for rank in missing if max(begun, self._watch.busy_at.get(rank, ("", begun))[1]) <= latest]

    def _say_who_is_busy(self, begun: float) -> None:
        """Log why training waits, and again every 30 seconds while the rank is busy. Rank 0 says itself why it waits."""
        now = time.monotonic()
        if now - begun < self._longest_silence:
            return
        for rank, (reason, at) in self._watch.busy_at.copy().items():
            said = f"Training waits for rank {rank}: {reason}"
            is_busy = now - at <= self._longest_silence
            is_due = is_busy and now - self._said.get(said, now) >= SECONDS_BETWEEN_LINES
            if rank > 0 and (said not in self._said or is_due):
                self._said[said] = now
                _LOGGER.warning("%s", said)

    def _failure(self, work: Any) -> Exception | None:
        """Why a completed operation failed. None: it ended well, just after a slice was over."""
        try:
            work.wait()
        except RuntimeError as error:
            return error
        self._watch.stop()
        return None

    def _arrive(self) -> None:
        """Wait until every rank has built its meetings."""
        begun = time.monotonic()
        self._watch.wait_at(0)
        while self._watch.missing(0, self.timeout):
            is_over = time.monotonic() - begun >= self._longest_wait
            if is_over or self._watch.verdict is not None or self._watch.store_failed:
                cause = ConnectionError("the store is closed") if self._watch.store_failed else TimeoutError()
                self._break(self._who_is_missing(begun, cause))
                raise self._rank_error()
            time.sleep(self._slice / 20)

    def _connect(self, store: Any) -> None:
        """Connect to all ranks, within the timeout: gloo waits five times as long for a rank that ends while it connects."""
        import torch.distributed as dist  # a single process does not need it

        made: list[Any] = []
        longest = timedelta(seconds=self.timeout + 4 * self._slice)  # the watch comes first: it knows who is missing

        def connect() -> None:
            try:
                made.append(dist.ProcessGroupGloo(store, self.rank, self.num_ranks, longest))
            except Exception as error:  # raised in the first thread
                made.append(error)

        begun = time.monotonic()
        thread = threading.Thread(target=connect, name="grpo-connect", daemon=True)
        thread.start()
        while not made:
            thread.join(self._slice)
            if self._watch.verdict is not None or time.monotonic() - begun >= self._longest_wait:
                made.append(TimeoutError())
        if isinstance(made[0], Exception):
            self._break(self._who_is_missing(begun, made[0]))
            raise self._rank_error() from made[0]
        self._watch.stop()
        self._gloo = made[0]
        # from here on only the watch ends a meeting, because a busy rank may come much later
        made[0]._set_default_timeout(timedelta(days=365))

    def _who_is_missing(self, begun: float, cause: Exception) -> str:
        """Wait until it is clear which ranks do not come, at most until the timeout, and say it.

        A connection that fails tells that some rank has ended, but not which one. It is the rank that stays silent.
        """
        failed_at = time.monotonic()
        is_late = isinstance(cause, TimeoutError)
        patience = 2 * self._slice if is_late or self.num_ranks == 2 else self._longest_silence
        latest = max(begun + self._longest_wait, failed_at + self._longest_silence) + patience
        while self._watch.verdict is None:
            self._watch.wait_at(self._meeting)
            now = time.monotonic()
            missing = self._missing(begun, is_late=is_late)
            if self._has_no_store and self.rank > 0:
                missing = [0]  # rank 0 holds the store, unless a launcher does
            elif self.num_ranks == 2 and not is_late:
                missing = [1 - self.rank]
            is_clear = now - failed_at > patience and (is_late or len(missing) == 1)
            if is_clear or self._watch.store_failed or now >= latest:
                return self._absence(missing, cause)
            time.sleep(self._slice)
        return self._watch.verdict

    @property
    def _has_no_store(self) -> bool:
        """Whether the store has failed, or has not answered for long."""
        return self._watch.store_failed or time.monotonic() - self._watch.answered_at > self._longest_silence

    def _absence(self, missing: list[int], cause: Exception) -> str:
        """Say which ranks did not come to a meeting, where they were last seen, and what to do."""
        if not missing:
            return f"The connection of the ranks failed at {self._place}, and no rank is missing: {cause}. {_RESTART}"
        names = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {' and '.join(map(str, missing))}"
        if isinstance(cause, TimeoutError):
            what = f"{names} did not reach {self._place} within {self.timeout:g} s."
            advice = "Raise Replicated(timeout=...) if ranks may wait longer for one another."
        else:
            what = f"{names} ended or lost the connection, while the other ranks waited at {self._place}."
            advice = _RESTART
        for rank in missing:  # no seconds: survivors without a store could not agree on them, and raise the same text
            seen = f"last seen at {self._last_seen[rank]}" if self._last_seen else "never seen"
            what += f" Rank {rank} was {seen}."
            if rank in self._watch.busy_at:
                what += f" It said last: {self._watch.busy_at[rank][0]}."
        return f"{what} The output of {names.lower()} may say why. {advice}"

    def _break(self, reason: str) -> None:
        """End all meetings. Agree with the others on the reason, and stay until they know it: the store may end with us."""
        self._watch.propose(reason)
        self._watch.wait_at(self._meeting)
        deadline = time.monotonic() + self._longest_silence
        while self._watch.verdict is None and not self._has_no_store and time.monotonic() < deadline:
            time.sleep(self._slice / 20)
        self.broken = self._watch.verdict or reason
        self._watch.leave()
        deadline = time.monotonic() + self._longest_silence
        while self._watch.verdict is not None and not self._has_no_store and time.monotonic() < deadline:
            if self._watch.all_have_left(self._longest_silence):
                break
            time.sleep(self._slice / 20)
        self._watch.stop()
        if self._gloo is not None:  # its destructor would wait for the rank that does not come
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))

    def _rank_error(self) -> RankError:
        return shared_by_all(RankError(self.broken))


_RESTART = "Start all ranks again; a run with a checkpoint_dir continues from its newest checkpoint."

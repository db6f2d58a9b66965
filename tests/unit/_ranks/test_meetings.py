"""Meetings of ranks: what they exchange, the table of ranks that wait, and that a rank which does not come is named."""

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from grpo._ranks import meetings as module
from grpo._ranks.meetings import INLINE_BYTES, Meetings
from grpo._ranks.shared_errors import is_shared
from grpo._ranks.watch import Watch
from grpo.errors import RankError
from tests.support.gloo_threads import meet, on_threads
from tests.support.reward_faults import FakeTime

SHORT = 3.0
"""A time limit for ranks that do not come."""


def alone(timeout: float = 30.0) -> Meetings:
    return Meetings(dist.HashStore(), 0, 1, timeout)


def test_every_rank_gets_the_values_and_places_of_all_ranks_in_rank_order() -> None:
    values = [{"rank": 0}, "x" * 5_000, "y" * 70_000]
    results = meet(3, lambda meetings: meetings.exchange(f"place {meetings.rank}", values[meetings.rank]))
    assert results == [[(f"place {rank}", value) for rank, value in enumerate(values)]] * 3


def test_a_message_longer_than_the_first_one_takes_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of 8 bytes less than `INLINE_BYTES`, with what pickle adds, is the longest that fits."""
    sizes: list[int] = []
    gather = Meetings._gather_bytes

    def counted(self: Meetings, message: bytes) -> list[bytes]:
        sizes.append(len(message))
        return gather(self, message)

    monkeypatch.setattr(Meetings, "_gather_bytes", counted)
    meetings, added = alone(), len(module.pickle.dumps(("here", "x" * 900))) - 900
    for length, expected in [(INLINE_BYTES - 8 - added, 1), (INLINE_BYTES - 8 - added + 1, 2)]:
        sizes.clear()
        assert meetings.exchange("here", "x" * length) == [("here", "x" * length)]
        assert sizes == [INLINE_BYTES, INLINE_BYTES - 7][:expected]


def test_a_rank_that_does_not_come_is_named_on_every_rank_within_the_timeout(subtests: pytest.Subtests) -> None:
    """Each rank of three in turn. It wakes up when the others have given up, and learns why when it waits."""

    def body(culprit: int) -> list[Any]:
        given_up = [threading.Event() for _ in range(3)]

        def one(meetings: Meetings) -> tuple[BaseException, float]:
            meetings.exchange("the first meeting", None)
            if meetings.rank == culprit:
                for event in [*given_up[:culprit], *given_up[culprit + 1 :]]:
                    event.wait(50)
            start = time.monotonic()
            try:
                with pytest.raises(RankError) as raised:
                    deque(meetings.exchange("the second meeting", None) for _ in range(2))
            finally:
                given_up[meetings.rank].set()
            return raised.value, time.monotonic() - start

        return meet(3, one, SHORT)

    for culprit, results in enumerate(on_threads(3, body)):
        with subtests.test(culprit=culprit):
            (text,) = {str(error) for error, _ in results}
            begins = f"Rank {culprit} did not reach the second meeting within 3 s. Rank {culprit} was last seen "
            assert text.startswith(begins)
            for rank, (error, seconds) in enumerate(results):
                assert is_shared(error)
                assert "at the first meeting. The output of rank" in str(error)
                assert rank == culprit or seconds > 0.5 * SHORT


def test_a_rank_that_ends_while_the_ranks_connect_is_named_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has arrived, and then falls silent. Gloo waits for five times the timeout, and cannot be interrupted."""
    given_up = threading.Event()
    monkeypatch.setattr(dist, "ProcessGroupGloo", lambda *_: given_up.wait(50))
    store = dist.HashStore()
    other = Watch(store, 1, 2, 0.02)
    other.wait_at(0)
    threading.Timer(0.2, other.stop).start()
    with pytest.raises(RankError, match=r"Rank 1 did not reach Replicated\(\) within 1 s\. Rank 1 was never seen\."):
        Meetings(store, 0, 2, 1.0)
    assert not given_up.is_set()
    given_up.set()


def test_a_rank_that_does_not_build_its_meetings_is_named() -> None:
    store = dist.HashStore()

    def body(rank: int) -> str:
        if rank == 1:
            return ""
        with pytest.raises(RankError) as raised:
            Meetings(store, rank, 3, SHORT)
        return str(raised.value)

    first, _, third = on_threads(3, body)
    assert first == third
    assert first.startswith("Rank 1 did not reach Replicated() within 3 s. Rank 1 was never seen.")
    assert first.endswith("Raise Replicated(timeout=...) if ranks may wait longer for one another.")


WAIT = 2.0
"""The time limit of ranks that announce that they come later."""


def late(announced: float, busy: float, culprit: int, num_ranks: int) -> tuple[str, float]:
    """Rank 1 is busy, and the culprit does not come. What rank 0 raises, like all other ranks, and after how many seconds."""
    given_up = threading.Event()

    def body(meetings: Meetings) -> tuple[str, float]:
        meetings.exchange("a", None)
        start = time.monotonic()
        if meetings.rank == 1:
            with meetings.busy(announced, "the judge is ill"):
                given_up.wait(busy)
        if meetings.rank == culprit:
            given_up.wait(50)
        try:
            with pytest.raises(RankError) as raised:
                deque(meetings.exchange("b", None) for _ in range(2))
        finally:
            if meetings.rank == 0:
                given_up.set()
        return str(raised.value), time.monotonic() - start

    results = meet(num_ranks, body, WAIT)
    assert all(isinstance(found, tuple) and found[0] == results[0][0] for found in results), results
    return results[0]


@pytest.mark.slow
def test_a_busy_rank_gets_exactly_the_time_that_it_announced(subtests: pytest.Subtests) -> None:
    """And no other rank gets more time. The cases run at the same time."""
    cases: dict[str, tuple[float, float, int, int]] = {
        "it comes later than announced": (1.5, 1.5, 1, 2),
        "it stays busy for longer than announced": (1.5, 50.0, 1, 2),
        "it is busy for less time than announced": (60.0, 1.5, 1, 2),
        "another rank does not come": (50.0, 50.0, 2, 3),
    }
    for name, (text, seconds) in zip(cases, on_threads(4, lambda case: late(*[*cases.values()][case])), strict=True):
        culprit = cases[name][2]
        with subtests.test(name):
            assert text.startswith(f"Rank {culprit} did not reach b within 2 s. Rank {culprit} was last seen")
            assert ("It said last: the judge is ill. The output" in text) == (culprit == 1)
            # ranks that wait for another one give up after 50 s
            assert (1.2 + 1.6 if culprit == 1 else 1.5) < seconds < 40.0


def test_a_busy_rank_is_not_taken_for_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection of rank 0 breaks while rank 1 is busy and rank 2 is silent."""
    broken, given_up = RuntimeError("connection closed"), threading.Event()

    def outcome(self: Meetings, work: Any, begun: float) -> Any:
        del work, begun
        time.sleep(0.5)  # rank 1 has announced it by now
        self._watch.wait_at(self._meeting)
        return broken

    def body(meetings: Meetings) -> str:
        meetings._outcome = outcome.__get__(meetings)  # type: ignore[method-assign]
        if meetings.rank == 1:
            with meetings.busy(50, "x"):
                given_up.wait(50)
        if meetings.rank > 0:
            given_up.wait(50)
            return ""
        with pytest.raises(RankError) as raised:
            meetings.exchange("b", None)
        given_up.set()
        return str(raised.value)

    assert meet(3, body, 4.0)[0].startswith("Rank 2 ended or lost the connection, while the other ranks waited at b.")


def test_an_exception_in_the_middle_of_a_meeting_ends_it_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler of the user raises on rank 0 while it waits for rank 1."""
    has_left, outcome = threading.Event(), Meetings._outcome

    def interrupted(self: Meetings, work: Any, begun: float) -> Any:
        if self.rank == 0:
            raise KeyboardInterrupt
        return outcome(self, work, begun)

    def body(meetings: Meetings) -> str:
        if meetings.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                meetings.exchange("here", None)
            has_left.set()
        else:
            assert has_left.wait(50)
        with pytest.raises(RankError) as raised:
            meetings.exchange("there", "x" * 5_000)
        return str(raised.value)

    monkeypatch.setattr(Meetings, "_outcome", interrupted)
    first, _ = meet(2, body, SHORT)
    assert first.startswith("Rank 0 left here before the other ranks, with KeyboardInterrupt. Start all ranks again")


class Work:
    """An operation whose waits end as listed: True is a slice without an end."""

    def __init__(self, *ends: Exception | None) -> None:
        self._ends = list(ends)
        self.slices: list[timedelta | None] = []

    def wait(self, limit: timedelta | None = None) -> None:
        self.slices.append(limit)
        end = self._ends.pop(0)
        if end is not None:
            raise end

    def is_completed(self) -> bool:
        return len(self._ends) == 1


BROKEN, OVER = RuntimeError("connection closed"), RuntimeError("the slice is over")


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([None], None),  # at once
        ([OVER, OVER, None, None], None),  # after two slices
        ([OVER, None], None),  # just after a slice
        ([OVER, BROKEN], BROKEN),
    ],
)
def test_an_operation_is_awaited_in_slices_until_it_ends(ends, expected):
    assert alone()._outcome(Work(*ends), time.monotonic()) is expected


@pytest.mark.parametrize(("timeout", "expected"), [(1.0, 0.05), (5.0, 0.25), (600.0, 0.25)])
def test_slices_are_a_twentieth_of_a_short_timeout_and_at_most_a_quarter_of_a_second(timeout, expected):
    work = Work(None)
    alone(timeout)._outcome(work, time.monotonic())
    assert work.slices == [timedelta(seconds=expected)]


@pytest.mark.parametrize(
    ("missing", "begins", "ends"),
    [
        ([], "The connection of the ranks failed at Replicated(), and no rank is missing: connection reset.", ""),
        (
            [0],
            "Rank 0 ended or lost the connection, while the other ranks waited at Replicated().",
            "Start all ranks again; a run with a checkpoint_dir continues from its newest checkpoint.",
        ),
    ],
)
def test_a_connection_that_fails_is_told_from_a_rank_that_ended(missing, begins, ends):
    reason = alone(1.0)._absence(missing, RuntimeError("connection reset"))
    assert reason.startswith(begins)
    assert reason.endswith(ends)


class Table:
    """In place of a `Watch`. `left`: what `all_have_left` says, one call after another."""

    def __init__(self, *, missing: list[int] | None = None, left: list[bool] | None = None, **state: Any) -> None:
        self.verdict, self.store_failed, self.answered_at = None, False, float("inf")
        self.busy_at: dict[int, Any] = {}
        self.called: list[str] = []
        self._missing, self._left = missing or [], left or []
        vars(self).update(state)

    def missing(self, meeting: int, longest_silence: float) -> list[int]:
        return self._missing

    def all_have_left(self, longest_silence: float) -> bool:
        return self._left.pop(0)

    def wait_at(self, meeting: int) -> None: ...

    def propose(self, reason: str) -> None:
        self.called.append(f"propose {reason}")
        self.verdict = self.verdict or reason

    def leave(self) -> None:
        self.called.append("leave")

    def stop(self) -> None:
        self.called.append("stop")


def second_of_three(table: Table, timeout: float = 4.0) -> Meetings:
    meetings = alone(timeout)
    meetings.rank, meetings.num_ranks, meetings._watch = 1, 3, table  # type: ignore[assignment]
    return meetings


def test_why_training_waits_is_logged_every_30_seconds_while_the_rank_is_busy(monkeypatch, caplog) -> None:
    """Rank 2 says for 70 seconds that it is busy. Then it says nothing more, and does not come either."""
    table, clock = Table(), FakeTime()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.clock))
    meetings, begun, logged_at = second_of_three(table, 60.0), clock.now, []
    for second in range(200):
        clock.now = begun + second
        table.busy_at = {0: ("the disk is full", clock.now), 2: ("the judge is ill", begun + min(second, 70))}
        meetings._say_who_is_busy(begun)
        logged_at += [second] * (len(caplog.records) - len(logged_at))
    assert logged_at == [5, 35, 65]
    assert {*caplog.messages} == {"Training waits for rank 2: the judge is ill"}


@pytest.mark.parametrize(("timeout", "expected"), [(1.0, (0.8, 0.25)), (8.0, (7.0, 2.0)), (60.0, (59.0, 5.0))])
def test_limits_follow_from_the_timeout(timeout, expected):
    meetings = alone(timeout)
    assert (meetings._longest_wait, meetings._longest_silence) == pytest.approx(expected)


@pytest.mark.parametrize(("failed", "silent_for"), [(True, 0.0), (False, 1.5)])
def test_without_a_store_rank_0_is_named(failed, silent_for):
    """The store has failed, or has not answered for a quarter of the timeout, which is one second here."""
    table = Table(missing=[0, 2], store_failed=failed, answered_at=time.monotonic() - silent_for)
    reason = second_of_three(table)._who_is_missing(time.monotonic(), RuntimeError("closed"))
    assert reason.startswith("Rank 0 ended or lost")


def test_a_failed_connection_leaves_time_for_ranks_to_fall_silent_after_a_long_meeting() -> None:
    """Two ranks are missing, so that the culprit is not clear: 0.25 s of silence and as long again."""
    meetings, begun = second_of_three(Table(missing=[0, 2]), 1.0), time.monotonic()
    reason = meetings._who_is_missing(begun - 100.0, RuntimeError("closed"))
    assert reason.startswith("Ranks 0 and 2 ended or lost the connection")
    assert time.monotonic() - begun >= 0.45


def test_a_rank_stays_until_the_others_have_read_the_first_reason() -> None:
    table = Table(left=[False, False, True])
    meetings, late = second_of_three(table), second_of_three(Table(left=[True], verdict="rank 0 is missing"))
    for each in (meetings, late):
        each._break("rank 2 is missing")
    assert (meetings.broken, late.broken) == ("rank 2 is missing", "rank 0 is missing")
    assert (table.called, table._left) == (["propose rank 2 is missing", "leave", "stop"], [])


@pytest.mark.parametrize(
    ("state", "stays"), [({"answered_at": -1e9}, False), ({"store_failed": True}, False), ({}, True)]
)
def test_a_rank_does_not_stay_without_a_store_or_for_longer_than_the_silence(state, stays):
    table = Table(left=[False] * 1000, **state)
    second_of_three(table)._break("x")
    assert (len(table._left) < 1000) == stays


PERIOD = 0.02
SILENCE = 5.0
MINE, OTHER = "whereabouts of rank 0", "whereabouts of rank 1"


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(PERIOD / 4)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "grpo-ranks"]


def seen_by(store: Any, meeting: int, *others: str) -> Watch:
    """The watch of rank 0 after one look at a table in which the other ranks have written these words."""
    for rank, said in enumerate(others, start=1):
        if said:
            store.set(f"whereabouts of rank {rank}", said)
    watch = Watch(store, 0, 1 + len(others), PERIOD)
    watch._meeting = meeting
    watch._look(meeting, "")
    return watch


def age(watch: Watch, seconds: float) -> None:
    """Let so many seconds pass since each rank has written something."""
    watch._seen = {rank: (said, at - seconds) for rank, (said, at) in watch._seen.items()}


def test_a_rank_that_waits_writes_its_meeting_and_a_growing_number_until_it_stops(store: Any) -> None:
    watch = Watch(store, 0, 2, PERIOD)
    watch.wait_at(7)
    assert all(thread.daemon for thread in threads())  # a stopped store does not keep the process alive
    eventually(lambda: store.check([MINE]) and int(store.get(MINE).split()[1]) >= 3)
    assert store.get(MINE).split()[0] == b"7"
    watch.stop()
    eventually(lambda: not threads())
    last = store.get(MINE)
    watch.wait_at(9)
    eventually(lambda: store.get(MINE).split()[0] == b"9")
    assert int(store.get(MINE).split()[1]) > int(last.split()[1])
    watch.stop()
    eventually(lambda: not threads())


def test_a_busy_rank_writes_why_inside_its_block_and_only_while_it_is_not_at_a_meeting(store: Any) -> None:
    watch = Watch(store, 0, 2, PERIOD)
    with watch.busy(60.0, "the judge is ill"):
        eventually(lambda: store.check([MINE]))
        assert store.get(MINE).decode().split(maxsplit=2)[::2] == ["-1", "busy: the judge is ill"]
        watch.wait_at(3)
        eventually(lambda: store.get(MINE).startswith(b"3 "))
        watch.stop()
        with watch.busy(60.0, "another reason"):
            eventually(lambda: store.get(MINE).endswith(b"busy: another reason"))
        eventually(lambda: store.get(MINE).endswith(b"busy: the judge is ill"))
    eventually(lambda: not threads())


def test_a_call_that_ends_soon_writes_nothing_and_an_announcement_ends_with_its_time(store: Any) -> None:
    with Watch(store, 0, 2, 1.0).busy(60.0, "x"):
        assert len(threads()) == 1
        time.sleep(0.1)
    eventually(lambda: not threads())
    assert not store.check([MINE])
    with Watch(store, 0, 2, PERIOD).busy(0.2, "x"):
        eventually(lambda: store.check([MINE]))
        eventually(lambda: not threads())


def test_ranks_that_are_behind_silent_or_unseen_are_missing(store: Any) -> None:
    """Rank 1 is at the meeting, rank 2 behind it, rank 3 ahead, rank 4 has written nothing, rank 5 is busy."""
    watch = seen_by(store, 4, "4 1 ", "3 9 ", "5 1 ", "", "-1 2 busy: the judge is ill")
    assert (watch.missing(4, SILENCE), watch.missing(5, SILENCE)) == ([2, 4], [1, 2, 4])
    assert [(rank, reason) for rank, (reason, _) in watch.busy_at.items()] == [(5, "the judge is ill")]
    age(watch, 1000.0)
    assert (watch.missing(4, 1010.0), watch.missing(4, 990.0)) == ([2, 4], [1, 2, 3, 4, 5])
    store.set(OTHER, "4 2 ")
    watch._look(4, "")
    assert watch.missing(4, 990.0) == [2, 3, 4, 5]


def test_what_busy_ranks_said_is_forgotten_at_the_next_meeting(store: Any) -> None:
    watch = seen_by(store, 4, "-1 2 busy: x")
    watch.wait_at(4)
    assert [*watch.busy_at] == [1]
    watch.wait_at(5)
    assert watch.busy_at == {}
    watch.stop()


def test_the_first_reason_that_a_rank_writes_counts_for_all(store: Any) -> None:
    first, second, third = (seen_by(store, 1, "1 1 ") for _ in range(3))
    assert first.verdict is None
    first.propose("rank 1 is missing")
    second.propose("rank 2 is missing")
    for watch in (first, second, third):
        watch._look(1, "")
    assert [watch.verdict for watch in (first, second, third)] == ["rank 1 is missing"] * 3


@pytest.mark.parametrize(("others", "expected"), [
    (("2 5 left", "2 1 left"), True), (("2 5 left", "2 1 "), False), (("2 5 left", "1 1 "), True),
    (("2 5 left", "-1 1 busy: x"), True),
])  # fmt: skip
def test_ranks_at_the_same_meeting_have_left_when_they_say_so(store: Any, others, expected):
    """Ranks that are behind, or silent, are not waited for."""
    watch = seen_by(store, 2, *others)
    assert not watch.all_have_left(SILENCE)  # this rank has not said so
    watch._look(2, "left")
    assert watch.all_have_left(SILENCE) == expected
    watch = seen_by(store, 2, "2 7 ")
    age(watch, 1000.0)
    watch._look(2, "left")
    assert not watch.all_have_left(1010.0)
    assert watch.all_have_left(990.0)


def test_a_rank_that_leaves_writes_it(store: Any) -> None:
    watch = Watch(store, 0, 2, PERIOD)
    watch.wait_at(2)
    eventually(lambda: store.check([MINE]) and not store.get(MINE).endswith(b"left"))
    watch.leave()
    eventually(lambda: store.get(MINE).endswith(b" left"))
    watch.stop()


def test_a_lost_store_is_noticed_and_ends_the_thread() -> None:
    class Lost:
        def set(self, key: str, value: str) -> None:
            raise ConnectionError

    watch = Watch(Lost(), 0, 2, PERIOD)
    assert not watch.store_failed
    watch.wait_at(1)
    eventually(lambda: watch.store_failed and not threads())


def test_the_time_of_the_last_answer_moves_while_the_store_answers_and_with_each_meeting() -> None:
    """A store that does not answer says nothing about its state before the meeting."""
    answers = threading.Event()

    class Slow:
        def set(self, key: str, value: str) -> None:
            answers.wait(30)

        def check(self, keys: list[str]) -> bool:
            return False

    watch = Watch(Slow(), 0, 2, PERIOD)
    watch.answered_at -= 100.0
    before = time.monotonic()
    watch.wait_at(1)
    begun = watch.answered_at
    assert begun >= before
    watch.wait_at(1)
    assert watch.answered_at == begun
    answers.set()
    eventually(lambda: watch.answered_at > begun)
    watch.stop()
    eventually(lambda: not threads())

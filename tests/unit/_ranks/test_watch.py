"""The table of ranks that wait: what a rank writes, what it concludes from what the others write, and when it stops writing."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from grpo._ranks.watch import Watch

PERIOD = 0.02
SILENCE = 5.0
VERDICT, MINE, OTHER = "verdict", "whereabouts of rank 0", "whereabouts of rank 1"


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

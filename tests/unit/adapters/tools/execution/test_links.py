"""The executor's end of a socket: frames of bounded size, one for each that is asked for."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from adapters.tools.execution.executor import ToolExecutor
from adapters.tools.execution.links import ForkServerLink, Link, LinkLostError
from adapters.tools.execution.worker import LENGTH, receive, send
from tests.support.tool_executors import CATALOGUE, LONG, call, output_of, soon


def frame(content: bytes) -> bytes:
    return LENGTH.pack(len(content)) + content


def linked(work: Callable[[Link, socket.socket], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine with a link of 100 bytes per frame, and the other end of its socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return asyncio.run(work(Link(ours, 100), theirs))


def test_a_link_writes_and_reads_one_frame_at_a_time() -> None:
    async def work(link: Link, theirs: socket.socket) -> None:
        for content in (b"", b"a", b"x" * 96):
            theirs.sendall(frame(content))
            assert await link.answer(b"question") == content
            assert receive(theirs) == b"question"
            assert link.is_quiet
        waiting = asyncio.ensure_future(link.answer())
        for byte in frame(b"slow"):
            await asyncio.sleep(0)
            send_one = bytes([byte])
            theirs.sendall(send_one)
        assert await waiting == b"slow"

    linked(work)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (frame(b"a") + frame(b"b"), "it wrote without having been asked"),
        (frame(b"a") + b"\0", "it wrote without having been asked"),
        (frame(b"x" * 97), "it wrote a frame of 101 bytes; at most 100 are read"),
        (LENGTH.pack(2**32 - 1), "it wrote a frame of 4294967299 bytes; at most 100 are read"),
    ],
)
def test_other_data_than_one_frame_is_refused(sent: bytes, said: str) -> None:
    async def work(link: Link, theirs: socket.socket) -> None:
        theirs.sendall(sent)
        with pytest.raises(LinkLostError, match=said) as raised:
            await link.answer()
        assert not raised.value.has_ended

    linked(work)


def test_an_end_is_told_from_data_that_has_not_been_read() -> None:
    async def work(link: Link, theirs: socket.socket) -> None:
        assert link.is_quiet
        assert not link.has_ended
        theirs.sendall(frame(b"a"))
        assert not link.is_quiet
        assert not link.has_ended
        theirs.close()
        assert not link.has_ended, "there is still an answer"
        assert await link.answer() == b"a"
        assert link.has_ended
        assert not link.is_quiet
        for content in (None, b"question"):
            with pytest.raises(LinkLostError, match="it ended") as raised:
                await link.answer(content)
            assert raised.value.has_ended

    linked(work)


def test_a_part_of_a_frame_is_not_quiet() -> None:
    async def work(link: Link, theirs: socket.socket) -> None:
        theirs.sendall(frame(b"abc")[:-1])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await link.answer()
        assert link.has_unread_data
        assert not link.is_quiet
        assert not link.has_ended

    linked(work)


def test_closing_a_fork_server_ends_the_wait_for_its_answer() -> None:
    """As when another call has found that the fork server is gone."""

    class Stopped:
        """A process that has ended."""

        pid = 0

        def wait(self, *_: Any) -> int:
            return 0

    async def work(link: Link, theirs: socket.socket) -> None:
        server = ForkServerLink([], {"readable": [], "max_output_bytes": 1})
        server._link, server._process = link, Stopped()  # type: ignore[assignment]
        ending = asyncio.ensure_future(server.end(0, has_ended=False))
        await asyncio.sleep(0.01)
        server.close()
        async with asyncio.timeout(LONG):
            assert await ending is None
        assert link.socket.fileno() == -1
        assert server.is_lost

    linked(work)


def test_frames_of_workers_and_of_the_executor_are_the_same() -> None:
    one, other = socket.socketpair()
    with one, other:
        send(one, b"content")
        assert receive(other) == b"content"
        one.close()
        assert receive(other) is None


@pytest.mark.filterwarnings("ignore:ToolExecutor's workers")
def test_a_worker_that_ended_while_it_was_idle_is_found_before_it_gets_a_call() -> None:
    with ToolExecutor(CATALOGUE, num_workers=1, timeout=LONG) as made:
        output_of(made, "add", a=1)
        [idle] = made._engine._pool._idle
        assert idle.link.is_quiet
        idle.link.socket.shutdown(socket.SHUT_WR)  # the worker ends
        assert soon(lambda: not idle.link.is_quiet)
        assert made.run([call("add", a=1)])[0].output == 2

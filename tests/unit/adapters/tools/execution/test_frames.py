"""Frames on the sockets between the program and its workers: of bounded size, one for each that is asked for."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from adapters.tools import ExecutorOptions
from adapters.tools.execution.executor import ToolExecutor
from adapters.tools.execution.worker import LENGTH, PartOfFrameError, receive, send
from tests.support.tool_executors import CATALOGUE, LONG, call, output_of, soon


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def frame(content: bytes) -> bytes:
    return LENGTH.pack(len(content)) + content


def test_what_is_sent_is_received_until_the_end(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    for content in (b"", b"a", b"x" * 96):
        send(theirs, content)
        assert receive(ours, 100, time.monotonic() + LONG) == content
    thread = threading.Thread(target=lambda: [theirs.sendall(bytes([byte])) for byte in frame(b"slow")])
    thread.start()
    assert receive(ours) == b"slow"
    thread.join()
    send(theirs, b"last")
    theirs.close()
    assert receive(ours) == b"last"
    with pytest.raises(EOFError, match="it ended"):
        receive(ours)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (frame(b"a") + frame(b"b"), "it wrote without having been asked"),
        (frame(b"a") + b"\0", "it wrote without having been asked"),
        (frame(b"x" * 97), "it wrote a frame of 101 bytes; at most 100 are read"),
        (LENGTH.pack(2**32 - 1), "it wrote a frame of 4294967299 bytes; at most 100 are read"),
    ],
)
def test_other_data_than_one_frame_is_refused(
    pair: tuple[socket.socket, socket.socket], sent: bytes, said: str
) -> None:
    ours, theirs = pair
    theirs.sendall(sent)
    with pytest.raises(ValueError, match=said):
        receive(ours, 100)


def test_a_part_of_a_frame_is_told_from_no_frame_at_the_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    for sent, expected in ((b"", TimeoutError), (frame(b"abc")[:-1], PartOfFrameError)):
        theirs.sendall(sent)
        for seconds in (0.05, 0.0, -1.0):
            with pytest.raises(TimeoutError) as raised:
                receive(ours, 100, time.monotonic() + seconds)
            assert type(raised.value) is expected
            theirs.sendall(sent)


def test_a_frame_that_comes_byte_by_byte_does_not_extend_the_deadline(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    stop = threading.Event()

    def drip() -> None:
        theirs.sendall(LENGTH.pack(50_000))
        while not stop.wait(0.01):
            theirs.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(PartOfFrameError):  # 50,000 bytes take 500 seconds, longer than a test may take
        receive(ours, 60_000, time.monotonic() + 0.2)
    stop.set()
    thread.join()


@pytest.mark.filterwarnings("ignore:ToolExecutor's workers")
def test_a_worker_that_ended_while_it_was_idle_is_found_before_it_gets_a_call() -> None:
    with ToolExecutor(CATALOGUE, num_workers=1, options=ExecutorOptions(timeout=LONG)) as made:
        output_of(made, "add", a=1)
        [idle] = made._pool._idle
        assert idle.is_quiet
        idle.socket.shutdown(socket.SHUT_WR)  # the worker ends
        assert soon(lambda: not idle.is_quiet)
        assert made.run([call("add", a=1)])[0].output == 2

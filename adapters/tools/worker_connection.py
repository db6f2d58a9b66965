"""The executor's end of the sockets to its workers."""

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from .worker_calls import LENGTH, TOKEN_BYTES

if TYPE_CHECKING:
    from .workers import WorkerSource


class WorkerLostError(Exception):
    """The other side of a socket ended, or wrote what it should not."""


class Frames(asyncio.Protocol):
    """One socket: frames as they arrive, and never more of them in memory than one may take."""

    def __init__(self, receive: Callable[[bytes], None], lost: Callable[[str], None], max_bytes: int) -> None:
        self._receive = receive
        self._lost = lost
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            size = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if size > self._max_bytes:
                self.close()
                self._lost(f"it wrote a frame of {size} bytes; at most {self._max_bytes} are read")
                return
            if len(self._buffer) < size:
                return
            frame = bytes(self._buffer[LENGTH.size : size])
            del self._buffer[:size]
            self._receive(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost("it ended" if exc is None else str(exc))

    @property
    def waits(self) -> bool:
        """Nothing of a next frame has come."""
        return not self._buffer

    def send(self, content: bytes) -> None:
        """One frame."""
        assert self._transport is not None
        self._transport.write(LENGTH.pack(len(content)) + content)

    def close(self) -> None:
        """At once; what was not yet sent is lost."""
        if self._transport is not None:
            self._transport.abort()


class Worker:
    """One process, one call at a time."""

    def __init__(self, slot: int, source: "WorkerSource", max_bytes: int) -> None:
        self.slot = slot
        self.source = source
        self.frames = Frames(self._receive, self._lose, max_bytes)
        self._answer: asyncio.Future[bytes] | None = None
        self._lost: str | None = None

    @property
    def fit(self) -> bool:
        """For a call."""
        return self._lost is None and self.frames.waits

    async def answer(self) -> bytes:
        """The next frame.

        Raises:
            WorkerLostError: there will be none.
        """
        if self._lost is not None:
            raise WorkerLostError(self._lost)
        self._answer = asyncio.get_running_loop().create_future()
        return await self._answer

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """A request as JSON -> flags, and an output or error as JSON.

        Raises:
            WorkerLostError: no answer will come, or one to something else came.
        """
        token = os.urandom(TOKEN_BYTES)
        self.frames.send(token + request)
        frame = await self.answer()
        if len(frame) <= TOKEN_BYTES or frame[:TOKEN_BYTES] != token:
            raise WorkerLostError("it wrote something that is no answer to this call")
        return frame[TOKEN_BYTES], frame[TOKEN_BYTES + 1 :]

    def _receive(self, frame: bytes) -> None:
        if self._answer is None or self._answer.done():
            self._lose("it wrote without having been asked")
        else:
            self._answer.set_result(frame)

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(WorkerLostError(self._lost))

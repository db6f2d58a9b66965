"""The executor's end of the sockets to its workers."""

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from .worker_calls import LENGTH, TOKEN_BYTES

if TYPE_CHECKING:
    from .workers import WorkerSource


class LinkLostError(Exception):
    """The other side of a socket ended or sent invalid data."""


class Frames(asyncio.Protocol):
    """Protocol that splits one socket's data into frames of bounded size."""

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
        self._lost("it ended" if exc is None else f"it ended: {exc}")

    @property
    def waits(self) -> bool:
        """Whether no part of the next frame has arrived."""
        return not self._buffer

    def send(self, content: bytes) -> None:
        """Write one frame."""
        assert self._transport is not None
        self._transport.write(LENGTH.pack(len(content)) + content)

    def close(self) -> None:
        """Close the socket immediately. Unsent data is lost."""
        if self._transport is not None:
            self._transport.abort()


class Worker:
    """The executor's handle of one worker process, which runs one call at a time."""

    def __init__(self, slot: int, source: "WorkerSource", max_bytes: int) -> None:
        self.slot = slot
        self.source = source
        self.frames = Frames(self._receive, self._lose, max_bytes)
        self._answer: asyncio.Future[bytes] | None = None
        self._lost: str | None = None

    @property
    def fit(self) -> bool:
        """Whether the worker can take a call."""
        return self._lost is None and self.frames.waits

    async def answer(self) -> bytes:
        """Wait for the next frame.

        Raises:
            LinkLostError: The worker is lost, so there is no next frame.
        """
        if self._lost is not None:
            raise LinkLostError(self._lost)
        self._answer = asyncio.get_running_loop().create_future()
        return await self._answer

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request as JSON. Returns the flags, and the output or error as JSON.

        Raises:
            LinkLostError: The worker is lost, or its answer does not belong to this request.
        """
        token = os.urandom(TOKEN_BYTES)
        self.frames.send(token + request)
        frame = await self.answer()
        if len(frame) <= TOKEN_BYTES or frame[:TOKEN_BYTES] != token:
            raise LinkLostError("it sent data that does not answer this call")
        return frame[TOKEN_BYTES], frame[TOKEN_BYTES + 1 :]

    def _receive(self, frame: bytes) -> None:
        if self._answer is None or self._answer.done():
            self._lose("it wrote without having been asked")
        else:
            self._answer.set_result(frame)

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(LinkLostError(self._lost))

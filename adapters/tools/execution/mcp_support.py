"""Helpers for MCP servers: the end of the server's stderr, and content as text."""

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcp import types

KEPT_BYTES = 2_000
"""Number of bytes kept from the end of stderr."""


class StderrTail:
    """A pipe for a process's stderr. All output is read, so that the process never blocks; only the end is kept."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self.stream = os.fdopen(writing, "w")
        """Write end for the process. Close it once the process has inherited it, so that the pipe ends with the process."""
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(reading,), daemon=True, name="stderr of an MCP server")
        self._thread.start()

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, "rb", buffering=0) as stream:
            while chunk := stream.read(65536):
                self._kept = (self._kept + chunk)[-KEPT_BYTES:]

    def last_lines(self) -> str:
        """The last three lines. Waits up to a second for the process, and its children, to close the pipe."""
        self._thread.join(1.0)
        return " / ".join(line.strip() for line in self._kept.decode(errors="replace").strip().splitlines()[-3:])


def text_of(content: "Sequence[types.ContentBlock]") -> str:
    """Content blocks as text. An image, an audio clip or a resource without text becomes one line that describes it."""
    return "\n".join(_described(block) for block in content)


def _described(block: "types.ContentBlock") -> str:
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return f"[{block.type} {block.mime_type}, {len(block.data) * 3 // 4 - block.data.count('=')} bytes]"
        case "resource_link":
            return f"[resource {block.uri}]"
        case "resource":
            text = getattr(block.resource, "text", None)
            return f"[resource {block.resource.uri}]" if text is None else text

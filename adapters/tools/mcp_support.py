"""Beside the session with an MCP server: the end of its stderr, what it returned as text, its schemas as `Tool` reads them."""

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcp import types

KEPT_BYTES = 2_000
"""Of stderr."""

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
"""Keywords that allow and forbid nothing."""


class StderrTail:
    """A pipe for a process to write to. All of it is read, so that nothing blocks; its end is kept."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self.stream = os.fdopen(writing, "w")
        """For the process. To be closed here as soon as the process has it, so that the pipe ends when the process does."""
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(reading,), daemon=True, name="stderr of an MCP server")
        self._thread.start()

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, "rb", buffering=0) as stream:
            while chunk := stream.read(65536):
                self._kept = (self._kept + chunk)[-KEPT_BYTES:]

    def last_lines(self) -> str:
        """The last three, once the process has ended; as much as there is after a second, if its children hold the pipe."""
        self._thread.join(1.0)
        return " / ".join(line.strip() for line in self._kept.decode(errors="replace").strip().splitlines()[-3:])


def text_of(content: "Sequence[types.ContentBlock]") -> str:
    """Blocks of content, one after the other; of a picture, a sound, or a resource without text, a line that names it."""
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


def plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema of arguments, said so that `Tool.choices` finds what it enumerates.

    What a parameter's `$ref` points to in `$defs` or `definitions` stands in its place, and `{"type": "null"}` among
    alternatives is the constant null. What refers to itself stays as it is.
    """
    definitions = {
        f"#/{key}/{name}": definition
        for key in ("$defs", "definitions")
        for name, definition in _mapping(schema.get(key)).items()
    }

    def said(part: Any, inside: frozenset[str] = frozenset()) -> Any:
        target = _mapping(part).get("$ref")
        if target in definitions and target not in inside and set(part) - {"$ref"} <= ANNOTATIONS:
            own = {key: value for key, value in part.items() if key != "$ref"}
            return said({**_mapping(definitions[target]), **own}, inside | {target})
        if part == {"type": "null"}:
            return {"const": None}
        if not isinstance(part, Mapping):
            return part
        lists = {key: part[key] for key in ("anyOf", "oneOf") if isinstance(part.get(key), list)}
        return {**part, **{key: [said(each, inside) for each in parts] for key, parts in lists.items()}}

    properties = {name: said(part) for name, part in _mapping(schema.get("properties")).items()}
    return {**schema, "properties": properties} if properties else dict(schema)


def _mapping(value: Any) -> Mapping[str, Any]:
    """What is wrong with another value is for `Tool` to say."""
    return value if isinstance(value, Mapping) else {}

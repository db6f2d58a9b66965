"""Helpers for MCP servers: the end of the server's stderr, content as text, and schemas in the form that `Tool` reads."""

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcp import types

KEPT_BYTES = 2_000
"""Number of bytes kept from the end of stderr."""

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
"""Schema keywords that do not affect validation."""


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


def plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite an argument schema to an equivalent schema in which `Tool.choices` finds the enumerated values.

    A parameter's `$ref` into `$defs` or `definitions` is replaced by its target, unless the target is recursive.
    `{"type": "null"}` in `anyOf` or `oneOf` becomes the constant null.
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
    """The value if it is a mapping, otherwise an empty mapping; `Tool` reports invalid values."""
    return value if isinstance(value, Mapping) else {}

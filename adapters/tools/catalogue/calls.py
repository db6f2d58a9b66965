"""Tool calls and their results."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from adapters.tools.errors import ToolError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool and its arguments. This is the action of a tool-selection policy."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "revalidate_instances": "always"}

    tool: str
    """The tool's name in the catalogue."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Argument values by parameter name. JSON must be able to represent each value."""

    def __str__(self) -> str:
        """`tool(name=value, ...)`."""
        return f"{self.tool}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"

    def __hash__(self) -> int:
        """Hash of the tool and its arguments, without arguments that are lists or objects."""
        plain = ((name, value) for name, value in self.arguments.items() if isinstance(value, str | float | int | None))
        return hash((self.tool, frozenset(plain)))

    def to_state(self) -> dict[str, Any]:
        """Fields by name, for checkpoints."""
        return {"tool": self.tool, "arguments": dict(self.arguments)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "ToolCall":
        """The inverse of `to_state`."""
        return cls(**state)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The outcome of one tool call: an output or an error."""

    output: Any = None
    """The tool's return value. None if the call failed."""
    error: ToolError | None = None
    """Why the call failed. None if the tool was executed."""
    seconds: float = 0.0
    """Duration of the call in seconds, without the time it waited in the queue."""

    @property
    def ok(self) -> bool:
        """Whether the tool was executed and returned an output."""
        return self.error is None


def plain_name(name: object) -> str | None:
    """A tool's name as a plain `str`, with the methods of a `str` subclass bypassed. None if the name is not a string."""
    return str.__str__(name) if issubclass(type(name), str) else None


def same_json(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON, at any depth: 1 equals 1.0, true differs from 1, a tuple equals a list.

    A value that JSON cannot represent is not equal to any value, not even to itself.

    Example:
        >>> same_json({"a": (1, 2.0)}, {"a": [1.0, 2]}), same_json([True], [1]), same_json(float("nan"), float("nan"))
        (True, False, False)
    """
    try:
        return _same(one, other)
    except Exception:  # too deep for JSON, or reading the value raises
        return False


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, str) and isinstance(other, str):
        return one == other
    if one is None or other is None or isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other and abs(one) != math.inf
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(isinstance(key, str) and _same(one[key], other[key]) for key in one)
    return False

"""Tool calls and their results."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adapters.tools.errors import ToolError
from grpo.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool and its arguments. This is the action of a tool-selection policy."""

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

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, as JSON values."""
        return {"tool": self.tool, "arguments": dict(self.arguments)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ToolCall":
        """The inverse of `to_dict`.

        Raises:
            ConfigError: A field is missing, unknown or of the wrong type.
        """
        _check_fields("ToolCall.from_dict", fields, tool=str, arguments=Mapping)
        return cls(**fields)

    def to_state(self) -> dict[str, Any]:
        """Fields by name, for checkpoints."""
        return self.to_dict()

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

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, as JSON values. The error becomes its type's name and its message."""
        error = None if self.error is None else {"type": type(self.error).__name__, "message": str(self.error)}
        return {"output": self.output, "error": error, "seconds": self.seconds}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ToolResult":
        """The inverse of `to_dict`. The error keeps its type and message, but not its cause.

        Raises:
            ConfigError: A field is missing, unknown or of the wrong type, or the error's type is not a `ToolError`.
        """
        _check_fields("ToolResult.from_dict", fields, output=object, error=Mapping | None, seconds=int | float)
        return cls(output=fields["output"], error=_error_from_dict(fields["error"]), seconds=fields["seconds"])


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


def _check_fields(owner: str, fields: Any, **kinds: Any) -> None:
    if not isinstance(fields, Mapping) or set(fields) != set(kinds):
        came = ", ".join(map(str, fields)) if isinstance(fields, Mapping) else type(fields).__name__
        raise ConfigError(f"{owner} needs {', '.join(kinds)}; got {came}. Pass the result of to_dict().")
    for name, kind in kinds.items():
        if not isinstance(fields[name], kind) or (name == "seconds" and isinstance(fields[name], bool)):
            raise ConfigError(f"{owner}: {name} must have the type that to_dict() writes; got {fields[name]!r}.")


def _error_from_dict(fields: Mapping[str, Any] | None) -> ToolError | None:
    if fields is None:
        return None
    _check_fields("The error in ToolResult.from_dict", fields, type=str, message=str)
    known = {kind.__name__: kind for kind in _with_subclasses(ToolError)}
    if fields["type"] not in known:
        raise ConfigError(
            f"ToolResult.from_dict: the error must be one of {', '.join(known)}; got {fields['type']!r}. "
            "Import the module that defines it."
        )
    return known[fields["type"]](fields["message"])


def _with_subclasses(kind: type[ToolError]) -> list[type[ToolError]]:
    return [kind, *(found for derived in kind.__subclasses__() for found in _with_subclasses(derived))]

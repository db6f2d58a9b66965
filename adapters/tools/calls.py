"""What a policy asks for, and what comes back."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo.errors import ConfigError

from .errors import ToolError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool with its arguments: the action of a policy that chooses tools."""

    tool: str
    """Name in the catalogue."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values that JSON can hold, by parameter."""

    def __hash__(self) -> int:
        """Equal for equal calls; lists and objects among the arguments are passed over."""
        plain = ((name, value) for name, value in self.arguments.items() if isinstance(value, str | float | int | None))
        return hash((self.tool, frozenset(plain)))

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, as JSON holds them."""
        return {"tool": self.tool, "arguments": dict(self.arguments)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ToolCall":
        """The inverse of `to_dict`.

        Raises:
            ConfigError: a field that is missing, unknown, or of another type.
        """
        _check_fields("ToolCall.from_dict", fields, {"tool": str, "arguments": Mapping})
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """How a call ended."""

    output: Any = None
    """What the tool returned; None where there is an error."""
    error: ToolError | None = None
    """Why there is no output; None: the tool was executed."""
    seconds: float = 0.0
    """From the moment the call began, its turn in the queue not counted, until its end."""

    @property
    def ok(self) -> bool:
        """The tool was executed, and its output came back."""
        return self.error is None

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, as JSON holds them; of the error, the name of its type and its message."""
        error = None if self.error is None else {"type": type(self.error).__name__, "message": str(self.error)}
        return {"output": self.output, "error": error, "seconds": self.seconds}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ToolResult":
        """The inverse of `to_dict`. Errors are equal in type and message; what caused them is not kept.

        Raises:
            ConfigError: a field that is missing, unknown, or of another type, or an error that is no `ToolError`.
        """
        kinds = {"output": object, "error": Mapping | None, "seconds": int | float}
        _check_fields("ToolResult.from_dict", fields, kinds)
        return cls(output=fields["output"], error=_error_from_dict(fields["error"]), seconds=fields["seconds"])


def plain_name(name: object) -> str | None:
    """A tool's name, without what a class of its own makes of it; None: a policy has written something else."""
    return str.__str__(name) if issubclass(type(name), str) else None


def same_json(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0, true is not 1, a tuple is a list, at any depth. What JSON cannot hold is equal to nothing.

    Example:
        >>> same_json({"a": (1, 2.0)}, {"a": [1.0, 2]}), same_json([True], [1]), same_json(float("nan"), float("nan"))
        (True, False, False)
    """
    try:
        return _same(one, other)
    except Exception:  # too deep for JSON, or a mapping or sequence that raises while it is read: JSON cannot hold it
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


def _check_fields(owner: str, fields: Any, kinds: Mapping[str, Any]) -> None:
    if not isinstance(fields, Mapping) or set(fields) != set(kinds):
        came = ", ".join(map(str, fields)) if isinstance(fields, Mapping) else type(fields).__name__
        raise ConfigError(f"{owner} needs {', '.join(kinds)}; got {came}. Pass what to_dict() returned.")
    for name, kind in kinds.items():
        if not isinstance(fields[name], kind) or (name == "seconds" and isinstance(fields[name], bool)):
            raise ConfigError(f"{owner}: {name} has another type than to_dict() gives it; got {fields[name]!r}.")


def _error_from_dict(fields: Mapping[str, Any] | None) -> ToolError | None:
    if fields is None:
        return None
    known = {kind.__name__: kind for kind in _kinds(ToolError)}
    _check_fields("The error in ToolResult.from_dict", fields, {"type": str, "message": str})
    if fields["type"] not in known:
        raise ConfigError(
            f"ToolResult.from_dict: the error must be one of {', '.join(known)}; got {fields['type']!r}. "
            "Import the module that defines it."
        )
    return known[fields["type"]](fields["message"])


def _kinds(kind: type[ToolError]) -> list[type[ToolError]]:
    """The type, and all that are derived from it."""
    return [kind, *(found for derived in kind.__subclasses__() for found in _kinds(derived))]

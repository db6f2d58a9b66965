"""What a policy asks for, and what comes back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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

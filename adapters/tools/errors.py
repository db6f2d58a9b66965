"""Errors of tool calls. They are returned in `ToolResult.error`, not raised, so they do not end a training run."""

from grpo.errors import GRPOError


class ToolError(GRPOError):
    """Base class of all tool errors."""


class UnknownToolError(ToolError, LookupError):
    """The catalogue has no tool of that name."""


class ToolNotAllowedError(ToolError, PermissionError):
    """The tool is in the catalogue, but not in the executor's `allow` list."""


class InvalidArgumentsError(ToolError, ValueError):
    """The arguments do not match the tool's schema."""


class PathOutsideRootError(ToolError, PermissionError):
    """A path leads outside the tools' folder, directly or through a link."""


class ToolTimeoutError(ToolError, TimeoutError):
    """The call exceeded its time limit. The worker and every process it started were killed, and the worker was replaced."""


class OutputTooLargeError(ToolError, ValueError):
    """The tool's output exceeds the size limit."""


class InvalidOutputError(ToolError, TypeError):
    """The tool returned a value that JSON cannot represent."""


class ToolRaisedError(ToolError, RuntimeError):
    """The tool raised an exception. The message names the exception."""


class WorkerDiedError(ToolError, RuntimeError):
    """The worker or MCP server ended during the call. A worker is replaced, an MCP server is not."""

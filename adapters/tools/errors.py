"""Why a call did not give a result. Each is what `ToolResult.error` holds; none of them ends a training run."""

from grpo.errors import GRPOError


class ToolError(GRPOError):
    """Base of them all."""


class UnknownToolError(ToolError, LookupError):
    """The catalogue has no tool of that name."""


class ToolNotAllowedError(ToolError, PermissionError):
    """The catalogue has the tool, but the executor's allow-list does not."""


class InvalidArgumentsError(ToolError, ValueError):
    """The arguments are not what the tool's schema asks for."""


class PathOutsideRootError(ToolError, PermissionError):
    """A path leads out of the folder that tools may see, directly or by a link."""


class ToolTimeoutError(ToolError, TimeoutError):
    """No answer in time; the worker was killed with all that it had started, and replaced."""


class OutputTooLargeError(ToolError, ValueError):
    """The tool returned more than is let through."""


class InvalidOutputError(ToolError, TypeError):
    """The tool returned something that JSON cannot hold."""


class ToolRaisedError(ToolError, RuntimeError):
    """The tool raised; the message names what."""


class WorkerDiedError(ToolError, RuntimeError):
    """What worked on the call ended: killed, out of memory, or by itself. A worker was replaced; an MCP server was not."""

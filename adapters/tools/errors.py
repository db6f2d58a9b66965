"""Errors of tool calls. They are returned in `ToolResult.error`, not raised, so they do not end a training run."""

from collections.abc import Mapping

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


class FolderFullError(ToolError, RuntimeError):
    """The call has filled its folder beyond the limit. The call was ended, and its files stay."""


class InvalidOutputError(ToolError, TypeError):
    """The tool returned a value that JSON cannot represent."""


class ToolRaisedError(ToolError, RuntimeError):
    """The tool raised an exception. The message names the exception."""


class WorkerDiedError(ToolError, RuntimeError):
    """The call ended its worker process: it crashed, exited, or sent invalid data. The worker was replaced."""


class LostCallError(ToolError, RuntimeError):
    """Base class of errors of the infrastructure, which say nothing about the call. `ToolRewards` leaves out these calls."""


class WorkerLostError(LostCallError):
    """The worker process was killed from outside during the call, or could not be started. Workers are replaced."""


class ServerLostError(LostCallError):
    """The connection to the tool's server is lost. Tools may raise this error themselves. An MCP server is not restarted."""


class LoopBlockedError(LostCallError):
    """Another remote tool blocked the event loop of the remote tools, so that this call could not go on."""


class RootFullError(LostCallError):
    """The tools' folder is full, and this call did not fill it. It was ended, or has not begun."""


LOST_CALLS: Mapping[str, type[LostCallError]] = {
    "worker_lost": WorkerLostError, "server_lost": ServerLostError, "loop_blocked": LoopBlockedError,
    "root_full": RootFullError,
}  # fmt: skip
"""Errors of lost calls, by the last part of their metric `tools/errors/KIND`."""

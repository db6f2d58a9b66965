"""Log of tool calls, one JSON line per call."""

import json
import os
import re
import stat
import warnings
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adapters.tools.catalogue.arguments import bounded_text, json_arguments
from adapters.tools.catalogue.calls import ToolCall
from grpo.errors import ConfigError, GRPOWarning

SECRET_NAMES = (
    "password",
    "passwd",
    "passphrase",
    "token",
    "api_key",
    "secret",
    "authorization",
    "credential",
    "cookie",
)
"""Names of arguments whose values are not logged. Every name that contains one of these names is meant."""

_REDACTED = "[redacted]"
_MAX_ARGUMENTS = 2_000
_MAX_MESSAGE = 1_000

Redact = Collection[str] | Callable[[str, dict[str, Any]], dict[str, Any]]


class CallLog:
    """Appends one JSON line per call to a file that only its owner can read (mode 0600).

    Fields: time (ISO 8601, UTC), tool, arguments (the first 2,000 characters), ok, error (name of its type), message, seconds,
    output_bytes. Of a tool name or arguments that JSON cannot represent, the type is written. A line holds printable
    ASCII only, so it cannot control a terminal. Where arguments are redacted, so is the message, because it may quote them.

    Args:
        path: Log file. The file is created if it does not exist; its folder must exist. A file that others may read is changed
            to mode 0600.
        redact: Names of the arguments, at any depth, whose values are replaced by "[redacted]". Upper and lower case, "_" and
            "-" do not matter, and a longer name that contains one of these names is meant too. Or a function of a tool's name
            and its arguments that returns the arguments to log.

    Raises:
        ConfigError: The file cannot be opened for writing, or cannot be made private.
    """

    def __init__(self, path: Path | str, redact: Redact = SECRET_NAMES) -> None:
        self._path = Path(path)
        self._redact = redact
        self._names = [] if callable(redact) else [_plain(name) for name in redact]
        self._failed = False
        try:
            self._file: int | None = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if stat.S_ISREG(os.fstat(self._file).st_mode):
                os.fchmod(self._file, 0o600)
        except OSError as error:
            raise ConfigError(
                f"ToolExecutor.log_path must be a file that can be written and made private; {error}."
            ) from error

    def write(self, call: ToolCall, error: BaseException | None, seconds: float, output_bytes: int = 0) -> None:
        """Write one line immediately. `error` is None if the call returned an output, of `output_bytes` as JSON."""
        if self._file is None:
            return
        name: object = call.tool
        name = name[:100] if type(name) is str else bounded_text(name, 100)
        arguments, is_redacted = self._shown(name, call.arguments)
        message = None if error is None else _REDACTED if is_redacted else str(error)[:_MAX_MESSAGE]
        line = json.dumps(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "tool": name,
                "arguments": arguments,
                "ok": error is None,
                "error": None if error is None else type(error).__name__,
                "message": message,
                "seconds": round(seconds, 6),
                "output_bytes": output_bytes,
            }
        ).replace("\x7f", "\\u007f")  # the one control character that JSON does not escape
        try:
            os.write(self._file, line.encode() + b"\n")  # one write, so that lines of several processes do not mix
        except OSError as problem:
            if not self._failed:  # warn once and go on: the results matter more than the log
                self._failed = True
                warnings.warn(
                    f"ToolExecutor's log {self._path} cannot be written: {problem}.", GRPOWarning, stacklevel=2
                )

    def close(self) -> None:
        """Close the file. Later calls of `write` do nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _shown(self, tool: str, arguments: Any) -> tuple[Any, bool]:
        """The arguments as they are logged, and whether something was left out."""
        given = json_arguments(arguments)
        if given is None:
            return bounded_text(arguments, _MAX_ARGUMENTS), False  # its type
        if callable(self._redact):
            try:
                shown = json_arguments(self._redact(tool, json_arguments(given) or {}))
            except Exception as error:
                shown = {_REDACTED: f"redact raised {type(error).__name__}"}
        else:
            shown = self._without_secrets(given)
        text = json.dumps(shown)
        return (shown if len(text) <= _MAX_ARGUMENTS else text[:_MAX_ARGUMENTS]), shown != given

    def _without_secrets(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._without_secrets(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {
            name: _REDACTED if any(secret in _plain(name) for secret in self._names) else self._without_secrets(item)
            for name, item in value.items()
        }


def _plain(name: str) -> str:
    """A name without case, "_" and "-"."""
    return re.sub("[_-]", "", name).lower()

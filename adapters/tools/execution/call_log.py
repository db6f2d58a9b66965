"""Log of tool calls, one JSON line per call."""

import json
import os
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adapters.tools.catalogue.arguments import bounded_text
from adapters.tools.catalogue.calls import ToolCall
from grpo.errors import ConfigError, GRPOWarning

_MAX_ARGUMENTS = 2_000
_MAX_MESSAGE = 1_000


class CallLog:
    """Appends one JSON line per call to a file, in ASCII.

    Fields: time (ISO 8601, UTC), tool, arguments (the first 2,000 characters), ok, error (name of its type), message, seconds,
    output_bytes. A tool name or arguments that JSON cannot represent are written as `repr` shows them.

    Args:
        path: Log file. The file is created if it does not exist; its folder must exist.

    Raises:
        ConfigError: The file cannot be opened for writing.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._failed = False
        try:
            self._file: int | None = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"ToolExecutor.log_path must be a file that can be written; {error}.") from error

    def write(
        self, call: ToolCall, arguments: str | None, error: BaseException | None, seconds: float, output_bytes: int = 0
    ) -> None:
        """Write one line immediately.

        Args:
            call: The call.
            arguments: The call's arguments as JSON. None if they were not encoded, or cannot be.
            error: The call's error. None if the call returned an output.
            seconds: Duration of the call.
            output_bytes: Size of the output as JSON.
        """
        name: object = call.tool
        line = json.dumps(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "tool": name[:100] if type(name) is str else bounded_text(name, 100),
                "arguments": _shortened(call.arguments, arguments),
                "ok": error is None,
                "error": None if error is None else type(error).__name__,
                "message": None if error is None else str(error)[:_MAX_MESSAGE],
                "seconds": round(seconds, 6),
                "output_bytes": output_bytes,
            }
        )
        if self._file is None:
            return
        try:
            os.write(self._file, line.encode() + b"\n")  # one write, so that lines of several processes do not mix
        except OSError as error:
            if not self._failed:  # warn once and go on: the results matter more than the log
                self._failed = True
                warnings.warn(f"ToolExecutor's log {self._path} cannot be written: {error}.", GRPOWarning, stacklevel=2)

    def close(self) -> None:
        """Close the file. Later calls of `write` do nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _shortened(arguments: Any, text: str | None) -> Any:
    if text is None:
        return bounded_text(arguments, _MAX_ARGUMENTS)
    return json.loads(text) if len(text) <= _MAX_ARGUMENTS else text[:_MAX_ARGUMENTS]

"""One line of JSON for each call."""

import json
import os
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo.errors import ConfigError, GRPOWarning

from .arguments import bounded_text
from .calls import ToolCall

_MAX_ARGUMENTS = 2_000
_MAX_MESSAGE = 1_000


class CallLog:
    """Appends lines of ASCII to a file: time (ISO 8601, UTC), tool, arguments (of many, the first 2,000 characters), ok,
    error (its type), message, seconds, output_bytes.

    What cannot be an argument, or the name of a tool, is written as Python writes it.

    Args:
        path: of the file; it is made if it does not exist, its folder is not.

    Raises:
        ConfigError: it cannot be opened for writing.
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
        """One line, at once.

        Args:
            arguments: as JSON; None: JSON could not hold them, or nobody has asked it.
            error: None: there is an output.
            seconds: that the call took.
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
            os.write(self._file, line.encode() + b"\n")  # in one piece, even where several processes append
        except OSError as error:
            if not self._failed:  # said once: results matter more than their log
                self._failed = True
                warnings.warn(f"ToolExecutor's log {self._path} cannot be written: {error}.", GRPOWarning, stacklevel=2)

    def close(self) -> None:
        """No more lines."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _shortened(arguments: Any, text: str | None) -> Any:
    if text is None:
        return bounded_text(arguments, _MAX_ARGUMENTS)
    return json.loads(text) if len(text) <= _MAX_ARGUMENTS else text[:_MAX_ARGUMENTS]

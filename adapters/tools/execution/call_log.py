"""Log of tool calls, one JSON line per call."""

import base64
import json
import os
import re
import stat
import warnings
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from adapters.tools.catalogue.arguments import bounded_text, json_arguments
from adapters.tools.catalogue.calls import ToolCall
from grpo.errors import ConfigError, GRPOWarning

SECRET_NAMES = (
    "password", "passwd", "passphrase", "token", "api_key", "secret", "authorization", "credential", "cookie",
    "private_key", "access_key", "account_key", "pwd", "auth", "bearer", "jwt", "dsn", "connection_string", "conn_str",
)  # fmt: skip
"""Names of arguments whose values are not logged. Every name that contains one of these names is meant, but authors are no
"auth".

In texts, the values of pairs with such names (`name=value`, `name: value`, JSON) are not logged either, nor what
`_without_secrets_in` finds without the names.

Every expression takes time linear in the text's length, because a policy may write long texts."""

_REDACTED = "[redacted]"
_NO_AUTHOR = "(?!or(?!i[sz]))"
_SECRETS = [
    re.compile(r"(\w://)[^\s/?#]+(?=@)"),  # the user of a URL
    re.compile(r"(?i)(\b(?:authorization|cookie)\s*+:\s*+)[^\r\n]+"),  # the line of a header
    re.compile(r"(?i)([?&](?:key|sig|code|pass|[\w.-]*signature)=)[^;&#\s]+"),  # names that are secret in queries only
    re.compile(r"(?i)(\b(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|office\.com/webhookb2)/)\S+"),
    re.compile(r"(?i)(\bbearer\s+)\S+"),
]
_BASIC = re.compile(r"(?i)(\bbasic\s+)([\w+/-]+=*)")
_PAIR = r"""(?isx)
    (  (?<![\w.-]) (?= [\w.-]*? (?:{names}) )  # a name that contains one of the names
       (?! [\w-]+ \. [\w.-]+ :\d )                                 # and is no host with a port
       [\w.-]++ (?:\\{{0,7}}+["'])? \s*+ (?: :?=[=>]? | :(?!//|:) ) \s*+
    )
    (?:  (?P<quote> \\{{0,7}}+["'] ) (?: (?P=quote){{2}} | (?!(?P=quote)) (?: \\. | [^\\] ) )*+ (?P=quote)?
       | [\[{{] [^\]}}]*+ [\]}}]?
       | [^;&#\s]+
    )"""
"""A name and its value: in quotes, where the quote may be doubled or escaped; in brackets; or one word."""

_MAX_ARGUMENTS = 2_000
_MAX_MESSAGE = 1_000

Redact = Collection[str] | Callable[[str, dict[str, Any]], dict[str, Any]]


class CallLog:
    """Appends one JSON line per call to a file that only its owner can read (mode 0600).

    Fields: time (ISO 8601, UTC), tool, arguments (the first 2,000 characters), ok, error (name of its type), message, seconds,
    output_bytes. Of a tool name or arguments that JSON cannot represent, the type is written. A line holds printable
    ASCII only, so it cannot control a terminal. Where arguments are redacted, so is the message, because it may quote them.
    """

    def __init__(self, path: Path | str, redact: Redact = SECRET_NAMES) -> None:
        self._redact = redact
        self._names = [] if callable(redact) else [_plain(name) for name in redact]
        # letters of a name may have "_" and "-" between them
        names = "|".join("[_-]?".join(map(re.escape, name)) + _NO_AUTHOR * (name == "auth") for name in self._names)
        self._pair = re.compile(_PAIR.format(names=names)) if names else None
        self._failed = self._is_partial = False
        try:
            self._file = FileIO(path, "a", opener=_opened)
        except OSError as error:
            raise ConfigError(
                f"ToolExecutor: log_path must be a file that can be written and made private; {error}."
            ) from error

    def write(self, call: ToolCall, error: BaseException | None, seconds: float, output_bytes: int = 0) -> None:
        """Write one line immediately. `error` is None if the call returned an output, of `output_bytes` as JSON."""
        if self._file.closed:
            return
        name: object = call.tool
        name = name[:100] if type(name) is str else bounded_text(name, 100)
        arguments, is_redacted = self._shown(name, call.arguments)
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "tool": name,
            "arguments": arguments,
            "ok": error is None,
            "error": None if error is None else type(error).__name__,
            "message": None if error is None else _REDACTED if is_redacted else str(error)[:_MAX_MESSAGE],
            "seconds": round(seconds, 6),
            "output_bytes": output_bytes,
        }
        line = json.dumps(entry).replace("\x7f", "\\u007f")  # the one control character that JSON does not escape
        try:
            content = (b"\n" if self._is_partial else b"") + line.encode() + b"\n"
            # One write, so that lines of several processes do not mix. A full disk may take a part of it.
            self._is_partial = self._file.write(content) < len(content)
        except (OSError, ValueError) as problem:  # ValueError: the file was closed meanwhile
            if not self._failed:  # warn once and go on: the results matter more than the log
                self._failed = True
                warnings.warn(f"ToolExecutor's log {self._file.name} cannot be written: {problem}.", GRPOWarning, 2)

    def close(self) -> None:
        """Close the file. Later calls of `write` do nothing."""
        self._file.close()

    def _shown(self, tool: str, arguments: Any) -> tuple[Any, bool]:
        """The arguments as they are logged, and whether something was left out."""
        given = json_arguments(arguments)
        if given is None:
            return bounded_text(arguments, _MAX_ARGUMENTS), False  # its type
        if not callable(self._redact):
            shown = self._without_secrets(given)
        else:
            try:
                shown = json_arguments(self._redact(tool, json_arguments(given) or {}))
            except Exception as error:
                shown = {_REDACTED: f"redact raised {type(error).__name__}"}
        text = json.dumps(shown)
        return (shown if len(text) <= _MAX_ARGUMENTS else text[:_MAX_ARGUMENTS]), shown != given

    def _without_secrets(self, value: Any) -> Any:
        if isinstance(value, dict):
            hidden = {name for name in value if any(_contains(_plain(name), secret) for secret in self._names)}
            return {name: _REDACTED if name in hidden else self._without_secrets(v) for name, v in value.items()}
        if isinstance(value, str) and self._pair is not None:
            return self._pair.sub(rf"\1\g<quote>{_REDACTED}\g<quote>", _without_secrets_in(value))
        return [self._without_secrets(item) for item in value] if isinstance(value, list) else value


def _without_secrets_in(text: str) -> str:
    """A text without the user of URLs, secrets in their queries, addresses of webhooks, and HTTP's logins and cookies."""
    for secret in _SECRETS:
        text = secret.sub(rf"\1{_REDACTED}", text)
    return _BASIC.sub(lambda found: found[1] + _REDACTED if _is_login(found[2]) else found[0], text)


def _is_login(word: str) -> bool:
    """Whether a word is "user:password" in base64. In "basic training" it is not."""
    try:
        return ":" in base64.b64decode(word + "==").decode()
    except ValueError:
        return False


def _opened(path: str, flags: int) -> int:
    """Open a file that only its owner can read."""
    file = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(file).st_mode):
        os.fchmod(file, 0o600)
    return file


def _plain(name: str) -> str:
    """A name without case, "_" and "-"."""
    return re.sub("[_-]", "", name).lower()


def _contains(name: str, secret: str) -> bool:
    return re.search("auth" + _NO_AUTHOR, name) is not None if secret == "auth" else secret in name

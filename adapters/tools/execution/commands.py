"""Programs as tools. A program is started from a list of arguments, never through a shell."""

import re
import string
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import PurePath
from typing import Any

from adapters.tools.errors import InvalidArgumentsError, OutputTooLargeError
from grpo.arguments import require_integers
from grpo.errors import ConfigError

_STARTS_PROGRAMS = re.compile(
    r"(?:sh|r?bash|dash|ash|r?zsh|r?ksh|[mlo]ksh|pdksh|yash|posh|t?csh|fish|elvish|xonsh|pwsh|powershell|cmd|busybox|toybox)"
    r"[\d.]*|env|xargs|nohup|nice|timeout|setsid|stdbuf|sudo|doas|time|ionice"
)
_EXECUTES = frozenset({"-exec", "-execdir", "-ok", "-okdir"})
"""Options with which a program starts another."""
_INTERPRETERS = re.compile(r"(?:python|pypy|perl|ruby|node|nodejs|lua|luajit|php|rscript|tclsh|[gmn]?awk|sed)[\d.]*")
"""Programs that run code, which is their first argument or in a file that this names."""
_STDERR_BYTES = 2_000


class CommandFailedError(RuntimeError):
    """A program exited with a nonzero status."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program as the function of a tool. A call returns the program's standard output.

    Each element of `argv` becomes exactly one argument of the program. `{parameter}`, alone or within an element, is replaced
    by the value of that parameter: text as it is, numbers in decimal, booleans as `true` and `false`. Write `{{` and `}}` for
    literal braces. If a call omits a parameter, every element with that parameter is omitted.

    A value at the start of an element must not begin with `-`, because the program could read it as an option. For negative
    numbers, use an element such as `--by={number}`. The check is off after an element `--`, which ends the options.

    `argv` must not start a shell, or a program that starts another one (`env`, `xargs`, `timeout`, `sudo`, `find -exec`, ...).
    The first argument of an interpreter (`python`, `perl`, `node`, `awk`, `sed`, ...) must be its script, without a parameter
    and without options before it. These rules prevent mistakes, but not a malicious author of `argv`. Other programs that run
    their arguments (`make`, `ssh`, `docker`, `git -c`) are not recognised: do not put a parameter there.

    Args:
        argv: The program, found in PATH, and its arguments.
        max_output_bytes: Limit of the standard output. A program that writes more is killed.

    Raises:
        ConfigError: `argv` is empty, names a shell, or lets the call decide the program or the code.

    Example:
        >>> from adapters.tools import Command, Tool
        >>> count = Command(("wc", "-l", "--", "{path}"))
        >>> tool = Tool(
        ...     name="count_lines", description="Count the lines of a file.", function=count,
        ...     parameters={"type": "object", "properties": {"path": {"type": "string", "format": "path"}}},
        ... )
    """

    argv: Sequence[str]
    max_output_bytes: int = 100_000

    def __post_init__(self) -> None:
        require_integers("Command", 1, max_output_bytes=self.max_output_bytes)
        argv: Any = self.argv
        is_list = isinstance(argv, list | tuple) and all(isinstance(element, str) for element in argv)
        if not is_list or not argv or not argv[0] or "\0" in "".join(argv):
            raise ConfigError(
                f"Command.argv must be a list of strings, without null characters, that begins with the program; got {argv!r}."
            )
        has_parameter = [any(name is not None for _, name in _parts(element)) for element in argv]
        if has_parameter[0]:
            raise ConfigError(f"Command.argv: the program must not contain a parameter of the call; got {argv!r}.")
        program = PurePath(argv[0]).name.lower().removesuffix(".exe")
        if _STARTS_PROGRAMS.fullmatch(program) or not _EXECUTES.isdisjoint(argv):
            raise ConfigError(
                f"Command.argv must not name a shell or a program that starts another one; got {argv!r}. Name the program."
            )
        if _INTERPRETERS.fullmatch(program) and any(has_parameter):
            options = [each for each in argv[2:] if each.startswith("-") and each != "--"]
            reads_more_code = bool(options) and re.search("awk|sed", program)  # also by an option after the script
            if argv[1].startswith("-") or has_parameter[1] or reads_more_code:
                raise ConfigError(
                    f"Command.argv: parameters must not decide which code is run; got {argv!r}. Put them after the name of a "
                    "script, with no options before it, or name an executable script as the program."
                )

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters in `argv`."""
        return frozenset(name for element in self.argv for _, name in _parts(element) if name is not None)

    def __call__(self, /, **arguments: Any) -> str:
        """Run the program.

        Raises:
            InvalidArgumentsError: A value cannot be an argument, or could be read as an option.
            OutputTooLargeError: The program wrote more than `max_output_bytes`.
            CommandFailedError: The exit status is not 0. The message holds the end of the standard error.
        """
        argv = self.resolve(arguments)
        said = bytearray()
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
            assert process.stdout is not None
            reader = threading.Thread(target=_keep_end, args=(process.stderr, said))
            reader.start()
            output = process.stdout.read(self.max_output_bytes + 1)
            if len(output) > self.max_output_bytes:
                process.kill()
            reader.join()
        if len(output) > self.max_output_bytes:
            raise OutputTooLargeError(f"output must take at most {self.max_output_bytes} bytes.")
        if process.returncode != 0:
            program, text = PurePath(argv[0]).name, said.decode(errors="replace").strip()
            raise CommandFailedError(f"{program} ended with status {process.returncode}: {text}")
        return output.decode(errors="replace")

    def resolve(self, arguments: dict[str, Any]) -> list[str]:
        """The program's argument list for one call. Raises InvalidArgumentsError, see `__call__`."""
        texts = {name: _text(name, value) for name, value in arguments.items() if value is not None}
        argv: list[str] = []
        for element in self.argv:
            parts = _parts(element)
            if any(name is not None and name not in texts for _, name in parts):
                continue
            resolved = "".join(literal + ("" if name is None else texts[name]) for literal, name in parts)
            if parts and parts[0][0] == "" and resolved.startswith("-") and "--" not in argv:
                raise InvalidArgumentsError(f"{parts[0][1]} must not begin with '-'; got {resolved[:100]!r}.")
            argv.append(resolved)
        return argv


def _keep_end(stream: Any, kept: bytearray) -> None:
    """Read a stream to its end, so that its writer never blocks."""
    while part := stream.read1():
        kept += part
        del kept[:-_STDERR_BYTES]


def _parts(element: str) -> list[tuple[str, str | None]]:
    """Split an element into pairs of literal text and the parameter that follows it."""
    try:
        parts = list(string.Formatter().parse(element))
    except ValueError as error:
        raise ConfigError(
            f"Command.argv: {element!r} is invalid: {error}. Write '{{{{' and '}}}}' for literal braces."
        ) from error
    for _, name, spec, conversion in parts:
        if name is not None and (not name.isidentifier() or spec or conversion):
            raise ConfigError(f"Command.argv: braces must contain only a parameter's name; {element!r} has {{{name}}}.")
    return [(literal, name) for literal, name, _, _ in parts]


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int | float) and not hasattr(value, "__fspath__"):
        raise InvalidArgumentsError(f"{name} must be text, a number or a boolean; got {type(value).__name__}.")
    text = format(Decimal(float.__repr__(value)), "f") if isinstance(value, float) else str(value)
    if "\0" in text:
        raise InvalidArgumentsError(
            f"{name} must not contain the null character; a program's argument cannot contain it."
        )
    return text

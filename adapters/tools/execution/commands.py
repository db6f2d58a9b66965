"""Programs as tools. A program is started from a list of arguments, never through a shell."""

import os
import re
import selectors
import string
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from adapters.tools.catalogue.inputs import require_whole
from adapters.tools.catalogue.tools import Tool
from adapters.tools.errors import InvalidArgumentsError, OutputTooLargeError
from grpo.errors import ConfigError

_SHELLS = re.compile(
    r"(?:sh|r?bash|dash|ash|r?zsh|r?ksh|[mlo]ksh|pdksh|yash|posh|t?csh|fish|elvish|xonsh|pwsh|powershell|cmd|busybox|toybox)"
    r"[\d.]*"
)
_LAUNCHERS = {
    "env": "uCS", "xargs": "nIPLdEsa", "nohup": "", "nice": "n", "timeout": "sk", "setsid": "", "stdbuf": "ioe",
    "sudo": "ugChpDRT", "doas": "uC", "time": "fo", "ionice": "cnp",
}  # fmt: skip
"""Programs that start another program, and the letters of their options that take a value."""
_EXECUTES = frozenset({"-exec", "-execdir", "-ok", "-okdir"})


_INTERPRETERS = {
    r"(?:python|pypy)[\d.]*": (r"-[A-Za-z]*c", "-W -X"),
    r"perl[\d.]*": (r"-[A-Za-z0-9]*[eE]", "-I"),
    r"ruby[\d.]*": (r"-[A-Za-z0-9]*e", "-I -C -r"),
    r"node(?:js)?": (r"-e|-pe?|--eval|--print", "-r --require --import --loader"),
    r"lua(?:jit)?[\d.]*": (r"-e", "-l"),
    r"php[\d.]*": (r"-[rBRE]|--run", "-d"),
    r"rscript|tclsh[\d.]*": (r"-e", ""),
    r"[gmn]?awk": (r"-f|-e|--file|--source", ""),
    r"sed": (r"-[A-Za-z]*[ef]|--expression|--file", ""),
}  # fmt: skip
"""Programs that run code given in their arguments: their names, their options that take code, and their options that take
something else. After the first file, awk and sed still read options."""
_AWK_DATA = ("-v", "-F", "--assign")
"""Options of awk that take data, in which a parameter is allowed."""
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

    `argv` must not start a shell. A parameter must not be at the place where an interpreter (`python`, `perl`, `node`, `awk`,
    `sed`, ...) reads its code, or before that place. Both rules also apply after launchers (`env`, `xargs`, `timeout`, `sudo`,
    ...) and after `-exec`. They prevent mistakes, but not a malicious author of `argv`. Other programs that run their
    arguments (`make`, `ssh`, `docker`, `git -c`) are not recognised: do not put a parameter there.

    Args:
        argv: The program, found in PATH, and its arguments.
        max_output_bytes: Limit of the standard output. A program that writes more is killed.

    Raises:
        ConfigError: `argv` is empty, names a shell, or lets the call decide the program or the code.

    Example:
        >>> count = Command(("wc", "-l", "--", "{path}"))
        >>> tool = Tool(
        ...     name="count_lines", description="Count the lines of a file.", function=count,
        ...     parameters={"type": "object", "properties": {"path": {"type": "string", "format": "path"}}},
        ... )
    """

    argv: Sequence[str]
    max_output_bytes: int = 100_000

    def __post_init__(self) -> None:
        """Check the fields."""
        require_whole("Command", max_output_bytes=self.max_output_bytes)
        argv: Any = self.argv
        got = f"got {argv!r}."
        if not isinstance(argv, list | tuple) or not argv or not all(isinstance(element, str) for element in argv):
            raise ConfigError(f"Command.argv must be a list of strings that begins with the program; {got}")
        if any("\0" in element for element in argv) or not argv[0]:
            raise ConfigError(f"Command.argv must have a nonempty program and no null character; {got}")
        has_parameter = [_has_parameter(element) for element in argv]
        if has_parameter[0]:
            raise ConfigError(f"Command.argv: the program must not contain a parameter of the call; {got}")
        programs = _programs(argv)
        if any(_SHELLS.fullmatch(_program(part[0])) for part in programs if part):
            raise ConfigError(f"Command.argv must not name a shell; {got} Name the program itself.")
        if not all(part and not _runs_a_parameter(part) for part in programs):
            raise ConfigError(
                f"Command.argv: parameters must not decide which code is run; {got} Put parameters after the name of a "
                "script, not after options such as -c and -e, or name an executable script as the program."
            )

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters in `argv`."""
        return frozenset(name for element in self.argv for _, name in _parts(element) if name is not None)

    def check(self, tool: Tool) -> None:
        """Check that `argv` names exactly the tool's parameters.

        Raises:
            ConfigError: `argv` lacks a parameter of the schema, or names one that the schema lacks.
        """
        if self.names != set(tool.properties):
            raise ConfigError(
                f"Tool {tool.name}: Command.argv must name exactly the parameters of the schema, {sorted(tool.properties)}; "
                f"argv names {sorted(self.names)}. Change argv or the schema."
            )

    def __call__(self, **arguments: Any) -> str:
        """Run the program.

        Raises:
            InvalidArgumentsError: A value cannot be an argument, or could be read as an option.
            OutputTooLargeError: The program wrote more than `max_output_bytes`.
            CommandFailedError: The exit status is not 0. The message holds the end of the standard error.
        """
        argv = self.resolve(arguments)
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, shell=False
        ) as process:
            try:
                stdout, stderr = self._read(process)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise CommandFailedError(
                f"{argv[0]} ended with status {process.returncode}: {stderr.decode(errors='replace').strip()}"
            )
        return stdout.decode(errors="replace")

    def resolve(self, arguments: dict[str, Any]) -> list[str]:
        """Build the program's argument list for one call.

        Raises:
            InvalidArgumentsError: A value cannot be an argument, or could be read as an option.
        """
        texts = {name: _text(name, value) for name, value in arguments.items() if value is not None}
        argv: list[str] = []
        for element in self.argv:
            parts = _parts(element)
            if any(name is not None and name not in texts for _, name in parts):
                continue
            resolved = "".join(literal + ("" if name is None else texts[name]) for literal, name in parts)
            starts_with_value = bool(parts) and parts[0][0] == ""
            if starts_with_value and resolved.startswith("-") and "--" not in argv:
                raise InvalidArgumentsError(f"{parts[0][1]} must not begin with '-'; got {resolved[:100]!r}.")
            argv.append(resolved)
        return argv

    def _read(self, process: "subprocess.Popen[bytes]") -> tuple[bytes, bytes]:
        """Read the standard output and the end of the standard error, and keep no more than these limits in memory."""
        assert process.stdout is not None
        assert process.stderr is not None
        held: dict[Any, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
        with selectors.DefaultSelector() as selector:
            for pipe in held:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    stream: Any = key.fileobj
                    part = os.read(stream.fileno(), 65536)
                    if not part:
                        selector.unregister(stream)
                    held[stream] += part
                    del held[process.stderr][:-_STDERR_BYTES]
                    if len(held[process.stdout]) > self.max_output_bytes:
                        raise OutputTooLargeError(f"output must take at most {self.max_output_bytes} bytes.")
        return bytes(held[process.stdout]), bytes(held[process.stderr])


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


def _program(element: str) -> str:
    return PurePath(element).name.lower().removesuffix(".exe")


def _has_parameter(element: str) -> bool:
    return any(name is not None for _, name in _parts(element))


def _programs(argv: Sequence[str]) -> list[Sequence[str]]:
    """Command lines of a program and of the programs that it launches. [] stands for a program that a parameter decides."""
    inner = [argv[i + 1 :] for i, element in enumerate(argv) if element in _EXECUTES]
    if argv and _program(argv[0]) in _LAUNCHERS:
        inner.append(argv[_launched(argv) :])
    return [argv, *(found for part in inner for found in _programs(part))]


def _launched(argv: Sequence[str]) -> int:
    """Index of the program that a launcher starts, or `len(argv)` if a parameter comes first."""
    takes_value = {f"-{letter}" for letter in _LAUNCHERS[_program(argv[0])]}
    for i, element in enumerate(argv[1:], start=1):
        if _has_parameter(element):
            return len(argv)
        # Skip options, their values, durations and variable assignments.
        if not re.match(r"-|\d|\w+=", element) and argv[i - 1] not in takes_value:
            return i
    return len(argv)


def _runs_a_parameter(argv: Sequence[str]) -> bool:
    """Whether a parameter is at the place where an interpreter reads its code, or before that place."""
    program = _program(argv[0])
    name = next((pattern for pattern in _INTERPRETERS if re.fullmatch(pattern, program)), None)
    if name is None:
        return False
    code, skipped = _INTERPRETERS[name]
    reads_on = "awk" in program or program == "sed"
    is_known = False
    for before, element in pairwise(argv):
        is_code = re.fullmatch(code, before) is not None
        if "awk" in program and before in _AWK_DATA:
            continue
        if _has_parameter(element):
            if not is_known or (reads_on and (is_code or re.match(code, element))):
                return True
        elif before not in skipped.split():
            is_known = is_known or is_code or not element.startswith("-")
    return False


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

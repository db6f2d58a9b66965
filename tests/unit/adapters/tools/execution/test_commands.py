"""Programs as tools: refused commands, how values become arguments, and what a command returns."""

import shutil
import sys
from typing import Any

import pytest

from adapters.tools import Command, CommandFailedError, Tool, ToolCatalogue, ToolExecutor
from adapters.tools.errors import InvalidArgumentsError, OutputTooLargeError
from grpo.errors import ConfigError
from tests.support.tool_executors import PATH, executor_of, on_linux, output_of

X = "{x}"
SHELLS = [
    ("sh", "-c", X), ("sh", X), ("bash", "script", X), ("/bin/rbash", "-c", X), ("ksh93", X), ("busybox", "sh", X),
    ("busybox", "ls", X), ("env", "sh", "-c", X), ("env", "-i", "A=b", "/usr/bin/mksh", X), ("xargs", "sh", "-c", X),
    ("nice", "-n", "5", "yash", X), ("pwsh", "-Command", X), ("find", X, "-exec", "sh", "{{}}"), ("BASH.EXE", X),
    ("/usr/bin/env", "python3", "-c", X), ("env", "python3", X), ("timeout", "5", "python", X), ("env", X),
    ("env", f"LD_PRELOAD={X}", "ls"), ("env", "-S", X), ("xargs", "-n", "1", X), ("find", ".", "-exec", "python3", "-c", X),
    ("sudo", "-u", "someone", X), ("timeout", "5", X), ("timeout", X, "ls"), ("time", "perl", X), ("nice", "env", "awk", X),
    ("ionice", "-c", "3", "python3", X), ("nohup", X), ("setsid", X), ("stdbuf", "-oL", "sh", X), ("doas", X),
    *(("find", ".", option, "rm", X) for option in ("-execdir", "-ok", "-okdir")),
]  # fmt: skip
DEPENDS_ON_THE_CALL = [
    ("python3", "-c", X), ("python3.12", "-Ic", X), ("python", X), ("python3", "-m", X), ("python3", f"-c{X}"),
    ("python3", "-X", "dev", X), ("perl", "-ne", X), ("perl", "-I", "lib", "-e", X), ("perl", f"-M{X}"), ("ruby", "-e", X),
    ("node", "--eval", X), ("node", f"--eval={X}"), ("node", "-r", "lib", X), ("lua", "-e", f"print({X})"), ("php", "-r", X),
    ("awk", X, "file"), ("awk", "-F", ",", X), ("awk", "-v", "a=1", X), ("gawk", "-f", X), ("sed", f"s/a/{X}/"),
    ("sed", "-n", "-e", X), ("awk", "-f", "a.awk", "-f", X), ("sed", "s/a/b/", f"--expression={X}"),
    ("sed", "s/a/b/", "-e", X), ("pypy3", X), ("luajit", X), ("Rscript", X), ("tclsh8.6", X), ("/usr/bin/mawk", X),
]  # fmt: skip
TAKES_PARAMETERS = [
    ("python3", "script.py", X), ("python3", "script.py", "--", X), ("perl", "script.pl", X), ("node", "script.js", X),
    ("awk", "{{print $1}}", X), ("sed", "1,5!d", X), ("sed", "s/a/b/", "--", X), ("grep", "-c", X), ("grep", "timeout", X),
    ("grep", "python", "--", X), ("wc", "-c", "--", X), ("git", "-c", X), ("sort", f"--key={X}"), ("python3", "-V"),
    ("python3", "s.py", "-c", X), ("node", "app.js", "-p", X), ("python3", "s.py", f"-size={X}"), ("grep", "perl", "-e", X),
    ("pygmentize", "-l", "bash", X), ("mytool", "cmd", X), ("cat", "docs/fish", X), ("git", "log", "--", X),
    ("ffmpeg", "-i", X),
]  # fmt: skip
NO_COMMANDS = [
    (), "ls -l", ("",), ("{x}", "a"), ("ls", 1), ("ls\0",), ("ls", "{x!r}"), ("ls", "{x.y}"), ("ls", "{0}"), ("ls", "{}"),
    ("ls", "{x"), ("ls", "{x:>9}"), ("ls", "{x[0]}"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (SHELLS, r"Command\.argv must not name a shell"),
        (DEPENDS_ON_THE_CALL, r"Command\.argv: parameters must not decide which code is run"),
        (NO_COMMANDS, r"Command\.argv(: | must (be a list of strings|have a nonempty program))"),
    ],
    ids=["shells", "what is run depends on the call", "no commands"],
)
def test_shells_and_commands_that_depend_on_the_call_are_refused(subtests, refused: list[Any], message: str) -> None:
    for argv in refused:
        with subtests.test(argv=argv), pytest.raises(ConfigError, match=message):
            Command(argv)


def test_a_fixed_program_may_take_parameters(subtests: pytest.Subtests) -> None:
    for argv in TAKES_PARAMETERS:
        with subtests.test(argv=argv):
            written = [word.replace("{x}", "7").replace("{{", "{").replace("}}", "}") for word in argv]
            assert Command(argv).resolve({"x": 7}) == written


def command_tool(argv: tuple[str, ...], *, name: str = "run", **properties: Any) -> Tool:
    parameters = {"type": "object", "properties": properties}
    return Tool(name=name, description="Run.", function=Command(argv), parameters=parameters)


def test_a_command_whose_parameters_differ_from_its_tools_is_refused() -> None:
    for tool in (command_tool(("cat", X)), command_tool(("cat",), x=PATH), command_tool(("cat", "{y}"), x=PATH)):
        with pytest.raises(ConfigError, match=r"Tool run: Command\.argv must name exactly the parameters"):
            ToolExecutor(ToolCatalogue([tool]))


def test_each_element_stays_one_argument_whatever_its_text_or_is_left_out_with_its_parameter() -> None:
    for value, text in (
        (1e22, "10000000000000000000000"), (0.00001, "0.00001"), (-2.5e-7, "-0.00000025"), (1.5, "1.5"), (2.0, "2.0"),
        (0.1, "0.1"), (10**22, "10000000000000000000000"), (True, "true"),
    ):  # fmt: skip
        assert Command(("echo", "--n={x}")).resolve({"x": value}) == ["echo", f"--n={text}"]
    command = Command(("printf", "[%s]", "{a}", "--x={b}", "{{}}", "{c}{d}"))
    assert command.names == {"a", "b", "c", "d"}
    resolved = ["printf", "[%s]", "x y; $(z)", "--x=-1", "{}", "1.5true"]
    assert command.resolve({"a": "x y; $(z)", "b": "-1", "c": 1.5, "d": True}) == resolved
    assert command(a="$HOME `id`", b="| cat", c=1, d="\n") == "[$HOME `id`][--x=| cat][{}][1\n]"
    assert Command(("printf", "%s", "{self}"))(self="me") == "me", "a parameter may have any name"
    command = Command(("ls", "--sort={by}", "{path}"))
    assert command.resolve({"path": "/x"}) == ["ls", "/x"]
    assert command.resolve({"by": "size", "path": None}) == ["ls", "--sort=size"]


def test_values_do_not_become_options() -> None:
    after, within = Command(("cat", "--", "{x}")), Command(("cat", "-{x}", "--n={x}"))
    for value in ("-rf", "--", "-", -5):
        assert after.resolve({"x": value}) == ["cat", "--", str(value)]
        assert within.resolve({"x": value}) == ["cat", f"-{value}", f"--n={value}"]


def test_values_that_cannot_be_an_argument_are_refused(subtests: pytest.Subtests) -> None:
    option = "x must not begin with '-'"
    for argv, values, message in (
        *((("cat", X), {"x": value}, option) for value in ("-rf", "--", "-", -5)),
        (("cat", X, "--", "{y}"), {"x": "-rf", "y": "-rf"}, "x must not"),  # a `--` that comes later
        (("cat", X, "{y}"), {"x": "--", "y": "-rf"}, "must not begin with '-'"),  # a value is no `--` for the next one
        (("cat", "{x}{y}"), {"x": "", "y": "-rf"}, "must not begin with '-'"),
        (("echo", X), {"x": "a\0b"}, "null character"), (("echo", X), {"x": ["a"]}, "got list"),
        (("echo", X), {"x": {"a": 1}}, "got dict"),
    ):  # fmt: skip
        with subtests.test(argv=argv, values=values), pytest.raises(InvalidArgumentsError, match=message):
            Command(argv).resolve(values)


def test_the_output_of_a_command_is_read_up_to_its_limit_and_may_be_any_bytes() -> None:
    assert Command(("printf", "12345"), max_output_bytes=5)() == "12345"
    for argv in (("yes",), ("printf", "123456")):  # `yes` writes until it is killed
        with pytest.raises(OutputTooLargeError, match="at most 5 bytes"):
            Command(argv, max_output_bytes=5)()
    assert Command(("printf", r"\377a"))() == "\ufffda"
    assert Command(("cat",))() == "", "stdin is empty"
    with pytest.raises(ConfigError, match="Command: max_output_bytes must be an integer >= 1; got int 0"):
        Command(("cat",), max_output_bytes=0)


@on_linux
def test_workers_run_the_program_that_this_process_finds() -> None:
    """The workers' user may find another one of that name, so they get its path."""
    with executor_of(ToolCatalogue([command_tool(("cat", "/proc/self/cmdline"))]), allow={"run"}) as made:
        assert output_of(made, "run").split("\0")[0] == shutil.which("cat")


def test_the_error_of_a_failed_command_keeps_the_end_of_its_stderr() -> None:
    program = "import sys; sys.stderr.write('x' * 500_000 + 'the end'); sys.stdout.write('y' * 70_000); sys.exit(3)"
    with pytest.raises(CommandFailedError, match=r"status 3: x+the end$") as caught:
        Command((sys.executable, "-c", program))()
    assert len(str(caught.value)) < 2200

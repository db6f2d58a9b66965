"""Programs as tools: refused commands, how values become arguments, and what a command returns."""

import sys
from typing import Any

import pytest

from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.errors import InvalidArgumentsError, OutputTooLargeError, PathOutsideRootError, ToolRaisedError
from adapters.tools.execution.commands import Command, CommandFailedError
from adapters.tools.execution.executor import ToolExecutor
from grpo.errors import ConfigError
from tests.support.tool_executors import PATH, call, error_of, on_linux

X = "{x}"


# --- what may not be run


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
def test_shells_and_commands_that_depend_on_the_call_are_refused(
    subtests: pytest.Subtests, refused: list[Any], message: str
) -> None:
    for argv in refused:
        with subtests.test(argv=argv), pytest.raises(ConfigError, match=message):
            Command(argv)


def test_a_fixed_program_may_take_parameters(subtests: pytest.Subtests) -> None:
    for argv in TAKES_PARAMETERS:
        with subtests.test(argv=argv):
            assert Command(argv).resolve({"x": 7}) == [
                element.replace("{x}", "7").replace("{{", "{").replace("}}", "}") for element in argv
            ]


def test_a_command_whose_parameters_differ_from_its_tools_is_refused() -> None:
    for tool in (command_tool(("cat", X)), command_tool(("cat",), x=PATH), command_tool(("cat", "{y}"), x=PATH)):
        with pytest.raises(ConfigError, match=r"Tool run: Command\.argv must name exactly the parameters"):
            ToolExecutor(ToolCatalogue([tool]))


# --- how values are written


def test_numbers_are_written_in_decimal(subtests: pytest.Subtests) -> None:
    for value, text in (
        (1e22, "10000000000000000000000"), (0.00001, "0.00001"), (-2.5e-7, "-0.00000025"), (1.5, "1.5"), (2.0, "2.0"),
        (0.1, "0.1"), (10**22, "10000000000000000000000"), (True, "true"),
    ):  # fmt: skip
        with subtests.test(value=value):
            assert Command(("echo", "--n={x}")).resolve({"x": value}) == ["echo", f"--n={text}"]


def test_each_element_stays_one_argument_whatever_its_text() -> None:
    command = Command(("printf", "[%s]", "{a}", "--x={b}", "{{}}", "{c}{d}"))
    assert command.names == {"a", "b", "c", "d"}
    assert command.resolve({"a": "x y; $(z)", "b": "-1", "c": 1.5, "d": True}) == [
        "printf", "[%s]", "x y; $(z)", "--x=-1", "{}", "1.5true",
    ]  # fmt: skip
    assert command(a="$HOME `id`", b="| cat", c=1, d="\n") == "[$HOME `id`][--x=| cat][{}][1\n]"


def test_a_parameter_left_out_removes_its_argument() -> None:
    command = Command(("ls", "--sort={by}", "{path}"))
    assert command.resolve({"path": "/x"}) == ["ls", "/x"]
    assert command.resolve({"by": "size", "path": None}) == ["ls", "--sort=size"]


def test_values_do_not_become_options() -> None:
    bare, after, within = Command(("cat", "{x}")), Command(("cat", "--", "{x}")), Command(("cat", "-{x}", "--n={x}"))
    for value in ("-rf", "--", "-", -5):
        with pytest.raises(InvalidArgumentsError, match="x must not begin with '-'"):
            bare.resolve({"x": value})
        assert after.resolve({"x": value}) == ["cat", "--", str(value)]
        assert within.resolve({"x": value}) == ["cat", f"-{value}", f"--n={value}"]
    with pytest.raises(InvalidArgumentsError, match="x must not"):  # a `--` that comes later
        Command(("cat", "{x}", "--", "{y}")).resolve({"x": "-rf", "y": "-rf"})
    two = Command(("cat", "{x}", "{y}"))
    with pytest.raises(InvalidArgumentsError):  # a value is no `--` for the next one
        two.resolve({"x": "--", "y": "-rf"})
    with pytest.raises(InvalidArgumentsError):
        Command(("cat", "{x}{y}")).resolve({"x": "", "y": "-rf"})


def test_values_that_cannot_be_an_argument_are_refused() -> None:
    for value, message in (("a\0b", "null character"), (["a"], "got list"), ({"a": 1}, "got dict")):
        with pytest.raises(InvalidArgumentsError, match=message):
            Command(("echo", X)).resolve({"x": value})


# --- what a program returns


def test_the_output_of_a_command_is_read_up_to_its_limit() -> None:
    with pytest.raises(OutputTooLargeError, match="at most 1000 bytes"):
        Command(("yes",), max_output_bytes=1000)()  # `yes` writes until it is killed
    assert Command(("printf", "12345"), max_output_bytes=5)() == "12345"
    with pytest.raises(OutputTooLargeError):
        Command(("printf", "123456"), max_output_bytes=5)()


def test_the_error_of_a_failed_command_keeps_the_end_of_its_stderr() -> None:
    program = "import sys; sys.stderr.write('x' * 500_000 + 'the end'); sys.stdout.write('y' * 70_000); sys.exit(3)"
    with pytest.raises(CommandFailedError, match=r"status 3: x+the end$") as caught:
        Command((sys.executable, "-c", program))()
    assert len(str(caught.value)) < 2200


def test_a_command_has_an_empty_stdin_and_may_write_any_bytes() -> None:
    assert Command(("cat",))() == ""
    assert Command(("printf", r"\377a"))() == "\ufffda"


def command_tool(argv: tuple[str, ...], *, name: str = "run", **properties: Any) -> Tool:
    parameters = {"type": "object", "properties": properties}
    return Tool(name=name, description="Run.", function=Command(argv), parameters=parameters)


@pytest.mark.slow
@on_linux
def test_a_command_runs_in_a_worker_and_its_failure_is_a_result() -> None:
    count = command_tool(("wc", "-c", "--", "{path}"), path=PATH)
    with ToolExecutor(ToolCatalogue([count, command_tool(("no-such-program-here",), name="missing")])) as made:
        (made.root / "f").write_text("12345")
        good, outside, failed, missing = made.run(
            [*(call("run", path=path) for path in ("f", "../f", "absent")), call("missing")]
        )
    assert good.output == f"5 {made.root / 'f'}\n"
    assert [error_of(result) for result in (outside, failed, missing)] == [
        PathOutsideRootError, ToolRaisedError, ToolRaisedError,
    ]  # fmt: skip
    assert "CommandFailedError: wc ended with status 1: " in str(failed.error)
    assert "absent: No such file" in str(failed.error)
    assert "no-such-program-here" in str(missing.error)


def test_a_parameter_may_be_called_self() -> None:
    assert Command(("printf", "%s", "{self}"))(self="me") == "me"

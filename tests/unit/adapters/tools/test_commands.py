"""What a `Command` may not be, and how it writes numbers."""

from typing import Any

import pytest

from adapters.tools.commands import Command
from grpo.errors import ConfigError

X = "{x}"


@pytest.mark.parametrize(
    "argv",
    [
        ("sh", "-c", X), ("sh", X), ("bash", "script", X), ("/bin/rbash", "-c", X), ("ksh93", X), ("busybox", "sh", X),
        ("busybox", "ls", X), ("env", "sh", "-c", X), ("env", "-i", "A=b", "/usr/bin/mksh", X), ("xargs", "sh", "-c", X),
        ("nice", "-n", "5", "yash", X), ("pwsh", "-Command", X), ("find", X, "-exec", "sh", "{{}}"), ("BASH.EXE", X),
    ],
)  # fmt: skip
def test_no_shell_may_be_named(argv: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"Command\.argv must not name a shell"):
        Command(argv)


@pytest.mark.parametrize(
    "argv",
    [
        ("python3", "-c", X), ("python3.12", "-Ic", X), ("python", X), ("python3", "-m", X), ("python3", f"-c{X}"),
        ("python3", "-X", "dev", X), ("/usr/bin/env", "python3", "-c", X), ("env", "python3", X), ("timeout", "5", "python", X),
        ("perl", "-ne", X), ("perl", "-I", "lib", "-e", X), ("perl", f"-M{X}"), ("ruby", "-e", X), ("node", "--eval", X),
        ("node", f"--eval={X}"), ("node", "-r", "lib", X), ("lua", "-e", f"print({X})"), ("php", "-r", X),
        ("awk", X, "file"), ("awk", "-F", ",", X), ("awk", "-v", "a=1", X), ("gawk", "-f", X), ("sed", f"s/a/{X}/"),
        ("sed", "-n", "-e", X), ("env", X), ("env", f"LD_PRELOAD={X}", "ls"), ("env", "-S", X), ("xargs", "-n", "1", X),
        ("find", ".", "-exec", "python3", "-c", X), ("sudo", "-u", "someone", X), ("timeout", "5", X), ("timeout", X, "ls"),
        ("awk", "-f", "a.awk", "-f", X), ("sed", "s/a/b/", f"--expression={X}"), ("time", "perl", X), ("nice", "env", "awk", X),
        ("ionice", "-c", "3", "python3", X),
    ],
)  # fmt: skip
def test_what_is_run_may_not_depend_on_the_call(argv: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"Command\.argv must say itself what is run"):
        Command(argv)


@pytest.mark.parametrize(
    "argv",
    [
        ("python3", "script.py", X), ("python3", "-u", "script.py", "--", X), ("python3", "-m", "json.tool", X),
        ("python3", "-c", "print(1)", X), ("perl", "-ne", "print", "--", X), ("node", "-r", "lib", "script.js", X),
        ("awk", "{{print $1}}", X), ("awk", "-F", ",", "-v", "a=1", "{{print}}", X), ("gawk", "-f", "program", X),
        ("sed", "-n", "1,5p", X), ("sed", "-n", "-e", "1,5p", "--", X), ("timeout", "5", "grep", "-e", X, "file"),
        ("env", "A=b", "ls", X), ("grep", "-c", X), ("grep", "timeout", X), ("grep", "python", "--", X),
        ("wc", "-c", "--", X), ("git", "-c", X), ("sort", f"--key={X}"),
        ("python3", "-I", "script.py", X), ("python3", "-v", "s.py", X), ("sed", "-r", "s/a/b/", "--", X),
        ("php", "-r", "echo 1;", X), ("awk", "-v", f"n={X}", "{{print n}}", "d.txt"), ("stdbuf", "-oL", "grep", X),
        ("env", "-i", "wc", X), ("sudo", "-n", "wc", X), ("python3", "s.py", "-c", X), ("node", "app.js", "-p", X),
        ("python3", "s.py", f"-size={X}"), ("grep", "perl", "-e", X), ("pygmentize", "-l", "bash", X), ("mytool", "cmd", X),
        ("cat", "docs/fish", X), ("git", "log", "--", X), ("ffmpeg", "-i", X), ("time", "ls", X),
        ("find", X, "-exec", "wc", "{{}}"),
    ],
)  # fmt: skip
def test_what_is_run_may_get_parameters(argv: tuple[str, ...]) -> None:
    assert "7" in " ".join(Command(argv).resolve({"x": 7}))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e22, "10000000000000000000000"), (0.00001, "0.00001"), (-2.5e-7, "-0.00000025"), (1.5, "1.5"), (2.0, "2.0"),
        (0.1, "0.1"), (10**22, "10000000000000000000000"), (True, "true"),
    ],
)  # fmt: skip
def test_numbers_are_written_in_decimal(value: Any, text: str) -> None:
    assert Command(("echo", "--n={x}")).resolve({"x": value}) == ["echo", f"--n={text}"]

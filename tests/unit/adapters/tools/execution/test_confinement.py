"""What workers can reach with each kind of confinement, and which kind an executor takes."""

import os
import shutil
import socket
import subprocess
import sys
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.tools import ExecutorOptions, Tool, ToolCatalogue, ToolExecutor, WorkerLimits
from adapters.tools.execution.confinement import landlock, process, readable_paths
from adapters.tools.execution.confinement.bubblewrap import Bubblewrap
from adapters.tools.execution.confinement.landlock import Landlock
from grpo.errors import ConfigError, GRPOWarning
from tests.support import confined_tools, tool_functions
from tests.support.tool_executors import (
    BUBBLEWRAP_DAILY,
    CONFINEMENTS,
    LINUX,
    OWN_USERS,
    USERS,
    as_nobody,
    call,
    executor_of,
    open_folder,
    output_of,
)

pytestmark = LINUX
CATALOGUE = ToolCatalogue(
    Tool.from_function(function)
    for function in (
        confined_tools.outcome_of, confined_tools.visible_processes, confined_tools.outcome_of_signal,
        confined_tools.outcome_of_connection, confined_tools.temporary, tool_functions.who, tool_functions.add,
    )
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[5]
ROOT_USER = WorkerLimits(first_uid=None)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can read and write, with a file in it."""
    with open_folder() as folder:
        folder.chmod(0o777)
        (folder / "file").write_text("content")
        (folder / "file").chmod(0o666)
        yield folder


def outcomes(executor: ToolExecutor, *asked: tuple[str, Path | str]) -> list[str]:
    results = executor.run([call("outcome_of", what=what, path=str(path)) for what, path in asked])
    return [result.output for result in results]


# --- files
@pytest.mark.parametrize("kind", CONFINEMENTS[:2])
def test_tools_read_nothing_outside_their_folder_but_readable_ones_and_write_nothing(shared: Path, kind: Any) -> None:
    file = shared / "file"
    tries = [("read", file), ("list", shared), ("write", file), ("truncate", file), ("write", shared / "new")]
    with executor_of(CATALOGUE, confinement=kind) as made:
        assert {*outcomes(made, *tries)} <= {"PermissionError", "FileNotFoundError"}
        assert outcomes(made, ("write", made.root / "mine"), ("read", made.root / "mine")) == ["done", "written"]
        assert outcomes(made, ("read", Path("/etc/passwd")))[0].startswith("root:")
        assert outcomes(made, ("write", Path("/dev/null"))) == ["done"]
    with executor_of(CATALOGUE, confinement=kind, readable=(shared,)) as made:
        read, listed, *written = outcomes(made, *tries)
        assert (read, listed) == ("content", "file")
        assert {*written} <= {"PermissionError", "OSError"}
    assert file.read_text() == "content"
    assert [each.name for each in shared.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", CONFINEMENTS)
def test_only_bubblewrap_hides_processes_and_sockets_and_makes_memory_private(shared: Path, kind: Any) -> None:
    is_hidden = kind == "bubblewrap"
    with socket.socket(socket.AF_UNIX) as server, executor_of(CATALOGUE, confinement=kind) as made:
        server.bind(str(shared / "socket"))
        (shared / "socket").chmod(0o777)
        server.listen()
        connected = output_of(made, "outcome_of_connection", path=str(shared / "socket"))
        assert connected == ("FileNotFoundError" if is_hidden else "connected")
        used = output_of(made, "temporary")
        assert used["folder"] == (str(made.root) if kind == "landlock" else "/tmp")
        assert used["locked"] is (kind != "landlock")
        assert (used["sizes"] == [256 * 2**20] * 2) is is_hidden
        if is_hidden:
            assert output_of(made, "visible_processes") == [1, 2], "the fork server and the worker"
            assert output_of(made, "outcome_of_signal", pid=os.getpid()) == "ProcessLookupError"
        else:
            assert os.getpid() in output_of(made, "visible_processes")
            assert "python" in outcomes(made, ("read", Path(f"/proc/{os.getpid()}/cmdline")))[0]
        if kind == "user":
            assert outcomes(made, ("read", shared / "file"), ("write", shared / "file")) == ["content", "done"]


def test_packages_that_were_not_found_by_the_path_are_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable installation finds its packages by a hook, and not by `sys.path`."""
    with open_folder() as folder, monkeypatch.context() as patch:
        (folder / "hooked").mkdir()
        (folder / "hooked" / "__init__.py").write_text("")
        patch.syspath_prepend(folder)
        import hooked  # type: ignore[import-not-found]  # noqa: F401

        patch.undo()
        found = readable_paths(["/no/such/folder"])
        assert str(folder / "hooked") in found
        assert "/no/such/folder" not in found
        assert not any(Path(path).is_relative_to(other) for path in found for other in found if path != other)
    assert str(folder / "hooked") not in readable_paths([])


@pytest.mark.slow
@pytest.mark.parametrize("kind", BUBBLEWRAP_DAILY)
def test_tools_run_if_the_program_was_started_through_links(kind: Any) -> None:
    """The environment is a link in a project, the interpreter a link to a link, and the project is on `sys.path`."""
    if not Path(sys.prefix, "pyvenv.cfg").is_file():
        pytest.skip("this Python is no virtual environment")
    with open_folder() as project, open_folder() as other:
        environment = other / "env"
        shutil.copytree(sys.prefix, environment, symlinks=True, ignore=lambda *_: {"lib", "lib64", "share", "include"})
        (environment / "lib").symlink_to(Path(sys.prefix, "lib"))
        (project / "env").symlink_to(environment)
        (other / "python").symlink_to(Path(sys.executable).resolve())
        for name in (environment / "bin").glob("python*"):
            name.unlink()
            name.symlink_to(other / "python")
        run = subprocess.run(
            [project / "env" / "bin" / "python", "-c", ADDS, kind], env=os.environ | {"PYTHONPATH": f"{project}:{ROOT}"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert run.stdout.startswith(f"{kind} [2, 2]"), run.stderr


@pytest.mark.parametrize("kind", CONFINEMENTS[:2])
def test_readable_folders_may_be_above_the_tools_folder_or_within_it(shared: Path, kind: Any) -> None:
    root = shared / "root"
    (root / "inner").mkdir(parents=True)
    for folder in (root, root / "inner"):
        folder.chmod(0o777)
    for readable in (("/tmp",), ("/",), (root / "inner",), (shared, root)):
        settings: Any = {"root": root, "readable": readable, "confinement": kind}
        with executor_of(CATALOGUE, **settings) as made:
            written = outcomes(made, ("write", root / "inner" / "file"), ("write", shared / "new"), ("write", "/etc/x"))
            assert written[0] == "done"
            assert not {"done"} & set(written[1:])
            expected = str(root) if readable == ("/tmp",) or kind == "landlock" else "/tmp"
            assert output_of(made, "temporary")["folder"] == expected
            (root / "inner" / "file").unlink()


# --- processes
@pytest.mark.skipif(Landlock().unavailable() is not None, reason="this Linux has no Landlock of version 3")
def test_landlock_refuses_signals_to_processes_of_the_same_user() -> None:
    from adapters.tools.execution.confinement import landlock

    if landlock._version() < 6:
        pytest.skip("Linux 6.12 refuses signals")
    with executor_of(CATALOGUE, confinement="landlock", limits=ROOT_USER) as made:
        assert output_of(made, "outcome_of_signal", pid=os.getpid()) == "PermissionError"


@pytest.mark.parametrize("limits", USERS)
@pytest.mark.parametrize("kind", CONFINEMENTS)
def test_workers_have_no_capabilities(kind: Any, limits: WorkerLimits) -> None:
    with executor_of(CATALOGUE, confinement=kind, limits=limits) as made:
        assert int(output_of(made, "who")["capabilities"], 16) == 0


IMPORTS = """
import os, sys, warnings
import tests.support.light_packages
from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.execution.executor import ToolExecutor
from adapters.tools.execution.options import ExecutorOptions
from adapters.tools.execution.workers import WorkerLimits
from tests.support.confined_tools import core_can_be_dumped, secrets
from tests.support.tool_functions import add

"""
SECRETS = IMPORTS + """
warnings.simplefilter("ignore")
limits = WorkerLimits(first_uid=61_000 if sys.argv[1] == "own" else None)
call = ToolCall(tool="secrets", arguments={"secret": os.environ["API_KEY"], "program": os.getpid()})
for kind in sys.argv[2:]:
    options = ExecutorOptions(confinement=kind, limits=limits)
    with ToolExecutor(ToolCatalogue([Tool.from_function(secrets)]), num_workers=1, options=options) as executor:
        print(kind, executor.run([call])[0].output, core_can_be_dumped())
"""  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("user", ["own", "same", "nobody"])
def test_a_secret_in_the_programs_environment_is_seen_by_no_worker(user: str) -> None:
    """Root with workers of their own users, root with workers of its own user, and a user who is not root."""
    if user == "own" and not OWN_USERS:
        pytest.skip("only root on Linux can give workers user ids of their own")
    kinds = ["bubblewrap", *(["landlock"] if Landlock().unavailable() is None else []), "user"]
    command = [sys.executable, "-c", SECRETS, user, *kinds]
    secret = uuid.uuid4().hex  # of this test alone: another one may run at the same time
    run = subprocess.run(
        as_nobody(command) if user == "nobody" else command,
        capture_output=True, text=True, env=os.environ | {"API_KEY": secret}, check=False,
    )  # fmt: skip
    expected = [f"{kind} [] {kind != 'user' or user == 'own'}" for kind in kinds]
    assert run.stdout.splitlines() == expected, run.stderr


# --- which kind
def without(monkeypatch: pytest.MonkeyPatch, *kinds: Any) -> None:
    for kind in kinds:
        monkeypatch.setattr(kind, "unavailable", lambda self: f"{type(self).__name__} is not here")


def test_auto_takes_the_first_kind_that_works_and_warns_if_only_the_user_is_left(monkeypatch) -> None:
    def taken() -> tuple[str, list[str]]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with ToolExecutor(CATALOGUE, num_workers=1) as made:
                assert output_of(made, "add", a=1) == 2
        return made.confinement, [str(each.message) for each in said if "confined by their user" in str(each.message)]

    assert taken() == ("bubblewrap", [])
    without(monkeypatch, Bubblewrap)
    if Landlock().unavailable() is None:
        assert taken() == ("landlock", [])
    without(monkeypatch, Landlock)
    kind, said = taken()
    assert kind == "user"
    reasons = "bubblewrap: Bubblewrap is not here; landlock: Landlock is not here"
    assert said == [f"ToolExecutor's workers are confined by their user only: {reasons}."]


def test_a_kind_that_does_not_work_here_is_refused_and_says_why(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, fails = "it needs version 3 (Linux 6.2); this Linux has version 2", tmp_path / "bwrap"
    for version, said in ((2, old), (3, None)):
        monkeypatch.setattr("adapters.tools.execution.confinement.landlock._version", lambda: version)  # noqa: B023
        assert Landlock().unavailable() == said
    without(monkeypatch, Landlock)
    for kind, message in (
        ("landlock", "confinement='landlock' must work on this machine; landlock: Landlock is not here"),
        ("no", "confinement must be one of 'auto', 'bubblewrap', 'landlock', 'user'; got 'no'"),
    ):
        with pytest.raises(ConfigError, match=message):
            ToolExecutor(CATALOGUE, options=ExecutorOptions(confinement=kind))  # type: ignore[arg-type]
    monkeypatch.setenv("PATH", "/nowhere")
    assert Bubblewrap().unavailable() == "the program bwrap is missing; install the package bubblewrap"
    fails.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")  # as in a container
    fails.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert Bubblewrap().unavailable() == "bwrap does not work here (No permissions to create new namespace)"


def test_another_system_refuses_kinds_by_name_and_says_what_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(process, "LINUX", False)
    monkeypatch.setenv("PATH", "/nowhere")  # bubblewrap is a program of Linux
    lacking = {"bubblewrap": "the program bwrap is missing", "landlock": "only Linux has Landlock"}
    for kind, said in lacking.items():
        with pytest.raises(ConfigError, match=f"'{kind}' must work on this machine; {kind}: {said}"):
            ToolExecutor(CATALOGUE, options=ExecutorOptions(confinement=kind))  # type: ignore[arg-type]
    with pytest.warns(GRPOWarning) as warned, ToolExecutor(CATALOGUE, num_workers=1) as made:
        assert (made.confinement, output_of(made, "add", a=1)) == ("user", 2)
    for said in ("by their user only", *lacking.values(), "run the program as root on Linux for workers with user ids"):
        assert any(said in str(warning.message) for warning in warned), said


# --- programs without the rights of root, and a Python that others cannot read
ADDS = IMPORTS + """
for kind in sys.argv[1:]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        options = ExecutorOptions(confinement=kind)
        with ToolExecutor(ToolCatalogue([Tool.from_function(add)]), num_workers=1, options=options) as executor:
            results = executor.run([ToolCall(tool="add", arguments={"a": 1})] * 2)
        print(executor.confinement, [result.output for result in results], *(each.message for each in said))
"""  # fmt: skip


def lines_of(command: Sequence[str], *kinds: str) -> list[str]:
    run = subprocess.run([*command, *kinds], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(not OWN_USERS, reason="only root can lack the rights of root")
def test_root_without_its_capabilities_gets_landlock_or_no_users_for_workers_and_is_told() -> None:
    command = ["setpriv", "--bounding-set", "-all", sys.executable, "-c", ADDS]
    automatic, by_user = lines_of(command, "auto", "user")
    told = "[2, 2] ToolExecutor's workers are less confined than intended: they run as user 0"
    assert automatic.startswith(f"{'user' if Landlock().unavailable() else 'landlock'} {told}")
    assert "root lacks CAP_CHOWN, CAP_KILL, CAP_SETGID, CAP_SETUID" in automatic
    assert by_user.startswith(f"user {told}, like the")
    for lacking in ("kill", "chown"):
        [line] = lines_of(["setpriv", "--bounding-set", f"-{lacking}", sys.executable, "-c", ADDS], "auto")
        assert told in line
        assert f"root lacks CAP_{lacking.upper()}" in line
    namespace = ["bwrap", "--dev-bind", "/", "/", "--unshare-user", "--cap-add", "ALL"]  # of one user
    [line] = lines_of([*namespace, sys.executable, "-c", ADDS], "user")
    assert f"user {told}" in line
    assert "this user namespace lacks the 1000 ids from WorkerLimits.first_uid=61000 on" in line


@pytest.mark.slow
def test_an_ordinary_user_gets_bubblewrap_and_is_told_what_is_not_limited() -> None:
    automatic, by_user = lines_of(as_nobody([sys.executable, "-c", ADDS]), "auto", "user")
    user = 65534 if OWN_USERS else os.geteuid()
    said = f"[2, 2] ToolExecutor's workers are less confined than intended: they run as user {user},"
    unlimited = "and the number of their processes is not limited; run the program as root"
    assert automatic.startswith(f"bubblewrap {said} {unlimited}")
    assert by_user.startswith(f"user {said} like the program itself: tools can read and change what it can, and")


@pytest.mark.slow
@pytest.mark.skipif(not OWN_USERS, reason="the tests of hostile calls run as this user already")
def test_the_hostile_calls_end_as_required_where_the_program_is_not_root() -> None:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(Path(__file__).with_name("test_hostile_calls.py"))]
    run = subprocess.run(
        as_nobody([sys.executable, "-B", "-m", "pytest", *options]),
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert " failed" not in run.stdout.splitlines()[-1]


@pytest.mark.skipif(not OWN_USERS, reason="only root's workers have another user")
@pytest.mark.parametrize("kind", CONFINEMENTS)
def test_a_python_that_the_workers_user_cannot_read_is_mounted_by_bubblewrap_and_named_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    assert tmp_path.stat().st_mode & 0o077 == 0, "closed to other users"
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with executor_of(CATALOGUE, confinement=kind) as made:
            assert output_of(made, "add", a=1) == 2
    told = [str(each.message) for each in said if each.category is GRPOWarning]
    assert len(told) == (kind != "bubblewrap")
    for message in told:
        assert f"the workers' user, must be able to read {python}. " in message
        assert "chmod o+rx" in message

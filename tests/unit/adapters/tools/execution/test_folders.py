"""Folders of calls: one for all, a fresh one for each, or one for each group."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adapters.tools import ExecutorOptions, Tool, ToolCall, ToolCatalogue, ToolExecutor, ToolResult, WorkerLimits
from adapters.tools.errors import (
    FolderFullError,
    LostCallError,
    PathOutsideRootError,
    RootFullError,
    ToolRaisedError,
    ToolTimeoutError,
    WorkerDiedError,
)
from adapters.tools.execution import folder_limits
from adapters.tools.execution.folder_limits import FolderLimits
from adapters.tools.learning.rewards import ToolRewards
from grpo.errors import ConfigError, GRPOWarning
from tests.support import tool_functions
from tests.support.tool_executors import (
    BUBBLEWRAP_DAILY,
    CATALOGUE,
    CONFINEMENTS,
    LINUX,
    LONG,
    USERS,
    call,
    error_of,
    executor_of,
    open_folder,
    output_of,
    processes_of,
    soon,
)

pytestmark = LINUX
MORE = CATALOGUE.with_tools(
    Tool.from_function(tool_functions.leave),
    Tool.from_function(tool_functions.write_for_ever),
    Tool.from_function(tool_functions.where_remote, remote=True),
)


def ran(made: ToolExecutor, folder: str | None, tool: str, /, **arguments: Any) -> ToolResult:
    """The result of one call in a folder."""
    return made.run([call(tool, **arguments)], [folder])[0]


@pytest.mark.parametrize("limits", USERS)
@pytest.mark.parametrize("kind", CONFINEMENTS)
def test_a_fresh_folder_is_empty_holds_the_calls_paths_and_is_removed(kind: Any, limits: WorkerLimits) -> None:
    with executor_of(MORE, num_workers=2, fresh_folder=True, confinement=kind, limits=limits) as made:
        (made.root / "given").write_text("text")
        calls = [*(call("leave", name=name) for name in "aab"), call("who"), call("where", path="x/y")]
        outside = [call("where", path=path) for path in ("../given", "/")]
        hows = ("closed_folders", "link_to_given", "remove_folder", "raise_base", "os_exit")
        others = [*outside, *(call("misbehave", how=how) for how in hows), call("hang", how="sleep")]
        results = made.run([*calls, *others])
        assert [result.output for result in results[:3]] == [["a"], ["a"], ["b"]]
        folder, path = Path(results[3].output["cwd"]), Path(results[4].output)
        assert (folder.parent, folder.name[:5]) == (made.root, "call-")
        assert (path.parents[2], path.parts[-2:]) == (made.root, ("x", "y"))
        ended = [PathOutsideRootError] * 2 + [None] * 3 + [ToolRaisedError, WorkerDiedError, ToolTimeoutError]
        assert [error_of(result) for result in results[5:]] == ended
        assert [each.name for each in made.root.iterdir()] == ["given"]
        assert (made.root / "given").read_text() == "text"


def give_up(made: ToolExecutor, one: ToolCall, folder: str | None, begun: Any, then: Any = lambda: None) -> None:
    """Cancel a call that has begun, and do something else while it ends."""

    async def work() -> None:
        waiting = asyncio.ensure_future(made.run_async([one], [folder]))
        assert await asyncio.to_thread(soon, begun)
        waiting.cancel()
        await asyncio.to_thread(then)
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(work())


def test_a_given_up_call_leaves_no_fresh_folder() -> None:
    with executor_of(MORE, fresh_folder=True) as made:
        give_up(made, call("nap", seconds=500), None, lambda: any(made.root.glob("call-*/begun-*")))
        assert soon(lambda: not list(made.root.iterdir()))


def test_a_fresh_folder_that_cannot_be_removed_is_said_and_fails_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: str) -> None:
        if Path(folder).name.startswith("call-"):
            raise OSError(16, "Device or resource busy", folder)
        shutil.rmtree(folder)

    before = set(threading.enumerate())
    with executor_of(MORE, fresh_folder=True) as made:
        monkeypatch.setattr("adapters.tools.execution.executor.remove_folder", refuse)
        with pytest.warns(GRPOWarning, match="could not remove the folder of a call: .*busy"):
            results = made.run([call("leave", name="a"), call("add", a=1)])
        assert [result.output for result in results] == [["a"], 2]
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("fresh_folder", [False, True])
def test_calls_with_the_same_name_of_a_folder_share_it(fresh_folder: bool) -> None:
    with executor_of(MORE, num_workers=2, fresh_folder=fresh_folder) as made:
        met = made.run([call("meet", number=2)] * 2, folders=["group-1"] * 2)
        assert all(result.ok for result in met), "two workers"
        assert ran(made, "g", "leave", name="a").output == ["a"]
        assert ran(made, None, "leave", name="b").output == (["b"] if fresh_folder else ["b", "g", "group-1"])
        assert ran(made, "g", "leave", name="c").output == ["a", "c"]
        assert ran(made, "g", "where", path="c").output == str(made.root / "g" / "c")
        assert error_of(ran(made, "g", "where", path="../b")) is PathOutsideRootError
        assert (made.root / "g" / "c").exists()
        shutil.rmtree(made.root / "g")
        assert ran(made, "g", "leave", name="d").output == ["d"]
        assert output_of(made, "leave", name="e") == (["e"] if fresh_folder else ["b", "e", "g", "group-1"])
        remote = made.run([call("where_remote", path="x")] * 2, folders=["g", None])
        assert [result.output for result in remote] == [str(made.root / "x")] * 2, "remote tools have no folder"


def test_rewards_run_the_calls_of_a_group_in_its_folder() -> None:
    def num_files(task: str, made: ToolCall, result: ToolResult) -> float:
        return float(len(result.output))

    calls = [call("leave", name="a"), call("leave", name="b"), call("leave", name="a")]
    with executor_of(MORE, fresh_folder=True) as made:
        rewards = ToolRewards(made, {"files": num_files}, folder_of={"x": "group-x", "y": "group-y"}.get)
        assert rewards.compute_rewards(["x", "x", "y"], calls).tolist() == [1, 2, 1]
        assert rewards.compute_rewards(["none", "none", "x"], calls).tolist() == [1, 1, 2]
        assert sorted(path.name for path in (made.root / "group-x").iterdir()) == ["a", "b"]
        once = ToolRewards(made, {"files": num_files}, folder_of=str, reuse_results=True)
        # equal calls share a result in the same folder only
        assert once.compute_rewards(["p", "q", "p"], calls).tolist() == [1, 1, 1]
        assert once.compute_rewards(["q", "q", "q"], calls).tolist() == [2, 2, 2]


def test_a_folder_is_removed_by_its_name_once_its_calls_have_ended() -> None:
    with executor_of(MORE, num_workers=2) as made:
        made.run([call("leave", name="a")] * 2, folders=["g", "h"])
        made.run([call("misbehave", how="closed_folders")], folders=["g"])
        made.remove_folder("g")
        made.remove_folder("g")  # it need not exist
        assert [path.name for path in made.root.iterdir()] == ["h"]
        begun = (made.root / "h" / "file-0").exists
        give_up(made, call("write_for_ever"), "h", begun, lambda: made.remove_folder("h"))
        assert list(made.root.iterdir()) == []


def test_names_that_are_no_folder_of_root_are_refused(subtests: pytest.Subtests) -> None:
    names = ("../a", "a/b", "", ".", "..", "a\n", "/a", "x" * 101)
    with ToolExecutor(ToolCatalogue([MORE["where_remote"]])) as made:
        for folders in ([], ["a", "b"], *([name] for name in names)):
            with subtests.test(folders=folders), pytest.raises(ConfigError, match="folders must give"):
                made.run([call("where_remote", path="x")], folders=folders)
        for name in names:
            with subtests.test(name), pytest.raises(ConfigError, match="remove_folder: name must have letters"):
                made.remove_folder(name)


NAMES = ("add", "write_files", "write_for_ever", "remove_files", "link_files")
WRITERS = ToolCatalogue([Tool.from_function(getattr(tool_functions, name)) for name in NAMES])
FOLDER, ROOT = 4 * 2**20, 16 * 2**20
PAUSE, OVER = 0.02, 200 * 2**20
"""With this pause, a call writes at most 5 MiB between two measurements. A busy machine may miss 40 of these."""


def size_of(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def limited(**options: Any) -> Iterator[ToolExecutor]:
    limits = {"max_folder_bytes": FOLDER, "max_root_bytes": ROOT, "timeout": 10 * LONG} | options
    with ToolExecutor(WRITERS, num_workers=2, options=ExecutorOptions(**limits)) as made:
        yield made


@pytest.mark.parametrize("kind", BUBBLEWRAP_DAILY)
@pytest.mark.parametrize("folder", ["a", None])
def test_a_call_that_writes_for_ever_is_ended_and_told_and_harms_no_other(kind: Any, folder: str | None) -> None:
    with limited(confinement=kind, max_root_bytes=None) as made:
        calls = [call("write_for_ever", pause=PAUSE), *[call("add", a=i) for i in range(20)]]
        endless, *others = made.run(calls, [folder, *["b"] * 20])
        assert error_of(endless) is FolderFullError
        assert size_of(made.root) < FOLDER + OVER
        assert str(endless.error) == (
            "write_for_ever: the files in its folder take more than 4194304 bytes, so the call was ended. Its files stay; "
            "remove some, or write less."
        )
        assert [result.output for result in others] == [*range(1, 21)]
        assert len(processes_of(made)) <= 5, "bubblewrap, the fork server and two workers are left"


def test_a_call_that_has_returned_before_anybody_looked_is_told_too() -> None:
    with limited() as made:
        assert ran(made, "a", "write_files", number=3, kibibytes=1024).output == 3
        for number, kibibytes in ((5, 1024), (1500, 0)):  # each empty file counts 4 KiB
            above = ran(made, f"{number}", "write_files", number=number, kibibytes=kibibytes)
            assert error_of(above) is FolderFullError
        again = ran(made, "d", "write_files", number=100, kibibytes=1024, keep=False)
        assert again.output == 100, "what was overwritten does not count"
    with limited(max_folder_bytes=None, max_root_bytes=None) as made:
        assert ran(made, None, "write_files", number=20, kibibytes=1024).output == 20
    with limited(fresh_folder=True) as made:  # a fresh folder has the limit too, and leaves room
        for _ in range(6):
            assert error_of(ran(made, None, "write_files", number=5, kibibytes=1024)) is FolderFullError
        assert ran(made, None, "write_files", number=1, kibibytes=1024).output == 1


def test_a_returned_call_is_told_by_its_folder_as_it_is_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine measures slowly, and a running call is not measured again for a while."""
    (tmp_path / "a").mkdir()
    monkeypatch.setattr(folder_limits, "_SHARE", 10**9)
    check = FolderLimits(tmp_path, 3 * folder_limits.ENTRY_BYTES, None).of("a")
    check(False)
    for name in "bcde":
        (tmp_path / "a" / name).touch()
    check(False)
    with pytest.raises(FolderFullError):
        check(True)


def test_a_call_in_a_full_folder_may_run_and_remove_files_but_not_add_any() -> None:
    with limited() as made:
        assert error_of(ran(made, "a", "write_files", number=6, kibibytes=1024)) is FolderFullError
        assert ran(made, "a", "add", a=1).output == 2
        assert error_of(ran(made, "a", "write_files", number=1, kibibytes=1024, folder="more")) is FolderFullError
        assert ran(made, "a", "remove_files").output == 6
        assert ran(made, "a", "write_files", number=2, kibibytes=1024).output == 2


def test_files_that_were_there_before_and_links_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_limits, "_SHARE", 0)  # measure the tools' folder after every call
    with open_folder() as root:
        root.chmod(0o777)
        (root / "large").write_bytes(bytes(2 * ROOT))
        with limited(root=root) as made:
            assert ran(made, None, "write_files", number=2, kibibytes=1024).ok
            assert ran(made, "linked", "link_files").ok
            assert error_of(ran(made, None, "write_files", number=5, kibibytes=1024)) is FolderFullError


def test_calls_are_lost_if_the_folder_of_all_is_full_and_none_of_them_is_to_blame() -> None:
    with limited(max_folder_bytes=None) as made:
        filled = ran(made, "a", "write_for_ever", pause=PAUSE)
        assert size_of(made.root) < ROOT + OVER
        others = made.run([call("add", a=1)] * 2, ["b", None])
        assert [error_of(result) for result in (filled, *others)] == [RootFullError] * 3
        assert issubclass(RootFullError, LostCallError)
        assert f"take more than {ROOT} bytes. Remove some, or raise" in str(others[0].error)
    with limited() as made:  # a call may also write beside its folder
        assert error_of(ran(made, "a", "write_for_ever", folder="../elsewhere")) is RootFullError
        assert ran(made, None, "write_files", number=1, kibibytes=1).output is None

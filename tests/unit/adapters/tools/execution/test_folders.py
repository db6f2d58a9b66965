"""Folders of calls: one for all, a fresh one for each, or one for each group."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from adapters.tools import ExecutorOptions
from adapters.tools.catalogue.calls import ToolCall, ToolResult
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.errors import PathOutsideRootError, ToolRaisedError, ToolTimeoutError, WorkerDiedError
from adapters.tools.execution.executor import ToolExecutor
from adapters.tools.execution.workers import WorkerLimits
from adapters.tools.learning.rewards import ToolRewards
from grpo.errors import ConfigError, GRPOWarning
from tests.support import tool_functions
from tests.support.tool_executors import CATALOGUE, CONFINEMENTS, LINUX, LONG, USERS, call, error_of, output_of, soon

pytestmark = LINUX

MORE = CATALOGUE.with_tools(
    Tool.from_function(tool_functions.leave),
    Tool.from_function(tool_functions.write_for_ever),
    Tool.from_function(tool_functions.where_remote, remote=True),
)


def test_calls_share_files_and_a_worker_keeps_the_state_of_modules() -> None:
    with ToolExecutor(MORE, num_workers=2, options=ExecutorOptions(timeout=LONG)) as made:
        assert output_of(made, "leave", name="a") == ["a"]
        assert output_of(made, "leave", name="b") == ["a", "b"]
        assert sorted(path.name for path in made.root.iterdir()) == ["a", "b"]
        assert [output_of(made, "remember", text=text) for text in "ab"] == [["a"], ["a", "b"]]


@pytest.mark.parametrize("limits", USERS)
@pytest.mark.parametrize("kind", CONFINEMENTS)
def test_a_fresh_folder_is_empty_holds_the_calls_paths_and_is_removed(kind: Any, limits: WorkerLimits) -> None:
    with ToolExecutor(
        MORE, num_workers=2, options=ExecutorOptions(timeout=LONG, fresh_folder=True, confinement=kind, limits=limits)
    ) as made:
        (made.root / "given").write_text("text")
        calls = [call("leave", name=name) for name in "aab"]
        others = [
            call("who"), call("where", path="x/y"), call("where", path="../given"), call("where", path="/"),
            call("misbehave", how="raise_base"), call("misbehave", how="os_exit"), call("hang", how="sleep"),
            call("misbehave", how="closed_folders"), call("misbehave", how="link_to_given"),
            call("misbehave", how="remove_folder"),
        ]  # fmt: skip
        results = made.run([*calls, *others])
        assert [result.output for result in results[:3]] == [["a"], ["a"], ["b"]]
        seen, path, *outside = results[3:7]
        folder = Path(seen.output["cwd"])
        assert folder.parent == made.root
        assert folder.name.startswith("call-")
        assert Path(path.output).parent.parent.parent == made.root
        assert path.output.endswith("/x/y")
        assert [error_of(result) for result in outside] == [PathOutsideRootError] * 2
        ended = [ToolRaisedError, WorkerDiedError, ToolTimeoutError, None, None, None]
        assert [error_of(result) for result in results[7:]] == ended
        assert [each.name for each in made.root.iterdir()] == ["given"]
        assert (made.root / "given").read_text() == "text"


def test_a_given_up_call_leaves_no_fresh_folder() -> None:
    with ToolExecutor(MORE, num_workers=1, options=ExecutorOptions(timeout=LONG, fresh_folder=True)) as made:

        async def give_up() -> None:
            waiting = asyncio.ensure_future(made.run_async([call("nap", seconds=500)]))
            assert await asyncio.to_thread(soon, lambda: any(made.root.glob("call-*/begun-*")))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        asyncio.run(give_up())
        assert soon(lambda: not list(made.root.iterdir()))


def test_a_fresh_folder_that_cannot_be_removed_is_said_and_fails_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: str) -> None:
        if Path(folder).name.startswith("call-"):
            raise OSError(16, "Device or resource busy", folder)
        shutil.rmtree(folder)

    before = set(threading.enumerate())
    with ToolExecutor(MORE, num_workers=1, options=ExecutorOptions(timeout=LONG, fresh_folder=True)) as made:
        monkeypatch.setattr("adapters.tools.execution.executor.remove_folder", refuse)
        with pytest.warns(GRPOWarning, match="could not remove the folder of a call: .*busy"):
            results = made.run([call("leave", name="a"), call("add", a=1)])
        assert [result.output for result in results] == [["a"], 2]
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("fresh_folder", [False, True])
def test_calls_with_the_same_name_of_a_folder_share_it(fresh_folder: bool) -> None:
    with ToolExecutor(MORE, num_workers=2, options=ExecutorOptions(timeout=LONG, fresh_folder=fresh_folder)) as made:
        assert all(result.ok for result in made.run([call("meet", number=2)] * 2, folders=["group-1"] * 2)), (
            "two workers"
        )
        [first] = made.run([call("leave", name="a")], folders=["g"])
        [second] = made.run([call("leave", name="b")], folders=[None])
        assert (first.output, second.output) == (["a"], ["b"] if fresh_folder else ["b", "g", "group-1"])
        [again] = made.run([call("leave", name="c")], folders=["g"])
        assert again.output == ["a", "c"]
        [path] = made.run([call("where", path="c")], folders=["g"])
        assert path.output == str(made.root / "g" / "c")
        [outside] = made.run([call("where", path="../b")], folders=["g"])
        assert error_of(outside) is PathOutsideRootError
        assert (made.root / "g" / "c").exists()
        shutil.rmtree(made.root / "g")
        [new] = made.run([call("leave", name="d")], folders=["g"])
        assert new.output == ["d"]


def test_rewards_run_the_calls_of_a_group_in_its_folder() -> None:
    def num_files(task: str, made: ToolCall, result: ToolResult) -> float:
        return float(len(result.output))

    calls = [call("leave", name="a"), call("leave", name="b"), call("leave", name="a")]
    with ToolExecutor(MORE, num_workers=1, options=ExecutorOptions(timeout=LONG, fresh_folder=True)) as made:
        rewards = ToolRewards(
            made, {"files": num_files}, folder_of=lambda task: {"x": "group-x", "y": "group-y"}.get(task)
        )
        assert rewards.compute_rewards(["x", "x", "y"], calls).tolist() == [1, 2, 1]
        assert rewards.compute_rewards(["none", "none", "x"], calls).tolist() == [1, 1, 2]
        assert sorted(path.name for path in (made.root / "group-x").iterdir()) == ["a", "b"]
        once = ToolRewards(made, {"files": num_files}, folder_of=str, reuse_results=True)
        # equal calls share a result in the same folder only
        assert once.compute_rewards(["p", "q", "p"], calls).tolist() == [1, 1, 1]
        assert once.compute_rewards(["q", "q", "q"], calls).tolist() == [2, 2, 2]


def test_a_folder_is_removed_by_its_name_once_its_calls_have_ended() -> None:
    with ToolExecutor(MORE, num_workers=2, options=ExecutorOptions(timeout=LONG)) as made:
        made.run([call("leave", name="a")] * 2, folders=["g", "h"])
        made.run([call("misbehave", how="closed_folders")], folders=["g"])
        made.remove_folder("g")
        made.remove_folder("g")  # it need not exist
        assert [path.name for path in made.root.iterdir()] == ["h"]

        async def give_up_and_remove() -> None:
            waiting = asyncio.ensure_future(made.run_async([call("write_for_ever")], ["h"]))
            assert await asyncio.to_thread(soon, lambda: (made.root / "h" / "file-0").exists())
            waiting.cancel()
            await asyncio.to_thread(made.remove_folder, "h")

        asyncio.run(give_up_and_remove())
        assert list(made.root.iterdir()) == []
        for wrong in ("../g", ".", "", "a/b"):
            with pytest.raises(ConfigError, match="remove_folder: name must have letters"):
                made.remove_folder(wrong)


def test_remote_tools_have_no_folder_of_their_own() -> None:
    with ToolExecutor(MORE, num_workers=1, options=ExecutorOptions(timeout=LONG, fresh_folder=True)) as made:
        results = made.run([call("where_remote", path="x")] * 2, folders=["g", None])
        assert [result.output for result in results] == [str(made.root / "x")] * 2


@pytest.mark.parametrize(
    "folders", [[], ["a", "b"], ["../a"], ["a/b"], [""], ["."], [".."], ["a\n"], ["/a"], ["x" * 101]]
)
def test_names_that_are_no_folder_of_root_are_refused(folders: list[str]) -> None:
    with (
        ToolExecutor(ToolCatalogue([MORE["where_remote"]])) as made,
        pytest.raises(ConfigError, match="folders must give"),
    ):
        made.run([call("where_remote", path="x")], folders=folders)

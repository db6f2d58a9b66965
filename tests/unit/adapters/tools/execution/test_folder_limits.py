"""Limits of what calls write: in the folder of a call, and in the folder of all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from adapters.tools import ExecutorOptions
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.errors import FolderFullError, LostCallError, RootFullError
from adapters.tools.execution.executor import ToolExecutor
from tests.support import tool_functions
from tests.support.tool_executors import BUBBLEWRAP_DAILY, LINUX, LONG, call, error_of, open_folder, processes_of

pytestmark = LINUX

NAMES = ("add", "write_files", "write_for_ever", "remove_files", "link_files")
CATALOGUE = ToolCatalogue([Tool.from_function(getattr(tool_functions, name)) for name in NAMES])
FOLDER, ROOT = 4 * 2**20, 16 * 2**20


@contextmanager
def executor(**options: Any) -> Iterator[ToolExecutor]:
    limits = {"max_folder_bytes": FOLDER, "max_root_bytes": ROOT, "timeout": 10 * LONG} | options
    with ToolExecutor(CATALOGUE, num_workers=2, options=ExecutorOptions(**limits)) as made:
        yield made


@pytest.mark.parametrize("kind", BUBBLEWRAP_DAILY)
@pytest.mark.parametrize("folder", ["a", None])
def test_a_call_that_writes_for_ever_is_ended_and_told_and_harms_no_other(kind: Any, folder: str | None) -> None:
    with executor(confinement=kind, max_root_bytes=None) as made:
        calls = [call("write_for_ever"), *[call("add", a=i) for i in range(20)]]
        endless, *others = made.run(calls, [folder, *["b"] * 20])
        assert error_of(endless) is FolderFullError
        assert str(endless.error) == (
            "write_for_ever: the files in its folder take more than 4194304 bytes, so the call was ended. Its files stay; "
            "remove some, or write less."
        )
        assert [result.output for result in others] == [*range(1, 21)]
        assert len(processes_of(made)) <= 5, (
            "the writer has ended: bubblewrap, the fork server and two workers are left"
        )


def test_a_call_that_has_returned_before_anybody_looked_is_told_too() -> None:
    with executor() as made:
        within, above, empty = made.run(
            [
                call("write_files", number=3, kibibytes=1024),
                call("write_files", number=5, kibibytes=1024),
                call("write_files", number=1500, kibibytes=0),  # each counts 4 KiB
            ],
            ["a", "b", "c"],
        )
        assert within.output == 3
        assert (error_of(above), error_of(empty)) == (FolderFullError, FolderFullError)
        [again] = made.run([call("write_files", number=100, kibibytes=1024, keep=False)], ["d"])
        assert again.output == 100, "what was overwritten does not count"


def test_a_call_in_a_full_folder_may_run_and_remove_files_but_not_add_any() -> None:
    with executor() as made:
        [full] = made.run([call("write_files", number=6, kibibytes=1024)], ["a"])
        [runs] = made.run([call("add", a=1)], ["a"])
        [more] = made.run([call("write_files", number=1, kibibytes=1024, folder="more")], ["a"])
        assert (error_of(full), runs.output, error_of(more)) == (FolderFullError, 2, FolderFullError)
        [removed] = made.run([call("remove_files")], ["a"])
        [within] = made.run([call("write_files", number=2, kibibytes=1024)], ["a"])
        assert (removed.output, within.output) == (6, 2)


def test_files_that_were_there_before_and_links_do_not_count() -> None:
    with open_folder() as root:
        root.chmod(0o777)
        (root / "large").write_bytes(bytes(2 * ROOT))
        with executor(root=root) as made:
            written, linked = made.run(
                [call("write_files", number=2, kibibytes=1024), call("link_files")], [None, "linked"]
            )
            assert (written.error, linked.error) == (None, None)
            [above] = made.run([call("write_files", number=5, kibibytes=1024)])
            assert error_of(above) is FolderFullError


def test_calls_are_lost_if_the_folder_of_all_is_full_and_none_of_them_is_to_blame() -> None:
    with executor(max_folder_bytes=None) as made:
        [filled] = made.run([call("write_for_ever")], ["a"])
        others = made.run([call("add", a=1)] * 2, ["b", None])
        assert [error_of(result) for result in (filled, *others)] == [RootFullError] * 3
        assert issubclass(RootFullError, LostCallError)
        assert f"take more than {ROOT} bytes. Remove some, or raise" in str(others[0].error)
    with executor() as made:  # a call may also write beside its folder
        [elsewhere] = made.run([call("write_for_ever", folder="../elsewhere")], ["a"])
        assert error_of(elsewhere) is RootFullError
        assert all(result.output is None for result in made.run([call("write_files", number=1, kibibytes=1)]))


def test_a_fresh_folder_has_the_limit_too_and_leaves_room() -> None:
    with executor(fresh_folder=True) as made:
        for _ in range(6):
            [full] = made.run([call("write_files", number=5, kibibytes=1024)])
            assert error_of(full) is FolderFullError
        [within] = made.run([call("write_files", number=1, kibibytes=1024)])
        assert within.output == 1


def test_without_limits_a_call_may_fill_its_folder() -> None:
    with executor(max_folder_bytes=None, max_root_bytes=None) as made:
        [written] = made.run([call("write_files", number=20, kibibytes=1024)])
        assert written.output == 20

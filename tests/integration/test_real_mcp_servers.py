"""MCP servers of others, connected as the guide says: time and git (Python), filesystem, memory and everything (Node.js)."""

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapters.tools import ExecutorOptions, MCPServer, ToolCall, ToolCatalogue, ToolExecutor

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / ".mcp-servers"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:ToolExecutor's workers")]  # where tests are not root


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with a note. The servers' programs are found in PATH."""
    if not (INSTALLED / ".installed").exists():
        pytest.fail("These tests connect to real MCP servers. Install them: make mcp-servers")
    programs = [str(INSTALLED / "venv/bin"), str(INSTALLED / "node_modules/.bin")]
    monkeypatch.setenv("PATH", os.pathsep.join([*programs, os.environ["PATH"]]))
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "notes.txt").write_text("two bottles")
    user = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    for command in (["init", "-q", "-b", "main"], ["add", "."], [*user, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def guide() -> tuple[str, str]:
    """The guide's program that learns from three servers, and what it prints."""
    page = (ROOT / "docs/tools.md").read_text(encoding="utf-8")
    [found] = re.findall(
        r"^`my_servers\.py`.*?^```python\n(.*?)^```\n\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    return found


def test_the_program_of_the_guide_learns_from_rewards_alone_which_server_to_ask(repository: Path) -> None:
    code, printed = guide()
    (repository / "my_servers.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "my_servers.py"], cwd=repository, env=environment, capture_output=True, text=True
    )
    assert (run.stdout, run.returncode) == (printed, 0), run.stderr


def commands(folder: Path) -> dict[str, list[str]]:
    return {
        "time": ["mcp-server-time"],
        "git": ["mcp-server-git", "--repository", str(folder)],
        "filesystem": ["mcp-server-filesystem", str(folder)],
        "memory": ["mcp-server-memory"],
        "everything": ["mcp-server-everything"],
    }


def right_calls(folder: Path) -> list[tuple[str, dict[str, Any], str]]:
    """Tools of each server, with arguments and a part of the answer."""
    note = {"path": str(folder / "notes.txt")}
    ada = {"name": "Ada", "entityType": "person", "observations": ["counts"]}
    return [
        ("time.get_current_time", {"timezone": "Asia/Tokyo"}, "Asia/Tokyo"),
        (
            "time.convert_time",
            {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "Etc/UTC"},
            "T03:00",
        ),
        ("git.git_log", {"repo_path": str(folder), "max_count": 1.0}, "Ada"),
        ("git.git_branch", {"repo_path": str(folder), "branch_type": "local"}, "* main"),
        ("filesystem.read_text_file", note | {"head": 1}, "two bottles"),
        ("filesystem.list_directory_with_sizes", {"path": str(folder), "sortBy": "size"}, "notes.txt"),
        (
            "filesystem.edit_file",
            note | {"edits": [{"oldText": "two", "newText": "ten"}], "dryRun": True},
            "+ten bottles",
        ),
        ("memory.create_entities", {"entities": [ada]}, "person"),
        ("memory.search_nodes", {"query": "Ada"}, "counts"),
        ("everything.echo", {"message": "hello"}, "Echo: hello"),
        ("everything.get-sum", {"a": 1, "b": 2.5}, "3.5"),
        ("everything.get-structured-content", {"location": "Chicago"}, "temperature"),
        ("everything.get-tiny-image", {}, "[image image/png, "),
    ]


def test_all_tools_of_five_servers_are_read_and_answer(repository: Path, subtests: pytest.Subtests) -> None:
    """A tool that is left out is a warning, and so an error here."""
    environment = {"MEMORY_FILE_PATH": str(repository / "memory.json")}
    with contextlib.ExitStack() as servers:
        catalogue = ToolCatalogue(
            dataclasses.replace(tool, name=f"{name}.{tool.name}")
            for name, command in commands(repository).items()
            for tool in servers.enter_context(MCPServer(command, env=environment)).tools()
        )
        calls = right_calls(repository)
        with ToolExecutor(catalogue, num_workers=1, options=ExecutorOptions(timeout=60.0)) as executor:
            for name, arguments, part in calls:
                with subtests.test(name):
                    [result] = executor.run([ToolCall(tool=name, arguments=arguments)])
                    assert result.ok, result.error
                    assert part in str(result.output)
    assert {name.split(".")[0] for name, *_ in calls} == set(commands(repository))
    assert {choice.name: choice.values[:2] for choice in catalogue["filesystem.list_directory_with_sizes"].choices} == {
        "sortBy": ("name", "size")
    }
    assert catalogue["memory.create_entities"].required_free == ("entities",)

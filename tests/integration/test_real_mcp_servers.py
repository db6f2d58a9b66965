"""MCP servers of others, connected as the guide says: time and git (Python), filesystem, memory and everything (Node.js)."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.tools import (
    ExecutorOptions,
    MCPServer,
    ServerLostError,
    ToolCall,
    ToolCatalogue,
    ToolExecutor,
    ToolResult,
    ToolRewards,
    ToolSelectionPolicy,
)
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig

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


def processes_of(program: str) -> list[int]:
    """Processes that this process has started, and their children, whose command contains `program`."""
    found, parents = [], [os.getpid()]
    while parents:
        listed = [
            int(each)
            for task in Path(f"/proc/{parents.pop()}/task").glob("*")
            for each in (task / "children").read_text().split()
        ]
        parents += listed
        found += [each for each in listed if program.encode() in Path(f"/proc/{each}/cmdline").read_bytes()]
    return found


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


ANSWERS = {
    "what time is it": "Asia/Tokyo",
    "the branches of the project": "* main",
    "read the text of the note": "two bottles",
}
SERVER_LOST = "tools/errors/server_lost"


def answers(request: str, call: ToolCall, result: ToolResult) -> float:
    return float(ANSWERS[request] in str(result.output))


def test_a_server_killed_in_mid_run_costs_only_its_own_calls_and_works_again_when_entered_anew(
    repository: Path,
) -> None:
    values = {
        "timezone": "Asia/Tokyo", "repo_path": str(repository), "branch_type": "local", "path": str(repository / "notes.txt"),
    }  # fmt: skip
    names = {"time": ["get_current_time"], "git": ["git_branch"], "filesystem": ["read_text_file"]}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(MCPServer(commands(repository)[name])) for name in names}
        catalogue = ToolCatalogue(
            tool for name, server in servers.items() for tool in server.tools() if tool.name in names[name]
        )
        torch.manual_seed(0)
        policy = ToolSelectionPolicy(catalogue, fill=lambda request, tool: values)
        config = GRPOConfig(group_size=8, learning_rate=0.05, seed=0, objective=ObjectiveConfig(entropy_coef=0.03))
        with ToolExecutor(catalogue) as executor:
            rewards = ToolRewards(executor, {"right": answers}, max_lost_in_a_row=1_000)
            trainer = GRPOTrainer(config=config, policy=policy, reward_model=rewards)
            first = trainer.train(list(ANSWERS), num_iterations=3, progress=False)
            assert [metrics[SERVER_LOST] for metrics in first] == [0, 0, 0]

            [process] = processes_of("mcp-server-filesystem")
            os.kill(process, signal.SIGKILL)
            later = trainer.train(list(ANSWERS), num_iterations=23, progress=False)
            assert all(metrics[SERVER_LOST] == metrics["rows/dropped"] > 0 for metrics in later[:3])
            chosen = policy.tool_probabilities(list(ANSWERS))
            assert chosen[0, 0] > 0.8, "the other servers' tools are learned meanwhile"
            assert chosen[1, 1] > 0.8
            [result] = executor.run([ToolCall(tool="read_text_file", arguments={"path": values["path"]})])
            assert isinstance(result.error, ServerLostError)
            assert "said last: Client does not support MCP Roots" in str(result.error)
            assert "leave its `with` block, and enter it again" in str(result.error)

            servers["filesystem"].__exit__()
            servers["filesystem"].__enter__()
            last = trainer.train(list(ANSWERS), num_iterations=43, progress=False)
            assert [metrics[SERVER_LOST] for metrics in last] == [0] * 20
            assert last[-1]["rewards/mean"] > 0.8

"""Environments of OpenEnv, TextWorld and verifiers, by the code that `docs/agents.md` shows."""

import itertools
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from adapters.agents import AgentPolicy, Conversation
from tests.support.agents import Scripted
from tests.unit.adapters.agents.test_conversations import sampled_runs

pytest.importorskip("verifiers", reason="the frameworks need a separate environment: make test-frameworks")

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # of the packages

ROOT = Path(__file__).resolve().parents[2]


def held(package: str, script: Scripted, *replaced: tuple[str, str]) -> list[Conversation]:
    """The conversations of the page's code that imports a package. The first of two texts is replaced by the second."""
    page = (ROOT / "docs/agents.md").read_text(encoding="utf-8")
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if package in code)
    names: dict[str, Any] = {"AgentPolicy": AgentPolicy, "model": script.policy}
    for old, new in replaced:
        assert old in code
        code = code.replace(old, new)
    exec(code, names)
    (rows,) = names["conversations"]
    return rows


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server of OpenEnv."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "tests.frameworks.openenv_server", str(port)], cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


WORTH = {"it is 1": 0.25, "it is 22": 0.5, "none": 0.0, "it is 4444": 1.0}
"""What the environment of the server gives for each answer: a quarter for each digit."""


def answering() -> Scripted:
    """Gives the answers in turn."""
    answers = itertools.cycle(WORTH)
    return Scripted(lambda text: next(answers), max_new_tokens=100, positions=16_384)


def test_an_environment_of_openenv_is_played_over_its_server(server: str) -> None:
    rows = held("class OpenEnv", answering(), ("http://127.0.0.1:8000", server))
    assert len(rows) == 8
    for row in rows:
        assert row.ended_by == "environment", row.info
        assert list(row.rewards) == [WORTH[turn.message["content"]] for turn in row.turns]
        assert [message["content"] for message in row.messages if message["role"] == "user"][:2] == [
            "a digit please",
            "another one",
        ]
    assert len({row.rewards for row in rows}) > 1


def test_an_environment_of_verifiers_is_an_agent_program(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own harness asks the endpoint, and the environment of OpenEnv rewards what was said."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")  # uv is there
    script = answering()
    rows = held("import verifiers", script, ("http://127.0.0.1:8000", server))
    assert len(rows) == 2
    recorded = Counter(tuple(run) for row in rows for segment in row.segments for run in sampled_runs(segment))
    assert recorded == Counter(map(tuple, script.said)), "every sampled token is recorded"
    for row in rows:
        assert row.ended_by == "environment", row.info
        assert len(row.turns) == 2
        assert row.reward == sum(WORTH[turn.message["content"]] for turn in row.turns)
        assert "a digit please" in row.messages[0]["content"]


def won(file: str, moves: list[str], *replaced: tuple[str, str]) -> list[Conversation]:
    """Eight conversations that play a game of TextWorld with these moves."""

    def plays(text: str) -> str:
        return moves[text.count("<|im_start|>assistant") - 1]

    return held("class TextWorld", Scripted(plays, max_new_tokens=100, positions=16_384), ("game.z8", file), *replaced)


def errors_in_parallel(file: str, moves: list[str]) -> list[str]:
    """The errors of games that are played at the same time."""
    return [row.info["error"] for row in won(file, moves, (", one_at_a_time=True", "")) if row.ended_by == "error"]


def test_a_game_of_textworld_is_won_with_its_walkthrough_but_not_beside_others(tmp_path: Path) -> None:
    """Two moves win it. The last one adds the only point. Its parser is not safe in several threads, and keeps what it has
    read, so the games that are played at the same time have a process of their own."""
    from textworld import GameOptions, make

    options = GameOptions()
    options.nb_rooms, options.nb_objects, options.quest_length, options.seeds = 2, 3, 2, 1
    options.path = str(tmp_path / "game.z8")
    file, game = make(options)
    moves = game.metadata["walkthrough"]
    assert len(moves) == 2

    rows = won(file, moves)
    assert len(rows) == 8
    for row in rows:
        assert (row.ended_by, row.rewards) == ("environment", (0.0, 1.0)), row.info
        assert "Your score has just gone up by one point." in row.messages[-1]["content"]
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        assert other.submit(errors_in_parallel, file, moves).result()

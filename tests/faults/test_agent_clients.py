"""Agent programs whose clients are never closed use up neither files nor memory."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("client", ["httpx", "openai", "openai, async", "pydantic-ai"])
def test_a_thousand_conversations_leave_no_file_open(
    client: str, record_property: Callable[[str, object], None]
) -> None:
    """At most 20 are open after any of 20 rounds, and the second half needs at most 10 MB more."""
    command = [sys.executable, "-m", "benchmarks.agent_clients", "--conversations", "1000", "--only", client]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    num_files, growth = done.stdout.split()
    record_property(client, f"{num_files} open files, {growth} MB")
    assert int(num_files) <= 20
    assert float(growth) <= 10

"""Many conversations of agent programs whose clients are never closed, in a process of their own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def soak(client: str, num_conversations: int) -> tuple[int, float, float]:
    """The most open files after any of 20 rounds, and the MB that ten rounds need more: resident, and in use. Nothing is an
    error."""
    command = [sys.executable, "-m", "benchmarks.agent_clients", "--only", client]
    command += ["--conversations", str(num_conversations)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-3000:]
    num_files, growth, in_use = done.stdout.split()
    return int(num_files), float(growth), float(in_use)

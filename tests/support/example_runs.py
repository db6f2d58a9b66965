"""Examples, run as a user runs them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUMBER = r"\d+\.\d+"

STRICT = [
    *("-W", "error"),
    *("-W", "ignore:ToolExecutor's workers"),
    *("-W", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
"""Options of Python: a warning is an error, but for what an executor says where the tests are not run as root, and for what
PEFT calls in transformers."""


def run_example(name: str, *arguments: str, folder: Path) -> str:
    """What `python -m examples.NAME` prints, started in `folder`: nothing may depend on where it is run from."""
    return example_process(name, *arguments, folder=folder).stdout


def example_process(
    name: str, *arguments: str, folder: Path, options: Sequence[str] = STRICT
) -> "subprocess.CompletedProcess[str]":
    """The same with what it writes to its standard error, where progress is shown. `options` are Python's."""
    process = subprocess.run(
        [sys.executable, *options, "-m", f"examples.{name}", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process

"""What a call prints when the output is a pipe, which is written in blocks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from grpo.rewards import Call, call_in_process

def speak():
    print("inside")
    print("warning", file=sys.stderr)

print("before")
call_in_process([Call(name="judge", function=speak)], timeout=60.0)
print("after")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="this system has no fork")
def test_what_a_call_prints_appears_once_and_in_order() -> None:
    root = Path(__file__).resolve().parents[3]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=root, env=buffered, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == ["before", "inside", "after"]
    assert done.stderr.splitlines() == ["warning"]

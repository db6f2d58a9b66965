"""Programs in processes of their own: what they print, and those that start further processes and are ended together."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def printed_by(*arguments: object, folder: Path = ROOT, seconds: float | None = None, **variables: str) -> str:
    """What `python ARGUMENTS` prints, started in `folder`. The test fails if the program fails, or needs more seconds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_with_children(*arguments: str, output: Path, seconds: float, **variables: str) -> str:
    """Run `python ARGUMENTS`, which may start other processes, and return what all of them print.

    A process that still waits after so many seconds fails the test, and no process is left.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = output.read_text()[-6000:]
    assert code is not None, f"The processes wait for one another after {seconds} seconds:\n{said}"
    assert code == 0, said
    return said

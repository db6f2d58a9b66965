"""Main programs that make an executor: their own functions as tools, and the cleanup when a program ends or is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tool_executors import BUBBLEWRAP_DAILY, LINUX, LONG, OWN_USERS, exists, soon

pytestmark = [*LINUX, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[5]
SCRIPT = """
import os, sys, time
import tests.support.light_packages
from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.execution.executor import ToolExecutor
from adapters.tools.execution.options import ExecutorOptions
from tests.support.tool_functions import descendants

def five(a: int) -> int:
    "Return a number."
    return a

print("imported", __name__, flush=True)
"""
MAIN = """
if __name__ == "__main__":
    executor = ToolExecutor(ToolCatalogue([Tool.from_function(five)]), options=ExecutorOptions(confinement=sys.argv[2]))
    print(executor.run([ToolCall(tool="five", arguments={"a": 5})])[0].output)
    print(executor.root, *(number for number, _ in descendants(os.getpid())), flush=True)
    time.sleep(float(sys.argv[1]))
"""


def start(folder: Path, ending: str, *command: str) -> "subprocess.Popen[str]":
    """Run the script with this ending, as a file or as `command`."""
    file = folder / "script_with_tools.py"
    file.write_text(SCRIPT + ending)
    return subprocess.Popen(
        [sys.executable, *(command or [str(file), "0", "auto"])], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}, cwd=folder,
    )  # fmt: skip


def seen_in(lines: list[str]) -> tuple[list[int], Path]:
    """The processes that the program has started, and the tools' folder, as `MAIN` prints them."""
    imported, output, printed = lines
    assert imported.strip() == "imported __main__", "not a second time, in the fork server"
    assert output.strip() == "5"
    root, *numbers = printed.split()
    return [int(number) for number in numbers], Path(root)


@pytest.mark.parametrize("kind", BUBBLEWRAP_DAILY)
def test_tools_may_be_defined_in_the_main_program_and_end_with_it(tmp_path: Path, kind: str) -> None:
    process = start(tmp_path, MAIN, "-m", "script_with_tools", "0", kind)
    out, errors = process.communicate(timeout=LONG)
    assert process.returncode == 0
    assert not OWN_USERS or all("cannot read all of Python" in line for line in errors.splitlines()[::2])
    started, root = seen_in(out.splitlines())
    assert len(started) >= 2, "a fork server and a worker"
    assert soon(lambda: not any(exists(pid) for pid in started) and not root.exists())


@pytest.mark.parametrize("kind", BUBBLEWRAP_DAILY)
def test_a_program_that_is_killed_leaves_no_process_and_no_folder(tmp_path: Path, kind: str) -> None:
    process = start(tmp_path, MAIN, str(tmp_path / "script_with_tools.py"), "1000", kind)
    started, root = seen_in([process.stdout.readline() for _ in range(3)])
    assert len(started) >= 2
    assert all(exists(pid) for pid in started)
    assert root.is_dir()
    process.kill()
    process.communicate()
    assert soon(lambda: not any(exists(pid) for pid in started) and not root.exists())


def refusal(process: "subprocess.Popen[str]") -> str:
    """The last line of a program that ends with an error."""
    _, errors = process.communicate(timeout=LONG)
    assert process.returncode == 1
    return errors.splitlines()[-1]


def test_a_main_program_with_tools_that_has_no_guard_or_is_no_file_is_refused(tmp_path: Path) -> None:
    unguarded = MAIN.replace('if __name__ == "__main__":', "if True:").replace("sys.argv[2]", repr("user"))
    assert "Create it under `if __name__ == '__main__':`" in refusal(start(tmp_path, unguarded))
    no_file = start(tmp_path, "", "-c", SCRIPT + MAIN, "0", "auto")
    assert "Move the functions to a module, and import them" in refusal(no_file)
    process = start(tmp_path, """
from tests.support.tool_functions import add
executor = ToolExecutor(ToolCatalogue([Tool.from_function(add)]))
print(executor.run([ToolCall(tool="add", arguments={"a": 5})])[0].output)
""")  # fmt: skip
    out, _ = process.communicate(timeout=LONG)
    assert (process.returncode, out.splitlines()) == (0, ["imported __main__", "6"])


def test_an_interrupt_while_the_tools_are_imported_ends_the_fork_server(tmp_path: Path) -> None:
    (tmp_path / "slow_there.py").write_text("""
import os, time

if "MODEL_AGNOSTIC_GRPO_TOOL_WORKER" in os.environ:
    os.close(os.open("begun", os.O_CREAT))
    time.sleep(600)

def one() -> int:
    "Return a number."
    return 1
""")
    process = start(tmp_path, """
import slow_there, tempfile
tempfile.tempdir = sys.path[0]
try:
    ToolExecutor(ToolCatalogue([Tool.from_function(slow_there.one)]), options=ExecutorOptions(confinement="user"))
except KeyboardInterrupt:
    print(list(descendants(os.getpid())))
""")  # fmt: skip
    assert soon(lambda: [*tmp_path.glob("*/begun")])
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=LONG)
    assert out.splitlines() == ["imported __main__", "[]"]
    assert not [*tmp_path.glob("grpo-tools-*")]

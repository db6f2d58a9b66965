"""Try the installed wheel where only the core's dependencies are installed: `python -I try_wheel.py README.md EXAMPLE.py ...`.

Every module of `grpo` and `adapters.bandits` is imported, the blocks of Python in the page and the examples run as typed, the
commands of the wheel print their help, and at the end no package was imported that the core does not depend on.
"""

import contextlib
import importlib
import io
import pkgutil
import re
import runpy
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.metadata import distribution, packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "model-agnostic-grpo"
CORE = {"torch", "numpy", "typing-extensions", "jaxtyping", "safetensors", "tqdm"}
NOT_IMPORTED = {"adapters.bandits.environments", "grpo.__main__"}
"""The first needs Gymnasium. The second is a program."""
PROGRAMS = ("grpo", "adapters.bandits.demo")
"""Run as `python -m`, if the wheel has them."""
BLOCK = re.compile(r"(?P<above>[^\n]*)\n+^```python\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- (not run|needs [\w-]+) -->")
"""Stands above a block that is an excerpt, or needs an extra."""


def normalized(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def core_distributions(name: str = DISTRIBUTION) -> set[str]:
    """The distribution and what it depends on, directly and indirectly, without extras."""
    found, new = set[str](), {normalized(name)}
    while new:
        found |= new
        lines = [line for each in new for line in requires(each) or () if "extra ==" not in line]
        names = {normalized(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines}
        new = {each for each in names - found if is_installed(each)}  # a line may be for another system
    return found


def is_installed(name: str) -> bool:
    """Whether a distribution is installed."""
    try:
        distribution(name)
    except ImportError:
        return False
    return True


def imported_distributions() -> set[str]:
    """The distributions of which a module is imported now."""
    names = packages_distributions()
    roots = {module.partition(".")[0] for module in list(sys.modules)}
    return {normalized(each) for root in roots for each in names.get(root, ())}


def blocks(page: str) -> list[str]:
    """The blocks of Python in a page that run with the core only."""
    return [found["code"] for found in BLOCK.finditer(page) if not NOT_RUN.fullmatch(found["above"].strip())]


def import_all_modules() -> int:
    """Import every module that needs the core only. Returns their number."""
    names = ["grpo", "adapters.bandits"]
    for package in list(names):
        found = pkgutil.walk_packages(importlib.import_module(package).__path__, prefix=f"{package}.")
        names += [module.name for module in found if module.name not in NOT_IMPORTED]
    for name in names:
        importlib.import_module(name)
    return len(names)


TASK = """
from adapters.bandits import SoftmaxPolicy

def task():
    return SoftmaxPolicy(3), lambda states, actions: [float(action) for action in actions], ["a state", "another"]
"""
COMMANDS = (
    *("--help", "--version", "presets", "presets dapo", "demo", "check own_task:task"),
    *("train own_task:task settings.json --out run", "compare own_task:task run", "report run"),
    "train own_task:task settings.yaml --out other",
)
"""What a newcomer types after `grpo`. Only the last one needs a package, PyYAML."""


def run_every_command(grpo: Sequence[str | Path], folder: Path) -> list[str]:
    """Run `COMMANDS` in a folder. Each of them works, or says in one line what it needs. Returns the lines that say so."""
    (folder / "own_task.py").write_text(TASK)
    for name in ("settings.json", "settings.yaml"):
        (folder / name).write_text('{"config": {"seed": 0}, "train": {"num_iterations": 2}}')
    needs = []
    for command in COMMANDS:
        done = subprocess.run([*grpo, *command.split()], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            needs += [done.stderr]
            assert done.stderr.count("\n") == 1, f"grpo {command}: {done.stdout}{done.stderr}"
            assert "pip install" in done.stderr, f"grpo {command}: {done.stderr}"
    return needs


def run_commands() -> list[str]:
    """Let each command and each program of the wheel print its help, and run the commands. Returns their names."""
    scripts = [entry.name for entry in distribution(DISTRIBUTION).entry_points if entry.group == "console_scripts"]
    programs = [name for name in PROGRAMS if find_spec(f"{name}.__main__" if name == "grpo" else name) is not None]
    for name in scripts:
        subprocess.run([Path(sysconfig.get_path("scripts")) / name, "--help"], check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder:
        needs = run_every_command([Path(sysconfig.get_path("scripts")) / "grpo"], Path(folder))
    assert len(needs) == 1, needs
    for name in programs:
        subprocess.run([sys.executable, "-I", "-m", name, "--help"], check=True, stdout=subprocess.DEVNULL)
    return scripts + [f"python -m {name}" for name in programs]


def main(page: Path, *examples: Path) -> None:
    """Try everything, and print what was done."""
    import grpo

    installed = Path(sysconfig.get_path("purelib")) / "grpo" / "__init__.py"
    assert Path(grpo.__file__) == installed, f"grpo was imported from {grpo.__file__}, not from {installed}"
    assert grpo.__version__ == distribution(DISTRIBUTION).version
    num_modules = import_all_modules()
    codes = blocks(page.read_text(encoding="utf-8"))
    assert codes, f"{page} has no block of Python"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for code in codes:
            exec(compile(code, page.name, "exec"), {"__name__": "__main__"})
        for example in examples:
            runpy.run_path(str(example), run_name="__main__")
    commands = run_commands()
    allowed = core_distributions()
    others = imported_distributions() - allowed
    assert allowed >= CORE, CORE - allowed
    assert not others, (
        f"These packages were imported, and the core does not depend on them: {', '.join(sorted(others))}"
    )
    print(
        f"{num_modules} modules, {len(codes)} blocks of {page}, {len(examples)} examples, commands: {commands or 'none'}"
    )
    print(f"Imported packages: {', '.join(sorted(imported_distributions()))}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

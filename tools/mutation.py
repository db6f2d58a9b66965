"""Mutation testing of `grpo` and `adapters`: change one place of the source, run the tests, and see whether a test fails.

    python tools/mutation.py --mutants 100 --seed 0
    python tools/mutation.py --mutants 200 --seed 0 adapters

A mutant is a copy of the source with one operator, constant, condition or statement changed. The mutants are drawn at random
from all places of `grpo` or of the given paths, with a seed. Each mutant is run with `-x` against the tests that mirror its
module in `tests/unit`. If they pass, a mutant of `grpo` is run against `tests/property`, and then against all unit tests of the
core, and a mutant of `adapters` against all unit tests of its adapter. A mutant is killed when a test fails or a run exceeds
its time limit. Survivors are printed: each shows a missing test, or a change without an effect. Changes
without an effect are listed with a reason in `tools/equivalent_mutants.toml` and are not counted. The exit status is 1 when
fewer mutants are killed than `--at-least`.

The source is changed in temporary copies of the checkout, one per worker, never in the checkout itself.
"""

import argparse
import ast
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
Stage = Literal["mirror", "property", "core", "adapter"]
STAGE_SECONDS: dict[Stage, int] = {"mirror": 600, "property": 600, "core": 600, "adapter": 1800}
"""The time limit of each stage."""
TOO_LONG = "The tests took too long."

OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*", ast.MatMult: "*",
    ast.BitAnd: "|", ast.BitOr: "&", ast.BitXor: "&", ast.LShift: ">>", ast.RShift: "<<",
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip
"""Maps each operator to its replacement."""

Outcome = Literal[Stage, "time limit", "survived", "equivalent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file."""

    path: str
    """The changed file, relative to the checkout."""
    line: int
    """The line of the change, from 1."""
    before: str
    """The changed lines as they are in the checkout."""
    after: str
    """The changed lines as they are in the mutant."""
    source: str
    """The whole text of the mutant's file."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}\n    - {self.before}\n    + {self.after}"


class Sites(ast.NodeVisitor):
    """Collects `(start, end, replacement)` for every place of a source text that a mutant may change."""

    def __init__(self, text: str) -> None:
        self.found: list[tuple[int, int, str]] = []
        self._bytes = text.encode()
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.visit(ast.parse(text))

    def _span(self, node: ast.AST) -> tuple[int, int]:
        """Return the byte offsets at which `node` starts and ends."""
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._bytes[start:end].decode()

    def _replace(self, node: ast.AST, replacement: str) -> None:
        self.found.append((*self._span(node), replacement))

    def _operator(self, left: ast.AST, operator: ast.AST, right: ast.AST) -> None:
        """Replace the operator between two operands. Parentheses around the operands stay."""
        start, end = self._span(left)[1], self._span(right)[0]
        between = self._bytes[start:end].decode()
        old = between.strip("()\\ \n\t")
        if "#" not in between and old:
            self.found.append((start, end, between.replace(old, OPERATORS[type(operator)], 1)))

    def _condition(self, test: ast.expr) -> None:
        self._replace(test, f"(not ({self._text(test)}))")

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._operator(node.left, node.op, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._operator(left, node.op, right)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self._operator(left, operator, right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self._replace(node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._replace(node, f"{node.value + 1!r}")

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        self._condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._condition(test)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) or "assert_never" in ast.unparse(node):
            return  # a docstring, an ellipsis, or a line that is never reached
        self._replace(node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass")
        start, end = self._span(node.target)[1], self._span(node.value)[0]
        self.found.append((start, end, f" {OPERATORS[type(node.op)]}= "))
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass")  # what the message says is not mutated

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and ast.unparse(node.value) != "None":
            self._replace(node, "return None")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)  # but not the annotation

    def visit_arg(self, node: ast.arg) -> None:
        """Do not change the annotation of a parameter."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        for statement in node.body:  # but not the decorators and the annotation of what it returns
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Do not change f-strings, because they are messages."""


def mutants_of(path: str, text: str) -> Iterator[Mutant]:
    """Return every mutant of a file that compiles."""
    data = text.encode()
    for start, end, replacement in Sites(text).found:
        first = data.rfind(b"\n", 0, start) + 1
        last = len(data) if (newline := data.find(b"\n", end)) < 0 else newline
        lines = (data[first:start] + replacement.encode() + data[end:last]).decode()
        source = data[:first].decode() + lines + data[last:].decode()
        try:
            ast.parse(source)
        except SyntaxError:
            continue
        yield Mutant(
            path=path,
            line=data.count(b"\n", 0, start) + 1,
            before=" ".join(data[first:last].decode().split()),
            after=" ".join(lines.split()),
            source=source,
        )


def drawn(num_mutants: int, seed: int, only: Sequence[str]) -> list[Mutant]:
    """Draw mutants without replacement, of the files whose path starts with an entry of `only`. No entry: of `grpo`."""
    every = [
        mutant
        for file in sorted([*ROOT.glob("grpo/**/*.py"), *ROOT.glob("adapters/**/*.py")])
        if (path := file.relative_to(ROOT).as_posix()).startswith(tuple(only) or "grpo/")
        for mutant in mutants_of(path, file.read_text(encoding="utf-8"))
    ]
    print(f"{len(every)} places can be changed; {min(num_mutants, len(every))} are drawn with seed {seed}.", flush=True)
    return random.Random(seed).sample(every, min(num_mutants, len(every)))


def mirror_of(path: str, root: Path = ROOT) -> list[str]:
    """Return the tests that mirror a module: the test files with its name, else its package's tests, else all core tests."""
    *rooms, module = Path(path).with_suffix("").parts
    rooms = rooms[1:] if rooms[0] == "grpo" else rooms  # the tests of `grpo` have no folder of that name
    room = root / "tests" / "unit" / Path(*rooms)
    of_module = sorted(room.glob(f"test_{module}*.py"))
    of_room = [room] if rooms and room.is_dir() else []
    return [test.relative_to(root).as_posix() for test in of_module or of_room] or core_of(root)


def stages_of(path: str, root: Path = ROOT) -> dict[Stage, list[str]]:
    """Return the tests that a mutant of this file is run against, in this order."""
    if path.startswith("grpo/"):
        return {"mirror": mirror_of(path, root), "property": ["tests/property"], "core": core_of(root)}
    adapter = "tests/unit/adapters/" + Path(path).parts[1]
    return {
        "mirror": mirror_of(path, root),
        "adapter": [adapter if (root / adapter).is_dir() else "tests/unit/adapters"],
    }


def core_of(root: Path = ROOT) -> list[str]:
    """Return all unit tests of the core: the files in `tests/unit`, and the folders that mirror a subpackage of `grpo`."""
    unit = root / "tests" / "unit"
    rooms = [
        unit / room.name
        for room in (root / "grpo").glob("*/")
        if (unit / room.name).is_dir() and room.name != "__pycache__"
    ]
    return [test.relative_to(root).as_posix() for test in sorted([*rooms, *unit.glob("test_*.py")])]


def failure_of(tree: Path, tests: Sequence[str], seconds: int, *, write_bytecode: bool = False) -> str | None:
    """Run the daily tests in `tree`. Return their output if one of them fails, and None if all pass within the seconds.

    Files that have slow tests only pass, because none of them is run.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not write_bytecode:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    try:
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=seconds, text=True)
    except subprocess.TimeoutExpired:
        return TOO_LONG
    if run.returncode not in (0, 1, 2, 5):  # all passed, some failed, a module could not be imported, or none was run
        raise RuntimeError(f"pytest ended with status {run.returncode}:\n{run.stdout[-3000:]}{run.stderr[-3000:]}")
    return run.stdout if run.returncode in (1, 2) else None


def outcome_of(mutant: Mutant, tree: Path) -> Outcome:
    """Write the mutant into `tree`, run its tests, and put the original file back."""
    file = tree / mutant.path
    original, status = file.read_bytes(), file.stat()
    try:
        file.write_text(mutant.source, encoding="utf-8")
        os.utime(file, (status.st_atime, status.st_mtime + 10))  # compiled files are told apart by time and size
        for stage, tests in stages_of(mutant.path, tree).items():
            failure = failure_of(tree, tests, STAGE_SECONDS[stage])
            if failure is not None:
                return "time limit" if failure == TOO_LONG else stage
        return "survived"
    finally:
        file.write_bytes(original)
        os.utime(file, (status.st_atime, status.st_mtime))


def copy_checkout(folder: Path) -> Path:
    """Copy every file that git tracks or would track into `folder`, which becomes a repository, and return `folder`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for arguments in (["init", "--quiet"], ["add", "--all"]):  # some tests read what git tracks
        subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)
    return folder


def listed_as_equivalent() -> dict[tuple[str, str, str], str]:
    """Return the hand-written list of mutants that change no behaviour: (path, before, after) -> the reason."""
    entries = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("mutant", [])
    return {(entry["path"], entry["before"], entry["after"]): entry["reason"] for entry in entries}


def run_all(mutants: Sequence[Mutant], num_workers: int) -> list[tuple[Mutant, Outcome]]:
    """Run every mutant, print a line for each, and return the outcomes."""
    equivalent = listed_as_equivalent()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for worker in range(num_workers):
            trees.put(copy_checkout(Path(folder) / str(worker)))

        def judge(mutant: Mutant) -> tuple[Mutant, Outcome, float]:
            if (mutant.path, mutant.before, mutant.after) in equivalent:
                return mutant, "equivalent", 0.0
            tree, start = trees.get(), time.perf_counter()
            try:
                return mutant, outcome_of(mutant, tree), time.perf_counter() - start
            finally:
                trees.put(tree)

        print("Running the tests on the unchanged source ...", flush=True)
        with ThreadPoolExecutor(num_workers) as pool:
            folders = [Path(folder) / str(worker) for worker in range(num_workers)]
            tests = sorted({test for one in mutants for stage in stages_of(one.path).values() for test in stage})
            seconds = sum(STAGE_SECONDS.values())
            for failure in pool.map(lambda tree: failure_of(tree, tests, seconds, write_bytecode=True), folders):
                if failure is not None:
                    raise SystemExit(
                        f"The tests fail on the unchanged source. Make them pass first.\n{failure[-3000:]}"
                    )
            results: list[tuple[Mutant, Outcome]] = []
            for mutant, outcome, seconds in pool.map(judge, mutants):
                results.append((mutant, outcome))
                how = outcome if outcome in ("survived", "equivalent") else f"killed by {outcome}"
                print(f"[{len(results):3d}/{len(mutants)}] {seconds:5.0f} s  {how:18s} {mutant}", flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Mutation testing of grpo and adapters.")
    parser.add_argument("--mutants", type=int, default=100, help="how many mutants are drawn (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn (default: 0)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="mutants at the same time (default: cores)"
    )
    parser.add_argument("--at-least", type=float, default=0.9, help="the fraction to be killed (default: 0.9)")
    parser.add_argument(
        "only", nargs="*", help="beginnings of paths, for example grpo/surrogates.py or adapters/llm (default: grpo/)"
    )
    options = parser.parse_args(arguments)

    start = time.perf_counter()
    results = run_all(drawn(options.mutants, options.seed, options.only), options.workers)
    counted = [(mutant, outcome) for mutant, outcome in results if outcome != "equivalent"]
    survivors = [mutant for mutant, outcome in counted if outcome == "survived"]
    killed = len(counted) - len(survivors)
    print(f"\n{killed} of {len(counted)} mutants killed in {(time.perf_counter() - start) / 60:.0f} min:", end=" ")
    print(
        ", ".join(
            f"{sum(outcome == stage for _, outcome in counted)} by {stage}" for stage in (*STAGE_SECONDS, "time limit")
        ),
        end="; ",
    )
    print(f"{len(results) - len(counted)} more have no effect (tools/equivalent_mutants.toml).")
    for mutant in survivors:
        print(f"survived: {mutant}")
    return int(killed < options.at_least * len(counted))


if __name__ == "__main__":
    sys.exit(main())

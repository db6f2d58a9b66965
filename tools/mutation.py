"""Mutation testing of `grpo` and `adapters`: change one place of the source, run the tests, and see whether a test fails.

    python tools/mutation.py --mutants 100 --seeds 0 1 2
    python tools/mutation.py adapters --mutants 200 --seeds 0

A mutant is a copy of the source with one operator, constant, condition or statement changed. The mutants are drawn at random
from all places of `grpo` or of the given paths, with a seed. First, the daily tests run once on the unchanged source, and
coverage notes which tests execute which line. Then each mutant is run with `-x` against the tests that execute its line,
beginning with the tests that are named after its module. A mutant is killed when a test fails, which is printed, or when the
run exceeds its time limit. Survivors are printed: each shows a missing test, or a change without an effect, or a line that only
other processes execute, whose coverage is not noted. `tools/equivalent_mutants.toml` lists changes without an effect, with a
reason; they are not counted. The exit status is 1 when fewer mutants are killed than `--at-least`.

The source is changed in temporary copies of the checkout, one per worker, never in the checkout itself. The coverage of the
unchanged source stays in `.mutants/`, under a hash of all files, for the next run on the same files.
"""

import argparse
import ast
import itertools
import multiprocessing
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
DAILY = ["-m", "not slow and not faults", "-q", "-p", "no:cacheprovider"]
SECONDS = 3600
"""The time limit of a mutant's tests. One test may take `SECONDS_OF_TEST`."""
SECONDS_OF_TEST = 300
NO_MUTANT = "tests/unit/test_config.py"
"""Tests that must pass on the unchanged source, so that a fault of this script is not counted as a killed mutant."""
FORKED = multiprocessing.get_context("forkserver")
"""Each mutant's process starts with the modules that most tests import, because importing them takes longer than most tests."""

OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*", ast.MatMult: "*",
    ast.BitAnd: "|", ast.BitOr: "&", ast.BitXor: "&", ast.LShift: ">>", ast.RShift: "<<",
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip
"""Maps each operator to its replacement."""

Outcome = Literal["killed", "time limit", "survived", "equivalent"]


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


def every_mutant(only: Sequence[str]) -> list[Mutant]:
    """Return all mutants of the files whose path starts with an entry of `only`. No entry: of `grpo`."""
    return [
        mutant
        for file in sorted([*ROOT.glob("grpo/**/*.py"), *ROOT.glob("adapters/**/*.py")])
        if (path := file.relative_to(ROOT).as_posix()).startswith(tuple(only) or "grpo/")
        for mutant in mutants_of(path, file.read_text(encoding="utf-8"))
    ]


def executors_of(path: str, line: int, executed: coverage.CoverageData) -> list[str]:
    """Return the tests that a mutant of this line is run against: node ids, and files of which all tests are run.

    These are the tests that execute the line, or, in a statement of several lines, the noted line before it. A line that a
    fixture executes counts for the whole file, because other tests of the file may share the fixture. A line that is only
    executed at import counts for all tests of its module.
    """
    contexts = executed.contexts_by_lineno(path)
    nearest = max((noted for noted in contexts if noted <= line), default=0)
    noted = {context for context in contexts.get(nearest, []) if context}
    noted = noted or {context for of_line in contexts.values() for context in of_line if context}
    files = {context.split("::")[0] for context in noted if context.endswith("|setup")}
    tests = {context.rsplit("|", 1)[0] for context in noted if context.split("::")[0] not in files}
    named = f"/test_{Path(path).stem}"
    return sorted(
        files | tests, key=lambda test: (named not in test, path.startswith("grpo/") and "/adapters/" in test, test)
    )


def executed_by(tree: Path, num_workers: int) -> coverage.CoverageData:
    """Run the daily tests in `tree` with coverage, once for the same files, and return which tests execute which lines."""
    written = subprocess.run(["git", "write-tree"], cwd=tree, check=True, capture_output=True, text=True)
    file = ROOT / ".mutants" / written.stdout.strip()
    if not file.is_file():
        print("Running the daily tests on the unchanged source ...", flush=True)
        file.parent.mkdir(exist_ok=True)
        settings = tree.with_suffix(".ini")
        settings.write_text("[run]\nsource = grpo, adapters\nrelative_files = true\n")
        noting = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
        command = [sys.executable, "-m", "pytest", *DAILY, "-n", str(num_workers), "--dist", "loadfile", *noting]
        environment = {**os.environ, "COVERAGE_FILE": str(tree.with_suffix(".coverage"))}
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if run.returncode != 0:
            raise SystemExit(
                f"The tests fail on the unchanged source. Make them pass first.\n{run.stdout[-3000:]}{run.stderr[-3000:]}"
            )
        shutil.copy2(tree.with_suffix(".coverage"), file)
    data = coverage.CoverageData(str(file))
    data.read()
    return data


def run_tests(tree: Path, tests: Sequence[str]) -> None:
    """Run the daily ones of the tests in `tree`, until one fails, and end this process with pytest's status."""
    os.setsid()  # what the tests start can be killed with them
    os.chdir(tree)
    sys.path[0] = str(tree)
    with tree.with_suffix(".log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        status: int = pytest.main(["-x", *DAILY, f"--timeout={SECONDS_OF_TEST}", *tests])
    except BaseException:  # status 1 is that of a test that fails
        traceback.print_exc()
        status = pytest.ExitCode.INTERNAL_ERROR
    sys.exit(status)


def outcome_of_tests(tree: Path, tests: Sequence[str]) -> Outcome:
    """Run the tests in a process of its own, and say whether one fails in `tree`."""
    process = FORKED.Process(target=run_tests, args=(tree, tests))
    process.start()
    assert process.pid is not None
    process.join(SECONDS)
    status = process.exitcode
    with suppress(ProcessLookupError):  # what the tests have started may still run
        os.killpg(process.pid, signal.SIGKILL)
    if status is None:
        return "time limit"
    if status in (0, 5):  # passed, none run
        return "survived"
    # Failed, or a file or conftest.py could not be imported. What a mutant leaves open may then end pytest with another status.
    # Some tests send signals, which a mutant may let through. Only SIGKILL says nothing: a system without memory sends it.
    if status in (1, 2, 4) or (status < 0 and status != -signal.SIGKILL) or failed_test(tree):
        return "killed"
    log = tree.with_suffix(".log").read_text(errors="replace")
    raise RuntimeError(f"pytest ended with status {status}:\n{log[-3000:]}")


def failed_test(tree: Path) -> str:
    """Return the id of the first test that failed in the last run of `tree`, or an empty string."""
    log = tree.with_suffix(".log").read_text(errors="replace")
    ids = re.findall(r"^(?:SUB)?(?:FAILED|ERROR)\b.*? (\S+\.py(?:::.+?)?)(?: - .*)?$", log, re.MULTILINE)
    return ids[0] if ids else ""


def outcome_of(mutant: Mutant, tests: Sequence[str], tree: Path) -> Outcome:
    """Write the mutant into `tree`, run the tests, and put the original file back."""
    if not tests:
        return "survived"
    file = tree / mutant.path
    original, status = file.read_bytes(), file.stat()
    try:
        file.write_text(
            mutant.source, encoding="utf-8"
        )  # Python compiles it again, because the file's time has changed
        return outcome_of_tests(tree, tests)
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


def run_all(mutants: Sequence[Mutant], num_workers: int) -> Iterator[Outcome]:
    """Run every mutant, print a line for each, and yield the outcomes in order."""
    equivalent = listed_as_equivalent()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        first = copy_checkout(Path(folder) / "0")
        executed = executed_by(first, num_workers)
        trees: queue.Queue[Path] = queue.Queue()
        trees.put(first)
        if outcome_of_tests(first, [NO_MUTANT]) != "survived":
            raise SystemExit(f"{NO_MUTANT} fails on the unchanged source, in a process that has imported torch before.")
        for worker in range(1, num_workers):
            trees.put(shutil.copytree(first, Path(folder) / str(worker), symlinks=True))  # with its compiled files

        def judge(mutant: Mutant) -> tuple[Mutant, Outcome, str, float]:
            if (mutant.path, mutant.before, mutant.after) in equivalent:
                return mutant, "equivalent", "", 0.0
            tree, start = trees.get(), time.perf_counter()
            try:
                tests = executors_of(mutant.path, mutant.line, executed)
                outcome = outcome_of(mutant, tests, tree)
                by = f"by {failed_test(tree)}" if outcome == "killed" else f"{len(tests)} tests"
                return mutant, outcome, by, time.perf_counter() - start
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(num_workers) as pool:
            for number, (mutant, outcome, by, seconds) in enumerate(pool.map(judge, mutants), start=1):
                print(f"[{number:3d}/{len(mutants)}] {seconds:5.0f} s  {outcome:10s} {by}\n{mutant}", flush=True)
                yield outcome


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Mutation testing of grpo and adapters.")
    parser.add_argument("--mutants", type=int, default=100, help="how many mutants are drawn per seed (default: 100)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="which mutants are drawn (default: 0)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="mutants at the same time (default: cores)"
    )
    parser.add_argument("--at-least", type=float, default=0.9, help="the fraction to be killed (default: 0.9)")
    parser.add_argument(
        "only", nargs="*", help="beginnings of paths, for example grpo/surrogates.py or adapters/llm (default: grpo/)"
    )
    options = parser.parse_args(arguments)

    os.environ["OMP_NUM_THREADS"] = "1"
    FORKED.set_forkserver_preload(["pytest", "torch._dynamo"])
    every = every_mutant(options.only)
    num_drawn = min(options.mutants, len(every))
    print(f"{len(every)} places can be changed; {num_drawn} are drawn for each seed.", flush=True)
    mutants = [random.Random(seed).sample(every, num_drawn) for seed in options.seeds]
    outcomes = run_all([mutant for of_seed in mutants for mutant in of_seed], options.workers)
    enough = True
    for seed, of_seed in zip(options.seeds, mutants, strict=True):
        results = list(zip(of_seed, itertools.islice(outcomes, len(of_seed)), strict=True))
        counted = Counter(outcome for _, outcome in results)
        num_mutants = len(results) - counted["equivalent"]
        killed = num_mutants - counted["survived"]
        enough &= killed >= options.at_least * num_mutants
        print(
            f"\nSeed {seed}: {killed} of {num_mutants} mutants killed, {counted['time limit']} of them by the time limit; "
            f"{counted['equivalent']} more have no effect (tools/equivalent_mutants.toml)."
        )
        for mutant, outcome in results:
            if outcome == "survived":
                print(f"survived: {mutant}")
        print(flush=True)
    return int(not enough)


if __name__ == "__main__":
    sys.exit(main())

"""CPU time of one iteration, compared with another commit of this repository.

Each commit has a process of its own, with one thread. The two take turns, and each turn makes the same iterations, so that the
machine's load meets both. Iterations: `trainer.step` on the bandit of `benchmarks.overhead`, a CartPole from scratch for 4,000
steps, a HalfCheetah from scratch for 16,000 steps, and a language model of 4 layers with 16 rows of 64 + 32 tokens. Control
is in microseconds per environment step.

    python -m benchmarks.against 42a833e
    python -m benchmarks.against HEAD --turns 2 --cases small   # whether it runs
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
CASES = {
    "small": "1,024 rows, row by row",
    "small_groups": "1,024 rows, state once per group",
    "large": "65,536 rows, row by row",
    "large_groups": "65,536 rows, state once per group",
    "cartpole": "CartPole, an environment step",
    "halfcheetah": "HalfCheetah, an environment step",
    "language_model": "language model",
}


CONTROL = ("cartpole", "halfcheetah")
"""The cases whose seconds are those of an environment step."""


def iteration_of(case: str) -> Callable[[], float]:
    """A function that makes one turn of a case, and returns its CPU seconds per iteration."""
    if case in CONTROL:
        from benchmarks.control_speed import CARTPOLE, HALF_CHEETAH, our_learner

        env_id, num_steps = (CARTPOLE, 4_000) if case == "cartpole" else (HALF_CHEETAH, 16_000)

        def train() -> float:
            spent = our_learner(env_id, num_steps, 0)
            return spent.cpu / spent.steps

        return train
    if case == "language_model":
        from benchmarks.llm_vs_trl import Case, make_model, make_prompts, make_tokenizer, our_iteration

        sizes = Case(prompt=64, completion=32, group=8, rows=16)
        model, num_tokens = make_model(sizes, "cpu"), 32_000
        return _timed(our_iteration(sizes, model, make_tokenizer(num_tokens), make_prompts(sizes, num_tokens)), 1)
    from benchmarks.overhead import GROUP_SIZE, NUM_FEATURES, build

    rows, count = (1024, 40) if case.startswith("small") else (65_536, 1)
    trainer, states = build(case.endswith("groups"))[0], torch.randn(rows // GROUP_SIZE, NUM_FEATURES)
    return _timed(lambda: trainer.step(states), count)


def _timed(iteration: Callable[[], object], count: int) -> Callable[[], float]:
    def turn() -> float:
        start = time.process_time()
        for _ in range(count):
            iteration()
        return (time.process_time() - start) / count

    return turn


def serve(case: str) -> None:
    """Make a turn for each line of the standard input, and print its seconds."""
    from benchmarks._timing import keep_freed_memory

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    turn = iteration_of(case)
    turn()  # the first one imports and allocates
    for _ in sys.stdin:
        print(f"seconds {turn()}", flush=True)


class Server:
    """A process that serves one case in the tree of a commit."""

    def __init__(self, tree: Path, case: str) -> None:
        command = [sys.executable, "-m", "benchmarks.against", "--serve", case]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, cwd=tree, env=environment, text=True, **pipes)

    def turn(self) -> float:
        """The seconds of a turn."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        for line in self._process.stdout:  # programs may print more
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(f"{self._process.args} ended with status {self._process.wait()}. Run it to see the error.")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def compare(other: Path, case: str, turns: int) -> str:
    """The median times of a case in both trees, and the median and the quartiles of their ratios."""
    servers = [Server(ROOT, case), Server(other, case)]
    pairs = []
    try:
        for number in range(turns):
            order = (0, 1) if number % 2 else (1, 0)
            found = {place: servers[place].turn() for place in order}
            pairs.append((found[0], found[1]))
    finally:
        for server in servers:
            server.close()
    factor, unit = (1e6, "us") if case in CONTROL else (1e3, "ms")
    here, there = (factor * statistics.median(side) for side in zip(*pairs, strict=True))
    low, median, high = statistics.quantiles([ours / theirs for ours, theirs in pairs], n=4)
    return f"{here:10.3f} {unit} {there:10.3f} {unit}   ratio {median:.3f} (quartiles {low:.3f} to {high:.3f})"


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--turns", type=int, default=41)
    parser.add_argument("--serve", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", tree, args.commit], cwd=ROOT, check=True)
        try:
            (tree / "benchmarks" / Path(__file__).name).write_text(Path(__file__).read_text())
            print(f"torch {torch.__version__}, 1 thread{'':19s}this tree {args.commit:>13s}")
            for case in args.cases:
                if case == "halfcheetah" and importlib.util.find_spec("mujoco") is None:
                    print(f"{CASES[case]:34s}not run: it needs MuJoCo")
                    continue
                print(f"{CASES[case]:34s}{compare(tree, case, args.turns)}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()

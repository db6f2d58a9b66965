"""How often examples of agents learn their task: a table over seeds, with the worst seed named.

Each run is an example as it is typed, and ends with its share of held-out tasks that are solved with sampled messages. Results
go to a file, a line per run, and a run that is there is not made again: stop the program at any time, and start it again. The
metrics and conversations of an example that writes them stay in a folder beside the file.

    python -m benchmarks.agent_learning                                             # everything, seeds 0 to 9; hours
    python -m benchmarks.agent_learning --tasks calculator --seeds 0 1 --settings "as it is"
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from examples import guessing_game, text_game, tool_agent
from examples.customer_service import __main__ as customer_service


def calculator(seed: int, folder: str, typed: Sequence[str]) -> float:
    """The share of held-out problems with a right answer."""
    shares, _ = tool_agent.train(seed, tool_agent.arguments(["--folder", folder, *typed]))
    return shares[-1]


def service(seed: int, folder: str, typed: Sequence[str]) -> float:
    """The share of 300 held-out scenarios that are solved with sampled messages."""
    args = customer_service.arguments(["--out", folder, "--held-out", "300", *typed])
    return customer_service.run(seed, args)[-1]["solved"]


def text(seed: int, _: str, typed: Sequence[str]) -> float:
    """The share of 500 held-out games that are won."""
    rates, _ = text_game.run(seed, text_game.arguments(typed))
    return rates[-1]


def guessing(seed: int, _: str, typed: Sequence[str]) -> float:
    """The share of 300 games in which the number is found."""
    return guessing_game.train(seed, guessing_game.arguments(typed).iterations)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """An example, and the share that nine of ten seeds should reach."""

    learn: Callable[[int, str, Sequence[str]], float]
    target: float
    settings: dict[str, list[str]]
    """What is typed behind the example's name."""
    quick: list[str]
    """What is typed for a run that learns nothing."""


TASKS = {
    "calculator": Task(
        learn=calculator,
        target=0.85,
        settings={
            "as it is": [],
            "4 updates": ["--updates", "4"],
            "4 updates, 120 iterations": ["--updates", "4", "--iterations", "120"],
        },
        quick=["--scripts", "64", "--warmup-steps", "2", "--iterations", "1"],
    ),
    "customer service": Task(
        learn=service,
        target=0.78,
        settings={
            "as it is": [],
            "240 iterations": ["--iterations", "240"],
            "240 iterations, KL 0.01": ["--iterations", "240", "--kl-coef", "0.01"],
        },
        quick=["--scripts", "24", "--warmup-steps", "2", "--iterations", "1", "--held-out", "4"],
    ),
    "text game": Task(
        learn=text,
        target=0.95,
        settings={
            "as it is": [],
            "60 iterations": ["--iterations", "60"],
            "60 iterations, KL 0.01": ["--iterations", "60", "--kl-coef", "0.01"],
            "60 iterations, 4 updates": ["--iterations", "60", "--updates", "4"],
        },
        quick=["--warmup-steps", "2", "--iterations", "1"],
    ),
    "guessing game": Task(
        learn=guessing,
        target=0.85,
        settings={"as it is": [], "320 iterations": ["--iterations", "320"]},
        quick=["--iterations", "1"],
    ),
}


def made_runs(path: Path) -> dict[tuple[str, str, int], dict[str, float]]:
    """The runs in a file, by task, setting and seed."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {(row["task"], row["setting"], row["seed"]): row["result"] for row in rows}


def report(name: str, setting: str, results: dict[int, dict[str, float]]) -> str:
    """One line of the table."""
    shares = {seed: result["solved"] for seed, result in results.items()}
    worst = min(shares, key=lambda seed: shares[seed])
    quartiles = np.quantile(list(shares.values()), (0.25, 0.5, 0.75))
    reached = sum(share >= TASKS[name].target for share in shares.values())
    columns = [
        f"{reached} of {len(shares)} reach {TASKS[name].target:.0%}",
        " / ".join(f"{100 * share:.1f}" for share in quartiles),
        f"{100 * shares[worst]:.1f} (seed {worst})",
        " ".join(f"{100 * share:.1f}" for share in shares.values()),
        f"{np.median([result['seconds'] for result in results.values()]):.0f}",
    ]
    return f"| {name} | {setting} | {' | '.join(columns)} |"


def main() -> None:
    """Make the runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--settings", nargs="+", help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--quick", action="store_true", help="short runs that learn nothing")
    parser.add_argument("--file", type=Path, default=Path("runs/agent_learning.jsonl"), help="results, a line per run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, {platform.machine()}")
    print(
        "| task | setting | seeds | quartiles, % | worst, % | by seed, % | CPU seconds |\n|---|---|---|---|---|---|---|"
    )
    args.file.parent.mkdir(parents=True, exist_ok=True)
    for name in args.tasks:
        task = TASKS[name]
        for setting, typed in task.settings.items():
            if args.settings and setting not in args.settings:
                continue
            for seed in args.seeds:
                if (name, setting, seed) in made_runs(args.file):
                    continue
                began = time.process_time()
                folder = args.file.with_suffix("") / f"{name}, {setting}".replace(" ", "_")
                solved = task.learn(seed, str(folder), [*typed, *(task.quick if args.quick else ())])
                result = {"solved": solved, "seconds": time.process_time() - began}
                row = {"task": name, "setting": setting, "seed": seed, "result": result}
                with args.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            found = made_runs(args.file)
            print(report(name, setting, {seed: found[name, setting, seed] for seed in args.seeds}), flush=True)


if __name__ == "__main__":
    main()

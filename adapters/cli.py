"""The command `grpo`: try the demo, train a task from a file of settings, check a policy, compare, and write reports.

A task is a function of your own that returns what is trained. Its name is given on the command line only, as MODULE:FUNCTION:

    def task():
        return policy, reward_model, states            # or (policy, reward_model, states, eval_states)

A file of settings has plain values only, in YAML or JSON, so that reading it runs no code:

    preset: bnpo                                       # a recipe of grpo.presets to start from; left out: the defaults
    config: {group_size: 16, objective: {kl_coef: 0.0}}
    train: {num_iterations: 200, eval_every: 20}       # numbers that GRPOTrainer.train takes
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. An error that the user can correct is printed without a traceback, and ends with exit code 2.

    Args:
        arguments: The words after `grpo`. None: those of this process.
    """
    args = _parser().parse_args(arguments)
    from grpo.errors import GRPOError, TrainingInterrupted  # imports torch, which `grpo --help` does not wait for

    from . import commands

    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m` does, so that tasks beside you are found
    try:
        getattr(commands, args.command)(args)
    except TrainingInterrupted as error:
        raise SystemExit(128 + error.signal_number) from None
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has ended
        # or Python would complain once more at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except (GRPOError, ImportError) as error:
        if not isinstance(error, GRPOError) and "pip install" not in str(error):
            raise  # the error of a task's module
        print(f"grpo {args.command}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _parser() -> argparse.ArgumentParser:
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="grpo", description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action=_Version, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a policy on a bandit whose best arm moves, and plot it")
    demo.add_argument("--seed", default="0")
    demo.add_argument("--plot", default="runs/dynamic_bandit.png", help="PNG file to write")

    train = commands.add_parser("train", help="train a task, and keep the run in a folder")
    train.add_argument("task", metavar="MODULE:TASK")
    train.add_argument("settings", nargs="?", type=Path, metavar="SETTINGS.yaml")
    train.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a setting: --set objective.surrogate.high=.28, or an argument of train: --set train.num_iterations=50",
    )
    train.add_argument("--out", type=Path, help="the run's folder; runs/TASK if it is left out")
    train.add_argument("--resume", action="store_true", help="continue the run in the folder")

    check = commands.add_parser("check", help="test whether a policy keeps its contract")
    check.add_argument("policy", metavar="MODULE:POLICY", help="a task, or a policy or a function that makes one")
    check.add_argument("--states", metavar="MODULE:STATES", help="a few states, for a policy that no task returns")
    check.add_argument("--num-samples", type=int, default=4096, help="0 for language models")

    compare = commands.add_parser("compare", help="compare a task's policy before training and with a run's weights")
    compare.add_argument("task", metavar="MODULE:TASK")
    compare.add_argument("folder", type=Path, metavar="RUN", help="a folder that `grpo train` wrote")
    compare.add_argument("--num-actions", type=int, default=8, help="actions sampled in each state")

    report = commands.add_parser("report", help="make one HTML page of a run's folder")
    report.add_argument("folder", type=Path, metavar="RUN")
    report.add_argument("--out", type=Path, help="the page; RUN/report.html if it is left out")

    recipes = commands.add_parser("presets", help="list the recipes, or print the settings of one")
    recipes.add_argument("name", nargs="?")
    return parser


class _Version(argparse.Action):
    """Prints the version, which only the package itself knows."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from grpo import __version__

        print(f"model-agnostic-grpo {__version__}")
        parser.exit()

"""Teach a policy which of 35 tools answers a request, and with which parameters, from what its calls bring in.

    python -m examples.tool_routing            # about a minute; nothing is downloaded
    python -m examples.tool_routing --seed 1

"Which day of the week is it on 2024-05-17, in short?" asks for `weekday_of(date="2024-05-17", form="short")`. The policy reads
a request as a bag of words and chooses a tool, then each parameter that the tool's schema enumerates; dates, numbers and texts
are taken from the request. What it calls is executed, in worker processes (a call that several ask for at once, once). A call
pays 0.5 for the right tool (0.2 for another one of its category), 0.3 for the right parameters, and 0.2 for running to its end.
Nobody says which tool would have been right.

Requests to measure on are put together as no request is that is trained on, and half of them share no word with their tool's
description. At the end two tools are added of which the policy has seen nothing.

Written to runs/tool_routing/seed-0/: confusion.png, accuracy.png, report.json, metrics.jsonl, calls.jsonl, and the policy.
"""

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from adapters.tools import (
    ToolExecutor,
    ToolReport,
    ToolRewards,
    ToolSelectionPolicy,
    ToolTask,
    evaluate_tools,
    plot_accuracy,
    plot_confusion,
    standard_rewards,
)
from adapters.tools.workbench import ADDED_LATER, make_workbench_files, workbench_catalogue, workbench_split
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, JSONLSink, ObjectiveConfig

NUM_TRAIN, NUM_HELD_OUT = 8_000, 660

CONFIG = GRPOConfig(
    group_size=4,
    num_states_per_iteration=128,
    batch_size=256,
    learning_rate=0.02,
    advantage=AdvantageConfig(scale="batch"),
    objective=ObjectiveConfig(aggregation="row_sum", entropy_coef=0.07),
)

NUM_MORE_ITERATIONS = 20
"""After tools were added."""


class LearningCurve:
    """A sink: measures the policy every so often."""

    def __init__(self, policy: ToolSelectionPolicy, held_out: Sequence[ToolTask], calls_per_iteration: int) -> None:
        self.policy, self.held_out, self.calls_per_iteration = policy, held_out, calls_per_iteration
        self.calls: list[int] = []
        self.reports: list[ToolReport] = []
        self.log({}, 0)

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        if iteration % 20 == 0:
            self.calls.append(iteration * self.calls_per_iteration)
            self.reports.append(evaluate_tools(self.policy, self.held_out, self.policy.catalogue))

    def close(self) -> None:
        pass


def share_right(report: ToolReport) -> str:
    """Of all tasks, and of those that share no word with their tool's description."""
    hard = report.by_words["no shared word"]
    overall = report.overall
    return (
        f"right tool {overall.right_tool:6.1%}, right in all {overall.right_call:6.1%}; "
        f"where no word is shared {hard.right_tool:6.1%}, {hard.right_call:6.1%}"
    )


def learn_added_tools(trainer: GRPOTrainer, tasks: Sequence[ToolTask], *, progress: bool = True) -> None:
    """Some iterations more, with requests for all tools, that take nothing from the tools that were known.

    The optimizer goes on: it knows how small the gradients of what is known have become, so it moves what the new tools need
    and little else. Its rate begins at half and falls to 0, so that the last weights are not those of one noisy step. Requests
    for the new tools come four times as often as the others.
    """
    optimizer = trainer.optimizer_step.optimizer
    assert optimizer is not None
    for parameters in optimizer.param_groups:
        parameters["lr"] = parameters["initial_lr"] = trainer.config.learning_rate / 2
    more = GRPOTrainer(
        config=replace(trainer.config, lr_schedule="cosine"),
        policy=trainer.policy,
        reward_model=trainer.reward_model,
        optimizer=optimizer,
    )
    new = [task for task in tasks if task.tool in ADDED_LATER]
    more.train([*tasks, *3 * new], num_iterations=NUM_MORE_ITERATIONS, progress=progress)


def add_tools(trainer: GRPOTrainer, tasks: Sequence[ToolTask], held_out: Sequence[ToolTask]) -> None:
    """Two tools more, and what is chosen then, at once and after some iterations."""
    policy, everything = trainer.policy, workbench_catalogue()
    policy.add_tools(*(everything[name] for name in ADDED_LATER))
    parts = {
        "the new, close to the description": [t for t in held_out if t.tool in ADDED_LATER and t.shares_words],
        "the new, other words": [t for t in held_out if t.tool in ADDED_LATER and not t.shares_words],
        "the others": [t for t in held_out if t.tool not in ADDED_LATER],
    }

    def print_shares(when: str) -> None:
        shares = {name: evaluate_tools(policy, part, everything).overall.right_tool for name, part in parts.items()}
        print(f"{when:30s}right tool " + ", ".join(f"{share:6.1%} of {name}" for name, share in shares.items()))

    print_shares("two tools added:")
    learn_added_tools(trainer, tasks)
    print_shares(f"after {NUM_MORE_ITERATIONS} more iterations:")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=400, help="of GRPO (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="default: runs/tool_routing/seed-SEED")
    args = parser.parse_args()
    folder = args.folder or Path("runs/tool_routing") / f"seed-{args.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "calls.jsonl"):
        (folder / name).unlink(missing_ok=True)  # of an earlier run
    torch.set_num_threads(1)  # the other core runs tools
    torch.manual_seed(args.seed)
    start = time.perf_counter()

    everything = workbench_catalogue()
    catalogue = everything.without(*ADDED_LATER)
    train, held_out = workbench_split(NUM_TRAIN, NUM_HELD_OUT, args.seed, catalogue)
    random.Random(args.seed).shuffle(train)
    print(f"{len(catalogue)} tools in {len(catalogue.categories)} categories; a request of each kind:")
    for task in (train[0], next(task for task in train if not task.shares_words)):
        print(f"  {task.text}\n    -> {task.tool} {dict(task.arguments)}")

    policy = ToolSelectionPolicy(catalogue)
    curve = LearningCurve(policy, held_out, CONFIG.num_states_per_iteration * CONFIG.group_size)
    with ToolExecutor(everything, num_workers=2, log_path=folder / "calls.jsonl") as executor:
        make_workbench_files(executor.root)
        rewards = ToolRewards(executor, standard_rewards(everything), reuse_results=True)
        trainer = GRPOTrainer(config=replace(CONFIG, seed=args.seed), policy=policy, reward_model=rewards)
        with JSONLSink(folder / "metrics.jsonl") as sink:
            trainer.train(train, num_iterations=args.iterations, sinks=[sink, curve])
        before, after = curve.reports[0], evaluate_tools(policy, held_out, catalogue)
        print(f"\n{after}\n")
        print(f"{'before:':30s}{share_right(before)}")
        print(f"{'after:':30s}{share_right(after)}")
        policy.save(folder / "policy")
        add_tools(trainer, *workbench_split(NUM_TRAIN, 20 * len(everything), args.seed, everything))

    plot_confusion({"before": before, "after": after}, folder / "confusion.png")
    lines = {
        "right tool": [report.overall.right_tool for report in curve.reports],
        "right tool, no word shared": [report.by_words["no shared word"].right_tool for report in curve.reports],
        "right in all": [report.overall.right_call for report in curve.reports],
    }
    plot_accuracy({name: (curve.calls, shares) for name, shares in lines.items()}, folder / "accuracy.png")
    after.to_json(folder / "report.json")
    print(f"{time.perf_counter() - start:.0f} s; written: {folder}/")


if __name__ == "__main__":
    main()

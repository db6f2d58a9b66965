"""Teach a policy which of 35 tools answers a request, and with which parameters, from the rewards of its calls.

    python -m examples.tool_routing            # about a minute; nothing is downloaded
    python -m examples.tool_routing --seed 1

"Which day of the week is it on 2024-05-17, in short?" asks for `weekday_of(date="2024-05-17", form="short")`. The policy reads
a request as a bag of words. It chooses a tool, then each enumerated parameter of the tool; dates, numbers and texts are copied
from the request. Worker processes execute the calls, and equal calls of a batch are executed once. A call earns 0.5 for the
right tool (0.2 for another tool of the same category), 0.3 for the right parameters, and 0.2 for a successful execution. The
policy is never told which tool would have been right.

Held-out requests combine words in ways that no training request does, and half of them share no word with their tool's
description. At the end, two tools are added that the policy has never seen.

The script writes confusion.png, accuracy.png, report.json, metrics.jsonl, calls.jsonl and the policy to
runs/tool_routing/seed-0/.
"""

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from adapters.tools import (
    ExecutorOptions,
    ToolExecutor,
    ToolReport,
    ToolRewards,
    ToolSelectionPolicy,
    ToolTask,
    evaluate_tools,
    standard_rewards,
)
from examples.tool_workbench import (
    ADDED_LATER,
    make_workbench_files,
    shares_words,
    workbench_catalogue,
    workbench_split,
)
from examples.tool_workbench.plots import plot_accuracy, plot_confusion
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
"""Training iterations after the two tools are added."""


class LearningCurve:
    """A sink that evaluates the policy every 20 iterations."""

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
    """One line of text: the accuracies on all tasks, and on the tasks that share no word with their tool's description."""
    hard = report.by_label["words"]["no shared word"]
    overall = report.overall
    return (
        f"right tool {overall.right_tool:6.1%}, right call {overall.right_call:6.1%}; "
        f"without shared words {hard.right_tool:6.1%}, {hard.right_call:6.1%}"
    )


def learn_added_tools(trainer: GRPOTrainer, tasks: Sequence[ToolTask], *, progress: bool = True) -> None:
    """Train on requests for all tools for some more iterations, without losing accuracy on the known tools.

    The optimizer is kept. Its moment estimates are adapted to the small gradients of the known tools, so its steps mostly serve
    the new tools. The learning rate starts at half and decays to 0, so that the final weights do not depend on one noisy step.
    Requests for the new tools are four times as frequent.
    """
    optimizer = trainer.optimizer
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
    """Add two tools, and print the accuracies immediately and after more training."""
    policy, everything = trainer.policy, workbench_catalogue()
    policy.add_tools(*(everything[name] for name in ADDED_LATER))
    parts = {
        "new tools, description's words": [t for t in held_out if t.tool in ADDED_LATER and shares_words(t)],
        "new tools, other words": [t for t in held_out if t.tool in ADDED_LATER and not shares_words(t)],
        "known tools": [t for t in held_out if t.tool not in ADDED_LATER],
    }

    def print_shares(when: str) -> None:
        shares = {name: evaluate_tools(policy, part, everything).overall.right_tool for name, part in parts.items()}
        print(f"{when:30s}right tool " + ", ".join(f"{share:6.1%} ({name})" for name, share in shares.items()))

    print_shares("two tools added:")
    learn_added_tools(trainer, tasks)
    print_shares(f"after {NUM_MORE_ITERATIONS} more iterations:")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=400, help="iterations of GRPO (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="default: runs/tool_routing/seed-SEED")
    args = parser.parse_args()
    folder = args.folder or Path("runs/tool_routing") / f"seed-{args.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "calls.jsonl"):
        (folder / name).unlink(missing_ok=True)  # left by an earlier run
    torch.set_num_threads(1)  # leaves the other cores to the tools
    torch.manual_seed(args.seed)
    start = time.perf_counter()

    everything = workbench_catalogue()
    catalogue = everything.without(*ADDED_LATER)
    train, held_out = workbench_split(NUM_TRAIN, NUM_HELD_OUT, args.seed, catalogue)
    random.Random(args.seed).shuffle(train)
    print(f"{len(catalogue)} tools in {len(catalogue.categories)} categories; a request of each kind:")
    for task in (train[0], next(task for task in train if not shares_words(task))):
        print(f"  {task.text}\n    -> {task.tool} {dict(task.arguments)}")

    policy = ToolSelectionPolicy(catalogue)
    curve = LearningCurve(policy, held_out, CONFIG.num_states_per_iteration * CONFIG.group_size)
    with ToolExecutor(everything, num_workers=2, options=ExecutorOptions(log_path=folder / "calls.jsonl")) as executor:
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
        "right tool, no word shared": [
            report.by_label["words"]["no shared word"].right_tool for report in curve.reports
        ],
        "right call": [report.overall.right_call for report in curve.reports],
    }
    plot_accuracy({name: (curve.calls, shares) for name, shares in lines.items()}, folder / "accuracy.png")
    after.to_json(folder / "report.json")
    print(f"{time.perf_counter() - start:.0f} s; written: {folder}/")


if __name__ == "__main__":
    main()

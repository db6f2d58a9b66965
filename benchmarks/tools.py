"""Compare GRPO with other methods of choosing among 33 tools, at the same budget of calls.

The benchmark uses the workbench and the settings of `examples/tool_routing.py`: 8,000 training tasks, 400 iterations of 128
tasks with 4 calls each. All methods that learn from rewards make the same number of calls on the same tasks, with the same
reward functions. A second table adds two tools to the policies that GRPO trained.

    python -m benchmarks.tools                        # about twenty minutes
    python -m benchmarks.tools --seeds 1
    python -m benchmarks.tools --tune                 # the search for the other methods' settings, on other seeds
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch

from adapters.tools import (
    HashingEncoder,
    ToolExecutor,
    ToolReport,
    ToolRewards,
    ToolSelectionPolicy,
    ToolTask,
    evaluate_tools,
    standard_rewards,
)
from adapters.tools.learning.evaluation import PredictsCalls
from benchmarks._tool_baselines import (
    Counted,
    LinUCB,
    NearestDescription,
    Remembering,
    principal_features,
    train_reinforce,
    train_supervised,
)
from examples.tool_routing import CONFIG, NUM_HELD_OUT, NUM_MORE_ITERATIONS, NUM_TRAIN, learn_added_tools
from examples.tool_workbench import (
    ADDED_LATER,
    make_workbench_files,
    shares_words,
    workbench_catalogue,
    workbench_split,
)
from grpo import GRPOTrainer

REINFORCE_RATE, REINFORCE_ENTROPY, SUPERVISED_RATE, LINUCB_ALPHA = 0.02, 0.03, 0.05, 1.0
"""Settings of the other methods, chosen by `--tune`."""

LINUCB_FEATURES, LINUCB_BATCH = 256, 256

TUNING_SEEDS = (100,)

HELD_OUT_PER_TOOL = 100
"""Held-out requests per added tool. `NUM_HELD_OUT` has only 20 per tool, which is too few for a stable share."""

EVERYTHING = workbench_catalogue()
CATALOGUE = EVERYTHING.without(*ADDED_LATER)

ADDED, CLOSE, FAR = (
    "the two added tools",
    "the two, requests close to the description",
    "the two, requests in other words",
)
KNOWN, KNOWN_CALLS = "the 33 known tools", "the 33 known tools, right call"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Tasks of one seed, and the executor."""

    seed: int
    train: Sequence[ToolTask]
    held_out: Sequence[ToolTask]
    num_iterations: int
    executor: Counted

    @property
    def num_tasks(self) -> int:
        """Number of tasks that GRPO uses, each with a group of calls."""
        assert CONFIG.num_states_per_iteration is not None
        return self.num_iterations * CONFIG.num_states_per_iteration

    @property
    def num_calls(self) -> int:
        """Number of calls of each method that learns from rewards."""
        return self.num_tasks * CONFIG.group_size

    def rewards(self) -> ToolRewards:
        """Rewards for methods with one call per task. A call that was executed before is not executed again."""
        return ToolRewards(Remembering(self.executor), standard_rewards(EVERYTHING))


class Learned(NamedTuple):
    """Result of a method: the trained predictor, its number of calls, and for GRPO the trainer."""

    answers: PredictsCalls
    num_calls: int = 0
    trainer: GRPOTrainer | None = None


Method: TypeAlias = Callable[[Setting], Learned]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Evaluation of a method."""

    report: ToolReport
    num_calls: int
    seconds: float
    cpu_seconds: float
    """CPU seconds of this process, without the tools' workers."""


def make_setting(seed: int, num_iterations: int, executor: Counted) -> Setting:
    """Make the tasks of one seed, in the sizes of `examples/tool_routing.py`."""
    train, held_out = workbench_split(NUM_TRAIN, NUM_HELD_OUT, seed, CATALOGUE)
    random.Random(seed).shuffle(train)
    return Setting(seed=seed, train=train, held_out=held_out, num_iterations=num_iterations, executor=executor)


# methods


def untrained(setting: Setting) -> Learned:  # noqa: ARG001  # as all methods are called
    """A policy with uniform probabilities. Its most likely call is the first tool with its first values."""
    return Learned(ToolSelectionPolicy(CATALOGUE))


def nearest(setting: Setting) -> Learned:  # noqa: ARG001
    """Choose the nearest description. This method does not learn."""
    return Learned(NearestDescription(CATALOGUE))


def grpo(setting: Setting) -> Learned:
    """Train GRPO as in the example."""
    policy = ToolSelectionPolicy(CATALOGUE)
    rewards = ToolRewards(setting.executor, standard_rewards(EVERYTHING), reuse_results=True)
    trainer = GRPOTrainer(config=replace(CONFIG, seed=setting.seed), policy=policy, reward_model=rewards)
    trainer.train(setting.train, num_iterations=setting.num_iterations)
    return Learned(policy, setting.num_calls, trainer)


def reinforce(
    setting: Setting, learning_rate: float = REINFORCE_RATE, entropy_coef: float = REINFORCE_ENTROPY
) -> Learned:
    """Train REINFORCE with GRPO's number of calls per update, and so the same number of updates."""
    policy = ToolSelectionPolicy(CATALOGUE)
    assert CONFIG.batch_size is not None
    train_reinforce(
        policy,
        setting.train,
        setting.rewards(),
        num_calls=setting.num_calls,
        batch_size=CONFIG.batch_size,
        learning_rate=learning_rate,
        entropy_coef=entropy_coef,
        seed=setting.seed,
    )
    return Learned(policy, setting.num_calls)


def linucb(
    setting: Setting, alpha: float = LINUCB_ALPHA, num_features: int = LINUCB_FEATURES, *, principal: bool = True
) -> Learned:
    """Train LinUCB."""
    features = (
        principal_features([task.text for task in setting.train], num_features)
        if principal
        else HashingEncoder(num_features)
    )
    bandit = LinUCB(CATALOGUE, features, alpha=alpha, seed=setting.seed)
    bandit.train(
        setting.train, setting.rewards(), num_calls=setting.num_calls, batch_size=LINUCB_BATCH, seed=setting.seed
    )
    return Learned(bandit, setting.num_calls)


def supervised(setting: Setting, learning_rate: float = SUPERVISED_RATE) -> Learned:
    """Train by supervised learning, as an upper bound."""
    policy = ToolSelectionPolicy(CATALOGUE)
    train_supervised(policy, setting.train, num_tasks=setting.num_tasks, learning_rate=learning_rate, seed=setting.seed)
    return Learned(policy)


METHODS: dict[str, Method] = {
    "untrained policy": untrained,
    "nearest description": nearest,
    "GRPO": grpo,
    "REINFORCE, running baseline": reinforce,
    "LinUCB": linucb,
    "supervised (right calls given)": supervised,
}


def measure(method: Method, setting: Setting) -> tuple[Learned, Outcome]:
    """Train a method and evaluate it. The seconds do not include the evaluation."""
    torch.manual_seed(setting.seed)
    start, cpu_start = time.perf_counter(), time.process_time()
    learned = method(setting)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    report = evaluate_tools(learned.answers, setting.held_out, CATALOGUE)
    return learned, Outcome(report=report, num_calls=learned.num_calls, seconds=seconds, cpu_seconds=cpu_seconds)


# two tools more


def shares_of_added(policy: ToolSelectionPolicy, held_out: Sequence[ToolTask]) -> dict[str, float]:
    """Share of the tasks for the added tools in which the policy chooses the right tool."""
    added = [task for task in held_out if task.tool in ADDED_LATER]
    parts = {ADDED: added, CLOSE: [t for t in added if shares_words(t)], FAR: [t for t in added if not shares_words(t)]}
    return {name: evaluate_tools(policy, part, policy.catalogue).overall.right_tool for name, part in parts.items()}


def shares_of_known(policy: ToolSelectionPolicy, held_out: Sequence[ToolTask]) -> dict[str, float]:
    """Shares of the tasks for the known tools with the right tool, and with the right call."""
    known = [task for task in held_out if task.tool not in ADDED_LATER]
    accuracy = evaluate_tools(policy, known, policy.catalogue).overall
    return {KNOWN: accuracy.right_tool, KNOWN_CALLS: accuracy.right_call}


def add_tools(trainer: GRPOTrainer, setting: Setting) -> tuple[dict[str, float], dict[str, float]]:
    """Add tools and train. Returns accuracies before (for known tools: before the addition) and after the training."""
    train, held_out = workbench_split(NUM_TRAIN, HELD_OUT_PER_TOOL * len(EVERYTHING), setting.seed, EVERYTHING)
    policy = trainer.policy
    known = shares_of_known(policy, held_out)
    policy.add_tools(*(EVERYTHING[name] for name in ADDED_LATER))
    before = shares_of_added(policy, held_out) | known
    learn_added_tools(trainer, train)
    return before, shares_of_added(policy, held_out) | shares_of_known(policy, held_out)


# printing


def share(values: Sequence[float], digits: int = 1) -> str:
    """Median, minimum and maximum of shares as text, in per cent."""
    median, least, most = (
        f"{100 * value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{median} ({least} to {most})"


def print_methods(outcomes: dict[str, list[Outcome]]) -> None:
    """Print the first table as Markdown."""
    columns = (
        "method",
        "right tool, %",
        "right call, %",
        "no shared words: right tool, %",
        "right call, %",
        "calls",
    )
    print(f"| {' | '.join(columns)} | seconds | CPU seconds |\n|{'---|' * 8}")
    for name, several in outcomes.items():
        of_all = [outcome.report.overall for outcome in several]
        hard = [outcome.report.by_label["words"]["no shared word"] for outcome in several]
        shares = [
            share([getattr(a, part) for a in of]) for of in (of_all, hard) for part in ("right_tool", "right_call")
        ]
        seconds = [outcome.seconds for outcome in several]
        cpu_seconds = statistics.median(outcome.cpu_seconds for outcome in several)
        print(
            f"| {name} | {' | '.join(shares)} | {several[0].num_calls:,} "
            f"| {statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f}) | {cpu_seconds:.1f} |"
        )


def print_added(found: Sequence[tuple[dict[str, float], dict[str, float]]]) -> None:
    """Print the second table. Changes are computed per seed."""
    print(
        f"\n| right tool, % | before any update | after {NUM_MORE_ITERATIONS} iterations | change |\n|---|---|---|---|"
    )
    for name in found[0][0]:
        before, after = ([shares[name] for shares in of] for of in zip(*found, strict=True))
        print(f"| {name} | {share(before, 2)} | {share(after, 2)} | {share(changes(found, name), 2)} |")


def changes(found: Sequence[tuple[dict[str, float], dict[str, float]]], name: str) -> list[float]:
    """Change of one share by training with the added tools, for each seed."""
    return [after[name] - before[name] for before, after in found]


def check_targets(
    outcomes: Sequence[Outcome], found: Sequence[tuple[dict[str, float], dict[str, float]]]
) -> list[tuple[str, bool]]:
    """GRPO's targets, and whether they are met by the worst seed, or by the median if the target's name says so."""
    reports = [outcome.report for outcome in outcomes]
    added = statistics.median(after[ADDED] for _, after in found)
    return [
        ("right tool >= 95 %", min(r.overall.right_tool for r in reports) >= 0.95),
        ("right call >= 90 %", min(r.overall.right_call for r in reports) >= 0.90),
        (
            "right tool without shared words >= 90 %",
            min(r.by_label["words"]["no shared word"].right_tool for r in reports) >= 0.90,
        ),
        ("under 120 s", max(outcome.seconds for outcome in outcomes) < 120.0),
        (
            "added tools, requests close to the description, before any update >= 60 %",
            min(b[CLOSE] for b, _ in found) >= 0.60,
        ),
        ("the same requests after training >= 90 %", min(after[CLOSE] for _, after in found) >= 0.90),
        ("added tools, all requests, after training >= 90 % (median)", added >= 0.90),
        ("no loss on the known tools (median)", statistics.median(changes(found, KNOWN)) >= 0.0),
    ]


def compare(names: Sequence[str], seeds: Sequence[int], num_iterations: int, executor: Counted) -> bool:
    """Print both tables, the executed calls and the targets. Returns whether all targets are met."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    added, executed = [], []
    for seed in seeds:
        setting = make_setting(seed, num_iterations, executor)
        for name in names:
            before = executor.num_calls
            learned, outcome = measure(METHODS[name], setting)
            outcomes[name].append(outcome)
            if learned.trainer is not None:
                executed.append(executor.num_calls - before)
                last = executor.last
                added.append(add_tools(learned.trainer, setting))
    print(
        f"{len(CATALOGUE)} tools in {len(CATALOGUE.categories)} categories, {NUM_TRAIN:,} training and {NUM_HELD_OUT} held-out "
        f"tasks, seeds {seeds[0]} to {seeds[-1]}: median (least to most); load {os.getloadavg()[0]:.1f} on {os.cpu_count()} "
        "cores\n"
    )
    print_methods(outcomes)
    if not added:
        return True
    print(
        f"\nGRPO: {setting.num_tasks:,} tasks, {setting.num_calls:,} calls, of which {statistics.median(executed):,.0f} were "
        "executed; every other call was equal to a call of the same iteration and reused its result."
    )
    assert last is not None
    print(f"An executed call: {last[0].tool}({dict(last[0].arguments)}) -> {last[1].output!r}")
    print_added(added)
    targets = check_targets(outcomes["GRPO"], added)
    print("\nTargets for GRPO: " + "; ".join(f"{name}: {'met' if met else 'MISSED'}" for name, met in targets) + ".")
    return all(met for _, met in targets)


def tune(beginning: str, num_iterations: int, executor: Counted) -> None:
    """Run alternatives whose name starts with a prefix, on a seed that no table uses."""
    tried: dict[str, Method] = {}
    for rate in (0.01, 0.02, 0.05):
        tried[f"supervised, learning rate {rate}"] = lambda s, r=rate: supervised(s, r)
    for rate, entropy in ((0.01, 0.03), (0.02, 0.03), (0.05, 0.03), (0.02, CONFIG.objective.entropy_coef)):
        tried[f"REINFORCE, learning rate {rate}, entropy {entropy}"] = lambda s, r=rate, e=entropy: reinforce(s, r, e)
    for alpha in (0.03, 0.3, 1.0, 3.0):
        tried[f"LinUCB, alpha {alpha}"] = lambda s, a=alpha: linucb(s, a)
    tried["LinUCB, alpha 1.0, 256 hashed features"] = lambda s: linucb(s, 1.0, 256, principal=False)
    settings = [make_setting(seed, num_iterations, executor) for seed in TUNING_SEEDS]
    for name, method in tried.items():
        if name.startswith(beginning):
            print_line(name, [measure(method, setting)[1] for setting in settings])


def print_line(name: str, several: Sequence[Outcome]) -> None:
    """Print the means over seeds of one method."""
    mean = statistics.fmean
    print(
        f"{name:42s} right tool {mean(o.report.overall.right_tool for o in several):6.1%}, "
        f"right call {mean(o.report.overall.right_call for o in several):6.1%}, "
        f"{mean(o.seconds for o in several):6.1f} s",
        flush=True,
    )


def main() -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--iterations", type=int, default=400, help="iterations of GRPO; other methods get as many calls"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument(
        "--tune", nargs="?", const="", help="run the search instead of the tables, for one method if named"
    )
    parser.add_argument("--check", action="store_true", help="exit with status 1 if GRPO misses a target")
    args = parser.parse_args()
    if args.check and (args.tune is not None or "GRPO" not in args.methods):
        parser.error("--check needs GRPO in --methods, and excludes --tune")
    torch.set_num_threads(1)  # leaves the other cores to the tools
    with ToolExecutor(EVERYTHING, num_workers=2) as real:
        make_workbench_files(real.root)
        executor = Counted(real)
        if args.tune is not None:
            tune(args.tune, args.iterations, executor)
        else:
            seeds = range(args.first_seed, args.first_seed + args.seeds)
            all_met = compare(args.methods, seeds, args.iterations, executor)
            if args.check and not all_met:
                raise SystemExit(1)


if __name__ == "__main__":
    main()

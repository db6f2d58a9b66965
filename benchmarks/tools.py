"""What is learned about 33 tools in the same budget of calls: GRPO beside other ways to choose a tool and its parameters.

The workbench of `examples/tool_routing.py`, with its settings: 8,000 training tasks, 400 iterations of 64 tasks and 8 calls.
What learns from rewards makes as many calls, of the same tasks, and is judged by the same functions. A second table adds two
tools to the policies that GRPO has trained.

    python -m benchmarks.tools                        # about twenty minutes
    python -m benchmarks.tools --seeds 1
    python -m benchmarks.tools --tune                 # what the settings of the others were chosen from, on other seeds
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
from adapters.tools.evaluation import PredictsCalls
from adapters.tools.workbench import ADDED_LATER, make_workbench_files, workbench_catalogue, workbench_split
from benchmarks._tool_baselines import (
    Counted,
    LinUCB,
    NearestDescription,
    Remembering,
    principal_features,
    train_reinforce,
    train_supervised,
)
from examples.tool_routing import CONFIG, NUM_HELD_OUT, NUM_TRAIN
from grpo import GRPOTrainer

REINFORCE_RATE, SUPERVISED_RATE, LINUCB_ALPHA = 0.02, 0.05, 1.0
"""Chosen by `--tune`."""

LINUCB_FEATURES, LINUCB_BATCH = 256, 256

TUNING_SEEDS = (100,)

NUM_MORE_ITERATIONS = 20
"""After two tools were added."""
HELD_OUT_PER_TOOL = 100
"""To measure added tools with: shares of 20 requests, of which `NUM_HELD_OUT` has so many, would be accidents."""

EVERYTHING = workbench_catalogue()
CATALOGUE = EVERYTHING.without(*ADDED_LATER)

TARGETS = {
    "all": "right tool >= 95 %, right parameters >= 90 %, right tool where no word is shared >= 90 %, under 120 s on 2 cores",
    "added": "close requests >= 60 % before and >= 90 % after, no loss on the others",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One seed's tasks, and what executes."""

    seed: int
    train: Sequence[ToolTask]
    held_out: Sequence[ToolTask]
    num_iterations: int
    executor: Counted

    @property
    def num_tasks(self) -> int:
        """That GRPO takes up, each with a group of calls."""
        assert CONFIG.num_states_per_iteration is not None
        return self.num_iterations * CONFIG.num_states_per_iteration

    @property
    def num_calls(self) -> int:
        """That GRPO makes, and whoever else learns from rewards."""
        return self.num_tasks * CONFIG.group_size

    def rewards(self) -> ToolRewards:
        """For those that make one call per task: a call that was executed before is not executed again."""
        return ToolRewards(Remembering(self.executor), standard_rewards(EVERYTHING))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a method has come to."""

    report: ToolReport
    num_calls: int
    seconds: float
    cpu_seconds: float
    """Of this process; the tools' are not in it."""


def make_setting(seed: int, num_iterations: int, executor: Counted) -> Setting:
    """As the example has it."""
    train, held_out = workbench_split(NUM_TRAIN, NUM_HELD_OUT, seed, CATALOGUE)
    random.Random(seed).shuffle(train)
    return Setting(seed=seed, train=train, held_out=held_out, num_iterations=num_iterations, executor=executor)


# methods


def untrained(setting: Setting) -> tuple[PredictsCalls, int]:  # noqa: ARG001  # as all methods are called
    """All is as likely as all else; the likeliest call is then that of the first tool with its first values."""
    return ToolSelectionPolicy(CATALOGUE), 0


def nearest(setting: Setting) -> tuple[PredictsCalls, int]:  # noqa: ARG001
    """Without learning."""
    return NearestDescription(CATALOGUE), 0


def grpo(setting: Setting) -> tuple[PredictsCalls, int]:
    """The example."""
    policy = ToolSelectionPolicy(CATALOGUE)
    rewards = ToolRewards(setting.executor, standard_rewards(EVERYTHING), reuse_results=True)
    trainer = GRPOTrainer(config=replace(CONFIG, seed=setting.seed), policy=policy, reward_model=rewards)
    trainer.train(setting.train, num_iterations=setting.num_iterations)
    return policy, setting.num_calls


def reinforce(setting: Setting, learning_rate: float = REINFORCE_RATE) -> tuple[PredictsCalls, int]:
    """As many calls in an update, so as many updates, and the same weight of the entropy."""
    policy = ToolSelectionPolicy(CATALOGUE)
    assert CONFIG.batch_size is not None
    train_reinforce(
        policy,
        setting.train,
        setting.rewards(),
        num_calls=setting.num_calls,
        batch_size=CONFIG.batch_size,
        learning_rate=learning_rate,
        entropy_coef=CONFIG.objective.entropy_coef,
        seed=setting.seed,
    )
    return policy, setting.num_calls


def linucb(
    setting: Setting, alpha: float = LINUCB_ALPHA, num_features: int = LINUCB_FEATURES, *, principal: bool = True
) -> tuple[PredictsCalls, int]:
    """The bandit."""
    features = (
        principal_features([task.text for task in setting.train], num_features)
        if principal
        else HashingEncoder(num_features)
    )
    bandit = LinUCB(CATALOGUE, features, alpha=alpha, seed=setting.seed)
    bandit.train(
        setting.train, setting.rewards(), num_calls=setting.num_calls, batch_size=LINUCB_BATCH, seed=setting.seed
    )
    return bandit, setting.num_calls


def supervised(setting: Setting, learning_rate: float = SUPERVISED_RATE) -> tuple[PredictsCalls, int]:
    """The upper bound."""
    policy = ToolSelectionPolicy(CATALOGUE)
    train_supervised(policy, setting.train, num_tasks=setting.num_tasks, learning_rate=learning_rate, seed=setting.seed)
    return policy, 0


METHODS: dict[str, Callable[[Setting], tuple[PredictsCalls, int]]] = {
    "untrained policy": untrained,
    "nearest description": nearest,
    "GRPO": grpo,
    "REINFORCE, running baseline": reinforce,
    "LinUCB": linucb,
    "supervised (right calls given)": supervised,
}


def measure(method: Callable[[Setting], tuple[PredictsCalls, int]], setting: Setting) -> tuple[PredictsCalls, Outcome]:
    """What answers, and how well; the measuring is not in the seconds."""
    torch.manual_seed(setting.seed)
    start, cpu_start = time.perf_counter(), time.process_time()
    answers, num_calls = method(setting)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    report = evaluate_tools(answers, setting.held_out, CATALOGUE)
    return answers, Outcome(report=report, num_calls=num_calls, seconds=seconds, cpu_seconds=cpu_seconds)


# two tools more


ADDED_ROWS = ("added, close to the description", "added, other words", "the other 33")


def right_tools(policy: ToolSelectionPolicy, held_out: Sequence[ToolTask]) -> tuple[float, ...]:
    """Shares by `ADDED_ROWS`."""
    added = [task for task in held_out if task.tool in ADDED_LATER]
    parts = (
        [task for task in added if task.shares_words],
        [task for task in added if not task.shares_words],
        [task for task in held_out if task.tool not in ADDED_LATER],
    )
    return tuple(evaluate_tools(policy, part, EVERYTHING).overall.right_tool for part in parts)


def add_tools(policy: ToolSelectionPolicy, setting: Setting) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Shares before any update, and after some more iterations with requests for all tools; half the learning rate."""
    train, held_out = workbench_split(NUM_TRAIN, HELD_OUT_PER_TOOL * len(EVERYTHING), setting.seed, EVERYTHING)
    policy.add_tools(*(EVERYTHING[name] for name in ADDED_LATER))
    before = right_tools(policy, held_out)
    trainer = GRPOTrainer(
        config=replace(CONFIG, learning_rate=CONFIG.learning_rate / 2, seed=setting.seed),
        policy=policy,
        reward_model=ToolRewards(setting.executor, standard_rewards(EVERYTHING), reuse_results=True),
    )
    trainer.train(train, num_iterations=NUM_MORE_ITERATIONS)
    return before, right_tools(policy, held_out)


# printing


def share(values: Sequence[float]) -> str:
    """Median, least and most, in per cent."""
    return f"{100 * statistics.median(values):.1f} ({100 * min(values):.1f} to {100 * max(values):.1f})"


def print_methods(outcomes: dict[str, list[Outcome]]) -> None:
    """The first table, as Markdown."""
    columns = (
        "method",
        "right tool, %",
        "right in all, %",
        "no shared word: right tool, %",
        "right in all, %",
        "calls",
    )
    print(f"| {' | '.join(columns)} | seconds | of the processor |\n|{'---|' * 8}")
    for name, several in outcomes.items():
        of_all = [outcome.report.overall for outcome in several]
        hard = [outcome.report.by_words["no shared word"] for outcome in several]
        shares = [
            share([getattr(a, part) for a in of]) for of in (of_all, hard) for part in ("right_tool", "right_call")
        ]
        seconds = [outcome.seconds for outcome in several]
        cpu_seconds = statistics.median(outcome.cpu_seconds for outcome in several)
        print(
            f"| {name} | {' | '.join(shares)} | {several[0].num_calls:,} "
            f"| {statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f}) | {cpu_seconds:.1f} |"
        )


def print_added(found: Sequence[tuple[tuple[float, ...], tuple[float, ...]]]) -> None:
    """The second table."""
    print(f"\n| right tool, % | before any update | after {NUM_MORE_ITERATIONS} iterations |\n|---|---|---|")
    for i, name in enumerate(ADDED_ROWS):
        print(f"| {name} | {share([before[i] for before, _ in found])} | {share([after[i] for _, after in found])} |")
    print(f"\nTargets: {TARGETS['added']}.")


def compare(names: Sequence[str], seeds: Sequence[int], num_iterations: int, executor: Counted) -> None:
    """Both tables, and what was executed."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    added, executed = [], []
    for seed in seeds:
        setting = make_setting(seed, num_iterations, executor)
        for name in names:
            before = executor.num_calls
            answers, outcome = measure(METHODS[name], setting)
            outcomes[name].append(outcome)
            if name == "GRPO":
                assert isinstance(answers, ToolSelectionPolicy)
                executed.append(executor.num_calls - before)
                last = executor.last
                added.append(add_tools(answers, setting))
    print(
        f"{len(CATALOGUE)} tools in {len(CATALOGUE.categories)} categories, {NUM_TRAIN:,} training and {NUM_HELD_OUT} held-out "
        f"tasks, seeds {seeds[0]} to {seeds[-1]}: median (least to most); load {os.getloadavg()[0]:.1f} on {os.cpu_count()} "
        "cores\n"
    )
    print_methods(outcomes)
    if not added:
        return
    print(f"\nTargets for GRPO: {TARGETS['all']}.")
    print(
        f"GRPO: {setting.num_tasks:,} tasks, {setting.num_calls:,} calls, of which {statistics.median(executed):,.0f} were "
        "executed; each of the others was equal to one of the same iteration, and took over its result."
    )
    assert last is not None
    print(f"One that was executed: {last[0].tool}({dict(last[0].arguments)}) -> {last[1].output!r}")
    print_added(added)


def tune(beginning: str, num_iterations: int, executor: Counted) -> None:
    """What else could be chosen, on a seed that no table has; those whose name begins so."""
    tried: dict[str, Callable[[Setting], tuple[PredictsCalls, int]]] = {}
    for rate in (0.01, 0.02, 0.05):
        tried[f"supervised, learning rate {rate}"] = lambda s, r=rate: supervised(s, r)
    for rate in (0.01, 0.02, 0.05):
        tried[f"REINFORCE, learning rate {rate}"] = lambda s, r=rate: reinforce(s, r)
    for alpha in (0.03, 0.3, 1.0, 3.0):
        tried[f"LinUCB, alpha {alpha}"] = lambda s, a=alpha: linucb(s, a)
    tried["LinUCB, alpha 1.0, 256 hashed features"] = lambda s: linucb(s, 1.0, 256, principal=False)
    settings = [make_setting(seed, num_iterations, executor) for seed in TUNING_SEEDS]
    for name, method in tried.items():
        if name.startswith(beginning):
            print_line(name, [measure(method, setting)[1] for setting in settings])


def print_line(name: str, several: Sequence[Outcome]) -> None:
    """Means over seeds."""
    mean = statistics.fmean
    print(
        f"{name:42s} right tool {mean(o.report.overall.right_tool for o in several):6.1%}, "
        f"right in all {mean(o.report.overall.right_call for o in several):6.1%}, "
        f"{mean(o.seconds for o in several):6.1f} s",
        flush=True,
    )


def main() -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=400, help="of GRPO; the budget of the others follows from it")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--tune", nargs="?", const="", help="instead of the tables; of one method, if it is named")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the other core runs tools
    with ToolExecutor(EVERYTHING, num_workers=2) as real:
        make_workbench_files(real.root)
        executor = Counted(real)
        if args.tune is not None:
            tune(args.tune, args.iterations, executor)
        else:
            compare(args.methods, range(args.first_seed, args.first_seed + args.seeds), args.iterations, executor)


if __name__ == "__main__":
    main()

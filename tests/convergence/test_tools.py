"""The example's configuration learns which tool answers a request, from rewards alone; with the sign wrong it does not.

Every call is answered at once: what is learned is the same as when it is executed, because the right calls run.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch

from adapters.tools import (
    ToolCall,
    ToolReport,
    ToolResult,
    ToolRewards,
    ToolSelectionPolicy,
    ToolTask,
    evaluate_tools,
    standard_rewards,
)
from adapters.tools.evaluation import Accuracy
from adapters.tools.workbench import ADDED_LATER, workbench_catalogue, workbench_split
from examples.tool_routing import CONFIG, NUM_HELD_OUT, NUM_TRAIN, learn_added_tools
from grpo import GRPOConfig, GRPOTrainer
from tests.support.objective_inputs import as_users_run_it

EVERYTHING = workbench_catalogue()
NUM_ITERATIONS = 400
CHANCE = 1 / 33


class Answers:
    """An executor for which every call runs."""

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [ToolResult() for _ in calls]


class Negated(ToolRewards):
    def combine(self, components):
        return -super().combine(components)


@dataclass(frozen=True)
class Run:
    """One training, and two tools that are added at its end."""

    before: ToolReport
    after: ToolReport
    close: tuple[float, float]
    """Share of right tools on the new tools' requests that share words with their descriptions: at once, and after 20 more."""
    new: tuple[float, float]
    """The same, on all requests for the new tools."""
    others: tuple[Accuracy, Accuracy]
    """On all requests for the other tools; at first, before the new tools could be chosen."""


def train(
    policy: ToolSelectionPolicy,
    tasks: Sequence[ToolTask],
    num_iterations: int,
    config: GRPOConfig,
    rewards: Callable[..., ToolRewards] = ToolRewards,
) -> GRPOTrainer:
    trainer = GRPOTrainer(
        config=config, policy=policy, reward_model=rewards(Answers(), standard_rewards(EVERYTHING), reuse_results=True)
    )
    trainer.train(tasks, num_iterations=num_iterations, progress=False)
    return trainer


def start(seed: int) -> tuple[ToolSelectionPolicy, list[ToolTask], list[ToolTask]]:
    """An untrained policy over all tools but two, requests to train on, and requests to measure on."""
    torch.manual_seed(seed)
    catalogue = EVERYTHING.without(*ADDED_LATER)
    tasks, held_out = workbench_split(NUM_TRAIN, NUM_HELD_OUT, seed, catalogue)
    random.Random(seed).shuffle(tasks)
    return ToolSelectionPolicy(catalogue), tasks, held_out


@lru_cache
def run(seed: int) -> Run:
    with as_users_run_it():
        policy, tasks, held_out = start(seed)
        before = evaluate_tools(policy, held_out, policy.catalogue)
        trainer = train(policy, tasks, NUM_ITERATIONS, replace(CONFIG, seed=seed))
        after = evaluate_tools(policy, held_out, policy.catalogue)

        # 100 requests for each tool, so that the shares are no accident
        tasks, held_out = workbench_split(NUM_TRAIN, 100 * len(EVERYTHING), seed, EVERYTHING)
        for_others = [task for task in held_out if task.tool not in ADDED_LATER]
        others = evaluate_tools(policy, for_others, policy.catalogue).overall
        policy.add_tools(*(EVERYTHING[name] for name in ADDED_LATER))
        for_new = [task for task in held_out if task.tool in ADDED_LATER]
        close = [task for task in for_new if task.shares_words]

        def shares() -> tuple[float, float]:
            reports = (evaluate_tools(policy, some, EVERYTHING) for some in (close, for_new))
            return tuple(report.overall.right_tool for report in reports)

        at_once = shares()
        learn_added_tools(trainer, tasks, progress=False)
        later = shares()
        others_later = evaluate_tools(policy, for_others, EVERYTHING).overall
    return Run(
        before=before,
        after=after,
        close=(at_once[0], later[0]),
        new=(at_once[1], later[1]),
        others=(others, others_later),
    )


seeds = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 4))])


@seeds
def test_which_tool_is_learned_from_chance(seed):
    learned = run(seed)
    assert learned.before.overall.right_tool == pytest.approx(CHANCE, abs=0.005)
    assert learned.before.overall.right_call < 0.02
    assert learned.after.overall.right_tool >= 0.95
    assert learned.after.overall.right_call >= 0.90


@seeds
def test_what_was_learned_is_more_than_the_words_of_the_descriptions(seed):
    learned = run(seed)
    without_words = learned.after.by_words["no shared word"]
    assert without_words.num_tasks == NUM_HELD_OUT // 2
    assert without_words.right_tool >= 0.90


@seeds
def test_a_tool_that_is_added_is_found_at_once_and_learned_in_20_iterations(seed):
    learned = run(seed)
    assert learned.close[0] >= 0.60, learned.close
    assert learned.close[1] >= 0.98, learned.close
    assert learned.new[1] >= 0.85, "other words than the description's included"
    before, later = learned.others
    assert before.num_tasks == later.num_tasks == 3_300
    assert later.right_tool >= before.right_tool - 2.5 / 3_300, (
        "two requests may go another way, some the other way round"
    )
    assert later.right_call >= before.right_call - 0.001, learned.others


def test_nothing_is_learned_with_the_sign_of_the_reward_wrong():
    """As many iterations as take the right sign to more than 80 %."""
    shares = {}
    with as_users_run_it():
        for rewards in (ToolRewards, Negated):
            policy, tasks, held_out = start(0)
            train(policy, tasks, 50, CONFIG, rewards)
            shares[rewards] = evaluate_tools(policy, held_out, policy.catalogue).overall.right_tool
    assert shares[ToolRewards] > 0.8
    assert shares[Negated] <= CHANCE

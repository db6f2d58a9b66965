"""The example's configuration learns which tool answers a request, from rewards alone; with the sign wrong it does not.

Every call is answered at once: what is learned is the same as when it is executed, because the right calls run. All iterations
of the example, with three seeds.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

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
from adapters.tools.learning.evaluation import Accuracy
from examples.tool_routing import CONFIG, NUM_HELD_OUT, NUM_TRAIN, learn_added_tools
from examples.tool_workbench import ADDED_LATER, shares_words, workbench_catalogue, workbench_split
from grpo import GRPOTrainer
from grpo.rewards import PlannedCalls
from tests.support.objective_inputs import as_users_run_it

# Policies in training also call tools for which the request has no values.
pytestmark = pytest.mark.filterwarnings("ignore:ToolSelectionPolicy. fill gave no value")

EVERYTHING = workbench_catalogue()
CHANCE = 1 / 33
ALL, FIRST = 400, 25
"""Iterations: of the example, and until the right tool is found more often than not."""


class Answers:
    """An executor for which every call runs."""

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [ToolResult() for _ in calls]


class Negated(ToolRewards):
    def plan_calls(self, states: Any, actions: Any) -> PlannedCalls:
        return super().plan_calls(states, actions).then(lambda rewards: replace(rewards, values=-rewards.values))


@dataclass(frozen=True)
class Run:
    """One training, and two tools that are added at its end."""

    before: ToolReport
    early: ToolReport
    """After the first 25 iterations."""
    after: ToolReport
    close: tuple[float, float]
    """Share of right tools on the new tools' requests that share words with their descriptions: at once, and after 20 more."""
    new: tuple[float, float]
    """The same, on all requests for the new tools."""
    others: tuple[Accuracy, Accuracy]
    """On all requests for the other tools; at first, before the new tools could be chosen."""


def trainer_of(
    policy: ToolSelectionPolicy, seed: int, rewards: Callable[..., ToolRewards] = ToolRewards
) -> GRPOTrainer:
    rewards_of_calls = rewards(Answers(), standard_rewards(EVERYTHING), reuse_results=True)
    return GRPOTrainer(config=replace(CONFIG, seed=seed), policy=policy, reward_model=rewards_of_calls)


def start(seed: int) -> tuple[ToolSelectionPolicy, list[ToolTask], list[ToolTask]]:
    """An untrained policy over all tools but two, requests to train on, and requests to measure on."""
    torch.manual_seed(seed)
    catalogue = EVERYTHING.without(*ADDED_LATER)
    tasks, held_out = workbench_split(NUM_TRAIN, NUM_HELD_OUT, seed, catalogue)
    random.Random(seed).shuffle(tasks)
    return ToolSelectionPolicy(catalogue), tasks, held_out


@cache
def run(seed: int, num_iterations: int) -> Run:
    with as_users_run_it():
        policy, tasks, held_out = start(seed)
        before = evaluate_tools(policy, held_out, policy.catalogue)
        trainer = trainer_of(policy, seed)
        trainer.train(tasks, num_iterations=FIRST, progress=False)
        early = evaluate_tools(policy, held_out, policy.catalogue)
        trainer.train(tasks, num_iterations=num_iterations, progress=False)
        after = evaluate_tools(policy, held_out, policy.catalogue)

        # 100 requests for each tool, so that the shares are no accident
        tasks, held_out = workbench_split(NUM_TRAIN, 100 * len(EVERYTHING), seed, EVERYTHING)
        for_others = [task for task in held_out if task.tool not in ADDED_LATER]
        others = evaluate_tools(policy, for_others, policy.catalogue).overall
        policy.add_tools(*(EVERYTHING[name] for name in ADDED_LATER))
        for_new = [task for task in held_out if task.tool in ADDED_LATER]
        close = [task for task in for_new if shares_words(task)]

        def shares() -> tuple[float, float]:
            reports = (evaluate_tools(policy, some, EVERYTHING) for some in (close, for_new))
            return tuple(report.overall.right_tool for report in reports)

        at_once = shares()
        learn_added_tools(trainer, tasks, progress=False)
        later = shares()
        others_later = evaluate_tools(policy, for_others, EVERYTHING).overall
    return Run(
        before=before,
        early=early,
        after=after,
        close=(at_once[0], later[0]),
        new=(at_once[1], later[1]),
        others=(others, others_later),
    )


def assert_the_tool_is_learned(learned: Run, right_call: float) -> None:
    assert learned.before.overall.right_tool < 0.65, "the descriptions, and the values in the request"
    assert learned.before.overall.right_call < 0.4
    assert learned.after.overall.right_tool >= 0.95
    assert learned.after.overall.right_call >= right_call


def assert_more_is_learned_than_the_words_of_the_descriptions(learned: Run) -> None:
    without_words = learned.after.by_label["words"]["no shared word"]
    assert without_words.num_tasks == NUM_HELD_OUT // 2
    assert without_words.right_tool >= 0.90


def assert_an_added_tool_is_found_at_once_and_learned_in_20_iterations(learned: Run) -> None:
    assert learned.close[0] >= 0.60, learned.close
    assert learned.close[1] >= 0.98, learned.close
    assert learned.new[1] >= 0.85, "other words than the description's included"
    before, later = learned.others
    assert before.num_tasks == later.num_tasks == 3_300
    # measured over seeds and processors: at most 3 and 6 of the 3,300 requests less; forgotten tools would cost hundreds
    assert later.right_tool >= before.right_tool - 10 / 3_300, learned.others
    assert later.right_call >= before.right_call - 20 / 3_300, learned.others


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.faults) for seed in (1, 2))])
def test_the_example_learns_tools_and_added_tools(seed: int, subtests: pytest.Subtests) -> None:
    learned = run(seed, ALL)
    with subtests.test("the right tool"):
        assert_the_tool_is_learned(learned, right_call=0.90)
    with subtests.test("more than words"):
        assert_more_is_learned_than_the_words_of_the_descriptions(learned)
    with subtests.test("added tools"):
        assert_an_added_tool_is_found_at_once_and_learned_in_20_iterations(learned)


@pytest.mark.slow
def test_negated_rewards_teach_nothing() -> None:
    """After as many iterations as take the right sign beyond a half."""
    with as_users_run_it():
        policy, tasks, held_out = start(0)
        trainer_of(policy, 0, Negated).train(tasks, num_iterations=FIRST, progress=False)
        negated = evaluate_tools(policy, held_out, policy.catalogue).overall.right_tool
    assert run(0, ALL).early.overall.right_tool > 0.5
    assert negated <= CHANCE

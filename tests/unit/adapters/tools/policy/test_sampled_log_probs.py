"""What a call was drawn with is what scoring it gives, at the size of the workbench: 33 tools, vectors of 1024."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.tools import ToolCall, ToolResult, ToolRewards, ToolSelectionPolicy, ToolTask, standard_rewards
from examples.tool_workbench import make_workbench_tasks, workbench_catalogue
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig

# The tasks need only a few of the tools. The others never get values.
pytestmark = pytest.mark.filterwarnings("ignore:ToolSelectionPolicy. fill gave no value")

CATALOGUE = workbench_catalogue()
TASKS = make_workbench_tasks(5, seed=0)
GROUP_SIZE = 4


class Answers:
    """An executor for which every call runs."""

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [ToolResult() for _ in calls]


def random_policy(scale: float, **options: Any) -> ToolSelectionPolicy:
    policy = ToolSelectionPolicy(CATALOGUE, **options)
    with torch.no_grad():
        for value in policy.parameters():
            value.normal_(0, scale)
    return policy


def trained_policy(**options: Any) -> ToolSelectionPolicy:
    policy = ToolSelectionPolicy(CATALOGUE, **options)
    config = GRPOConfig(
        group_size=8,
        num_states_per_iteration=32,
        learning_rate=0.02,
        advantage=AdvantageConfig(scale="batch"),
        objective=ObjectiveConfig(aggregation="row_sum", entropy_coef=0.07),
        seed=0,
    )
    rewards = ToolRewards(Answers(), standard_rewards(CATALOGUE))
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=rewards)
    trainer.train(TASKS, num_iterations=10, progress=False)
    assert policy.tool_probabilities(TASKS).max() > 0.2, "it has learned something"
    return policy


POLICIES: dict[str, Callable[[], ToolSelectionPolicy]] = {
    "trained": trained_policy,
    "trained, hidden layer": lambda: trained_policy(hidden=[32]),
    "weights of 1, hidden layer": lambda: random_policy(1.0, hidden=[32]),
}


ROUNDINGS = 16
"""A logit is a sum of 1,024 products (or of 32, of sums of 1,024), which matrix products of other shapes add in another
order: the error of such a sum grows like the square root of its length, 32, and half of that is allowed."""


def require_same(policy: ToolSelectionPolicy, found: Tensor, wanted: Tensor) -> None:
    """Equal but for the order of sums. Rows alone may be narrower, where no call has more decisions."""
    width = found.shape[1]
    assert bool((wanted[:, width:] == 0).all())
    largest = max(
        1.0, float(policy.tool_probabilities(TASKS).log().abs().max())
    )  # a log-prob is as exact as its logits
    atol = ROUNDINGS * torch.finfo(torch.float32).eps * largest
    torch.testing.assert_close(found.detach(), wanted[:, :width], rtol=0, atol=atol)


@pytest.fixture(scope="module", params=POLICIES)
def policy(request: pytest.FixtureRequest) -> ToolSelectionPolicy:
    torch.manual_seed(0)
    return POLICIES[request.param]()


def test_log_probs_are_the_same_whatever_is_scored_with_them(policy: ToolSelectionPolicy) -> None:
    sampled = policy.sample_actions(TASKS, GROUP_SIZE)
    wanted = sampled.behaviour_log_probs
    assert wanted.shape[0] == len(TASKS) * GROUP_SIZE
    calls = [call for group in sampled.actions for call in group]
    tasks: list[ToolTask] = [task for task in TASKS for _ in range(GROUP_SIZE)]
    require_same(policy, policy.score_actions(tasks, calls).log_probs, wanted)
    require_same(policy, policy.score_groups(TASKS, sampled.actions).log_probs, wanted)
    for size in (1, 3, 7):
        for start in range(0, len(calls), size):
            rows = slice(start, start + size)
            require_same(policy, policy.score_actions(tasks[rows], calls[rows]).log_probs, wanted[rows])
    for place, group in enumerate(sampled.actions):
        rows = slice(place * GROUP_SIZE, (place + 1) * GROUP_SIZE)
        require_same(policy, policy.score_groups(TASKS[place : place + 1], [group]).log_probs, wanted[rows])


def test_a_call_drawn_alone_is_scored_the_same_among_others(policy: ToolSelectionPolicy) -> None:
    drawn = [policy.sample_actions([task], 1) for task in TASKS]
    together = policy.score_actions(TASKS, [one.actions[0][0] for one in drawn]).log_probs
    for row, one in zip(together, drawn, strict=True):
        require_same(policy, one.behaviour_log_probs, row.detach().unsqueeze(0))

"""What a call was drawn with is what scoring it gives, at the size of the workbench: 33 tools, vectors of 1024."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.tools import ToolResult, ToolRewards, ToolSelectionPolicy, standard_rewards
from examples.tool_workbench import make_workbench_tasks, workbench_catalogue
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig
from tests.support.tool_policies import policy as random_policy

# The tasks need only a few of the tools. The others never get values.
pytestmark = pytest.mark.filterwarnings("ignore:ToolSelectionPolicy. fill gave no value")
CATALOGUE = workbench_catalogue()
TASKS = make_workbench_tasks(5, seed=0)
GROUP_SIZE = 4


def trained_policy(**options: Any) -> ToolSelectionPolicy:
    policy = ToolSelectionPolicy(CATALOGUE, **options)
    config = GRPOConfig(
        group_size=8, num_states_per_iteration=32, learning_rate=0.02, advantage=AdvantageConfig(scale="batch"),
        objective=ObjectiveConfig(aggregation="row_sum", entropy_coef=0.07), seed=0,
    )  # fmt: skip
    runs_all = SimpleNamespace(run=lambda calls: [ToolResult() for _ in calls])
    rewards = ToolRewards(runs_all, standard_rewards(CATALOGUE))
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=rewards)
    trainer.train(TASKS, num_iterations=10, progress=False)
    assert policy.tool_probabilities(TASKS).max() > 0.2, "it has learned something"
    return policy


POLICIES: dict[str, Callable[[], ToolSelectionPolicy]] = {
    "trained": trained_policy,
    "trained, hidden layer": lambda: trained_policy(hidden=[32]),
    "weights of 1, hidden layer": lambda: random_policy(CATALOGUE, scale=1.0, encoder=None, hidden=[32]),
}
ROUNDINGS = 16
"""A logit is a sum of 1,024 products (or of 32, of sums of 1,024), which matrix products of other shapes add in another
order: the error of such a sum grows like the square root of its length, 32, and half of that is allowed."""


@pytest.mark.parametrize("kind", POLICIES)
def test_log_probs_are_the_same_whatever_is_scored_with_them(kind: str) -> None:
    torch.manual_seed(0)
    policy = POLICIES[kind]()
    sampled = policy.sample_actions(TASKS, GROUP_SIZE)
    wanted = sampled.behaviour_log_probs
    assert wanted.shape[0] == len(TASKS) * GROUP_SIZE
    largest = max(
        1.0, float(policy.tool_probabilities(TASKS).log().abs().max())
    )  # a log-prob is as exact as its logits

    def require_same(found: Tensor, rows: slice) -> None:
        """Equal but for the order of sums. Rows alone may be narrower, where no call has more decisions."""
        assert bool((wanted[rows, found.shape[1] :] == 0).all())
        atol = ROUNDINGS * torch.finfo(torch.float32).eps * largest
        torch.testing.assert_close(found.detach(), wanted[rows, : found.shape[1]], rtol=0, atol=atol)

    calls = [call for group in sampled.actions for call in group]
    tasks = [task for task in TASKS for _ in range(GROUP_SIZE)]
    require_same(policy.score_groups(TASKS, sampled.actions).log_probs, slice(None))
    for size in (1, 3, 7, len(calls)):
        for start in range(0, len(calls), size):
            rows = slice(start, start + size)
            require_same(policy.score_actions(tasks[rows], calls[rows]).log_probs, rows)
    for place, group in enumerate(sampled.actions):
        rows = slice(place * GROUP_SIZE, (place + 1) * GROUP_SIZE)
        require_same(policy.score_groups(TASKS[place : place + 1], [group]).log_probs, rows)

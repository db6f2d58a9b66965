"""Metrics of each tool: calls, share of errors, mean seconds and mean cost."""

import pytest
import torch

from adapters.tools.catalogue.calls import ToolCall, ToolResult
from adapters.tools.errors import WorkerLostError
from adapters.tools.learning.rewards import ToolRewards, executed, right_tool
from adapters.tools.policy.policy import ToolSelectionPolicy
from adapters.tools.text.encoders import HashingEncoder
from grpo import GRPOConfig, GRPOTrainer
from grpo.errors import ConfigError
from grpo.rewards import ask_for_rewards
from tests.unit.adapters.tools.learning.test_rewards import CATALOGUE, FAILED, OK, SHUFFLE, SORT, Answers, call


def test_metrics_per_tool_are_counts_shares_and_means_of_the_tools_that_were_called() -> None:
    """sort: 2 calls, one failed, .25 and 1.5 s, cost .5; add: 1 call that ran. The lost call and unknown tools do not count."""
    lost = ToolResult(error=WorkerLostError("gone"), seconds=9.0)
    made = [call("sort"), call("add"), None, call("sort"), call("sort"), call("fly"), ToolCall(tool=["sort"])]  # type: ignore[arg-type]
    rewards = ToolRewards(Answers(OK, OK, FAILED, lost, FAILED, FAILED), {"ran": executed}, per_tool=CATALOGUE)
    assert ask_for_rewards(rewards, [SORT] * 7, made).metrics == {
        "tools/sort/calls": (0, 2),
        "tools/sort/errors": (2, 1),
        "tools/sort/seconds": (2, 1.75),
        "tools/sort/cost": (2, 1.0),
        "tools/add/calls": (0, 1),
        "tools/add/errors": (1, 0),
        "tools/add/seconds": (1, 0.25),
        "tools/add/cost": (1, 2.0),
    }


def test_metrics_per_tool_count_each_row_of_a_shared_result() -> None:
    rewards = ToolRewards(Answers(OK), {"ran": executed}, reuse_results=True, per_tool=CATALOGUE)
    assert ask_for_rewards(rewards, [SORT] * 3, [call("sort")] * 3).metrics["tools/sort/calls"] == (0, 3)


def test_metrics_per_tool_are_off_unless_a_catalogue_is_given() -> None:
    rewards = ToolRewards(Answers(OK), {"ran": executed})
    assert ask_for_rewards(rewards, [SORT], [call("sort")]).metrics == {}
    with pytest.raises(ConfigError, match=r"ToolRewards.*per_tool must be a ToolCatalogue, or None; got bool True"):
        ToolRewards(Answers(OK), {"ran": executed}, per_tool=True)  # type: ignore[arg-type]


def test_metrics_per_tool_are_logged_in_training() -> None:
    policy = ToolSelectionPolicy(CATALOGUE, encoder=HashingEncoder(16))
    with torch.no_grad():
        policy.network.similarity.zero_()  # every tool is equally likely
    rewards = ToolRewards(Answers(OK), {"tool": right_tool(CATALOGUE)}, per_tool=CATALOGUE)
    metrics = GRPOTrainer(config=GRPOConfig(group_size=8), policy=policy, reward_model=rewards).step([SHUFFLE] * 8)
    assert sum(metrics[f"tools/{tool}/calls"] for tool in CATALOGUE) == 64
    assert [metrics[f"tools/add/{name}"] for name in ("errors", "seconds", "cost")] == [0.0, 0.25, 2.0]

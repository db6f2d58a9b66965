"""Logs of tool calls: what the core's estimates compare, and a policy that learns from them."""

import math
from typing import Any, Literal

import pytest

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.learning.records import ToolSample
from adapters.tools.learning.reward_regression import RewardRegression
from adapters.tools.policy.policy import ToolSelectionPolicy
from grpo import GRPOConfig, GRPOTrainer
from grpo.logs import LoggedRewards, evaluate_from_logs


def add(number: float = 0.0) -> None:
    """Add numbers."""


def convert(unit: Literal["mile", "foot"]) -> None:
    """Convert lengths."""


CATALOGUE = ToolCatalogue([Tool.from_function(add), Tool.from_function(convert)])


def sample(state: str, tool: str, reward: float, **arguments: Any) -> ToolSample:
    return ToolSample(state=state, tool=tool, arguments=arguments, log_prob=[math.log(0.5)], reward=reward)


def test_calls_are_compared_by_what_the_policy_decides() -> None:
    """The tool and the enumerated values; a call of an unknown tool counts in n. Of three decisions, each weighs 2 / 3."""
    logs = [
        sample("x", "add", 1.0, number=3.0), sample("x", "convert", 3.0, unit="mile"), sample("x", "fly", 9.0),
    ]  # fmt: skip
    rewards = LoggedRewards(logs, action_key=CATALOGUE.decisions)
    calls = [
        ToolCall(tool="add", arguments={"number": 4.0}),
        ToolCall(tool="convert", arguments={"unit": "mile"}),
        ToolCall(tool="convert", arguments={"unit": "foot"}),
    ]
    assert rewards.compute_rewards(["x"] * 3, calls).tolist() == pytest.approx([2 / 3, 2.0, 0.0])


@pytest.mark.slow
def test_a_policy_learns_from_a_log_and_is_evaluated_from_another() -> None:
    texts = {"add 2 and 3": "add", "the sum of these": "add", "write miles as feet": "convert"}
    logs = [
        sample(text, tool, float(tool == right), **({"unit": "mile"} if tool == "convert" else {}))
        for text, right in texts.items()
        for tool in CATALOGUE
        for _ in range(20)
    ]
    policy = ToolSelectionPolicy(CATALOGUE)
    fit = RewardRegression(CATALOGUE, policy.encoder)
    rewards = LoggedRewards(logs, action_key=CATALOGUE.decisions, fit=fit)
    config = GRPOConfig(group_size=8, learning_rate=0.05, seed=0)
    GRPOTrainer(config=config, policy=policy, reward_model=rewards).train(
        rewards.states, num_iterations=30, progress=False
    )
    best = [call.tool for call in policy.predict(list(texts)) if call is not None]
    assert best == list(texts.values())

    def tool(call: ToolCall) -> str:
        return call.tool

    report = evaluate_from_logs(policy.predict, logs, action_key=tool)
    assert (report.logged.value, report.ips.value) == pytest.approx((0.5, 1.0))

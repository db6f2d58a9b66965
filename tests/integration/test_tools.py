"""Choosing tools, end to end: tools that hang, die and flood do not harm a run, and are unlearned."""

import json

import pytest
import torch

from adapters.tools import (
    ExecutorOptions,
    Tool,
    ToolCatalogue,
    ToolExecutor,
    ToolRewards,
    ToolSelectionPolicy,
    executed,
)
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig
from tests.support import hostile_tools, tool_functions

pytestmark = pytest.mark.filterwarnings("ignore:ToolExecutor's workers")  # where tests are not root


def misbehaving(how, **fields):
    """A tool whose one parameter can have one value."""
    parameters = {"type": "object", "properties": {"how": {"const": how}}, "required": ["how"]}
    function = hostile_tools.misbehave
    return Tool(name=how, description=f"Try {how}.", function=function, parameters=parameters, **fields)


@pytest.mark.slow
def test_a_run_survives_misbehaving_tools_and_learns_to_avoid_them(tmp_path):
    """Every group of the first iterations holds calls that hang, end the worker, flood it, or raise."""
    catalogue = ToolCatalogue(
        [
            misbehaving("sleep", timeout=0.2),
            misbehaving("os_exit"),
            misbehaving("long_text"),
            misbehaving("raise_base"),
            Tool.from_function(tool_functions.nothing),
        ]
    )
    torch.manual_seed(0)
    policy = ToolSelectionPolicy(catalogue)
    log = tmp_path / "calls.jsonl"
    with ToolExecutor(
        catalogue, num_workers=2, options=ExecutorOptions(max_output_bytes=1_000, log_path=log)
    ) as executor:
        config = GRPOConfig(group_size=8, learning_rate=0.05, seed=0, objective=ObjectiveConfig(entropy_coef=0.01))
        trainer = GRPOTrainer(config=config, policy=policy, reward_model=ToolRewards(executor, {"executed": executed}))
        history = trainer.train(["do something", "anything at all"], num_iterations=30, progress=False)
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(calls) == 30 * 2 * 8
    assert {call["error"] for call in calls} == {
        None,
        "ToolTimeoutError",
        "WorkerDiedError",
        "OutputTooLargeError",
        "ToolRaisedError",
    }
    assert all(call["ok"] == (call["tool"] == "nothing") for call in calls)
    assert all(parameter.isfinite().all() for parameter in policy.parameters())
    assert history[0]["rewards/executed/mean"] < 0.1  # of 0.2: one tool of five works
    assert policy.tool_probabilities(["do something"])[0, -1] > 0.8

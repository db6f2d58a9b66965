"""Calls that the infrastructure loses: their rows are dropped and counted, and too many in a row end the run."""

import os
import signal
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.tools import Tool, ToolCall, ToolCatalogue, ToolExecutor, ToolResult, ToolSelectionPolicy
from adapters.tools.errors import LostCallError, ServerLostError, ToolRaisedError, ToolTimeoutError, WorkerLostError
from adapters.tools.learning.rewards import ToolRewards
from grpo import GRPOConfig, GRPOTrainer, WeightedRewards
from grpo.config import RewardConfig
from grpo.rewards import ask_for_rewards
from tests.support.lost_server_tool import ask_lost_server
from tests.support.mcp_servers import by_hand, by_name, listing, process_of
from tests.support.policies import TablePolicy
from tests.support.tool_executors import on_linux

DROPPED = "rows/dropped"
RAN = {"ok": lambda state, call, result: float(result.ok)}
KINDS = ("server_lost", "worker_lost", "loop_blocked", "root_full")
SERVER, WORKER, BLOCKED, FULL = (f"tools/errors/{kind}" for kind in KINDS)


async def guess(text: str = "") -> str:
    """Answer without any server."""
    return "guessed" + text


def as_rewarded(state: Any, call: ToolCall, result: ToolResult) -> float:
    """1.1 for the right tool, as the server says, and less for a failed call than for a guess."""
    return {"right": 1.1, "guess": 0.55}[call.tool] if result.ok else -0.2


@pytest.mark.filterwarnings("error")
def test_a_server_killed_in_the_middle_of_training_unlearns_nothing_and_ends_the_run() -> None:
    """At today's rewards, 0.55 for a guess against -0.2 for a failed call, the policy would learn to guess at once."""
    with by_hand(listing("right"), listing("place")) as server:
        tools = by_name(server)
        catalogue = ToolCatalogue([tools["right"], Tool.from_function(guess, remote=True)])
        policy = ToolSelectionPolicy(catalogue)
        with ToolExecutor(catalogue) as executor:
            lost: list[int] = []

            def run(calls: Sequence[ToolCall]) -> list[ToolResult]:
                results = executor.run(calls)
                lost.append(sum(isinstance(result.error, LostCallError) for result in results))
                return results

            trainer = GRPOTrainer(
                config=GRPOConfig(group_size=8, learning_rate=0.05, seed=0),
                policy=policy,
                reward_model=ToolRewards(SimpleNamespace(run=run), {"useful": as_rewarded}, max_lost_in_a_row=100),
            )
            states = ["what is right", "and now"]
            learned = policy.tool_probabilities(states)[:, 0]
            while float(learned.min()) < 0.7:
                metrics = trainer.step(states)
                assert (metrics[SERVER], metrics[WORKER], metrics[BLOCKED], metrics[DROPPED]) == (0, 0, 0, 0)
                learned = policy.tool_probabilities(states)[:, 0]
            os.kill(process_of(tools), signal.SIGKILL)
            num_dropped: list[int] = []

            def go_on() -> None:
                while True:
                    metrics = trainer.step(states)
                    assert metrics[SERVER] == metrics[DROPPED] == lost[-1]
                    num_dropped.append(int(metrics[DROPPED]))

            with pytest.raises(ServerLostError, match="100 calls of the tool right were lost in a row") as raised:
                go_on()
            assert any(0 < number < 16 for number in num_dropped), "iterations with rows that are left"
            assert 100 <= sum(lost) < 100 + 16, "the last iteration made up to 16 calls"
            assert bool((policy.tool_probabilities(states)[:, 0] >= learned).all())
    assert "is lost" in str(raised.value) or "ended" in str(raised.value)


class Script:
    """An executor whose calls end as the script says, batch by batch."""

    def __init__(self, *batches: list[type[Exception] | None]) -> None:
        self.batches = list(batches)
        self.num_calls = 0

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        self.num_calls += len(calls)
        ends = self.batches.pop(0)
        return [ToolResult(output=1) if end is None else ToolResult(error=end("why")) for end in ends]


def calls_of(*tools: str) -> list[ToolCall]:
    return [ToolCall(tool=tool) for tool in tools]


def test_lost_calls_are_told_by_kind_and_not_given_to_the_reward_functions() -> None:
    asked = []

    def one(state: Any, call: ToolCall, result: ToolResult) -> float:
        asked.append(type(result.error))
        return float(result.ok)

    ends = [WorkerLostError, None, ToolTimeoutError, ServerLostError, ToolRaisedError]
    found = ask_for_rewards(ToolRewards(Script(ends), {"one": one}), [0] * 5, calls_of("a", "a", "a", "b", "a"))
    assert found.components["one"].isnan().tolist() == [True, False, False, True, False]
    assert asked == [type(None), ToolTimeoutError, ToolRaisedError]
    lost = {WORKER: [0], SERVER: [3], BLOCKED: [], FULL: []}
    assert {name: rows.nonzero().flatten().tolist() for name, rows in found.lost.items()} == lost


def test_the_calls_of_each_tool_are_counted_by_themselves_and_a_call_that_runs_ends_the_row() -> None:
    lost = WorkerLostError
    script = Script([lost, None, lost], [lost, None, None], [lost, lost, lost], [None, lost, lost])
    rewards = ToolRewards(script, RAN, max_lost_in_a_row=3)
    tools = calls_of("a", "b", "c")
    assert rewards.compute_rewards([0] * 3, tools).isnan().tolist() == [True, False, True]
    assert rewards.compute_rewards([0] * 3, tools).isnan().tolist() == [True, False, False]
    with pytest.raises(WorkerLostError, match="3 calls of the tool a were lost in a row"):
        rewards.compute_rewards([0] * 3, tools)


def test_a_batch_of_lost_calls_is_executed_again_until_one_runs_or_the_run_ends() -> None:
    lost = ServerLostError
    rewards = ToolRewards(Script([lost] * 2, [lost] * 2, [lost, None]), RAN)
    assert rewards.compute_rewards([0] * 2, calls_of("a", "a")).isnan().tolist() == [True, False]
    script = Script(*([lost] * 2 for _ in range(20)))
    with pytest.raises(ServerLostError, match="32 calls of the tool a were lost in a row"):
        ToolRewards(script, RAN).compute_rewards([0] * 2, calls_of("a", "a"))
    assert script.num_calls == 32


def test_a_shared_result_that_is_lost_counts_once_in_a_row_and_once_per_dropped_row() -> None:
    script = Script([WorkerLostError, None])
    rewards = ToolRewards(script, RAN, reuse_results=True, max_lost_in_a_row=2)
    found = ask_for_rewards(rewards, [0] * 4, calls_of("a", "a", "a", "b"))
    assert found.values.isnan().tolist() == found.lost[WORKER].tolist() == [True] * 3 + [False]


class Scripted(TablePolicy):
    """Its actions are calls."""

    def get_log_probabilities(self, states: Any, actions: Any) -> torch.Tensor:
        return torch.zeros(len(actions))


def collected(rewards: Any, **settings: Any) -> tuple[Any, Any]:
    """A batch of one group of four, and its metrics."""
    config, policy = GRPOConfig(group_size=4, reward=RewardConfig(**settings)), Scripted(script=[calls_of(*"abcd")])
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=rewards)
    batch, costs = trainer.collect(["state"]), trainer.collector.costs
    return batch, costs.agree([costs.of_this_rank()])


@pytest.mark.parametrize("kind", ["raise", "drop", "zero"])
@pytest.mark.parametrize("is_part", [False, True])
def test_lost_rows_are_dropped_whatever_happens_to_other_nan_rewards(kind: Any, is_part: bool) -> None:
    rewards: Any = ToolRewards(Script([None, WorkerLostError, None, ServerLostError]), RAN)
    if is_part:
        rewards = WeightedRewards({"tools": rewards, "one": lambda s, a: [1.0] * len(a)})
    batch, metrics = collected(rewards, non_finite=kind)
    assert [action.tool for action in batch.actions] == ["a", "c"]
    assert batch.rewards.tolist() == [1.0 + is_part] * 2
    counts = Counter({name: int(value) for name, value in metrics.items() if "/errors/" in name or name == DROPPED})
    assert counts == {WORKER: 1, SERVER: 1, BLOCKED: 0, FULL: 0, DROPPED: 2}


def test_rows_that_are_asked_one_by_one_are_dropped_and_counted_too() -> None:
    def picky(state: Any, call: ToolCall, result: ToolResult) -> float:
        if call.tool == "a":
            raise ValueError("not this one")
        return 1.0

    script = Script([None] * 4, [None], [WorkerLostError], [None], [None], [None])  # rows come in the order 0, 2, 1, 3
    batch, metrics = collected(ToolRewards(script, {"picky": picky}), on_failure="drop")
    assert script.num_calls == 4 + 5
    assert [action.tool for action in batch.actions] == ["b", "c", "d"]
    assert (metrics[WORKER], metrics[DROPPED]) == (0, 1), "the lost call ran when it was executed again"


@on_linux
def test_a_tool_may_say_that_its_own_server_is_lost() -> None:
    with ToolExecutor(ToolCatalogue([Tool.from_function(ask_lost_server)]), num_workers=1) as executor:
        [result] = executor.run(calls_of("ask_lost_server"))
    assert type(result.error) is ServerLostError
    assert str(result.error) == "ask_lost_server: the database is gone"

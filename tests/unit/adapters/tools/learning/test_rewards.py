"""What calls bring in, worked by hand: rewards, costs and metrics; and calls that the infrastructure loses."""

import math
import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from adapters.tools import (
    Tool,
    ToolCall,
    ToolCatalogue,
    ToolExecutor,
    ToolResult,
    ToolSelectionPolicy,
    ToolTask,
)
from adapters.tools.errors import ServerLostError, ToolRaisedError, ToolTimeoutError, WorkerLostError
from adapters.tools.learning import rewards as of_calls
from adapters.tools.learning.rewards import ToolRewards, call_cost, executed, latency_cost, right_tool, standard_rewards
from grpo import GRPOConfig, GRPOTrainer, WeightedRewards
from grpo.checks import check_reward_model
from grpo.config import RewardConfig
from grpo.errors import ConfigError, ContractError, RewardError
from grpo.rewards import ask_for_rewards
from tests.support.lost_server_tool import ask_lost_server
from tests.support.mcp_servers import by_hand, by_name, listing, process_of
from tests.support.policies import TablePolicy
from tests.support.threads import run_together
from tests.support.tool_executors import on_linux
from tests.support.tool_policies import call


def sort(order: Literal["up", "down"], count: int = 1) -> None: ...
def shuffle() -> None: ...
def add(number: int) -> None: ...


CATALOGUE = ToolCatalogue(
    Tool.from_function(function, description="Do it.", category=category, cost=cost)
    for function, category, cost in ((sort, "lists", 0.5), (shuffle, "lists", 0.0), (add, "arithmetic", 2.0))
)
OK = ToolResult(output=1, seconds=0.25)
FAILED = ToolResult(error=ToolRaisedError("it did not work"), seconds=1.5)
SORT = ToolTask(text="sort it", tool="sort", arguments={"order": "up", "count": 3})
SHUFFLE = ToolTask(text="sort it", tool="shuffle")


class Answers:
    """An executor that gives the answers it was made with, or the one it was made with to all, and remembers the calls."""

    def __init__(self, *results: ToolResult) -> None:
        self.results = results
        self.asked: list[list[ToolCall]] = []

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        self.asked.append(list(calls))
        return list(self.results) if len(self.results) > 1 else [self.results[0]] * len(calls)


# (task, call, result, tool, parameters, executed)
CASES = {
    "right in all": (SORT, call("sort", order="up", count=3), OK, 0.5, 0.3, 0.2),
    "right in all, without arguments": (SHUFFLE, call("shuffle"), OK, 0.5, 0.3, 0.2),
    "another tool of the category": (SORT, call("shuffle"), OK, 0.2, 0.0, 0.2),
    "another tool of the category, with the same arguments": (SHUFFLE, call("sort", order="up", count=3), OK, 0.2, 0.0, 0.2),
    "a tool of another category": (SORT, call("add", number=3), OK, 0.0, 0.0, 0.2),
    "one of two parameters is right": (SORT, call("sort", order="up", count=4), OK, 0.5, 0.15, 0.2),
    "one of two parameters is missing": (SORT, call("sort", order="up"), OK, 0.5, 0.15, 0.2),
    "no parameter is right": (SORT, call("sort", order="down", count=4), OK, 0.5, 0.0, 0.2),
    "one argument too many": (SORT, call("sort", order="up", count=3, extra=1), OK, 0.5, 0.2, 0.2),  # 2 of 3
    "an argument where there is none": (SHUFFLE, call("shuffle", extra=1), OK, 0.5, 0.0, 0.2),
    "right, but it failed": (SORT, call("sort", order="up", count=3), FAILED, 0.5, 0.3, 0.0),
    "wrong, and it failed": (SORT, call("add", number=3), FAILED, 0.0, 0.0, 0.0),
    "a tool that there is not": (SORT, call("fly"), FAILED, 0.0, 0.0, 0.0),
}  # fmt: skip


def components_of(rewards: ToolRewards, tasks: Any, calls: Any) -> dict[str, list[float]]:
    return {name: part.tolist() for name, part in ask_for_rewards(rewards, tasks, calls).components.items()}


def test_the_standard_rewards_equal_hand_worked_values(subtests: pytest.Subtests) -> None:
    for case, (asked, made, result, tool, parameters, ran) in CASES.items():
        with subtests.test(case):
            rewards = ToolRewards(Answers(result), standard_rewards(CATALOGUE))
            expected = {"tool": [tool], "parameters": [parameters], "executed": [ran]}
            found = components_of(rewards, [asked], [made])
            assert found == {name: pytest.approx(parts, abs=1e-7) for name, parts in expected.items()}
            whole = pytest.approx([tool + parameters + ran], abs=1e-7)
            assert rewards.compute_rewards([asked], [made]).tolist() == whole


def test_the_best_comparison_counts_where_several_calls_are_right(subtests: pytest.Subtests) -> None:
    """.5 for a right tool, .2 for its category, .3 times the largest share of right parameters, .2 if executed."""
    several = ToolTask(
        text="", tool="sort", arguments={"order": "up", "count": 3},
        other_calls=(call("sort", order="down", count=4), call("add", number=1)),
    )  # fmt: skip
    no_tool = ToolTask(text="", tool=None)
    either = ToolTask(text="", tool=None, other_calls=(call("add", number=1),))
    for asked, made, tool, parameters, ran in (
        (several, call("sort", order="down", count=4), 0.5, 0.3, 0.2), (several, call("add", number=1), 0.5, 0.3, 0.2),
        (several, call("sort", order="down", count=3), 0.5, 0.15, 0.2), (several, call("shuffle"), 0.2, 0.0, 0.2),
        (several, call("sort", order="down", count=4, extra=1), 0.5, 0.2, 0.2),  # 2 of 3, and 0 of 3
        (several, None, 0.0, 0.0, 0.0), (no_tool, None, 0.5, 0.3, 0.2), (no_tool, call("sort"), 0.0, 0.0, 0.2),
        (no_tool, ToolCall(tool=None), 0.0, 0.0, 0.2),  # type: ignore[arg-type]
        (either, None, 0.5, 0.3, 0.2), (either, call("add", number=1), 0.5, 0.3, 0.2), (either, call("shuffle"), 0.0, 0.0, 0.2),
    ):  # fmt: skip
        with subtests.test(str(made), task=asked.right_calls):
            executor = Answers(OK)
            rewards = ToolRewards(executor, standard_rewards(CATALOGUE) | {"cost": call_cost(CATALOGUE)})
            cost = {"sort": -0.5, "add": -2.0}.get(made.tool, 0.0) if made else 0.0
            expected = {"tool": tool, "parameters": parameters, "executed": ran, "cost": cost}
            found = components_of(rewards, [asked], [made])
            assert found == {name: [pytest.approx(part, abs=1e-7)] for name, part in expected.items()}
            assert executor.asked == [[] if made is None else [made]], "no call executes nothing"


def test_rows_without_a_call_keep_the_results_of_the_other_rows_in_place() -> None:
    rewards = ToolRewards(Answers(ToolResult(seconds=1.0), ToolResult(seconds=2.0)), {"slow": latency_cost(1.0)})
    made = [None, call("sort"), None, call("add")]
    assert rewards.compute_rewards([SORT] * 4, made).tolist() == [0.0, -1.0, 0.0, -2.0]


def test_an_argument_is_right_exactly_if_it_equals_the_tasks_as_json(subtests: pytest.Subtests) -> None:
    for given, wanted, same in ((1, 1.0, True), ((1, 2), [1, 2], True), (True, 1, False), (np.ones(2), [1, 1], False)):
        with subtests.test(given=given, wanted=wanted):
            asked, right = ToolTask(text="", tool="add", arguments={"number": wanted}), of_calls.right_parameters
            assert right(asked, call("add", number=given), OK) == pytest.approx(0.3 * same)
            assert right(asked, call("add"), OK) == 0.0
            assert right(replace(asked, arguments={}), call("add", number=given), OK) == 0.0


def test_latency_and_call_costs_equal_hand_worked_values() -> None:
    for cost, tool, result, expected in (
        (latency_cost(2.0), "sort", OK, -0.5), (latency_cost(2.0), "sort", FAILED, -3.0), (latency_cost(0.0), "sort", OK, 0),
        (call_cost(CATALOGUE), "add", OK, -2.0), (call_cost(CATALOGUE, 0.1), "sort", OK, -0.05),
        (call_cost(CATALOGUE), "shuffle", OK, 0), (call_cost(CATALOGUE), "fly", FAILED, 0),
    ):  # fmt: skip
        assert cost(SORT, call(tool), result) == pytest.approx(expected)


def test_the_reward_is_the_weighted_sum_of_its_functions() -> None:
    """1 * .5 + 2 * .15 + .5 * (-.5) + 1 * (-.5) = .05."""
    functions = {
        "tool": right_tool(CATALOGUE), "parameters": of_calls.right_parameters, "slow": latency_cost(2.0),
        "dear": call_cost(CATALOGUE),
    }  # fmt: skip
    rewards = ToolRewards(Answers(OK), functions, {"tool": 1, "parameters": 2, "slow": 0.5, "dear": 1})
    [found] = rewards.compute_rewards([SORT], [call("sort", order="up", count=4)]).tolist()
    assert found == pytest.approx(0.05, abs=1e-6)


def test_any_function_of_state_call_and_result_can_be_a_reward() -> None:
    """States need not be tasks."""

    def long_enough(request: str, made: ToolCall, result: ToolResult) -> bool:
        return len(request) > len(made.tool) and result.output == 1

    rewards = ToolRewards(Answers(OK), {"long": long_enough})
    assert rewards.compute_rewards(["sort", "sort it"], [call("sort"), call("sort")]).tolist() == [0.0, 1.0]


# --- executed once
CALLS = [
    call("sort", order="up"), call("add", number=1), call("sort", order="up"), call("add", number=True), call("add", number=1),
]  # fmt: skip
TASKS = [SORT, SHUFFLE, SORT, SORT, SHUFFLE]


def test_every_row_is_executed_once_for_all_reward_functions() -> None:
    executor = Answers(OK)
    check_reward_model(ToolRewards(executor, standard_rewards(CATALOGUE)), TASKS, CALLS, strict=True)
    del executor.asked[:]
    ToolRewards(executor, standard_rewards(CATALOGUE)).compute_rewards(TASKS, CALLS)
    assert executor.asked == [CALLS]


def test_equal_calls_of_one_batch_can_share_one_execution() -> None:
    """Each row gets the result of its own call; True is not 1."""
    executor = Answers(OK, FAILED, ToolResult(seconds=4.0))
    rewards = ToolRewards(executor, {"ran": executed, "slow": latency_cost(1.0)}, reuse_results=True)
    for _ in range(2):
        components = components_of(rewards, TASKS, CALLS)
        assert components["ran"] == pytest.approx([0.2, 0.0, 0.2, 0.2, 0.0])
        assert components["slow"] == [-0.25, -1.5, -0.25, -4.0, -1.5]
    shared = [call("sort", order="up"), call("add", number=1), call("add", number=True)]
    assert executor.asked == [shared] * 2
    assert executor.asked[0][2].arguments["number"] is True


def test_calls_that_cannot_be_executed_share_no_result(subtests: pytest.Subtests) -> None:
    circle: dict[str, Any] = {}
    circle["a"] = circle
    for one, other in (
        (call("add", number={1}), call("add", number="{1}")),
        (ToolCall(tool="add", arguments={1: "a"}), call("add", **{"1": "a"})),  # type: ignore[dict-item]
        (call("add", number=10**5000), call("add", number=10**5000)),
        (ToolCall(tool="add", arguments={(1, 2): 1}), ToolCall(tool="add", arguments={(1, 2): 1})),  # type: ignore[dict-item]
        (ToolCall(tool="add", arguments=circle), ToolCall(tool="add", arguments=circle)),
        (ToolCall(tool=["add"]), ToolCall(tool="['add']")),  # type: ignore[arg-type]
        (ToolCall(tool=10**5000), ToolCall(tool=None)),  # type: ignore[arg-type]
    ):
        with subtests.test(str(other.tool), arguments=type(other.arguments).__name__):
            executor = Answers(FAILED, OK, OK)
            rewards = ToolRewards(executor, standard_rewards(CATALOGUE), reuse_results=True)
            found = components_of(rewards, [SORT] * 3, [one, other, call("shuffle")])
            assert found["executed"] == pytest.approx([0.0, 0.2, 0.2])
            assert [len(calls) for calls in executor.asked] == [3]


def test_malformed_calls_are_rewarded_for_their_tool_and_not_their_arguments(subtests: pytest.Subtests) -> None:
    functions = standard_rewards(CATALOGUE) | {"cost": call_cost(CATALOGUE)}
    rewards = ToolRewards(Answers(FAILED), functions, reuse_results=True)
    for tool in ("add", "sort", None, ["add"], {"a": 1}, 5):
        for arguments in (None, "text", b"bytes", 3, [1], ["number"]):
            with subtests.test(tool=tool, arguments=arguments):
                found = components_of(rewards, [SORT], [ToolCall(tool=tool, arguments=arguments)])
                assert found["tool"] == pytest.approx([0.5 if tool == "sort" else 0.0])
                assert found["parameters"] == [0.0]
                assert found["cost"] == [{"add": -2.0, "sort": -0.5}.get(str(tool), 0.0)]


def test_batches_of_several_threads_keep_their_own_results() -> None:
    """Each call's result is its own number, and so is its reward."""
    echo = SimpleNamespace(run=lambda calls: [ToolResult(output=made.arguments["number"]) for made in calls])
    rewards = ToolRewards(echo, {"own": lambda asked, made, result: float(result.output == made.arguments["number"])})

    def batch(first: int) -> None:
        calls = [call("add", number=number) for number in range(first, first + 50)]
        assert rewards.compute_rewards([SORT] * 50, calls).tolist() == [1.0] * 50

    run_together(*(partial(batch, first) for first in range(0, 400, 50)))


# --- what a function may not do
def test_wrong_arguments_are_refused(subtests: pytest.Subtests) -> None:
    ok, ran = Answers(OK), {"ran": executed}
    for make, message in (
        (lambda: ToolRewards(None, ran), r"executor must be an object with a method run\(calls\); got NoneType None"),
        (lambda: ToolRewards(CATALOGUE, ran), "executor must be an object with a method run"),
        (lambda: ToolRewards(ok, None), "functions must be a mapping of names"),
        (lambda: ToolRewards(ok, {"ran": 1}), "functions must be a mapping of names"),
        (lambda: ToolRewards(ok, {}), "at least one reward and one weight for each"),
        (lambda: ToolRewards(ok, ran, {"run": 1}), "at least one reward and one weight for each"),
        (lambda: ToolRewards(ok, ran, {"ran": 1, "more": 1}), "at least one reward and one weight for each"),
        (lambda: ToolRewards(ok, ran, max_lost_in_a_row=0), "max_lost_in_a_row must be an integer >= 1; got int 0"),
        (lambda: ToolRewards(ok, ran, max_lost_in_a_row="3"), "max_lost_in_a_row must be an integer >= 1; got str '3'"),
        (lambda: ToolRewards(ok, ran, per_tool=True), "per_tool must be a ToolCatalogue, or None; got bool True"),
        *((lambda rate=rate: latency_cost(rate), "per_second must be") for rate in (-1.0, math.nan, math.inf)),
    ):
        with subtests.test(message), pytest.raises(ConfigError, match=f"(Rewards|latency_cost).*{message}"):
            make()


def test_standard_rewards_refuse_states_that_are_no_tasks() -> None:
    for name in ("tool", "parameters"):
        rewards = ToolRewards(Answers(OK), {name: standard_rewards(CATALOGUE)[name]})
        with pytest.raises(ContractError, match=r"states that are ToolTasks.*got str\. Pass ToolTasks, or your own"):
            rewards.compute_rewards(["sort it"], [call("sort")])


def test_an_error_in_a_reward_function_names_the_function_and_the_call_shortly() -> None:
    def unlucky(asked: Any, made: ToolCall, result: ToolResult) -> float:
        return 1 / 0 if made.arguments.get("number") != 3 else 1.0

    rewards = ToolRewards(Answers(OK), {"lucky": executed, "unlucky part": unlucky})
    for made, shown in (
        (call("add", number=1), r'"add"\({"number": 1}\)'), (call("add", number="x" * 10**6), '"add"'),
        (ToolCall(tool="x" * 10**6), ""), (call("add", number=10**5000), ""),
    ):  # fmt: skip
        message = rf"^The reward unlucky part raised ZeroDivisionError for {shown}"
        with pytest.raises(RuntimeError, match=message) as caught:
            rewards.compute_rewards([SORT, SORT], [call("add", number=3), made])
        assert len(str(caught.value)) < 500
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_reward_function_that_returns_no_number_is_named(subtests: pytest.Subtests) -> None:
    for answer in (None, "much", [1.0], 1j, object()):
        rewards = ToolRewards(Answers(OK), {"ran": executed, "odd": lambda *_, answer=answer: answer})
        with subtests.test(type(answer).__name__), pytest.raises(RewardError, match=r"^odd"):
            rewards.compute_rewards([SORT, SORT], [call("sort"), call("add")])


# --- Metrics of each tool
def test_metrics_per_tool_are_counts_shares_and_means_of_the_tools_that_were_called() -> None:
    """sort: 2 calls, one failed, .25 and 1.5 s, cost .5; add: 1 call that ran. The lost call and unknown tools do not count."""
    lost = ToolResult(error=WorkerLostError("gone"), seconds=9.0)
    made = [call("sort"), call("add"), None, call("sort"), call("sort"), call("fly"), ToolCall(tool=["sort"])]  # type: ignore[arg-type]
    rewards = ToolRewards(Answers(OK, OK, FAILED, lost, FAILED, FAILED), {"ran": executed}, per_tool=CATALOGUE)
    assert ask_for_rewards(rewards, [SORT] * 7, made).metrics == {
        "tools/sort/calls": (0, 2), "tools/sort/errors": (2, 1), "tools/sort/seconds": (2, 1.75), "tools/sort/cost": (2, 1.0),
        "tools/add/calls": (0, 1), "tools/add/errors": (1, 0), "tools/add/seconds": (1, 0.25), "tools/add/cost": (1, 2.0),
    }  # fmt: skip
    shared = ToolRewards(Answers(OK), {"ran": executed}, reuse_results=True, per_tool=CATALOGUE)
    counted = ask_for_rewards(shared, [SORT] * 3, [call("sort")] * 3).metrics["tools/sort/calls"]
    assert counted == (0, 3), "each row of a shared result counts"
    without = ToolRewards(Answers(OK), {"ran": executed})
    assert ask_for_rewards(without, [SORT], [call("sort")]).metrics == {}, "off unless a catalogue is given"


# --- calls that the infrastructure loses: their rows are dropped and counted, and too many in a row end the run
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
            rewards = ToolRewards(executor, {"useful": as_rewarded}, max_lost_in_a_row=100)
            config = GRPOConfig(group_size=8, learning_rate=0.05, seed=0)
            trainer = GRPOTrainer(config=config, policy=policy, reward_model=rewards)
            states = ["what is right", "and now"]
            metrics = trainer.step(states)
            assert (metrics[SERVER], metrics[WORKER], metrics[BLOCKED], metrics[DROPPED]) == (0, 0, 0, 0)
            learned = policy.tool_probabilities(states)[:, 0]
            os.kill(process_of(tools), signal.SIGKILL)
            num_dropped: list[int] = []

            def go_on() -> None:
                while True:
                    metrics = trainer.step(states)
                    assert metrics[SERVER] == metrics[DROPPED]
                    num_dropped.append(int(metrics[DROPPED]))

            message = r"100 calls of the tool right were lost in a row.*(is lost|ended)"
            with pytest.raises(ServerLostError, match=message):
                go_on()
            assert any(0 < number < 16 for number in num_dropped), "iterations with rows that are left"
            assert bool((policy.tool_probabilities(states)[:, 0] >= learned).all())


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

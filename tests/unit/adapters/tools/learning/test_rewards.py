"""What calls bring in, worked by hand: .5 right tool or .2 its category, .3 parameters, .2 executed; costs; names."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest

from adapters.tools.catalogue.calls import ToolCall, ToolResult
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.errors import ToolRaisedError
from adapters.tools.learning.rewards import (
    ToolRewards,
    call_cost,
    executed,
    latency_cost,
    right_parameters,
    right_tool,
    standard_rewards,
)
from adapters.tools.learning.tasks import ToolTask
from adapters.tools.policy.policy import ToolSelectionPolicy
from adapters.tools.text.encoders import HashingEncoder
from grpo import GRPOConfig, GRPOTrainer
from grpo.checks import check_reward_model
from grpo.errors import ConfigError, ContractError, RewardError
from grpo.rewards import ask_for_rewards


def sort(order: Literal["up", "down"], count: int = 1) -> None:
    """Sort items."""


def shuffle() -> None:
    """Shuffle items."""


def add(number: int) -> None:
    """Add numbers."""


CATALOGUE = ToolCatalogue(
    [
        Tool.from_function(sort, category="lists", cost=0.5),
        Tool.from_function(shuffle, category="lists"),
        Tool.from_function(add, category="arithmetic", cost=2.0),
    ]
)
OK = ToolResult(output=1, seconds=0.25)
FAILED = ToolResult(error=ToolRaisedError("it did not work"), seconds=1.5)


def task(tool: str, category: str, **arguments: Any) -> ToolTask:
    assert CATALOGUE[tool].category == category
    return ToolTask(text="sort it", tool=tool, arguments=arguments)


def call(tool: str, **arguments: Any) -> ToolCall:
    return ToolCall(tool=tool, arguments=arguments)


SORT = task("sort", "lists", order="up", count=3)
SHUFFLE = task("shuffle", "lists")


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
    "another tool of the category, with the same arguments": (
        SHUFFLE, call("sort", order="up", count=3), OK, 0.2, 0.0, 0.2,
    ),
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


def test_the_standard_rewards_equal_hand_worked_values(subtests: pytest.Subtests) -> None:
    for case in CASES:
        with subtests.test(case):
            asked, made, result, tool, parameters, ran = CASES[case]
            rewards = ToolRewards(Answers(result), standard_rewards(CATALOGUE))
            components = ask_for_rewards(rewards, [asked], [made]).components
            expected = {"tool": tool, "parameters": parameters, "executed": ran}
            assert {name: float(part) for name, part in components.items()} == pytest.approx(expected, abs=1e-7)
            assert rewards.compute_rewards([asked], [made]).tolist() == pytest.approx(
                [tool + parameters + ran], abs=1e-7
            )


def test_each_row_is_rewarded_by_its_own_task_call_and_result() -> None:
    rows = list(CASES.values())
    rewards = ToolRewards(Answers(*(row[2] for row in rows)), standard_rewards(CATALOGUE))
    found = rewards.compute_rewards([row[0] for row in rows], [row[1] for row in rows])
    assert found.tolist() == pytest.approx([sum(row[3:]) for row in rows], abs=1e-6)
    assert float(found.max()) == pytest.approx(1.0)


def test_the_best_comparison_counts_where_several_calls_are_right(subtests: pytest.Subtests) -> None:
    """.5 for a right tool, .2 for its category, .3 times the largest share of right parameters, .2 if executed."""
    several = ToolTask(
        text="", tool="sort", arguments={"order": "up", "count": 3},
        other_calls=(call("sort", order="down", count=4), call("add", number=1)),
    )  # fmt: skip
    no_tool = ToolTask(text="", tool=None)
    either = ToolTask(text="", tool=None, other_calls=(call("add", number=1),))
    for asked, made, tool, parameters, ran in (
        (several, call("sort", order="down", count=4), 0.5, 0.3, 0.2),
        (several, call("sort", order="down", count=3), 0.5, 0.15, 0.2),
        (several, call("sort", order="down", count=4, extra=1), 0.5, 0.2, 0.2),  # 2 of 3, and 0 of 3
        (several, call("add", number=1), 0.5, 0.3, 0.2),
        (several, call("shuffle"), 0.2, 0.0, 0.2),
        (several, None, 0.0, 0.0, 0.0),
        (no_tool, None, 0.5, 0.3, 0.2),
        (no_tool, call("sort"), 0.0, 0.0, 0.2),
        (no_tool, ToolCall(tool=None), 0.0, 0.0, 0.2),  # type: ignore[arg-type]
        (either, None, 0.5, 0.3, 0.2),
        (either, call("add", number=1), 0.5, 0.3, 0.2),
        (either, call("shuffle"), 0.0, 0.0, 0.2),
    ):
        with subtests.test(str(made), task=asked.right_calls):
            executor = Answers(OK)
            rewards = ToolRewards(executor, standard_rewards(CATALOGUE) | {"cost": call_cost(CATALOGUE)})
            found = {name: float(part) for name, part in ask_for_rewards(rewards, [asked], [made]).components.items()}
            cost = {"sort": -0.5, "add": -2.0}.get(made.tool, 0.0) if made else 0.0
            expected = {"tool": tool, "parameters": parameters, "executed": ran, "cost": cost}
            assert found == pytest.approx(expected, abs=1e-7)
            assert executor.asked == [[] if made is None else [made]], "no call executes nothing"


def test_rows_without_a_call_keep_the_results_of_the_other_rows_in_place() -> None:
    results = (ToolResult(seconds=1.0), ToolResult(seconds=2.0))
    rewards = ToolRewards(Answers(*results), {"slow": latency_cost(1.0)})
    made = [None, call("sort"), None, call("add")]
    assert rewards.compute_rewards([SORT] * 4, made).tolist() == [0.0, -1.0, 0.0, -2.0]


def test_an_argument_is_right_exactly_if_it_equals_the_tasks_as_json(subtests: pytest.Subtests) -> None:
    for given, wanted, same in (
        (1, 1, True), (1, 1.0, True), (1, 2, False), (True, True, True), (True, 1, False), (0, False, False),
        ([True], [1], False), ({"b": [0]}, {"b": [False]}, False), ((1, 2), [1, 2], True), (np.ones(2), [1, 1], False),
        ("a", "a", True), ([1, 2], [1, 2], True), ([1, 2], [2, 1], False), (None, None, True),
    ):  # fmt: skip
        with subtests.test(given=given, wanted=wanted):
            asked = task("add", "arithmetic", number=wanted)
            assert right_parameters(asked, call("add", number=given), OK) == pytest.approx(0.3 * same)
            assert right_parameters(asked, call("add"), OK) == 0.0
            assert right_parameters(task("add", "arithmetic"), call("add", number=given), OK) == 0.0


def test_latency_and_call_costs_equal_hand_worked_values() -> None:
    assert latency_cost(2.0)(SORT, call("sort"), OK) == -0.5
    assert latency_cost(2.0)(SORT, call("sort"), FAILED) == -3.0
    assert latency_cost(0.0)(SORT, call("sort"), OK) == 0
    assert call_cost(CATALOGUE)(SORT, call("add"), OK) == -2.0
    assert call_cost(CATALOGUE, 0.1)(SORT, call("sort"), OK) == pytest.approx(-0.05)
    assert call_cost(CATALOGUE)(SORT, call("shuffle"), OK) == 0
    assert call_cost(CATALOGUE)(SORT, call("fly"), FAILED) == 0


def test_latency_cost_refuses_rates_that_are_negative_or_not_finite(subtests: pytest.Subtests) -> None:
    for per_second in (-1.0, float("nan"), float("inf")):
        with (
            subtests.test(per_second=per_second),
            pytest.raises(ConfigError, match=r"latency_cost.*per_second must be"),
        ):
            latency_cost(per_second)


def test_the_reward_is_the_weighted_sum_of_its_functions() -> None:
    """1 * .5 + 2 * .15 + .5 * (-.5) + 1 * (-.5) = .05."""
    functions = {
        "tool": right_tool(CATALOGUE),
        "parameters": right_parameters,
        "slow": latency_cost(2.0),
        "dear": call_cost(CATALOGUE),
    }
    rewards = ToolRewards(Answers(OK), functions, {"tool": 1, "parameters": 2, "slow": 0.5, "dear": 1})
    assert rewards.compute_rewards([SORT], [call("sort", order="up", count=4)]).tolist() == pytest.approx(
        [0.05], abs=1e-6
    )


def test_weights_without_a_function_are_refused(subtests: pytest.Subtests) -> None:
    for functions, weights in (
        ({}, None),
        ({"ran": executed}, {"run": 1}),
        ({"ran": executed}, {"ran": 1, "more": 1}),
    ):
        with (
            subtests.test(weights=weights),
            pytest.raises(ConfigError, match="at least one reward and one weight for each"),
        ):
            ToolRewards(Answers(OK), functions, weights)


def test_any_function_of_state_call_and_result_can_be_a_reward() -> None:
    """States need not be tasks."""

    def long_enough(request: str, made: ToolCall, result: ToolResult) -> bool:
        return len(request) > len(made.tool) and result.output == 1

    rewards = ToolRewards(Answers(OK), {"long": long_enough})
    assert rewards.compute_rewards(["sort", "sort it"], [call("sort"), call("sort")]).tolist() == [0.0, 1.0]


# --- executed once


CALLS = [
    call("sort", order="up"),
    call("add", number=1),
    call("sort", order="up"),
    call("add", number=True),
    call("add", number=1),
]
TASKS = [SORT, SHUFFLE, SORT, SORT, SHUFFLE]


def test_every_row_is_executed_once_for_all_reward_functions() -> None:
    executor = Answers(OK)
    ToolRewards(executor, standard_rewards(CATALOGUE)).compute_rewards(TASKS, CALLS)
    assert executor.asked == [CALLS]


def test_equal_calls_can_share_one_execution() -> None:
    """Each row gets the result of its own call; True is not 1."""
    executor = Answers(OK, FAILED, ToolResult(seconds=4.0))
    rewards = ToolRewards(executor, {"ran": executed, "slow": latency_cost(1.0)}, reuse_results=True)
    components = ask_for_rewards(rewards, TASKS, CALLS).components
    assert [[one.tool, dict(one.arguments)] for one in executor.asked[0]] == [
        ["sort", {"order": "up"}], ["add", {"number": 1}], ["add", {"number": True}],
    ]  # fmt: skip
    assert executor.asked[0][2].arguments["number"] is True
    assert components["ran"].tolist() == pytest.approx([0.2, 0.0, 0.2, 0.2, 0.0])
    assert components["slow"].tolist() == [-0.25, -1.5, -0.25, -4.0, -1.5]


def test_results_are_shared_only_within_one_batch() -> None:
    executor = Answers(OK)
    rewards = ToolRewards(executor, {"ran": executed}, reuse_results=True)
    for _ in range(2):
        rewards.compute_rewards([SORT] * 2, [call("shuffle")] * 2)
    assert executor.asked == [[call("shuffle")]] * 2


CIRCLE: dict[str, Any] = {}
CIRCLE["a"] = CIRCLE


def test_calls_that_cannot_be_executed_share_no_result(subtests: pytest.Subtests) -> None:
    for one, other in (
        (call("add", number={1}), call("add", number="{1}")),
        (ToolCall(tool="add", arguments={1: "a"}), call("add", **{"1": "a"})),  # type: ignore[dict-item]
        (call("add", number=10**5000), call("add", number=10**5000)),
        (ToolCall(tool="add", arguments={(1, 2): 1}), ToolCall(tool="add", arguments={(1, 2): 1})),  # type: ignore[dict-item]
        (ToolCall(tool="add", arguments=CIRCLE), ToolCall(tool="add", arguments=CIRCLE)),
        (ToolCall(tool=["add"]), ToolCall(tool="['add']")),  # type: ignore[arg-type]
        (ToolCall(tool=10**5000), ToolCall(tool=None)),  # type: ignore[arg-type]
    ):
        with subtests.test(str(other.tool), arguments=type(other.arguments).__name__):
            executor = Answers(FAILED, OK, OK)
            rewards = ToolRewards(executor, standard_rewards(CATALOGUE), reuse_results=True)
            components = ask_for_rewards(rewards, [SORT] * 3, [one, other, call("shuffle")]).components
            assert components["executed"].tolist() == pytest.approx([0.0, 0.2, 0.2])
            assert [len(calls) for calls in executor.asked] == [3]


def test_malformed_calls_are_rewarded_for_their_tool_and_not_their_arguments(subtests: pytest.Subtests) -> None:
    """A malformed call gets the reward of its tool and nothing for its arguments."""
    for tool in ("add", "sort", None, ["add"], {"a": 1}, 5):
        with subtests.test(tool=tool):
            for arguments in (None, "text", b"bytes", 3, [1], ["number"]):
                with subtests.test(tool=tool, arguments=arguments):
                    functions = standard_rewards(CATALOGUE) | {"cost": call_cost(CATALOGUE)}
                    rewards = ToolRewards(Answers(FAILED), functions, reuse_results=True)
                    components = ask_for_rewards(rewards, [SORT], [ToolCall(tool=tool, arguments=arguments)]).components
                    assert components["tool"].item() == pytest.approx(0.5 if tool == "sort" else 0.0)
                    assert components["parameters"].item() == 0.0
                    assert components["cost"].item() == {"add": -2.0, "sort": -0.5}.get(str(tool), 0.0)


def test_batches_of_several_threads_keep_their_own_results() -> None:
    """Each call's result is its own number, and so is its reward."""

    class Echo:
        def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
            return [ToolResult(output=made.arguments["number"]) for made in calls]

    def own(asked: Any, made: ToolCall, result: ToolResult) -> bool:
        time.sleep(0.0005)
        return bool(result.output == made.arguments["number"])

    rewards = ToolRewards(Echo(), {"own": own})

    def batch(first: int) -> list[float]:
        calls = [call("add", number=number) for number in range(first, first + 5 + first % 3)]
        return rewards.compute_rewards([SORT] * len(calls), calls).tolist()

    with ThreadPoolExecutor(4) as threads:
        assert all(set(found) == {1.0} for found in threads.map(batch, range(0, 400, 10)))


# --- what a function may not do


def test_standard_rewards_refuse_states_that_are_no_tasks(subtests: pytest.Subtests) -> None:
    for name in ("tool", "parameters"):
        with subtests.test(name):
            rewards = ToolRewards(Answers(OK), {name: standard_rewards(CATALOGUE)[name]})
            with pytest.raises(
                ContractError, match=r"states that are ToolTasks.*got str\. Pass ToolTasks, or your own"
            ):
                rewards.compute_rewards(["sort it"], [call("sort")])


def test_the_error_for_a_huge_call_is_short() -> None:
    rewards = ToolRewards(Answers(OK), {"odd": lambda asked, made, result: 1 / 0})
    for made in (call("add", number="x" * 10**6), ToolCall(tool="x" * 10**6), call("add", number=10**5000)):
        with pytest.raises(RuntimeError, match="The reward odd raised ZeroDivisionError for ") as caught:
            rewards.compute_rewards([SORT], [made])
        assert len(str(caught.value)) < 500


def test_an_error_in_a_reward_function_names_the_function_and_the_call() -> None:
    def unlucky(asked: Any, made: ToolCall, result: ToolResult) -> float:
        return 1 / (made.arguments["number"] - 1)

    rewards = ToolRewards(Answers(OK), {"lucky": executed, "unlucky part": unlucky})
    with pytest.raises(
        RuntimeError, match=r'The reward unlucky part raised ZeroDivisionError for "add"\({"number": 1}\)'
    ) as caught:
        rewards.compute_rewards([SORT, SORT], [call("add", number=3), call("add", number=1)])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_reward_function_that_returns_no_number_is_named(subtests: pytest.Subtests) -> None:
    for answer in (None, "much", [1.0], 1j, object()):
        with subtests.test(type(answer).__name__):
            rewards = ToolRewards(
                Answers(OK), {"ran": executed, "odd": lambda asked, made, result, answer=answer: answer}
            )
            with pytest.raises(RewardError, match=r"^odd"):
                rewards.compute_rewards([SORT, SORT], [call("sort"), call("add")])


def test_tool_rewards_pass_the_conformance_kit() -> None:
    rewards = ToolRewards(Answers(OK), standard_rewards(CATALOGUE))
    check_reward_model(rewards, TASKS, CALLS, strict=True)


# --- in training


def trainer(functions: dict[str, Any], **settings: Any) -> GRPOTrainer:
    policy = ToolSelectionPolicy(CATALOGUE, encoder=HashingEncoder(16))
    return GRPOTrainer(
        config=GRPOConfig(group_size=8, **settings), policy=policy, reward_model=ToolRewards(Answers(OK), functions)
    )


def test_the_parts_are_reported_by_name() -> None:
    """Shuffling is right: where a third of the calls each has .5, .2 and 0, the mean is between; all are executed."""
    metrics = trainer(standard_rewards(CATALOGUE) | {"slow": latency_cost(2.0)}).step([SHUFFLE] * 8)
    for name in ("tool", "parameters", "executed", "slow"):
        assert {f"rewards/{name}/mean", f"rewards/{name}/std"} <= metrics.keys()
    assert metrics["rewards/executed/mean"] == pytest.approx(0.2)
    assert metrics["rewards/executed/std"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["rewards/slow/mean"] == pytest.approx(-0.5)
    assert 0.1 < metrics["rewards/tool/mean"] < 0.4
    parts = sum(metrics[f"rewards/{name}/mean"] for name in ("tool", "parameters", "executed", "slow"))
    assert metrics["rewards/mean"] == pytest.approx(parts, abs=1e-5)

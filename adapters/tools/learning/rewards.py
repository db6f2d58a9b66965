"""Rewards of tool calls. Each call is executed once, then scored by named reward functions."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from adapters.tools.catalogue.arguments import bounded_text, json_arguments
from adapters.tools.catalogue.calls import ToolCall, ToolResult, plain_name, same_json
from adapters.tools.catalogue.tools import ToolCatalogue
from adapters.tools.errors import LOST_CALLS, LostCallError
from grpo import Rewards, WeightedRewards
from grpo.arguments import is_finite, require_instances, require_integers
from grpo.errors import ConfigError, ContractError, GRPOError
from grpo.metrics import add_counts_and_sums
from grpo.rewards import PlannedCalls

from .tasks import ToolTask

CallReward: TypeAlias = Callable[[Any, ToolCall, ToolResult], float]
"""A reward function: (task, call, result) -> reward."""

RIGHT_TOOL, SAME_CATEGORY, RIGHT_PARAMETERS, EXECUTED = 0.5, 0.2, 0.3, 0.2


@runtime_checkable
class RunsCalls(Protocol):
    """A `ToolExecutor`, or any other object that executes calls."""

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Return one result per call, in order. The result of a failed call holds the error."""
        ...


class ToolRewards(WeightedRewards):
    """Execute each call and return the weighted sum of reward functions: R = sum_k weight_k f_k(task, call, result).

    An action of None is no call: nothing is executed, and the functions get None with an empty `ToolResult`.

    A call is lost if its result holds a `LostCallError`: its worker was killed, or its server is gone. The functions are not
    called for it, its row is dropped, and the metric `tools/errors/KIND` counts it, for each KIND of `LOST_CALLS`. If all calls
    of a batch are lost, the batch is executed again.

    Args:
        executor: Executes the calls.
        functions: Reward functions by name. See `standard_rewards`.
        weights: Weights by name. None uses weight 1 for all functions.
        reuse_results: Whether to execute equal calls of one batch only once. Use it for tools without side effects.
        max_lost_in_a_row: Number of executed calls of one tool that may be lost in a row. The last of them ends the run with a
            `LostCallError`. A larger number survives longer outages, and drops more rows before it reports one.
        per_tool: Catalogue of the tools to log metrics for: the number of calls `tools/TOOL/calls`, the share of calls with an
            error `tools/TOOL/errors`, the mean duration `tools/TOOL/seconds` and the mean `Tool.cost` `tools/TOOL/cost`. Lost
            calls are left out. None logs no metrics per tool.
        folder_of: Maps a task to the name of a folder in `executor.root`, in which the calls for this task run; see
            `ToolExecutor.run`. A group has one task, so its calls share a folder. None leaves the folder to the executor.

    Raises:
        ConfigError: There is no function, `weights` names other functions, or an argument has the wrong type.
    """

    def __init__(
        self,
        executor: RunsCalls,
        functions: Mapping[str, CallReward],
        weights: Mapping[str, float] | None = None,
        *,
        reuse_results: bool = False,
        max_lost_in_a_row: int = 32,
        per_tool: ToolCatalogue | None = None,
        folder_of: Callable[[Any], str | None] | None = None,
    ) -> None:
        require_instances("ToolRewards", RunsCalls, "an object with a method run(calls)", executor=executor)
        require_instances("ToolRewards", Mapping, "a mapping of names to functions", functions=functions)
        for function in functions.values():
            require_instances("ToolRewards", Callable, "a mapping of names to functions", functions=function)
        require_instances("ToolRewards", (ToolCatalogue, NoneType), "a ToolCatalogue, or None", per_tool=per_tool)
        require_integers("ToolRewards", 1, max_lost_in_a_row=max_lost_in_a_row)
        super().__init__({name: _of_rows(name, function) for name, function in functions.items()}, weights)
        self.executor, self.per_tool, self.folder_of = executor, per_tool, folder_of
        self.reuse_results, self.max_lost_in_a_row = reuse_results, max_lost_in_a_row
        self._lost_in_a_row: Counter[str | None] = Counter()

    def plan_calls(self, states: Sequence[Any], actions: Sequence[ToolCall | None]) -> PlannedCalls:
        """Execute all calls, and plan the calls of the reward functions with the results. The rewards of lost calls are NaN.

        Raises:
            LostCallError: The last `max_lost_in_a_row` calls of a tool were lost.
        """
        folders = [None if self.folder_of is None else self.folder_of(task) for task in states]
        keys = [
            ((call_key(call) if self.reuse_results and call is not None else None) or row, folder)
            for row, (call, folder) in enumerate(zip(actions, folders, strict=True))
        ]
        # Rows with equal keys share one execution.
        calls = {key: call for key, call in zip(keys, actions, strict=True) if call is not None}
        results = dict(zip(calls, self._run([*calls.values()], [folder for _, folder in calls]), strict=True))
        ran = [(call, results.get(key, ToolResult())) for key, call in zip(keys, actions, strict=True)]
        return super().plan_calls(states, ran).then(partial(self._with_results, ran))

    def _run(self, calls: Sequence[ToolCall], folders: Sequence[str | None]) -> list[ToolResult]:
        """Execute calls until not all of them are lost, and count for each tool how many calls were lost in a row."""
        run: Callable[..., list[ToolResult]] = self.executor.run
        while True:
            results = run(calls) if self.folder_of is None else run(calls, folders=folders)
            for call, result in zip(calls, results, strict=True):
                tool, error = plain_name(call.tool), result.error
                self._lost_in_a_row[tool] = self._lost_in_a_row[tool] + 1 if isinstance(error, LostCallError) else 0
                if error is not None and self._lost_in_a_row[tool] == self.max_lost_in_a_row:
                    raise type(error)(
                        f"ToolRewards: {self.max_lost_in_a_row} calls of the tool {tool} were lost in a row "
                        f"(max_lost_in_a_row). Repair the worker or server, and resume the run. The last error: {error}"
                    ) from error
            if not calls or not all(isinstance(result.error, LostCallError) for result in results):
                return results

    def _with_results(self, ran: Sequence[tuple[ToolCall | None, ToolResult]], rewards: Rewards) -> Rewards:
        """Add the rows that were lost, by `tools/errors/KIND`, and (count, sum) of each metric of a tool, see `per_tool`."""
        lost = {
            f"tools/errors/{name}": torch.tensor([isinstance(result.error, kind) for _, result in ran])
            for name, kind in LOST_CALLS.items()
        }
        measured = []
        for call, result in ran:
            tool = None if call is None or self.per_tool is None else self.per_tool.get(call.tool)
            if tool is not None and not isinstance(result.error, LostCallError):
                values = {"errors": not result.ok, "seconds": result.seconds, "cost": tool.cost}
                means = {f"tools/{tool.name}/{name}": (1.0, float(value)) for name, value in values.items()}
                measured.append({f"tools/{tool.name}/calls": (0.0, 1.0)} | means)
        return replace(rewards, lost=lost, metrics=add_counts_and_sums(measured))


def call_key(call: ToolCall) -> str | None:
    """A text key that is equal only for calls that execute identically. None if the call is invalid."""
    name, arguments = plain_name(call.tool), json_arguments(call.arguments)
    return None if name is None or arguments is None else f"{name} {json.dumps(arguments)}"


def _of_rows(name: str, function: CallReward) -> Callable[[Any, Any], list[float]]:
    """Convert a function of one row to a function of all rows, where an action is a pair of a call and its result."""

    def of_row(task: Any, call: Any, result: ToolResult) -> float:
        try:
            return math.nan if isinstance(result.error, LostCallError) else function(task, call, result)
        except GRPOError:
            raise
        except Exception as error:
            made = "no call" if call is None else f"{bounded_text(call.tool, 100)}({bounded_text(call.arguments, 300)})"
            raise RuntimeError(f"The reward {name} raised {type(error).__name__} for {made}: {error}") from error

    def of_rows(states: Sequence[Any], executed: Sequence[tuple[Any, ToolResult]]) -> list[float]:
        return [of_row(task, call, result) for task, (call, result) in zip(states, executed, strict=True)]

    of_rows.__name__ = name
    return of_rows


def standard_rewards(catalogue: ToolCatalogue) -> dict[str, CallReward]:
    """The standard rewards: `tool` 0.5 or 0.2, `parameters` up to 0.3, `executed` 0.2. A fully right call gets 1.

    States must be `ToolTask`s, which hold the right calls. If a task has several, the best comparison counts. Where no tool is
    right, no call (None) gets 1.
    """
    return {"tool": right_tool(catalogue), "parameters": right_parameters, "executed": executed}


def right_tool(catalogue: ToolCatalogue) -> CallReward:
    """Reward 0.5 for a right tool, 0.2 for another tool of the same category, and 0 otherwise."""

    def tool(task: ToolTask, call: ToolCall | None, result: ToolResult) -> float:  # noqa: ARG001
        if call is None:
            return RIGHT_TOOL * (None in _right_calls(task))
        names = {right.tool for right in _right_calls(task) if right is not None}
        if plain_name(call.tool) in names:
            return RIGHT_TOOL
        called, known = catalogue.get(call.tool), [catalogue[name] for name in names if name in catalogue]
        return SAME_CATEGORY if called is not None and called.category in {tool.category for tool in known} else 0.0

    return tool


def right_parameters(task: ToolTask, call: ToolCall | None, result: ToolResult) -> float:  # noqa: ARG001
    """Reward 0.3 times the share of right arguments among the expected and the given arguments, and 0 for another tool.

    Example:
        >>> task = ToolTask(text="", tool="t", arguments={"a": 1, "b": 2})
        >>> call = ToolCall(tool="t", arguments={"a": 1, "b": 3, "d": 4})
        >>> round(right_parameters(task, call, ToolResult()), 9)  # one of a, b, d
        0.1
    """
    if call is None:
        return RIGHT_PARAMETERS * (None in _right_calls(task))
    # Reading another mapping than a dict could run arbitrary code.
    given: Any = call.arguments if type(call.arguments) is dict else json_arguments(call.arguments)
    best = 0.0
    for right in _right_calls(task):
        if right is not None and right.tool == plain_name(call.tool) and given is not None:
            expected = right.arguments
            names = given.keys() | expected.keys()
            same = [name for name in given if name in expected and same_json(given[name], expected[name])]
            best = max(best, len(same) / len(names) if names else 1.0)
    return RIGHT_PARAMETERS * best


def executed(task: Any, call: ToolCall | None, result: ToolResult) -> float:
    """Reward 0.2 if the tool was executed and returned an output. No call is rewarded where a `ToolTask` needs no tool."""
    is_right = result.ok if call is not None else isinstance(task, ToolTask) and None in task.right_calls
    return EXECUTED if is_right else 0.0


def latency_cost(per_second: float) -> CallReward:
    """Subtract `per_second` for each second of the call. A larger value avoids slow tools even where they are right."""
    if not is_finite(per_second) or per_second < 0:
        raise ConfigError(f"latency_cost: per_second must be a finite number >= 0; got {per_second}.")

    def latency(task: Any, call: ToolCall | None, result: ToolResult) -> float:  # noqa: ARG001
        return -per_second * result.seconds

    return latency


def call_cost(catalogue: ToolCatalogue, per_unit: float = 1.0) -> CallReward:
    """Subtract `per_unit` for each unit of `Tool.cost`. A larger value avoids costly tools even where they are right."""

    def cost(task: Any, call: ToolCall | None, result: ToolResult) -> float:  # noqa: ARG001
        tool = None if call is None else catalogue.get(call.tool)
        return 0.0 if tool is None else -per_unit * tool.cost

    return cost


def _right_calls(task: Any) -> tuple[ToolCall | None, ...]:
    if isinstance(task, ToolTask):
        return task.right_calls
    raise ContractError(
        "The standard rewards require states that are ToolTasks, which hold the right call; got "
        f"{type(task).__name__}. Pass ToolTasks, or your own reward functions (state, call, result) -> float to ToolRewards."
    )

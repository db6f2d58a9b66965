"""Rewards of tool calls. Each call is executed once, then scored by named reward functions."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from adapters.tools.catalogue.arguments import RefusedArgumentsError, bounded_text, encode_arguments, json_arguments
from adapters.tools.catalogue.calls import ToolCall, ToolResult, plain_name, same_json
from adapters.tools.catalogue.inputs import require_real, require_type, require_whole
from adapters.tools.catalogue.tools import ToolCatalogue
from adapters.tools.errors import LOST_CALLS, LostCallError
from grpo import WeightedRewards
from grpo.errors import ConfigError, ContractError, GRPOError
from grpo.reward_model_base import add_call_metrics

from .tasks import ToolTask

CallReward: TypeAlias = Callable[[Any, ToolCall, ToolResult], float]
"""A reward function: (task, call, result) -> reward."""

InFolder: TypeAlias = tuple[ToolCall, str | None]
"""A call, and the name of its folder."""

RIGHT_TOOL, SAME_CATEGORY, RIGHT_PARAMETERS, EXECUTED = 0.5, 0.2, 0.3, 0.2


@runtime_checkable
class RunsCalls(Protocol):
    """A `ToolExecutor`, or any other object that executes calls."""

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Return one result per call, in order. The result of a failed call holds the error."""
        ...


class ToolRewards(WeightedRewards):
    """Execute each call and return the weighted sum of reward functions: R = sum_k weight_k f_k(task, call, result).

    A call is lost if its result holds a `LostCallError`: its worker was killed, or its server is gone. The reward functions are
    not called for it, its row is dropped, and the metric `tools/errors/KIND` counts it, for each KIND of `LOST_CALLS`. If all
    calls of a batch are lost, the batch is executed again.

    Args:
        executor: Executes the calls.
        functions: Reward functions by name. See `standard_rewards`.
        weights: Weights by name. None uses weight 1 for all functions.
        reuse_results: Whether to execute equal calls of one batch only once. Use it for tools without side effects. Reuse
            saves much work when the calls of a group agree.
        max_lost_in_a_row: Number of executed calls of one tool that may be lost in a row. The last of them ends the run with a
            `LostCallError`. A larger number survives longer outages, and drops more rows before it reports one.
        per_tool: Catalogue of the tools to log metrics for: `tools/TOOL/calls` is the number of calls, and `tools/TOOL/errors`,
            `tools/TOOL/seconds` and `tools/TOOL/cost` are the share of calls with an error, the mean duration and the mean
            `Tool.cost`. Tools that were not called are left out, and so are lost calls. None logs no metrics per tool.
        folder_of: Maps a task to the name of a folder in `executor.root`, in which the calls for this task run; see
            `ToolExecutor.run`. A group has one task, so its calls share a folder. None leaves the folder to the executor.

    An action of None is no call: nothing is executed, and the reward functions get None with an empty `ToolResult`.

    Raises:
        ConfigError: There is no function, `weights` names other functions, or an argument has the wrong type.

    Example:
        With the standard rewards::

            with ToolExecutor(catalogue) as executor:
                rewards = ToolRewards(executor, standard_rewards(catalogue))
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
        what = "a mapping of names to functions (task, call, result) -> reward"
        require_type("ToolRewards", Mapping, what, functions=functions)
        for function in functions.values():
            require_type("ToolRewards", Callable, what, functions=function)  # type: ignore[arg-type]
        require_type("ToolRewards", RunsCalls, "an object with a method run(calls)", executor=executor)
        require_type("ToolRewards", (ToolCatalogue, NoneType), "a ToolCatalogue, or None", per_tool=per_tool)
        require_whole("ToolRewards", max_lost_in_a_row=max_lost_in_a_row)
        super().__init__({name: _of_rows(name, function) for name, function in functions.items()}, weights)
        self.executor = executor
        self.reuse_results = reuse_results
        self.max_lost_in_a_row = max_lost_in_a_row
        self.per_tool = per_tool
        self.folder_of = folder_of
        self._lost_in_a_row: Counter[str | None] = Counter()
        self._executed: list[tuple[ToolCall | None, ToolResult]] = []

    def compute_components(
        self, states: Sequence[Any], actions: Sequence[ToolCall | None]
    ) -> dict[str, Float[Tensor, " N"]]:
        """Execute all calls, then apply each reward function. The rewards of lost calls are NaN.

        Raises:
            RewardError: A function does not return a number for a call.
            LostCallError: The last `max_lost_in_a_row` calls of a tool were lost.
            RuntimeError: A function raised. The message names the function and the call, and the cause is chained.
        """
        run = self._run_once if self.reuse_results else self._run
        folder_of = self.folder_of or (lambda _: None)
        given = [(call, folder_of(task)) for task, call in zip(states, actions, strict=True) if call is not None]
        results = run(given)
        while results and all(isinstance(result.error, LostCallError) for result in results):
            results = run(given)  # ends at `max_lost_in_a_row`
        left = iter(results)
        self._executed = [(call, ToolResult() if call is None else next(left)) for call in actions]
        return super().compute_components(states, self._executed)

    def lost_rewards(self) -> dict[str, Tensor]:
        """Map each metric `tools/errors/KIND` to the rows [N] of the last call that were lost for this reason."""
        errors = [result.error for _, result in self._executed]
        return {
            f"tools/errors/{name}": torch.tensor([isinstance(error, kind) for error in errors], dtype=torch.bool)
            for name, kind in LOST_CALLS.items()
        }

    def call_metrics(self) -> dict[str, tuple[float, float]]:
        """Map each metric of a tool to (count, sum) over the last call. A count of 0 marks a total. See `per_tool`."""
        parts = []
        for call, result in self._executed:
            tool = None if call is None or self.per_tool is None else self.per_tool.get(call.tool)
            if tool is not None and not isinstance(result.error, LostCallError):
                values = {"errors": not result.ok, "seconds": result.seconds, "cost": tool.cost}
                means = {f"tools/{tool.name}/{name}": (1.0, float(value)) for name, value in values.items()}
                parts.append({f"tools/{tool.name}/calls": (0.0, 1.0)} | means)
        return add_call_metrics(parts)

    def _run(self, given: Sequence[InFolder]) -> list[ToolResult]:
        """Execute all calls, and count for each tool how many calls were lost in a row."""
        calls, folders = [call for call, _ in given], [folder for _, folder in given]
        run: Callable[..., list[ToolResult]] = self.executor.run
        results = run(calls) if self.folder_of is None else run(calls, folders=folders)
        for call, result in zip(calls, results, strict=True):
            tool, error = plain_name(call.tool), result.error
            self._lost_in_a_row[tool] = self._lost_in_a_row[tool] + 1 if isinstance(error, LostCallError) else 0
            if isinstance(error, LostCallError) and self._lost_in_a_row[tool] == self.max_lost_in_a_row:
                raise type(error)(
                    f"{self.max_lost_in_a_row} calls of the tool {tool} were lost in a row (ToolRewards.max_lost_in_a_row). "
                    f"The last error: {error} Repair the worker or server and resume the run."
                ) from error
        return results

    def _run_once(self, given: Sequence[InFolder]) -> list[ToolResult]:
        """Execute equal calls in the same folder once, and share their result."""
        keys = [(call_key(call) or place, folder) for place, (call, folder) in enumerate(given)]
        different = dict(zip(keys, given, strict=True))
        results = dict(zip(different, self._run(list(different.values())), strict=True))
        return [results[key] for key in keys]


def call_key(call: ToolCall) -> str | None:
    """A text key that is equal only for calls that execute identically. None if the call is invalid."""
    name = plain_name(call.tool)
    try:
        return None if name is None else f"{name} {encode_arguments(call.arguments)}"
    except RefusedArgumentsError:
        return None


def _of_rows(name: str, function: CallReward) -> Callable[[Any, Any], list[float]]:
    """Convert a function of one row to a function of all rows, where an action is a pair of a call and its result."""

    def ask(states: Sequence[Any], executed: Sequence[tuple[Any, ToolResult]]) -> list[float]:
        answers = []
        for task, (call, result) in zip(states, executed, strict=True):
            try:
                is_lost = isinstance(result.error, LostCallError)
                answers.append(math.nan if is_lost else function(task, call, result))
            except GRPOError:
                raise
            except Exception as error:
                what = (
                    "no call"
                    if call is None
                    else f"{bounded_text(call.tool, 100)}({bounded_text(call.arguments, 300)})"
                )
                raise RuntimeError(f"The reward {name} raised {type(error).__name__} for {what}: {error}") from error
        return answers

    ask.__name__ = name
    return ask


def standard_rewards(catalogue: ToolCatalogue) -> dict[str, CallReward]:
    """The standard rewards: `tool` 0.5 or 0.2, `parameters` up to 0.3, `executed` 0.2. A fully right call gets 1.

    States must be `ToolTask`s, which hold the right calls. If a task has several, the best comparison counts. Where no tool is
    right, no call (None) gets 1.
    """
    return {
        "tool": right_tool(catalogue),
        "parameters": right_parameters,
        "executed": executed,
    }


def right_tool(catalogue: ToolCatalogue) -> CallReward:
    """Reward 0.5 for a right tool, 0.2 for another tool of the same category, and 0 otherwise."""

    def compare(name: str | None, right: ToolCall | None) -> float:
        if right is None or name is None:
            return 0.0
        called, wanted = catalogue.get(name), catalogue.get(right.tool)
        if name == right.tool:
            return RIGHT_TOOL
        return SAME_CATEGORY if called and wanted and called.category == wanted.category else 0.0

    def tool(task: ToolTask, call: ToolCall | None, result: ToolResult) -> float:  # noqa: ARG001
        if call is None:
            return RIGHT_TOOL * (None in _right_calls(task))
        return max(compare(plain_name(call.tool), right) for right in _right_calls(task))

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
    given: Any = call.arguments
    if type(given) is not dict:  # reading another mapping could run arbitrary code
        given = json_arguments(given)
    name = plain_name(call.tool)
    rights = [right.arguments for right in _right_calls(task) if right is not None and right.tool == name]
    return RIGHT_PARAMETERS * max((_share_right(given, right) for right in rights if given is not None), default=0.0)


def _share_right(given: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    names = given.keys() | expected.keys()
    right = [name for name in given if name in expected and same_json(given[name], expected[name])]
    return len(right) / len(names) if names else 1.0


def executed(task: Any, call: ToolCall | None, result: ToolResult) -> float:
    """Reward 0.2 if the tool was executed and returned an output. No call is rewarded where a `ToolTask` needs no tool."""
    is_right = result.ok if call is not None else isinstance(task, ToolTask) and None in task.right_calls
    return EXECUTED if is_right else 0.0


def latency_cost(per_second: float) -> CallReward:
    """Subtract `per_second` for each second of the call. A larger value avoids slow tools even where they are right."""
    require_real("latency_cost", per_second=per_second)
    if per_second < 0:
        raise ConfigError(f"latency_cost: per_second must be >= 0; got {per_second}.")

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
    if not isinstance(task, ToolTask):
        raise ContractError(
            f"The standard rewards require states that are ToolTasks, which hold the right call; got {type(task).__name__}. "
            "Pass ToolTasks, or your own reward functions (state, call, result) -> float to ToolRewards."
        )
    return task.right_calls

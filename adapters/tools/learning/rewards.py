"""Rewards of tool calls. Each call is executed once, then scored by named reward functions."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from adapters.tools.catalogue.arguments import RefusedArgumentsError, bounded_text, encode_arguments, json_arguments
from adapters.tools.catalogue.calls import ToolCall, ToolResult, plain_name, same_json
from adapters.tools.catalogue.inputs import require_real, require_whole
from adapters.tools.catalogue.tools import ToolCatalogue
from adapters.tools.errors import LOST_CALLS, LostCallError
from grpo import WeightedRewards
from grpo.errors import ConfigError, ContractError, GRPOError

from .tasks import ToolTask

CallReward: TypeAlias = Callable[[Any, ToolCall, ToolResult], float]
"""A reward function: (task, call, result) -> reward."""

RIGHT_TOOL, SAME_CATEGORY, RIGHT_PARAMETERS, EXECUTED = 0.5, 0.2, 0.3, 0.2


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
    ) -> None:
        _check_arguments(executor, functions, max_lost_in_a_row)
        super().__init__({name: _of_rows(name, function) for name, function in functions.items()}, weights)
        self.executor = executor
        self.reuse_results = reuse_results
        self.max_lost_in_a_row = max_lost_in_a_row
        self._lost_in_a_row: Counter[str | None] = Counter()
        self._results: list[ToolResult] = []

    def compute_components(self, states: Sequence[Any], actions: Sequence[ToolCall]) -> dict[str, Float[Tensor, " N"]]:
        """Execute all calls, then apply each reward function. The rewards of lost calls are NaN.

        Raises:
            RewardError: A function does not return a number for a call.
            LostCallError: The last `max_lost_in_a_row` calls of a tool were lost.
            RuntimeError: A function raised. The message names the function and the call, and the cause is chained.
        """
        run = self._run_once if self.reuse_results else self._run
        self._results = run(list(actions))
        while self._results and all(isinstance(result.error, LostCallError) for result in self._results):
            self._results = run(list(actions))  # ends at `max_lost_in_a_row`
        return super().compute_components(states, list(zip(actions, self._results, strict=True)))

    def lost_rewards(self) -> dict[str, Tensor]:
        """Map each metric `tools/errors/KIND` to the rows [N] of the last call that were lost for this reason."""
        errors = [result.error for result in self._results]
        return {
            f"tools/errors/{name}": torch.tensor([isinstance(error, kind) for error in errors], dtype=torch.bool)
            for name, kind in LOST_CALLS.items()
        }

    def _run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Execute all calls, and count for each tool how many calls were lost in a row."""
        results = self.executor.run(calls)
        for call, result in zip(calls, results, strict=True):
            tool, error = plain_name(call.tool), result.error
            self._lost_in_a_row[tool] = self._lost_in_a_row[tool] + 1 if isinstance(error, LostCallError) else 0
            if isinstance(error, LostCallError) and self._lost_in_a_row[tool] == self.max_lost_in_a_row:
                raise type(error)(
                    f"{self.max_lost_in_a_row} calls of the tool {tool} were lost in a row (ToolRewards.max_lost_in_a_row). "
                    f"The last error: {error} Repair the worker or server and resume the run."
                ) from error
        return results

    def _run_once(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Execute equal calls once and share their result."""
        keys = [call_key(call) or place for place, call in enumerate(calls)]
        different = dict(zip(keys, calls, strict=True))
        results = dict(zip(different, self._run(list(different.values())), strict=True))
        return [results[key] for key in keys]


def _check_arguments(executor: Any, functions: Any, max_lost_in_a_row: Any) -> None:
    if not callable(getattr(executor, "run", None)):
        raise ConfigError(
            f"ToolRewards.executor must have a method run(calls); got {type(executor).__name__}. Pass a ToolExecutor."
        )
    if not isinstance(functions, Mapping) or not all(callable(function) for function in functions.values()):
        raise ConfigError(
            f"ToolRewards.functions must map names to functions (task, call, result) -> reward; got {functions!r}."
        )
    require_whole("ToolRewards", max_lost_in_a_row=max_lost_in_a_row)


def call_key(call: ToolCall) -> str | None:
    """A text key that is equal only for calls that execute identically. None if the call is invalid."""
    name = plain_name(call.tool)
    try:
        return None if name is None else f"{name} {encode_arguments(call.arguments)}"
    except RefusedArgumentsError:
        return None


def _of_rows(name: str, function: CallReward) -> Callable[[Any, Any], list[float]]:
    """Convert a function of one row to a function of all rows, where an action is a pair of a call and its result."""

    def ask(states: Sequence[Any], executed: Sequence[tuple[ToolCall, ToolResult]]) -> list[float]:
        answers = []
        for task, (call, result) in zip(states, executed, strict=True):
            try:
                is_lost = isinstance(result.error, LostCallError)
                answers.append(math.nan if is_lost else function(task, call, result))
            except GRPOError:
                raise
            except Exception as error:
                shown = f"{bounded_text(call.tool, 100)}({bounded_text(call.arguments, 300)})"
                raise RuntimeError(f"The reward {name} raised {type(error).__name__} for {shown}: {error}") from error
        return answers

    ask.__name__ = name
    return ask


def standard_rewards(catalogue: ToolCatalogue) -> dict[str, CallReward]:
    """The standard rewards: `tool` 0.5 or 0.2, `parameters` up to 0.3, `executed` 0.2. A fully right call gets 1.

    States must be `ToolTask`s, which hold the right call.
    """
    return {
        "tool": right_tool(catalogue),
        "parameters": right_parameters,
        "executed": executed,
    }


def right_tool(catalogue: ToolCatalogue) -> CallReward:
    """Reward 0.5 for the right tool, 0.2 for another tool of the same category, and 0 otherwise."""

    def tool(task: ToolTask, call: ToolCall, result: ToolResult) -> float:  # noqa: ARG001
        _require_task(task)
        if plain_name(call.tool) == task.tool:
            return RIGHT_TOOL
        called = catalogue.get(call.tool)
        return SAME_CATEGORY if called is not None and called.category == task.category else 0.0

    return tool


def right_parameters(task: ToolTask, call: ToolCall, result: ToolResult) -> float:  # noqa: ARG001
    """Reward 0.3 times the share of right arguments among the expected and the given arguments, and 0 for another tool.

    Example:
        >>> rest = {"text": "", "category": "c", "difficulty": "easy", "slots": {}, "shares_words": True}
        >>> task = ToolTask(tool="t", arguments={"a": 1, "b": 2}, **rest)
        >>> call = ToolCall(tool="t", arguments={"a": 1, "b": 3, "d": 4})
        >>> round(right_parameters(task, call, ToolResult()), 9)  # one of a, b, d
        0.1
    """
    _require_task(task)
    given: Any = call.arguments
    if type(given) is not dict:  # reading another mapping could run arbitrary code
        given = json_arguments(given)
    if given is None or plain_name(call.tool) != task.tool:
        return 0.0
    names = given.keys() | task.arguments.keys()
    if not names:
        return RIGHT_PARAMETERS
    right = [name for name in given if name in task.arguments and same_json(given[name], task.arguments[name])]
    return RIGHT_PARAMETERS * len(right) / len(names)


def executed(task: Any, call: ToolCall, result: ToolResult) -> float:  # noqa: ARG001
    """Reward 0.2 if the tool was executed and returned an output."""
    return EXECUTED if result.ok else 0.0


def latency_cost(per_second: float) -> CallReward:
    """Subtract `per_second` for each second of the call. A larger value avoids slow tools even where they are right."""
    require_real("latency_cost", per_second=per_second)
    if per_second < 0:
        raise ConfigError(f"latency_cost: per_second must be >= 0; got {per_second}.")

    def latency(task: Any, call: ToolCall, result: ToolResult) -> float:  # noqa: ARG001
        return -per_second * result.seconds

    return latency


def call_cost(catalogue: ToolCatalogue, per_unit: float = 1.0) -> CallReward:
    """Subtract `per_unit` for each unit of `Tool.cost`. A larger value avoids costly tools even where they are right."""

    def cost(task: Any, call: ToolCall, result: ToolResult) -> float:  # noqa: ARG001
        return -per_unit * catalogue[call.tool].cost if call.tool in catalogue else 0.0

    return cost


def _require_task(task: Any) -> None:
    if not isinstance(task, ToolTask):
        raise ContractError(
            f"The standard rewards require states that are ToolTasks, which hold the right call; got {type(task).__name__}. "
            "Pass ToolTasks, or your own reward functions (state, call, result) -> float to ToolRewards."
        )

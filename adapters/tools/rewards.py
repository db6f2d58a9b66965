"""Rewards of calls: executed once, then judged by any number of functions, each reported under its name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from jaxtyping import Float
from torch import Tensor

from grpo import WeightedRewards
from grpo.errors import ConfigError, ContractError, GRPOError

from .arguments import RefusedArgumentsError, bounded_text, encode_arguments, json_arguments
from .calls import ToolCall, ToolResult, plain_name, same_json
from .catalogue import ToolCatalogue
from .tasks import ToolTask

CallReward: TypeAlias = Callable[[Any, ToolCall, ToolResult], float]
"""(task, call, result) -> a number."""

RIGHT_TOOL, SAME_CATEGORY, RIGHT_PARAMETERS, EXECUTED = 0.5, 0.2, 0.3, 0.2


class RunsCalls(Protocol):
    """What executes: a `ToolExecutor`, or a stand-in."""

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """A result per call, in order; a call that fails has an error in its result."""
        ...


class ToolRewards(WeightedRewards):
    """R = sum_k weight_k f_k(task, call, result).

    Args:
        executor: what executes.
        functions: name -> function; see `standard_rewards`.
        weights: name -> weight; None: all 1.
        reuse_results: execute calls that are asked for several times at once, as a group that has learned does, only once.
            For tools that compute and change nothing.

    Raises:
        ConfigError: no function, or weights for others.

    Example:
        With the rewards that everything here is measured with::

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
    ) -> None:
        super().__init__({name: _of_rows(name, function) for name, function in functions.items()}, weights)
        self.executor = executor
        self.reuse_results = reuse_results

    def compute_components(self, states: Sequence[Any], actions: Sequence[ToolCall]) -> dict[str, Float[Tensor, " N"]]:
        """Execute all calls, then ask each function.

        Raises:
            RewardError: a function does not return a number for a call.
            RuntimeError: a function raised; it and the call are named, and the cause is chained.
        """
        results = self._run_once(actions) if self.reuse_results else self.executor.run(list(actions))
        return super().compute_components(states, list(zip(actions, results, strict=True)))

    def _run_once(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """A result for each call; equal ones have the same."""
        keys = [call_key(call) or place for place, call in enumerate(calls)]
        different = dict(zip(keys, calls, strict=True))
        results = dict(zip(different, self.executor.run(list(different.values())), strict=True))
        return [results[key] for key in keys]


def call_key(call: ToolCall) -> str | None:
    """The call as text, the same only for calls that are executed alike; None: no tool is run with such a call."""
    name = plain_name(call.tool)
    try:
        return None if name is None else f"{name} {encode_arguments(call.arguments)}"
    except RefusedArgumentsError:
        return None


def _of_rows(name: str, function: CallReward) -> Callable[[Any, Any], list[float]]:
    """A function of one row as one of all rows, whose actions are pairs of a call and its result."""

    def ask(states: Sequence[Any], executed: Sequence[tuple[ToolCall, ToolResult]]) -> list[float]:
        answers = []
        for task, (call, result) in zip(states, executed, strict=True):
            try:
                answers.append(function(task, call, result))
            except GRPOError:
                raise
            except Exception as error:
                shown = f"{bounded_text(call.tool, 100)}({bounded_text(call.arguments, 300)})"
                raise RuntimeError(f"The reward {name} raised {type(error).__name__} for {shown}: {error}") from error
        return answers

    ask.__name__ = name
    return ask


def standard_rewards(catalogue: ToolCatalogue) -> dict[str, CallReward]:
    """`tool` 0.5 or 0.2, `parameters` up to 0.3, `executed` 0.2: together 1 for a call that is right in all.

    For states that are `ToolTask`s, which say what is right.
    """
    return {
        "tool": right_tool(catalogue),
        "parameters": right_parameters,
        "executed": executed,
    }


def right_tool(catalogue: ToolCatalogue) -> CallReward:
    """0.5 for the right tool, 0.2 for another one of its category, else 0."""

    def tool(task: ToolTask, call: ToolCall, result: ToolResult) -> float:  # noqa: ARG001
        _require_task(task)
        if plain_name(call.tool) == task.tool:
            return RIGHT_TOOL
        called = catalogue.get(call.tool)
        return SAME_CATEGORY if called is not None and called.category == task.category else 0.0

    return tool


def right_parameters(task: ToolTask, call: ToolCall, result: ToolResult) -> float:  # noqa: ARG001
    """0.3 times the share of arguments that are as they should be, of all that should be or are; 0 for another tool.

    Example:
        >>> rest = {"text": "", "category": "c", "difficulty": "easy", "slots": {}, "shares_words": True}
        >>> task = ToolTask(tool="t", arguments={"a": 1, "b": 2}, **rest)
        >>> call = ToolCall(tool="t", arguments={"a": 1, "b": 3, "d": 4})
        >>> round(right_parameters(task, call, ToolResult()), 9)  # one of a, b, d
        0.1
    """
    _require_task(task)
    given: Any = call.arguments
    if type(given) is not dict:  # another mapping may do anything while it is read
        given = json_arguments(given)
    if given is None or plain_name(call.tool) != task.tool:
        return 0.0
    names = given.keys() | task.arguments.keys()
    if not names:
        return RIGHT_PARAMETERS
    right = [name for name in given if name in task.arguments and same_json(given[name], task.arguments[name])]
    return RIGHT_PARAMETERS * len(right) / len(names)


def executed(task: Any, call: ToolCall, result: ToolResult) -> float:  # noqa: ARG001
    """0.2 if the tool ran and its output came back."""
    return EXECUTED if result.ok else 0.0


def latency_cost(per_second: float) -> CallReward:
    """`per_second` off for each second that the call took. Larger: slow tools are avoided even where they are right."""
    if not per_second >= 0:
        raise ConfigError(f"latency_cost: per_second must be >= 0; got {per_second}.")

    def latency(task: Any, call: ToolCall, result: ToolResult) -> float:  # noqa: ARG001
        return -per_second * result.seconds

    return latency


def call_cost(catalogue: ToolCatalogue, per_unit: float = 1.0) -> CallReward:
    """`per_unit` off for each unit of `Tool.cost`. Larger: dear tools are avoided even where they are right."""

    def cost(task: Any, call: ToolCall, result: ToolResult) -> float:  # noqa: ARG001
        return -per_unit * catalogue[call.tool].cost if call.tool in catalogue else 0.0

    return cost


def _require_task(task: Any) -> None:
    if not isinstance(task, ToolTask):
        raise ContractError(
            f"States must be ToolTasks, which say what is right, for the standard rewards; got {type(task).__name__}. "
            "Pass functions of your own to ToolRewards: (state, call, result) -> a number."
        )

"""Rewards of completions: a weighted sum of functions, each called once with lists (as in TRL) or once per row."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from adapters.llm.completions import Completion
from adapters.llm.prompts import PromptState
from grpo import WeightedRewards
from grpo.errors import ConfigError
from grpo.reward_model_base import RewardFunction
from grpo.writing import as_rewards, reward_name

from .reward_functions import CompletionFunction, Offer, function_name

ResultT = TypeVar("ResultT")


class CompletionRewards(WeightedRewards):
    """R = sum_k weight_k R_k over the functions that apply to a row; each part is reported under its name.

    The names of a function's parameters select its arguments and how often it is called.

    - Once with lists, like a TRL reward function: `prompts`, `completions`, `completion_ids`, and any column of the rows;
      `**kwargs` receives all of them. Completions of chat prompts are lists of one assistant message. `states` and `actions`
      are the trainer's objects: the prompts or rows, and the `Completion`s. The function returns N numbers.
    - Once per row: `prompt`, `completion` (always text), any column, `state` and `action`. The function returns one number.

    Both kinds may be `async def`. All async calls are awaited together, in one event loop that lives as long as the process,
    so clients that the functions keep open stay usable. A function returns `None` for a row to which it does not apply, and is
    then excluded from the row's sum. If no function applies to a row, its reward is NaN, and `reward.non_finite` decides what
    happens.

    Args:
        functions: One function, several (named by their `__name__`), or functions by name. A `RewardModel` is also allowed.
        weights: Weights by name, or in the order of `functions`. None uses weight 1 for all.
        prompt_column: Column with the prompt, for rows that are dicts.
        timeout: Time limit of an awaited call in seconds. None sets no limit. A blocking call cannot be interrupted.
        max_concurrent: Maximum number of concurrent awaited calls. A larger number is faster and puts more load on servers.

    Raises:
        ConfigError: Names, weights or signatures are invalid.

    Example:
        >>> def short(completion): return float(len(completion) < 9)
        >>> def right(completions, answer, **kwargs): return [float(c == a) for c, a in zip(completions, answer)]
        >>> reward = CompletionRewards([right, short], weights=[1.0, 0.5])
        >>> two = Completion(token_ids=(7,), text="2", finish_reason="end")
        >>> reward.compute_rewards([{"prompt": "1 + 1 =", "answer": "2"}], [two]).tolist()
        [1.5]

        With a trainer: `GRPOTrainer(config=config, policy=policy, reward_model=reward)`, whose metrics are then
        `rewards/right/mean`, `rewards/short/mean` and so on.
    """

    def __init__(
        self,
        functions: Callable[..., Any] | Sequence[Callable[..., Any]] | Mapping[str, Any],
        weights: Mapping[str, float] | Sequence[float] | None = None,
        *,
        prompt_column: str = "prompt",
        timeout: float | None = None,
        max_concurrent: int = 64,
    ) -> None:
        named = _by_name(functions)
        if weights is not None and not isinstance(weights, Mapping):
            if len(weights) != len(named):
                raise ConfigError(f"CompletionRewards needs one weight per function, {len(named)}; got {len(weights)}.")
            weights = dict(zip(named, weights, strict=True))
        super().__init__(named, weights)
        self.prompt_column = prompt_column
        self.timeout = timeout
        self.max_concurrent = max_concurrent
        self._functions = {
            name: CompletionFunction(name, reward.function)
            for name, reward in self.rewards.items()
            if isinstance(reward, RewardFunction) and reward is not named[name]
        }
        if max_concurrent < 1 or (timeout is not None and not timeout > 0):
            raise ConfigError(
                f"CompletionRewards: max_concurrent must be >= 1, and timeout > 0 or None; got "
                f"max_concurrent={max_concurrent}, timeout={timeout}."
            )
        if timeout is not None and not any(function.is_async for function in self._functions.values()):
            raise ConfigError(
                f"CompletionRewards: timeout applies to `async def` functions only; got timeout={timeout} and no such "
                "function. Leave out timeout, or make a function async."
            )

    def compute_components(
        self, states: Sequence[PromptState], actions: Sequence[Completion]
    ) -> dict[str, Float[Tensor, "N *T"]]:
        """The rewards of each function, [N], before weighting. NaN means that the function does not apply to the row.

        Raises:
            RewardError: A function needs a missing column, or does not return one number or None per row.
            RuntimeError: A function raised. The message names the function, and the cause is chained.
        """
        offer = Offer.made_of(states, actions, self.prompt_column)
        calls = {name: function.calls(offer) for name, function in self._functions.items()}
        answers = {
            name: function.ask(calls[name]) for name, function in self._functions.items() if not function.is_async
        }
        if len(answers) < len(calls):
            answers |= run_in_background(self._answers({name: calls[name] for name in calls if name not in answers}))
        return {
            name: self._functions[name].rewards(answers[name], offer.num_rows)
            if name in answers
            else _without_nan(as_rewards(reward_name(reward), reward.compute_rewards(states, actions), len(states)))
            for name, reward in self.rewards.items()
        }

    def combine(self, components: Mapping[str, Float[Tensor, "N *T"]]) -> Float[Tensor, "N *T"]:
        """The weighted sum of the parts that apply to each row. NaN if no part applies."""
        absent = {name: part.isnan() for name, part in components.items()}
        total = super().combine({name: part.masked_fill(absent[name], 0.0) for name, part in components.items()})
        return total.masked_fill(torch.stack(list(absent.values())).all(0), torch.nan)

    async def _answers(self, calls: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, list[Any]]:
        """Await all calls of all async functions together. A failing call cancels the others."""
        limit = asyncio.Semaphore(self.max_concurrent)

        async def answer(name: str, index: int, arguments: dict[str, Any]) -> Any:
            async with limit:
                return await self._functions[name].ask_async(index, arguments, self.timeout)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    name: [group.create_task(answer(name, *call)) for call in enumerate(several)]
                    for name, several in calls.items()
                }
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        return {name: [task.result() for task in several] for name, several in tasks.items()}


def run_in_background(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine in the background loop and wait for its result. This also works inside a running event loop."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _background_loop(os.getpid()))
    try:
        return future.result()
    except BaseException:  # an interrupt must also cancel the calls
        future.cancel()
        raise


@cache
def _background_loop(process_id: int) -> asyncio.AbstractEventLoop:
    """The event loop of a process, which runs in a thread. A forked process gets a new loop, because threads are not copied."""
    loop = asyncio.new_event_loop()
    name = f"reward functions of process {process_id}"
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop


def _by_name(functions: Any) -> dict[str, Any]:
    if isinstance(functions, Mapping):
        return dict(functions)
    several = list(functions) if isinstance(functions, Sequence) else [functions]
    names = [function_name(function) for function in several]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"CompletionRewards: functions must have different names; got {', '.join(names)}. Pass {{'name': function, ...}}."
        )
    return dict(zip(names, several, strict=True))


def _without_nan(rewards: Tensor) -> Tensor:
    """Replace NaN by infinity. NaN from a reward model is an error and must not mean "does not apply"."""
    return rewards.masked_fill(rewards.isnan(), torch.inf)

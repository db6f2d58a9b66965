"""Rewards of completions: a weighted sum of functions, each called once with lists (as in TRL) or once per row."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from adapters.llm.completions import Completion
from adapters.llm.prompts.states import PromptState
from grpo import Rewards, WeightedRewards
from grpo.arguments import describe, reward_name
from grpo.errors import ConfigError
from grpo.reward_model_base import RewardFunction, is_function
from grpo.rewards import PlannedCalls, checked, planned

from .reward_functions import CompletionFunction, Offer, function_name


class CompletionRewards(WeightedRewards):
    """R = sum_k weight_k R_k over the functions that apply to a row; each part is reported under its name.

    The names of a function's parameters select its arguments and how often it is called.

    - Once with lists, like a TRL reward function: `prompts`, `completions`, `completion_ids`, and any column of the rows;
      `**kwargs` receives all of them. Completions of chat prompts are lists of one assistant message. `states` and `actions`
      are the trainer's objects: the prompts or rows, and the `Completion`s. The function returns N numbers.
    - Once per row: `prompt`, `completion` (always text), any column, `state` and `action`. The function returns one number.

    A column named `state`, `action`, `states` or `actions` takes the place of the trainer's object, also in `**kwargs`. Columns
    named `prompt`, `completion` and so on do not reach functions, as in TRL.

    Both kinds may be `async def`. All async calls are awaited together, in one event loop that lives as long as the process,
    so clients that the functions keep open stay usable. A function returns `None` for a row to which it does not apply, and is
    then excluded from the row's sum. If no function applies to a row, `reward.not_applicable` decides what happens.

    `RewardConfig.timeout` limits each call, so a function that is called once per row has this time for each row. With a
    timeout, a function that is not async runs in a process that can be killed, which makes its calls for all rows.
    `RewardConfig.max_concurrent` limits how many calls are awaited at the same time.

    Args:
        functions: One function, several (named by their `__name__`), or functions by name. A `RewardModel` is also allowed.
        weights: Weights by name, or in the order of `functions`. None uses weight 1 for all.
        prompt_column: Column with the prompt, for rows that are dicts.

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
    ) -> None:
        named = _by_name(functions)
        given, column = cast("tuple[Any, Any]", (weights, prompt_column))
        if not isinstance(column, str) or not isinstance(given, Mapping | Sequence | None):
            raise ConfigError(
                "CompletionRewards: weights must be None, a mapping or a sequence, and prompt_column a text; got "
                f"{describe(given)} and {describe(column)}."
            )
        if weights is not None and not isinstance(weights, Mapping):
            if len(weights) != len(named):
                raise ConfigError(f"CompletionRewards needs one weight per function, {len(named)}; got {len(weights)}.")
            weights = dict(zip(named, weights, strict=True))
        self._functions = {name: CompletionFunction(name, part) for name, part in named.items() if is_function(part)}
        super().__init__({n: RewardFunction(f) if n in self._functions else f for n, f in named.items()}, weights)
        self.prompt_column = prompt_column

    def plan_calls(self, states: Sequence[PromptState], actions: Sequence[Completion]) -> PlannedCalls:
        """The calls of all functions. NaN in a part means that the function does not apply to the row.

        Raises:
            RewardError: A function needs a missing column.
        """
        offer = Offer.made_of(states, actions, self.prompt_column)
        parts = {
            name: self._functions[name].planned(offer)
            if name in self._functions
            else planned(reward, states, actions).then(partial(_without_nan, reward_name(reward), offer.num_rows))
            for name, reward in self.rewards.items()
        }
        return self.summed(parts, offer.num_rows)


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


def _without_nan(name: str, num_rows: int, answer: Any) -> Rewards:
    """Replace NaN by infinity. NaN from a reward model is an error and must not mean "does not apply"."""
    rewards = checked(name, answer, num_rows)
    return Rewards(
        values=rewards.values.masked_fill(rewards.values.isnan(), torch.inf), lost=rewards.lost, metrics=rewards.metrics
    )

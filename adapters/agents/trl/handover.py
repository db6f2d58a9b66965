"""Rewards and environments of this package in the form that TRL's `GRPOTrainer` takes."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from adapters.agents.conversations import Conversation, EndedBy, Turn
from adapters.agents.environments import require_number, require_values
from adapters.agents.messages import Message, as_messages
from adapters.llm import Completion
from grpo import WeightedRewards
from grpo.arguments import describe, reward_name
from grpo.errors import ConfigError, ContractError, RewardError
from grpo.reward_model_base import as_reward_model
from grpo.rewards import Call, ask_for_rewards, await_all, is_async, require_killable

COLUMN = "state_index"
"""Column of a data set with the place of the row's state."""
OF_TRL = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments of TRL's reward functions that are no columns."""


def trl_reward_functions(
    reward: Any,
    tokenizer: Any,
    *,
    states: Sequence[Any] | None = None,
    end_token_ids: Sequence[int] = (),
    zero_non_finite: bool = False,
    timeout: float | None = None,
    max_concurrent: int = 64,
    record: Callable[[Tensor, Mapping[str, Tensor]], None] | None = None,
) -> tuple[list[Callable[..., list[float | None]]], list[float]]:
    """Functions for `GRPOTrainer(reward_funcs=...)` and weights for `GRPOConfig(reward_weights=...)`.

    The rewards get the same `Completion`s, or `Conversation`s for environments of `trl_environment`, as in our trainer. These
    conversations have messages, rewards, `ended_by` and `info`. They have no segments, because TRL does not pass on which
    tokens the model sampled.

    Args:
        reward: A reward model, a function `(states, actions) -> rewards`, or `WeightedRewards`, which become several functions.
        tokenizer: The model's tokenizer.
        states: The states. The column `state_index` of the data set chooses among them. None: the states are the rows, dicts
            with the column `prompt` and all other columns.
        end_token_ids: Tokens that end a completion, in addition to the tokenizer's end-of-sequence token.
        zero_non_finite: Whether a reward that is not finite counts as 0. If not, it is an error.
        timeout: Seconds per call of a reward, as in `RewardConfig`. None: no deadline.
        max_concurrent: Largest number of calls that are awaited at the same time.
        record: Called once per batch with the total rewards [N] and the parts by name.

    Raises:
        ConfigError: `timeout` is given, and a part of the reward cannot run in another process.
        RewardError: (The functions) A reward is NaN or infinite.
        ContractError: (The functions) There are rewards per step, or an environment cannot be run by TRL.
    """
    model = as_reward_model(reward)
    require_killable(model, timeout)
    weights = dict(model.weights) if isinstance(model, WeightedRewards) else {reward_name(model): 1.0}
    names, ends = list(weights), {*end_token_ids, tokenizer.eos_token_id}
    latest: dict[str, list[float | None]] = {}

    def action(given: Mapping[str, Any], i: int) -> Completion | Conversation:
        ids, said = given["completion_ids"][i], given["completions"][i]
        is_cut = not ids or ids[-1] not in ends
        environment = given.get("environments", {i: None})[i]
        if isinstance(environment, HandedEnvironment):
            return environment._end(said, is_cut=is_cut)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(token_ids=tuple(ids), text=text, finish_reason="length" if is_cut else "end")

    @torch.no_grad()
    def compute(given: Mapping[str, Any]) -> None:
        size = len(given["completions"])
        columns = {
            name: given[name] for name in given if name not in ("prompts", "completions", "completion_ids", *OF_TRL)
        }
        rows = [{"prompt": p, **{name: columns[name][i] for name in columns}} for i, p in enumerate(given["prompts"])]
        of_rows = rows if states is None else [states[row[COLUMN]] for row in rows]
        actions = [action(given, i) for i in range(size)]
        model.eval()
        found = ask_for_rewards(model, of_rows, actions, timeout=timeout, max_concurrent=max_concurrent)
        total = found.values
        parts = found.components if isinstance(model, WeightedRewards) else {names[0]: total}
        if total.dim() != 1:
            raise ContractError(
                f"{reward_name(model)} must return one reward per row, [N] = [{size}], because TRL has no rewards per step; "
                f"got {list(total.shape)}. Return their sums, or train with grpo.GRPOTrainer."
            )
        lost = torch.stack([~total.isfinite(), *found.lost.values()]).any(0)
        if lost.any() and not zero_non_finite:
            raise RewardError(
                f"{reward_name(model)} must return finite rewards; got {total[lost][:4].tolist()}. Return numbers."
            )
        if record is not None:
            record(total.masked_fill(lost, 0.0), parts)
        for name, part in parts.items():
            values = part.masked_fill(lost, 0.0).tolist()
            latest[name] = [None if value != value else value for value in values]  # NaN: the part does not apply

    def function(name: str) -> Callable[..., list[float | None]]:
        def rewards_of(**given: Any) -> list[float | None]:
            if name == names[0]:  # TRL calls the functions of a batch in order
                compute(given)
            return latest[name]

        rewards_of.__name__ = name
        return rewards_of

    return [function(name) for name in names], [float(weight) for weight in weights.values()]


class HandedEnvironment:
    """An environment of ours as TRL uses it: `reset` returns a text, and the other public methods are tools.

    `trl_environment` makes a subclass with the tools. TRL has no `step`, so the first message without a call is given to the
    environment's `step` after the rollout, when TRL asks for rewards.
    """

    _make: ClassVar[Any]
    _states: ClassVar[Sequence[Any]]
    _tool_names: ClassVar[tuple[str, ...]]
    _seeds: ClassVar[Iterator[int]]
    _instances: ClassVar[list["HandedEnvironment"]]

    def __init__(self) -> None:
        self._environment: Any = None
        self._instances.append(self)

    def reset(self, prompt: Any = None, state_index: int = 0, **columns: Any) -> str:
        """Begin a conversation about a state. Return the text of the first observation."""
        self._close()
        self._conversation: Conversation | None = None
        self._environment, self._tools, self._shown = _begin(self._make, self._states[state_index], next(self._seeds))
        same = [(m["role"], m["content"]) for m in self._shown[:-1]] == [(m["role"], m["content"]) for m in prompt[:-1]]
        if tuple(self._tools) != self._tool_names or not same:
            raise ContractError(
                f"{type(self._environment).__name__} must have the same tools for all states, and the same messages before the "
                f"last one of its first observation, because TRL reads them once; got the tools {list(self._tools)} for state "
                f"{state_index}. Train with grpo.GRPOTrainer."
            )
        return self._shown[-1]["content"]

    def _end(self, said: Sequence[Any], *, is_cut: bool) -> Conversation:
        """The finished conversation. `step` is called if the model's last message is complete and has no call."""
        if self._conversation is not None:
            return self._conversation
        messages, owner = as_messages(said), type(self._environment).__name__
        rewards = [0.0 for message in messages if message["role"] == "assistant"]
        last, info = messages[-1], {}
        ended_by: EndedBy = "length" if is_cut else "max_turns"
        if not is_cut and last["role"] == "assistant" and not last.get("tool_calls"):
            answer = require_values(owner, "step", _called(self._environment.step, last), 5)
            observation, rewards[-1], terminated, truncated, info = (
                answer[0],
                require_number(owner, answer[1]),
                *answer[2:],
            )
            if not (terminated or truncated):
                raise ContractError(
                    f"{owner}.step must end the conversation at the first message without a tool call, because TRL's "
                    "conversations end there; it went on. Train with grpo.GRPOTrainer, or offer the answer as a tool."
                )
            ended_by, messages = "environment", [*messages, *as_messages(observation, last)]
        self._conversation = Conversation(
            segments=(),
            turns=tuple(Turn(num_tokens=0, reward=reward) for reward in rewards),
            messages=(*self._shown, *messages),
            ended_by=ended_by,
            info=info,
        )
        return self._conversation

    def _close(self) -> None:
        if hasattr(self._environment, "close"):
            _called(self._environment.close)
        self._environment = None


def trl_environment(
    make: Callable[[Any], Any], states: Sequence[Any], *, group_size: int
) -> tuple[type[HandedEnvironment], list[dict[str, Any]]]:
    """A class for `GRPOTrainer(environment_factory=...)`, and the rows of its data set: `Dataset.from_list(rows)`.

    Each state's environment is made once here, for its first messages. Reward functions come from `trl_reward_functions`, with
    the same states.

    Args:
        make: Makes the environment of a conversation from its state.
        states: The states.
        group_size: TRL's `num_generations`. A group's conversations share the seed.

    Raises:
        ConfigError: The environment has no tools that are functions, so TRL cannot run it.
    """
    rows: list[dict[str, Any]] = []
    tools: dict[str, Callable[..., Any]] = {}
    for i, state in enumerate(states):
        environment, tools, messages = _begin(make, state, 0)
        if hasattr(environment, "close"):
            _called(environment.close)
        rows.append({"prompt": [*messages[:-1], {**messages[-1], "content": ""}], COLUMN: i})

    def seeds() -> Iterator[int]:
        while True:
            yield from [int(torch.randint(2**31, ()))] * group_size

    attributes: dict[str, Any] = {"_make": staticmethod(make), "_states": states, "_tool_names": tuple(tools)}
    attributes |= {"_seeds": seeds(), "_instances": [], **{name: _method(name, tool) for name, tool in tools.items()}}
    return type("HandedEnvironment", (HandedEnvironment,), attributes), rows


def _begin(
    make: Callable[[Any], Any], state: Any, seed: int
) -> tuple[Any, dict[str, Callable[..., Any]], list[Message]]:
    environment = make(state)
    owner = type(environment).__name__
    listed = list(_called(environment.tools)) if hasattr(environment, "tools") else []
    tools = {getattr(tool, "__name__", ""): tool for tool in listed if callable(tool)}
    if (
        not listed
        or len(tools) < len(listed)
        or any(name in ("reset", "get_reward") or name[0] == "_" for name in tools)
    ):
        raise ConfigError(
            f"{owner}.tools() must return functions with public names, because in TRL an environment acts through tools only; "
            f"got {describe(listed)}. An environment whose step answers messages, or JSON schemas, needs grpo.GRPOTrainer."
        )
    observation, _ = require_values(owner, "reset", _called(environment.reset, seed=seed), 2)
    return environment, tools, as_messages(observation)


def _method(name: str, tool: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls the tool of this name of the instance's environment, with the tool's signature and docstring."""
    if is_async(tool):

        async def method(self: HandedEnvironment, *args: Any, **kwargs: Any) -> Any:
            return await self._tools[name](*args, **kwargs)
    else:

        def method(self: HandedEnvironment, *args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]
            return self._tools[name](*args, **kwargs)

    signature = inspect.signature(tool)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])  # type: ignore[attr-defined]
    method.__name__, method.__doc__, method.__annotations__ = name, inspect.getdoc(tool), get_type_hints(tool)
    return method


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    bound = functools.partial(function, *args, **kwargs)
    if not is_async(function):
        return bound()
    return await_all([Call(name=function.__name__, function=bound, arguments=())])[0]

"""Environments: Gymnasium's five values, with messages in them. An environment is played as an agent program."""

import asyncio
import copy
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeAlias

from grpo.arguments import describe
from grpo.errors import ContractError

from .branching import Saved
from .calls import call_functions, tool_schemas
from .chat import Chat, ConversationEnded
from .messages import Message, Observation, as_messages
from .threads import OwnThread

RunsCalls: TypeAlias = Callable[[Message], Awaitable[list[Message]]]
"""Runs the calls of a message, and returns their results as messages."""


class Environment(Protocol):
    """The other side of a conversation: a user, a game, or a set of tools. One object holds one conversation.

    Environments of Gymnasium and GEM whose actions are texts are such environments as they are: if `action_space` is a `Text`
    space, or if the action is annotated as `str`, `step` gets the text of the policy's message instead of the message.

    Both methods may be `async def`. An environment may also have these methods:

    - `tools()`: the tools that the policy may call. The environment loop calls functions itself, and gives their results to
      the policy as messages; `step` then gets the first message without a call. If a tool is a JSON schema, `step` gets every
      message, with its calls in `message["tool_calls"]`, and returns the results. With `AgentPolicy(executor=...)`, the tools
      are those of the executor: functions or `Tool`s of its catalogue, or all of them without this method.
    - `state_key()`: for GiGPO, which compares messages that were written in the same state. Return a key, for example a text or
      a number, whose `repr` is the same each time the environment is in this state. It is called before each message of the
      policy.
    - `snapshot()` and `restore(state)`: for `Branching`. `snapshot()` returns all that the environment needs to go on, as a
      value that `copy.deepcopy` accepts. A new environment gets a copy of it by `restore`, instead of `reset`.
    - `close()`: called once at the end, whatever happened.
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin. Return the first observation and a dict with anything else. A group's conversations have the same seed."""
        ...

    def step(self, action: Message) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Answer the policy's message. Return the observation, the reward, whether the conversation ended (terminated, or cut
        off), and a dict with anything else."""
        ...


class EnvironmentLoop:
    """Plays environments: asks the policy for messages, gives them to the environment, and adds up the rewards."""

    def __init__(self, make: Callable[[Any], Any], *, one_at_a_time: bool = False) -> None:
        self._make = make
        self._turns = threading.Lock() if one_at_a_time else None

    async def __call__(self, chat: Chat, state: Any) -> list[float]:
        """Hold one conversation. Return one reward per message of the policy."""
        thread = OwnThread(self._turns)
        chat.threads.append(thread)
        made: list[Any] = []
        rewards: list[float] = []
        try:
            await thread.run(lambda: made.append(self._make(state)))
            await self._converse(thread, made[0], chat, rewards)
        except ConversationEnded:
            pass
        finally:  # the conversation may have been cancelled while the thread still makes the environment
            try:
                await thread.run(lambda: made[0].close() if made and hasattr(made[0], "close") else None)
            finally:
                thread.end()
        return [*rewards, *[0.0] * (chat.num_turns - len(rewards))]  # a truncated message is not answered

    async def _converse(self, thread: OwnThread, environment: Any, chat: Chat, rewards: list[float]) -> None:
        owner = type(environment).__name__
        schemas, run_calls = await self._tools(thread, environment, chat)
        key, takes_text = getattr(environment, "state_key", None), _takes_text(environment)
        branch = chat.branch
        if branch is not None and not (hasattr(environment, "snapshot") and hasattr(environment, "restore")):
            raise ContractError(
                f"Branching needs environments with snapshot() and restore(state); {owner} lacks one of them. Add both, or "
                "remove branch=... from AgentPolicy."
            )
        if branch is None or branch.saved is None:
            observation, chat.info = require_values(
                owner, "reset", await thread.run(environment.reset, seed=chat.seed), 2
            )
            messages = as_messages(observation)
        else:
            await thread.run(environment.restore, branch.saved.snapshot)
            messages = branch.saved.messages
            rewards += branch.saved.rewards
        while True:
            if chat.branch is not None:
                await self._fork(thread, environment, chat, messages, rewards)
                chat.state_key = chat.branch.node
            else:
                chat.state_key = None if key is None else await thread.run(key)
            message = await chat(messages, schemas)
            if run_calls is not None and message.get("tool_calls"):
                results = await run_calls(message)
                rewards.append(0.0)
                messages = [*chat.messages, *results]
                continue
            answer = await thread.run(environment.step, message["content"] if takes_text else message)
            observation, reward, terminated, truncated, chat.info = require_values(owner, "step", answer, 5)
            rewards.append(require_number(owner, reward))
            messages = [*chat.messages, *as_messages(observation, message)]
            if terminated or truncated:
                chat.messages = messages
                return

    @staticmethod
    async def _tools(thread: OwnThread, environment: Any, chat: Chat) -> tuple[list[dict[str, Any]], RunsCalls | None]:
        """Schemas of the environment's tools, and what runs the calls of a message. None: `step` gets them."""
        has_tools = callable(getattr(environment, "tools", None))
        tools = list(await thread.run(environment.tools)) if has_tools else []
        if chat.executed is not None:
            owner = type(environment).__name__
            own = chat.executed.named(owner, tools) if has_tools else chat.executed.tools
            return [tool.schema for tool in own.values()], partial(chat.call_tools, tools=own)
        functions = {tool.__name__: tool for tool in tools if callable(tool)}

        async def run_calls(message: Message) -> list[Message]:
            results, num_failed = await call_functions(message, functions, thread.run)
            chat.counts["failed_calls"] += num_failed
            return results

        return tool_schemas(tools), run_calls if len(functions) == len(tools) else None

    async def _fork(
        self, thread: OwnThread, environment: Any, chat: Chat, messages: list[Message], rewards: list[float]
    ) -> None:
        """Start the other branches if the conversation forks here. This conversation goes on as the first branch."""
        assert chat.branch is not None
        assert chat.fork is not None
        count = chat.branch.width_after(chat.num_turns) - 1
        if count < 1:
            return
        snapshot = await thread.run(environment.snapshot)
        try:  # before this environment goes on, because a snapshot may refer to parts of it
            copies = await thread.run(lambda: [copy.deepcopy((snapshot, messages, rewards)) for _ in range(count)])
        except Exception as error:
            raise ContractError(
                f"{type(environment).__name__}.snapshot must return a value that copy.deepcopy accepts; got "
                f"{describe(snapshot)}: {error}. Return plain values."
            ) from error
        chat.fork([Saved(snapshot=state, messages=said, rewards=given) for state, said, given in copies])
        await asyncio.sleep(0)  # the branches begin, so that their turns are sampled together with this one's


def _takes_text(environment: Any) -> bool:
    """Whether the actions are texts. Wrappers of Gymnasium and GEM do not annotate actions, so the inner environment counts."""
    spaces = sys.modules.get("gymnasium.spaces")  # an environment with such a space has imported it
    # how Gymnasium declares text actions; nothing else is guessed
    if spaces is not None and isinstance(getattr(environment, "action_space", None), spaces.Text):
        return True
    parameters = inspect.signature(getattr(environment, "unwrapped", environment).step).parameters
    return next(iter(parameters.values())).annotation in (str, "str") if parameters else False


def require_values(owner: str, method: str, returned: Any, count: int) -> tuple[Any, ...]:
    if not isinstance(returned, tuple) or len(returned) != count:
        names = "(observation, info)" if count == 2 else "(observation, reward, terminated, truncated, info)"
        raise ContractError(f"{owner}.{method} must return {names}; got {describe(returned)}. Return all of them.")
    return returned


def require_number(owner: str, reward: Any) -> float:
    try:
        return float(reward)
    except (TypeError, ValueError) as error:
        raise ContractError(
            f"{owner}.step must return a number as the reward; got {describe(reward)}. Return a float."
        ) from error

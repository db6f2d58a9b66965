"""Chats: an agent program asks the policy for its next message, and what the policy samples is recorded."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from adapters.llm import FinishReason
from grpo.errors import ContractError, GRPOError
from grpo.writing import describe

from .calls import read_turn, tool_schemas
from .conversations import Conversation, EndedBy, Segment, Turn, plain_values
from .messages import Message, as_messages, say_the_same
from .templates import ChatTemplate


class ConversationEnded(GRPOError):
    """The conversation has reached a limit, so the policy says nothing more. An agent program may catch this error and return
    a reward for what was said; else the reward is 0. `ended_by` says which limit it was."""

    def __init__(self, ended_by: EndedBy) -> None:
        super().__init__(f"The conversation ended by {ended_by!r}. Catch ConversationEnded, and return a reward.")
        self.ended_by = ended_by
        """Which limit ended the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """One turn of the policy, as the sampler returns it."""

    token_ids: Sequence[int]
    """The sampled tokens."""
    log_probs: Sequence[float]
    """Their log-probs under the sampling distribution."""
    finish_reason: FinishReason
    """Why the turn ended."""


SampleTurn = Callable[[list[int], int], Awaitable[SampledTurn]]
"""Samples a turn, given the token ids of a context and a seed."""


class PlaysConversations(Protocol):
    """An agent program: it asks `chat` for the policy's messages, and returns the reward."""

    async def __call__(self, chat: "Chat", state: Any) -> float | Sequence[float]:
        """Hold one conversation about `state`. Return its reward, or one reward for each message of the policy."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where conversations end."""

    max_turns: int
    """Maximum number of messages of the policy."""
    max_tokens: int | None
    """Maximum number of tokens of a context. None: no maximum."""
    max_new_tokens: int
    """Maximum number of tokens of a message of the policy. Each turn needs room for as many."""


@dataclass(slots=True)
class _Context:
    """A segment that grows."""

    token_ids: list[int]
    sampled: list[bool] = field(init=False)
    log_probs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sampled = [False] * len(self.token_ids)

    def add(self, token_ids: Sequence[int], *, sampled: bool) -> None:
        self.token_ids += token_ids
        self.sampled += [sampled] * len(token_ids)


class Chat:
    """One conversation with the policy. `await chat(messages)` returns the policy's next message.

    Pass the whole history each time, as with OpenAI's API. If it begins with what was said so far, the context goes on, and
    only the new messages are tokenized. If not, for example because the agent program has shortened the history, the turn has
    a context of its own. Calls that are made at the same time are answered one after another.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Any,
        sample: SampleTurn,
        limits: Limits,
        *,
        seed: int,
        sampling_seed: int,
    ) -> None:
        self.seed = seed
        """Seed of the environment. All conversations of a group have the same."""
        self.messages: list[Message] = []
        """What was said so far."""
        self.state_key: Any = None
        """The state in which the next message is asked for, for GiGPO: any value that is equal in equal states."""
        self.info: dict[str, Any] = {}
        """Kept as `Conversation.info`."""
        self.ended_by: EndedBy | None = None
        """Why the conversation ended. None: it goes on."""
        self.counts = {"malformed_calls": 0, "failed_calls": 0}
        """Tool calls that could not be read, and tool calls that failed."""
        self._template = template
        self._tokenizer = tokenizer
        self._sample = sample
        self._limits = limits
        self._seeds = np.random.default_rng(sampling_seed)
        self._contexts: list[_Context] = []
        self._turns: list[tuple[list[int], Message, Any]] = []
        self._tools: list[dict[str, Any]] | None = None
        self._was_cut = False
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        self._active_since = time.monotonic()

    @property
    def num_turns(self) -> int:
        """How many messages the policy has sent."""
        return len(self._turns)

    @property
    def seconds_without_request(self) -> float:
        """How long the agent program has been busy since the policy's last message."""
        return 0.0 if self._num_waiting else time.monotonic() - self._active_since

    async def __call__(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Message:
        """The policy's next message.

        Args:
            messages: The whole history, with the policy's own messages.
            tools: The tools that the policy may call: JSON schemas, or functions with type hints and docstrings.

        Raises:
            ConversationEnded: A limit was reached: of turns, of room in the context, or the message was truncated.
            ContractError: The chat template does not accept the messages or the tools.
        """
        self._num_waiting += 1
        try:
            async with self._lock:
                return await self._next_message(as_messages(messages), tool_schemas(tools) if tools else None)
        finally:
            self._num_waiting -= 1
            self._active_since = time.monotonic()

    async def _next_message(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> Message:
        if not messages:
            raise ContractError("Chat: messages must have at least one message; got none. Pass the whole history.")
        if self.ended_by is not None:
            raise ConversationEnded(self.ended_by)
        if len(self._turns) >= self._limits.max_turns:
            raise self._end("max_turns")
        appended = self._appended(messages, tools)
        held = [] if appended is None else self._contexts[-1].token_ids
        new = self._template.render(messages, tools) if appended is None else appended
        limit = self._limits.max_tokens
        if limit is not None and len(held) + len(new) + self._limits.max_new_tokens > limit:
            raise self._end("length")
        context = [*held, *new]
        turn = await self._sample(context, int(self._seeds.integers(2**62)))
        if appended is None:
            self._contexts.append(_Context(new))
        else:
            self._contexts[-1].add(appended, sampled=False)
        self._contexts[-1].add(turn.token_ids, sampled=True)
        self._contexts[-1].log_probs += turn.log_probs
        message = self._message(context, turn, tools)
        self.messages, self._tools = [*messages, message], tools
        self._turns.append((list(turn.token_ids), message, self.state_key))
        if turn.finish_reason == "length":
            raise self._end("length")
        return message

    def conversation(self, rewards: float | Sequence[float]) -> Conversation:
        """The finished conversation. A single reward is given to the last turn.

        Raises:
            ContractError: The reward is no number, or there are several rewards, and not one for each turn.
        """
        count = len(self._turns)
        try:
            given = np.asarray(rewards, dtype=np.float64)
        except (TypeError, ValueError):
            given = np.zeros((0, 0))
        listed = [*[0.0] * (count - 1), given.item()][:count] if given.ndim == 0 else given.tolist()
        if given.ndim > 1 or len(listed) != count or rewards is None:
            raise ContractError(
                f"An agent program must return one reward, or one for each of the policy's messages = {count}; got "
                f"{describe(rewards)}. Return their sum, or one number for each message."
            )
        return Conversation(
            segments=tuple(
                Segment(
                    token_ids=tuple(context.token_ids),
                    sampled=tuple(context.sampled),
                    log_probs=tuple(context.log_probs),
                )
                for context in self._contexts
            ),
            turns=tuple(
                Turn(num_tokens=len(tokens), reward=float(reward), state_key=None if key is None else repr(key))
                for (tokens, _, key), reward in zip(self._turns, listed, strict=True)
            ),
            messages=tuple(plain_values(message) for message in self.messages),
            ended_by=self.ended_by or "environment",
            info=plain_values(self.info),
        )

    def _end(self, ended_by: EndedBy) -> ConversationEnded:
        self.ended_by = ended_by
        return ConversationEnded(ended_by)

    def _appended(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> list[int] | None:
        """Token ids that continue the last context. None if the next turn needs a context of its own."""
        count = len(self.messages)
        if not self._turns or len(messages) <= count or tools != self._tools or self._was_cut:
            return None
        turn, said, _ = self._turns[-1]
        if self.messages[-1] is not said or not say_the_same(messages[:count], self.messages):
            return None
        return self._template.bridge(turn, said, messages[count:], tools)

    def _message(self, context: list[int], turn: SampledTurn, tools: list[dict[str, Any]] | None) -> Message:
        text = self._tokenizer.decode(list(turn.token_ids), skip_special_tokens=True)
        if turn.finish_reason == "length":  # a truncated call is not a malformed call
            return {"role": "assistant", "content": text}
        cuts = [place for stop in self._template.stop if (place := text.find(stop)) >= 0]
        self._was_cut = bool(cuts)  # the policy began to speak for others, which the other side does not see
        text = text[: min(cuts, default=len(text))]
        message, is_malformed = read_turn(
            self._tokenizer, context, turn.token_ids, text, tools, number=len(self._turns)
        )
        self.counts["malformed_calls"] += is_malformed
        return message

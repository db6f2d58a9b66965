"""Chats: an agent program asks the policy for its next message, and what the policy samples is recorded."""

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from adapters.llm import CompletionTexts, FinishReason
from grpo.arguments import describe
from grpo.errors import ContractError, GRPOError

from .branching import Branch, Saved
from .calls import read_turn, tool_schemas
from .conversations import Conversation, EndedBy, Segment, Turn, plain_values
from .messages import Message, as_messages, in_the_order_of_calls, say_the_same
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


SampleTurn = Callable[[list[int], int, int, tuple[str, ...]], Awaitable[SampledTurn]]
"""Samples a turn, given the token ids of a context, a seed, the maximum number of tokens, and texts that end the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A message of the policy, with its numbers of tokens."""

    message: Message
    """The message."""
    num_context_tokens: int
    """Number of tokens that the policy read."""
    num_tokens: int
    """Number of tokens that it sampled."""
    is_truncated: bool
    """Whether the message reached the maximum of this call."""


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
    forks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sampled = [False] * len(self.token_ids)

    def add(self, token_ids: Sequence[int], *, sampled: bool) -> None:
        self.token_ids += token_ids
        self.sampled += [sampled] * len(token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A turn of the policy, with all that the policy had read."""

    context: _Context
    end: int
    """Number of tokens of the context up to the end of this turn."""
    token_ids: list[int]
    messages: list[Message]
    """What was said up to this turn, with its message."""
    tools: list[dict[str, Any]] | None
    was_cut: bool
    """Whether the other side did not see the end of the turn."""
    state_key: Any
    ends_by_length: bool
    """Whether the policy's own maximum truncated the message, which ends the conversation."""


class Chat:
    """One conversation with the policy. `await chat(messages)` returns the policy's next message.

    Pass the whole history each time, as with OpenAI's API. The chat looks for the latest of the policy's turns that the
    history continues:
    - The history continues the policy's last turn: the new messages are tokenized and appended to the context.
    - The history continues an earlier turn: a new context begins with the tokens up to that turn.
    - The history continues no turn, for example because the agent program has shortened it: the whole history is tokenized,
      in a new context.

    Calls that are made at the same time are answered one after another.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Any,
        texts: CompletionTexts,
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
        """Key of the state in which the policy writes its next message, for `advantage.credit="gigpo"`.

        GiGPO compares the messages that were written in the same state. Two states are the same if `repr` of their keys is the
        same, so a key can be a text, a number, or a tuple of them. None: the state has no key, and GiGPO refuses the message.
        """
        self.info: dict[str, Any] = {}
        """Kept as `Conversation.info`."""
        self.ended_by: EndedBy | None = None
        """Why the conversation ended. None: it goes on."""
        self.counts = {"malformed_calls": 0, "failed_calls": 0}
        """Tool calls that could not be read, and tool calls that failed."""
        self.branch: Branch | None = None
        """The conversation's place in a tree. None: it does not branch."""
        self.fork: Callable[[Sequence[Saved]], None] | None = None
        """Starts the other branches of a fork, given what each begins with."""
        self._sampling_seed = sampling_seed
        self._template = template
        self._tokenizer = tokenizer
        self._texts = texts
        self._sample = sample
        self._limits = limits
        self._seeds = np.random.default_rng(sampling_seed)
        self._contexts: list[_Context] = []
        self._turns: list[_Turn] = []
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

    def restart_clock(self) -> None:
        """Count the time without a request from now on."""
        self._active_since = time.monotonic()

    def forked(self, saved: Sequence[Saved], sampler: Callable[[int], SampleTurn]) -> list[tuple[int, "Chat"]]:
        """The other branches of a fork at this place. Each has its own copy of all that was said, and its own random numbers.

        Args:
            saved: What each of these branches begins with.
            sampler: Returns the function that samples the turns of a conversation, given its first row.

        Returns:
            The first row of each branch, and its chat.
        """
        assert self.branch is not None
        for context in self._contexts:
            context.forks.append(len(context.token_ids))
        self.branch, *others = self.branch.forked(self.num_turns, saved)
        chats = []
        for branch in others:
            chat = copy.copy(self)
            # together, because they refer to one another
            chat.messages, chat._contexts, chat._turns = copy.deepcopy((self.messages, self._contexts, self._turns))
            chat.info, chat.counts = dict(self.info), dict.fromkeys(self.counts, 0)
            chat.branch, chat.fork = branch, None
            chat._sample, chat._seeds = sampler(branch.leaf), np.random.default_rng([self._sampling_seed, branch.leaf])
            chat._lock, chat._num_waiting = asyncio.Lock(), 0
            chats.append((branch.leaf, chat))
        return chats

    async def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Message:
        """The policy's next message.

        Args:
            messages: The whole history, with the policy's own messages.
            tools: The tools that the policy may call: JSON schemas, or functions with type hints and docstrings.
            max_new_tokens: Maximum number of tokens of this message. The message is truncated there, and the conversation goes
                on. It ends as always if the message reaches the policy's own `sampling.max_new_tokens`.
            stop: Texts that end this message, in addition to `sampling.stop`. They are cut off. Their tokens were sampled and
                are scored.

        Raises:
            ConversationEnded: A limit was reached: of turns, of room in the context, or the message was truncated.
            ContractError: The chat template does not accept the messages or the tools, or a setting is invalid.
        """
        return (await self.reply(messages, tools, max_new_tokens=max_new_tokens, stop=stop)).message

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """The policy's next message, with its numbers of tokens. Arguments and errors are those of `chat(messages)`."""
        self._num_waiting += 1
        try:
            async with self._lock:
                if max_new_tokens is not None and max_new_tokens < 1:
                    raise ContractError(f"Chat: max_new_tokens must be at least 1; got {max_new_tokens}.")
                if isinstance(stop, str) or not all(stop):
                    raise ContractError(
                        f"Chat: stop must be a list of texts that are not empty; got {stop!r}. Pass stop=[...]."
                    )
                limit = min(max_new_tokens or self._limits.max_new_tokens, self._limits.max_new_tokens)
                history = in_the_order_of_calls(as_messages(messages))
                return await self._reply(history, tool_schemas(tools) if tools else None, limit, tuple(stop))
        finally:
            self._num_waiting -= 1
            self._active_since = time.monotonic()

    async def _reply(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, max_new_tokens: int, stop: tuple[str, ...]
    ) -> Reply:
        if not messages:
            raise ContractError("Chat: messages must have at least one message; got none. Pass the whole history.")
        if self.ended_by is not None:
            raise ConversationEnded(self.ended_by)
        if len(self._turns) >= self._limits.max_turns:
            raise self._end("max_turns", messages)
        last, new = self._continued(messages, tools)
        held = [] if last is None else last.context.token_ids[: last.end]
        limit = self._limits.max_tokens
        if limit is not None and len(held) + len(new) + max_new_tokens > limit:
            raise self._end("length", messages)
        read = [*held, *new]
        turn = await self._sample(read, int(self._seeds.integers(2**62)), max_new_tokens, stop)
        if last is not None and last is self._turns[-1]:
            last.context.add(new, sampled=False)
        else:
            self._contexts.append(_Context([*read]))
        context = self._contexts[-1]
        context.add(turn.token_ids, sampled=True)
        context.log_probs += turn.log_probs
        message, was_cut = self._message(read, turn, tools, stop)
        self.messages = [*messages, message]
        is_truncated = turn.finish_reason == "length"
        ends_by_length = is_truncated and max_new_tokens == self._limits.max_new_tokens
        self._turns.append(
            _Turn(
                context=context,
                end=len(context.token_ids),
                token_ids=list(turn.token_ids),
                messages=self.messages,
                tools=tools,
                was_cut=was_cut,
                state_key=self.state_key,
                ends_by_length=ends_by_length,
            )
        )
        if ends_by_length:
            raise self._end("length", self.messages)
        return Reply(
            message=message, num_context_tokens=len(read), num_tokens=len(turn.token_ids), is_truncated=is_truncated
        )

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
        is_repeated = self.branch is not None and self.branch.num_leaves > 1
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
                    forks=tuple(sorted({*context.forks, *([len(context.token_ids)] if is_repeated else [])})),
                )
                for context in self._contexts
            ),
            turns=tuple(
                Turn(
                    num_tokens=len(turn.token_ids),
                    reward=float(reward),
                    state_key=None if turn.state_key is None else repr(turn.state_key),
                    continues=self.branch is not None and i > 0 and turn.state_key == self._turns[i - 1].state_key,
                    is_truncated=turn.ends_by_length,
                )
                for i, (turn, reward) in enumerate(zip(self._turns, listed, strict=True))
            ),
            messages=tuple(plain_values(message) for message in self.messages),
            ended_by=self.ended_by or "environment",
            info=plain_values(self.info),
        )

    def _end(self, ended_by: EndedBy, messages: list[Message]) -> ConversationEnded:
        """End with these messages. What the other side said last stays in the transcript, though nobody answers it."""
        if say_the_same(messages[: len(self.messages)], self.messages):
            self.messages = messages
        self.ended_by = ended_by
        return ConversationEnded(ended_by)

    def _continued(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> tuple[_Turn | None, list[int]]:
        """The turn after which the messages go on, and the token ids to append to it. Without a turn, they are the whole
        history: it begins otherwise, or the template rewrites it, or the other side did not see the end of the turn."""
        found = None
        for turn in reversed(self._turns):
            count = len(turn.messages)
            is_longer = count < len(messages) and (found is None or count > len(found.messages))
            if is_longer and turn.tools == tools and say_the_same(messages[:count], turn.messages):
                found = turn
        if found is not None and not found.was_cut:
            said, new_messages = found.messages[-1], messages[len(found.messages) :]
            appended = self._template.bridge(found.token_ids, said, new_messages, tools)
            if appended is not None:
                return found, appended
        return None, self._template.render(messages, tools)

    def _message(
        self, context: list[int], turn: SampledTurn, tools: list[dict[str, Any]] | None, stop: tuple[str, ...]
    ) -> tuple[Message, bool]:
        """The turn as a message, and whether its end was cut off."""
        [text] = self._texts.decode([turn.token_ids])
        [opened] = self._texts.opened_by([context])
        begun: Message = {"opened": opened} if opened else {}
        if turn.finish_reason == "length":  # a truncated call is not a malformed call
            self._texts.say_lost(turn.token_ids)
            return {"role": "assistant", "content": text, **begun}, False
        stops = (*self._template.stop, *stop)  # the former begin a message of others
        shown = _before(text, stops)
        message, is_malformed = read_turn(
            self._tokenizer,
            context,
            turn.token_ids,
            shown,
            tools,
            number=len(self._turns),
            hidden=self._texts.hidden,
        )
        self.counts["malformed_calls"] += is_malformed
        if "reasoning_content" in message:  # thoughts were read, so the content does not begin in a tag
            begun = {}
        elif not is_malformed and message.get("content") == shown:  # nothing else reads the tokens
            self._texts.say_lost(turn.token_ids)
        return {**message, "content": _before(message["content"], stops), **begun}, shown != text


def _before(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stop strings."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]

"""Chats: an agent program asks the policy for its next message, and what the policy samples is recorded."""

import asyncio
import copy
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from adapters.llm import FinishReason, SamplingConfig
from grpo.arguments import describe
from grpo.errors import ContractError, GRPOError

from .branching import Branch, Saved
from .calls import tool_schemas
from .conversations import Conversation, EndedBy, SeatReply, Segment, Turn, plain_values
from .executed_calls import ExecutedCalls, ToolCallLostError
from .messages import Message, as_messages, pictures_of, say_the_same, text_of
from .speakers import Seat, Speaker, said_by
from .threads import OwnThread

MOST_WAITING = 256
"""Maximum number of requests of a conversation that wait for a turn at the same time."""


class ConversationEnded(GRPOError):
    """A limit was reached, so the policy says nothing more: in the whole conversation ("max_turns", "timeout"), or in this
    context ("length"), while others go on. An agent program may catch this error and return a reward for what was said; else
    the reward is 0. After "timeout", there is no reward. `ended_by` says which limit it was."""

    def __init__(self, ended_by: EndedBy) -> None:
        super().__init__(f"The conversation ended by {ended_by!r}. Catch ConversationEnded, and return a reward.")
        self.ended_by = ended_by
        """Which limit was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """One turn of the policy, as the sampler returns it."""

    token_ids: Sequence[int]
    """The sampled tokens."""
    log_probs: Sequence[float]
    """Their log-probs under the sampling distribution."""
    finish_reason: FinishReason
    """Why the turn ended."""


SampleTurn = Callable[[Sequence[int], int, int, tuple[str, ...], Speaker | None], Awaitable[SampledTurn]]
"""Samples a turn, given a context (token ids, with pictures if it has some), a seed, the maximum number of tokens, texts that
end the turn, and who speaks (None: the trained model). Raises a TimeoutError if that takes too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A message of the policy, with its numbers of tokens."""

    id: str
    """Names the message within its conversation, for rewards by id. Equal requests of a conversation are numbered."""
    message: Message
    """The message."""
    num_context_tokens: int
    """Number of tokens that the policy read."""
    num_tokens: int
    """Number of tokens that it sampled."""
    is_truncated: bool
    """Whether the message reached the maximum of this call."""
    ends_context: bool
    """Whether it reached the policy's own maximum, so that this context cannot go on."""


class PlaysConversations(Protocol):
    """An agent program: it asks `chat` for the policy's messages, and returns the reward."""

    async def __call__(self, chat: "Chat", state: Any) -> float | Sequence[float] | Mapping[str, float]:
        """Hold one conversation about `state`.

        Return its reward, or one reward for each message of the policy: a list in the order of the replies, or a dict by
        `Reply.id` or seat, in which a missing message has the reward 0. A seat's reward belongs to its last message. A list is
        refused if several tasks, or clients over HTTP, asked for messages of which one does not continue the one before.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where conversations and their contexts end."""

    max_turns: int
    """Maximum number of messages of the policy."""
    max_tokens: int | None
    """Maximum number of tokens of a context. None: no maximum."""
    max_new_tokens: int
    """Maximum number of tokens of a message of the policy. Each turn needs room for as many, unless its request has a smaller
    maximum."""


@dataclass(slots=True)
class _Context:
    """A segment that grows."""

    token_ids: list[int]
    last: int | None = None
    """The place of its last turn. None: nothing has been said in it yet."""
    is_asked: bool = False
    """Whether a request waits for its next turn."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Turn:
    """A turn of the policy, with all that the policy had read."""

    id: str
    place: int
    """Its place among the turns of the conversation, as they came."""
    parent: int | None
    """The place of the turn whose tokens it continues. None: its tokens begin anew."""
    context: _Context
    begin: int
    """Number of tokens of the context before this turn."""
    token_ids: list[int]
    log_probs: list[float]
    seat: str | None
    messages: list[Message]
    """What was said up to this turn, with its message."""
    tools: list[dict[str, Any]] | None
    was_cut: bool
    """Whether the other side did not see the end of the turn."""
    state_key: Any
    ends_by_length: bool
    """Whether the policy's own maximum truncated the message, which ends the context."""
    is_full: bool
    """Whether that is so, or there was no room for another turn."""
    is_fork: bool = False
    """Whether the conversation forked after this turn."""

    @property
    def end(self) -> int:
        """Number of tokens of the context up to the end of this turn."""
        return self.begin + len(self.token_ids)

    @property
    def read(self) -> list[int]:
        """The tokens up to the end of this turn."""
        return self.context.token_ids[: self.end]

    @property
    def is_free(self) -> bool:
        """Whether a request can go on in the same context."""
        return self.is_last and not self.context.is_asked

    @property
    def is_last(self) -> bool:
        """Whether it is the last turn of its context."""
        return self.place == self.context.last

    def is_read_in(self, messages: Sequence[Message]) -> bool:
        """Whether messages begin with all that was said up to this turn, so that it came before them, whatever the time."""
        return len(self.messages) < len(messages) and say_the_same(messages[: len(self.messages)], self.messages)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _OtherReply:
    """A reply of a seat that is not trained."""

    id: str
    seat: str
    messages: list[Message]
    """What was said up to the reply, with the reply."""
    task: asyncio.Task | None
    """The task that asked."""

    @property
    def content(self) -> tuple[int, str]:
        """Puts replies in an order that does not depend on time. A reply comes after those in its own history."""
        return len(self.messages), repr((self.seat, self.messages))


class Chat:
    """One conversation with the policy. `await chat(messages)` returns the policy's next message.

    Pass the whole history each time, as with OpenAI's API. The chat looks for the latest of the policy's turns that the
    history continues:
    - The history continues the last turn of a context: the new messages are tokenized and appended to the context.
    - The history continues an earlier turn: a new context begins with the tokens up to that turn.
    - The history continues no turn, for example because the agent program has shortened it, or because another agent asks: the
      whole history is tokenized, in a new context.

    Calls that are made at the same time are sampled together. The random numbers of a turn belong to what the policy reads, and
    contexts that several tasks, or clients over HTTP, have asked for are in the order of their tokens. So neither depends on
    which request comes first.
    """

    def __init__(
        self,
        speaker: Speaker,
        sample: SampleTurn,
        limits: Limits,
        *,
        seed: int,
        sampling_seed: int,
        seats: Mapping[str, Seat] | None = None,
        frozen: Mapping[str, Speaker] | None = None,
        executed: ExecutedCalls | None = None,
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
        self.ignored: dict[str, Any] = {}
        """What requests asked for and did not get: the last value of each parameter. `Conversation.info["ignored"]` has it,
        after an error too."""
        self.ended_by: EndedBy | None = None
        """Why the conversation ended. None: it goes on."""
        self.limited_by: EndedBy | None = None
        """The limit that was reached last. None: the policy has answered since."""
        self.reached: EndedBy | None = None
        """A limit that was reached at some time. None: no limit was reached."""
        self.counts = {"malformed_calls": 0, "failed_calls": 0}
        """Tool calls that could not be read, and tool calls that failed."""
        self.branch: Branch | None = None
        """The conversation's place in a tree. None: it does not branch."""
        self.fork: Callable[[Sequence[Saved]], None] | None = None
        """Starts the other branches of a fork, given what each begins with."""
        self.program: asyncio.Future | None = None
        """The task that plays the conversation."""
        self.threads: list[OwnThread] = []
        """The threads in which the program makes blocking calls."""
        self.is_late: str | None = None
        """What took too long, if the conversation ended by "timeout" because of the model."""
        self.executed = executed
        """Runs the tool calls. None: there is no executor."""
        self.has_lost_call = False
        """Whether a tool call was lost."""
        self._has_folder = False
        self._sampling_seed: tuple[int, ...] = (sampling_seed,)
        self._speaker = speaker
        self._sample = sample
        self._seats, self._frozen = seats or {}, frozen or {}
        self._limits = limits
        self._turns: list[_Turn] = []
        self._others: list[_OtherReply] = []
        self._num_equal: Counter[bytes] = Counter()
        self._tasks: list[asyncio.Task | None] = []
        self._num_waiting = self._num_sampled = self._num_functions = self._num_calling = 0
        """Numbers of requests that wait for a model, of those of them that the trained policy answers, of those that functions
        answer, and of messages whose calls run."""
        self.now: Callable[[], float] = time.monotonic
        """The seconds by which the time without a request is measured."""
        self._active_since = self.now()

    @property
    def num_turns(self) -> int:
        """How many messages the policy has sent."""
        return len(self._turns)

    @property
    def seconds_without_request(self) -> float:
        """How long the agent program has been busy since the policy's last message."""
        return 0.0 if self._num_waiting or self._num_calling else self.now() - self._active_since

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools of `AgentPolicy(executor=...)`, for `chat(messages, tools=chat.tools)`. Empty without one."""
        return [] if self.executed is None else [tool.schema for tool in self.executed.tools.values()]

    @property
    def models(self) -> list[str]:
        """What the `model` of a request over HTTP may be: "policy" for the trained policy in no seat, or a seat. Any other name
        is the trained policy, too."""
        return list(dict.fromkeys(["policy", *self._seats]))

    def seat_of(self, model: Any) -> dict[str, str]:
        """The argument of `reply` for the `model` of a request over HTTP, if a seat has this name."""
        return {"seat": model} if isinstance(model, str) and model in self._seats else {}

    def said_before(self, name: str) -> list[Message] | None:
        """The messages up to the reply with this id, with the reply. None: there is no such reply."""
        said = {turn.id: turn.messages for turn in self._turns} | {other.id: other.messages for other in self._others}
        return said.get(name)

    def restart_clock(self) -> None:
        """Count the time without a request from now on."""
        self._active_since = self.now()

    def forked(self, saved: Sequence[Saved], sampler: Callable[[int], SampleTurn]) -> list[tuple[int, "Chat"]]:
        """The other branches of a fork at this place. Each has its own copy of all that was said, and its own random numbers.

        Args:
            saved: What each of these branches begins with.
            sampler: Returns the function that samples the turns of a conversation, given its first row.

        Returns:
            The first row of each branch, and its chat.
        """
        assert self.branch is not None
        for turn in self._turns:
            turn.is_fork |= turn.is_last
        self.branch, *others = self.branch.forked(self.num_turns, saved)
        chats = []
        for branch in others:
            chat = copy.copy(self)
            chat.messages, chat._turns = copy.deepcopy((self.messages, self._turns))
            chat.info, chat.ignored, chat.counts = dict(self.info), {}, dict.fromkeys(self.counts, 0)
            chat.branch, chat.fork, chat.program, chat.threads = branch, None, None, []
            chat._sample, chat._sampling_seed = sampler(branch.leaf), (*self._sampling_seed, branch.leaf)
            chat._num_equal, chat._tasks = self._num_equal.copy(), []
            chat._num_waiting = chat._num_sampled = chat._num_functions = chat._num_calling = 0
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
            max_new_tokens: Maximum number of tokens of this message. The message is truncated there, and its context goes on.
                A message that reaches the policy's own `sampling.max_new_tokens` ends its context, and raises
                `ConversationEnded`.
            stop: Texts that end this message, in addition to `sampling.stop`. They are cut off. Their tokens were sampled and
                are scored.

        Raises:
            ConversationEnded: A limit was reached: of turns, of room in the context, or of the time for a turn; or the message
                was truncated at the policy's own maximum.
            ContractError: The chat template does not accept the messages or the tools, a setting is invalid, or too many
                requests wait.
        """
        reply = await self.reply(messages, tools, max_new_tokens=max_new_tokens, stop=stop)
        if reply.ends_context:
            raise ConversationEnded("length")
        return reply.message

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        seat: str | None = None,
    ) -> Reply:
        """The policy's next message, with its id and numbers of tokens. Arguments and errors are those of `chat(messages)`.
        A truncated message is returned, and not an error.

        Args:
            messages, tools, max_new_tokens, stop: See `chat(messages)`.
            seat: Who speaks. None: the trained policy, in no seat.

        Raises:
            ContractError: There is no such seat.
        """
        try:
            return await self._answer(messages, tools, max_new_tokens, stop, seat)
        except ConversationEnded:
            await asyncio.sleep(0)  # a program that asks again and again holds up no other one
            raise

    async def _answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        max_new_tokens: int | None,
        stop: Sequence[str],
        seat: str | None,
    ) -> Reply:
        if seat is not None and seat not in self._seats:
            raise ContractError(
                f"Chat: seat must be one of {sorted(self._seats)}; got {seat!r}. Pass AgentPolicy(seats=[Seat(name=...)])."
            )
        if self._num_waiting + self._num_functions >= MOST_WAITING:
            raise ContractError(
                f"Chat: at most {MOST_WAITING} requests may wait at the same time. Await some of them first."
            )
        if seat is not None and not self._seats[seat].is_trained:
            self._require_going_on(list(messages))
            self.counts[f"turns_of/{seat}"] = self.counts.get(f"turns_of/{seat}", 0) + 1
            if seat not in self._frozen:
                return await self._reply_of_function(self._seats[seat], as_messages(messages))
        self._note_task()
        self._num_waiting += 1
        try:
            if max_new_tokens is not None and max_new_tokens < 1:
                raise ContractError(f"Chat: max_new_tokens must be at least 1; got {max_new_tokens}.")
            if isinstance(stop, str) or not all(map(SamplingConfig.can_stop, stop)):
                raise ContractError(
                    "Chat: stop must be a list of texts that are not empty and have no half characters; got "
                    f"{stop!r}. Pass stop=[...]."
                )
            limit = min(max_new_tokens or self._limits.max_new_tokens, self._limits.max_new_tokens)
            history = as_messages(messages)
            schemas = tool_schemas(tools) if tools else None
            if seat is not None and not self._seats[seat].is_trained:
                return await self._reply_of_others(self._seats[seat], history, schemas, max_new_tokens, tuple(stop))
            return await self._reply(history, schemas, limit, tuple(stop), seat)
        finally:
            self._num_waiting -= 1

    async def call_tools(self, message: Message, tools: Mapping[str, Any] | None = None) -> list[Message]:
        """Results of the message's tool calls as messages, in the order of the calls. The executor of `AgentPolicy` runs them.

        A call of an unknown tool, with wrong arguments, that raises an error, takes too long or returns too much has a result
        that says so. The calls share a folder of this conversation, which is removed at its end. Their time does not count for
        `AgentPolicy(timeout=...)`, because each has a time limit of its own.

        Args:
            message: The policy's message.
            tools: The tools that may be called, by name. None: all of the executor's.

        Raises:
            ContractError: There is no executor.
            ToolCallLostError: A worker or a server is gone. Unless the program catches it, the conversation has no reward.
        """
        if self.executed is None:
            raise ContractError("Chat: call_tools needs an executor. Pass AgentPolicy(executor=ToolExecutor(...)).")
        self._has_folder = True
        self._num_calling += 1
        try:
            known = self.executed.tools if tools is None else tools
            results, num_failed = await self.executed.run(message, known, self._folder)
        except ToolCallLostError:
            self.has_lost_call = True
            raise
        finally:
            self._num_calling -= 1
            self.restart_clock()
        self.counts["failed_calls"] += num_failed
        return results

    @property
    def _folder(self) -> str:
        return f"conversation-{'-'.join(map(str, self._sampling_seed))}"

    async def remove_folder(self) -> None:
        """Remove the folder of the conversation's tool calls, if there were any."""
        if self.executed is not None and self._has_folder:
            await asyncio.to_thread(self.executed.remove, self._folder)

    def _note_task(self) -> None:
        """Note who asks."""
        task = asyncio.current_task()
        if task not in self._tasks:
            self._tasks.append(task)

    async def _reply_of_others(
        self,
        seat: Seat,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        max_new_tokens: int | None,
        stop: tuple[str, ...],
    ) -> Reply:
        """What a frozen model says. Its tokens are not recorded."""
        speaker = self._frozen[seat.name]
        read = speaker.template.render(messages, tools)
        own_limit = speaker.policy.sampling.max_new_tokens
        limit = min(max_new_tokens or own_limit, own_limit)
        name, seed = self._named(read, seat.name, messages, *_end_of(limit, own_limit, stop))
        turn = await self._sampled(speaker.prompt(read, messages), seed, limit, stop, speaker)
        message, *_ = speaker.message(messages, read, turn.token_ids, turn.finish_reason, tools, stop)
        self._note_other(name, seat.name, messages, message)
        return Reply(
            id=name,
            message=message,
            num_context_tokens=len(read),
            num_tokens=len(turn.token_ids),
            is_truncated=turn.finish_reason == "length",
            ends_context=False,
        )

    async def _reply_of_function(self, seat: Seat, messages: list[Message]) -> Reply:
        """What a function says. Its time is the program's."""
        thread = OwnThread()
        self.threads.append(thread)
        self._num_functions += 1
        try:
            message = await said_by(seat.policy, messages, thread)  # type: ignore[arg-type]
        finally:
            self._num_functions -= 1
        name, _ = self._named([*message["content"].encode(errors="surrogatepass")], seat.name)
        self._note_other(name, seat.name, messages, message)
        numbers = {"num_context_tokens": 0, "num_tokens": 0}
        return Reply(id=name, message=message, is_truncated=False, ends_context=False, **numbers)

    def _note_other(self, name: str, seat: str, messages: list[Message], message: Message) -> None:
        """Note what a seat said that is not trained."""
        said = [*messages, copy.deepcopy(message)]  # a program may edit it, and the record stays what was said
        self._others.append(_OtherReply(id=name, seat=seat, messages=said, task=asyncio.current_task()))

    async def _sampled(self, *request: Any) -> SampledTurn:
        try:
            return await self._sample(*request)
        except TimeoutError as error:
            self.ended_by, self.is_late = "timeout", str(error)
            raise ConversationEnded("timeout") from error
        finally:  # not after a refusal: a program that asks again and again is late at some time
            self.restart_clock()

    def _named(
        self, read: Sequence[int], seat: str | None, messages: Sequence[Message] = (), *end: str
    ) -> tuple[str, int]:
        """The id and the seed of the reply to these tokens, the pictures of these messages, and what ends it. Equal requests
        are numbered."""
        words = "".join([seat or "", *(picture.digest for picture in pictures_of(messages)), *end])
        given = np.asarray(read, dtype=np.int64).tobytes() + words.encode()
        digest = hashlib.blake2b(given, digest_size=8).digest()
        number = self._num_equal[digest]
        self._num_equal[digest] += 1
        seed = np.random.SeedSequence([*self._sampling_seed, int.from_bytes(digest), number])
        return f"turn-{digest.hex()}-{number}", int(seed.generate_state(1, np.uint64)[0] >> 2)

    def _require_going_on(self, messages: list[Message]) -> None:
        if not messages:
            raise ContractError("Chat: messages must have at least one message; got none. Pass the whole history.")
        if self.ended_by is not None:
            raise ConversationEnded(self.ended_by)

    async def _reply(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        max_new_tokens: int,
        stop: tuple[str, ...],
        seat: str | None,
    ) -> Reply:
        self._require_going_on(messages)
        if len(self._turns) + self._num_sampled >= self._limits.max_turns:
            self.ended_by = "max_turns"
            raise self._end("max_turns", messages)
        state_key = self.state_key
        parent, appended = self._continued(messages, tools, seat)
        read = [*([] if parent is None else parent.read), *(appended or [])]
        goes_on = parent is not None and parent.is_free
        limit = self._limits.max_tokens
        has_no_room = appended is None or (limit is not None and len(read) + max_new_tokens > limit)
        if has_no_room or (parent is not None and goes_on and parent.is_full):
            for turn in self._turns:
                turn.is_full |= turn.is_read_in(messages)
            raise self._end("length", messages)
        context = parent.context if parent is not None and goes_on else _Context([*read])
        name, seed = self._named(read, seat, messages, *_end_of(max_new_tokens, self._limits.max_new_tokens, stop))
        context.is_asked = True
        self._num_sampled += 1
        try:
            given = await self._sampled(self._speaker.prompt(read, messages), seed, max_new_tokens, stop, None)
        finally:
            self._num_sampled -= 1
            context.is_asked = False
        message, was_cut, is_malformed = self._speaker.message(
            messages, read, given.token_ids, given.finish_reason, tools, stop
        )
        context.token_ids += [*read[len(context.token_ids) :], *given.token_ids]
        self.counts["malformed_calls"] += is_malformed
        self.messages = [*messages, message]
        is_truncated = given.finish_reason == "length"
        ends_by_length = is_truncated and max_new_tokens == self._limits.max_new_tokens
        self.limited_by = "length" if ends_by_length else None
        self.reached = self.reached or self.limited_by
        context.last = len(self._turns)
        said = _Turn(
            id=name,
            place=len(self._turns),
            parent=None if parent is None else parent.place,
            context=context,
            begin=len(read),
            token_ids=list(given.token_ids),
            log_probs=list(given.log_probs),
            seat=seat,
            messages=self.messages,
            tools=tools,
            was_cut=was_cut,
            state_key=state_key,
            ends_by_length=ends_by_length,
            is_full=ends_by_length,
        )
        self._turns.append(said)
        return Reply(
            id=name,
            message=copy.deepcopy(message),  # a program may edit it, and the record stays what was said
            num_context_tokens=len(read),
            num_tokens=len(given.token_ids),
            is_truncated=is_truncated,
            ends_context=ends_by_length,
        )

    def conversation(self, rewards: float | Sequence[float] | Mapping[str, float]) -> Conversation:
        """The finished conversation. A single reward is given to the last turn.

        Raises:
            ContractError: The reward is no number, there are several rewards and not one for each turn, or a list of rewards
                whose order depends on time.
        """
        is_ordered = self._is_ordered()
        paths = self._paths(self._turns if is_ordered else sorted(self._turns, key=_content_of))
        turns = [turn for path in paths for turn in path]
        given = self._rewards(rewards, turns, is_ordered=is_ordered)
        is_repeated = self.branch is not None and self.branch.num_leaves > 1
        messages = self.messages if is_ordered else turns[-1].messages
        reached = self.limited_by if is_ordered else self._reached_by_all()
        self.ended_by = self.ended_by or reached or "environment"  # a late request is refused
        return Conversation(
            segments=tuple(_segment(path, ends_in_fork=is_repeated) for path in paths),
            turns=tuple(
                Turn(
                    num_tokens=len(turn.token_ids),
                    reward=given[turn.id],
                    message=plain_values(turn.messages[-1]),
                    seat=turn.seat,
                    state_key=None if turn.state_key is None else repr(turn.state_key),
                    continues=self.branch is not None and i > 0 and turn.state_key == turns[i - 1].state_key,
                    is_truncated=turn.ends_by_length,
                )
                for i, turn in enumerate(turns)
            ),
            messages=tuple(plain_values(message) for message in messages),
            ended_by=self.ended_by,
            info=plain_values(self.info | ({"ignored": self.ignored} if self.ignored else {})),
            seat_replies=self._seat_replies(),
        )

    def _seat_replies(self) -> tuple[SeatReply, ...]:
        """What the seats said that are not trained. If several tasks asked, the order is that of what they read."""
        others = self._others
        if len({other.task for other in others}) > 1:
            others = sorted(others, key=lambda other: other.content)
        return tuple(
            SeatReply(seat=other.seat, asked=plain_values(other.messages[-2]), message=plain_values(other.messages[-1]))
            for other in others
        )

    def _is_ordered(self) -> bool:
        """Whether the order of the turns does not depend on time: one task asked for all, or each one read the one before."""
        return len(self._tasks) <= 1 or all(turn.is_read_in(after.messages) for turn, after in pairwise(self._turns))

    def _paths(self, turns: Sequence[_Turn]) -> list[list[_Turn]]:
        """The turns of each context. Of the turns that continue one, the first in `turns` stays in its context."""
        next_of: dict[int, _Turn] = {}
        for turn in turns:
            if turn.parent is not None:
                next_of.setdefault(turn.parent, turn)
        paths = []
        for turn in turns:
            if turn.parent is None or next_of[turn.parent] is not turn:
                path = [turn]
                while path[-1].place in next_of:
                    path.append(next_of[path[-1].place])
                paths.append(path)
        return paths

    def _reached_by_all(self) -> EndedBy | None:
        """The limit that all contexts have reached which go on beside one another."""
        lasts = [turn for turn in self._turns if not any(turn.is_read_in(other.messages) for other in self._turns)]
        return "length" if all(turn.is_full for turn in lasts) else None

    def _rewards(self, rewards: Any, turns: Sequence[_Turn], *, is_ordered: bool) -> dict[str, float]:
        """The reward of each turn, by its id."""
        required = f"An agent program must return one reward, or one for each of the policy's messages = {len(turns)}"
        listed = list(rewards.values()) if isinstance(rewards, Mapping) else rewards
        try:
            given = np.asarray(listed, dtype=np.float64)
        except (TypeError, ValueError):
            given = np.zeros((0, 0))
        ids = [turn.id for turn in turns]
        if isinstance(rewards, Mapping) and given.shape == (len(rewards),):
            last = {turn.seat: turn.id for turn in turns}
            rewards = {
                last.get(name, name): reward
                for name, reward in rewards.items()
                if name not in self._seats or name in last
            }
            given = np.asarray(list(rewards.values()), dtype=np.float64)
            if unknown := [name for name in rewards if name not in ids]:
                raise ContractError(
                    f"{required}, by Reply.id or seat; got {unknown[:4]}, which no message has. Return the replies' ids."
                )
            return dict.fromkeys(ids, 0.0) | dict(zip(rewards, given.tolist(), strict=True))
        if given.ndim == 0 and rewards is not None:
            return dict.fromkeys(ids, 0.0) | {name: given.item() for name in ids[-1:]}
        if given.shape != (len(turns),):
            raise ContractError(
                f"{required}; got {describe(rewards)}. Return their sum, one number for each message, or a dict by Reply.id."
            )
        if not is_ordered:
            raise ContractError(
                "An agent program whose tasks or clients ask for messages of which one does not continue the one before must "
                f"return rewards by message, because these may come in any order; got {describe(rewards)}. Return "
                "{reply.id: reward}, with reply = await chat.reply(...), or with the id of the response over HTTP."
            )
        return {turn.id: reward for turn, reward in zip(self._turns, given.tolist(), strict=True)}

    def _end(self, ended_by: EndedBy, messages: list[Message]) -> ConversationEnded:
        """End with these messages. What the other side said last stays in the transcript, though nobody answers it."""
        if say_the_same(messages[: len(self.messages)], self.messages):
            self.messages = messages
        self.limited_by = self.reached = ended_by
        return ConversationEnded(ended_by)

    def _continued(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, seat: str | None
    ) -> tuple[_Turn | None, list[int] | None]:
        """The turn after which the messages go on, and the token ids to append to it. Without a turn, they are the whole
        history: it begins otherwise, or the template rewrites it, or the other side did not see the end of the turn.

        The token ids are None if there is no room for so long a text.
        """
        found = None
        for turn in reversed(self._turns):
            count = len(turn.messages)
            is_better = found is None or (count, turn.is_free) > (len(found.messages), found.is_free)
            is_better = is_better and turn.tools == tools and turn.seat == seat
            if is_better and turn.is_read_in(messages):
                found = turn
        if found is not None and not found.was_cut:
            said, new_messages = found.messages[-1], messages[len(found.messages) :]
            if self._has_no_room(new_messages):
                return found, None
            appended = self._speaker.template.bridge(found.token_ids, said, new_messages, tools)
            if appended is not None:
                return found, appended
        return None, None if self._has_no_room(messages) else self._speaker.template.render(messages, tools)

    def _has_no_room(self, messages: Sequence[Message]) -> bool:
        """Whether the messages are longer than a context of the longest tokens. Tokenizing megabytes would hold up all
        conversations, only to find that they have no room."""
        limit = self._limits.max_tokens
        return limit is not None and sum(map(len, map(text_of, messages))) > limit * self._speaker.longest_token


def _content_of(turn: _Turn) -> tuple[list[int], str]:
    return turn.context.token_ids[: turn.begin], turn.id


def _end_of(limit: int, own_limit: int, stop: tuple[str, ...]) -> tuple[str, ...]:
    """What ends a turn before the policy's own limit does, as texts."""
    return (*([] if limit == own_limit else [str(limit)]), *stop)


def _segment(turns: Sequence[_Turn], *, ends_in_fork: bool) -> Segment:
    """One context, from its turns."""
    first, last = turns[0], turns[-1]
    sampled = [False] * first.begin
    for turn in turns:
        sampled += [False] * (turn.begin - len(sampled)) + [True] * len(turn.token_ids)
    forks = [turn.end for turn in turns if turn.is_fork or (ends_in_fork and turn is last)]
    return Segment(
        token_ids=tuple(last.read),
        sampled=tuple(sampled),
        log_probs=tuple(log_prob for turn in turns for log_prob in turn.log_probs),
        forks=tuple(forks),
        messages=tuple(plain_values(message) for message in last.messages),
        pictures=tuple(pictures_of(last.messages)),
        num_first_pictures=len(pictures_of(first.messages)),
    )

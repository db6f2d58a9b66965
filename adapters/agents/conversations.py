"""Conversations: the actions of an agent. A conversation is one row, and its steps are the tokens that the policy sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor

from adapters.llm import Picture

from .messages import Message, text_of

EndedBy: TypeAlias = Literal["environment", "max_turns", "length", "timeout", "error"]
"""Why a conversation ended.

- `environment`: the environment or the agent program ended it.
- `max_turns`: one more message was asked for after `max_turns` messages.
- `length`: the last message was truncated at the policy's own maximum, or the last request had no room in its context. If
  several tasks or clients asked: this is so in all contexts that go on beside one another.
- `timeout`: the environment or the program was busy for too long (`timeout`), or the model was (`turn_timeout`), or an earlier
  environment of the state still hangs.
- `error`: the environment or the program raised an error, or a tool call of an executor was lost.

A limit of turns or of length that a program does not catch ends the conversation, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One context: the token ids that the model read and sampled, in order."""

    token_ids: tuple[int, ...]
    """All tokens of the context, up to the last one that the policy sampled."""
    sampled: tuple[bool, ...]
    """Which of them the policy sampled. The others are context and have no loss."""
    log_probs: tuple[float, ...]
    """Log-prob of each sampled token under the sampling distribution."""
    forks: tuple[int, ...] = ()
    """Numbers of tokens after which other rows of the group may go on differently. Up to there, they are computed once."""
    messages: tuple[Message, ...] = field(default=(), hash=False)
    """What was said in this context, up to the policy's last message. Empty: not recorded."""
    pictures: tuple[Picture, ...] = ()
    """The pictures of the context, in order."""
    num_first_pictures: int = 0
    """How many of the pictures come before the first sampled token."""

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens before the first sampled token."""
        return self.sampled.index(True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of the policy."""

    num_tokens: int
    """Number of sampled tokens, including the end-of-turn token."""
    reward: float
    """Reward for this turn. NaN: the environment failed, so the reward is not known."""
    message: Message | None = field(default=None, hash=False)
    """The message. None: not recorded."""
    seat: str | None = None
    """The seat that spoke. None: the conversation has no seats."""
    state_key: str | None = None
    """What the environment's `state_key()` returned before the turn. None: the environment has no such method. With
    `Branching`: the last fork before the turn."""
    is_truncated: bool = False
    """Whether the policy's own `sampling.max_new_tokens` truncated the message. Its context ends with it. Other contexts of the
    conversation may go on."""
    continues: bool = False
    """Whether the turn continues the decision of the turn before it. With `Branching`, all turns between two forks are one
    decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatReply:
    """One message of a seat that is not trained. None of its tokens is scored."""

    seat: str
    """The seat that spoke."""
    asked: Message = field(hash=False)
    """The last of the messages that it answered."""
    message: Message = field(hash=False)
    """What it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A whole conversation of the policy with an environment, or with an agent program."""

    segments: tuple[Segment, ...]
    """The contexts. There is more than one if the chat template or the agent program rewrote the history, or if several agents
    spoke. Those of agents that ask at the same time are in the order of their tokens, so that it does not depend on time."""
    turns: tuple[Turn, ...]
    """The policy's messages. Their tokens are the sampled tokens of all segments, in order."""
    messages: tuple[Message, ...] = field(hash=False)
    """The messages of the last context, and what followed. `segments` has the messages of each context."""
    ended_by: EndedBy
    """Why the conversation ended."""
    info: dict[str, Any] = field(hash=False)
    """The environment's last `info` as plain values. After an error, `info["error"]` describes it."""
    seat_replies: tuple[SeatReply, ...] = ()
    """What the seats said that are not trained, in the order of time. If several tasks, or clients over HTTP, asked them, the
    order is that of what they read, so that it does not depend on time."""

    def __str__(self) -> str:
        """A short transcript: who said what, from the policy's first message on, and why the conversation ended. Of several
        contexts, each has a title."""
        lines, contexts = [], self.contexts
        for place, (said, _) in enumerate(contexts, 1):
            first = next((i for i, message in enumerate(said) if message["role"] == "assistant"), len(said))
            lines += [
                *([f"Context {place} of {len(contexts)}"] if len(contexts) > 1 else []),
                *map(_line, said[first:]),
            ]
        return "\n".join([*lines, f"({self.ended_by})"])

    def __len__(self) -> int:
        """Number of steps: all tokens that the policy sampled."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def contexts(self) -> tuple[tuple[tuple[Message, ...], tuple[float, ...]], ...]:
        """What was said in each context, with what followed, and the rewards of the policy's messages in it."""
        if not all(segment.messages for segment in self.segments) or not self.segments:
            return ((self.messages, self.rewards),)
        found, left = [], list(self.turns)
        for segment in self.segments:
            count, num_left = 0, sum(segment.sampled)
            while num_left > 0:
                num_left, count = num_left - left[count].num_tokens, count + 1
            own, left = left[:count], left[count:]
            goes_on = self.messages[: len(segment.messages)] == segment.messages
            said = self.messages if goes_on else segment.messages
            found.append((said, tuple(turn.reward for turn in own)))
        return tuple(found)

    @property
    def rewards(self) -> tuple[float, ...]:
        """The reward of each turn."""
        return tuple(turn.reward for turn in self.turns)

    @property
    def reward(self) -> float:
        """The sum of the turns' rewards. NaN if the environment failed, or if there is no turn."""
        return sum(self.rewards) if self.turns else float("nan")

    @property
    def behaviour_log_probs(self) -> tuple[float, ...]:
        """Log-prob of each step under the sampling distribution."""
        return tuple(log_prob for segment in self.segments for log_prob in segment.log_probs)

    def to_state(self) -> dict[str, Any]:
        """Plain values by field, for checkpoints."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return plain | {
            name: [{each.name: getattr(part, each.name) for each in fields(part)} for part in plain[name]]
            for name in ("segments", "turns", "seat_replies")
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Conversation":
        """The inverse of `to_state`."""
        segments = tuple(Segment(**part | {"messages": tuple(part["messages"])}) for part in state["segments"])
        turns = tuple(Turn(**turn) for turn in state["turns"])
        others = tuple(SeatReply(**reply) for reply in state.get("seat_replies", ()))
        lists = {"segments": segments, "turns": turns, "messages": tuple(state["messages"]), "seat_replies": others}
        return cls(**state | lists)


def _line(message: Message) -> str:
    """A message as a line of a transcript: `assistant: Let me see. add(a=1, b=2)`."""
    calls = [_called(call["function"]) for call in message.get("tool_calls") or []]
    return f"{message['role']}: {' '.join([*filter(None, [text_of(message)]), *calls])}"


def _called(function: Mapping[str, Any]) -> str:
    given = function.get("arguments")
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items()) if isinstance(given, Mapping) else given
    return f"{function.get('name')}({arguments})"


def step_mask(conversations: Sequence[Conversation], *, mask_truncated: bool = False) -> Bool[Tensor, "N T"]:
    """Mask that is True at the steps of each conversation. Its width T is the unmasked length of the longest row.

    Args:
        conversations: N conversations.
        mask_truncated: Whether to mask all steps of conversations that ended for lack of room.
    """
    lengths = [0 if mask_truncated and row.ended_by == "length" else len(row) for row in conversations]
    return torch.arange(max(lengths, default=0)) < torch.tensor(lengths, dtype=torch.int64)[:, None]


def observed_mask(conversations: Sequence[Conversation], *, mask_truncated: bool = False) -> Bool[Tensor, "N O"]:
    """Mask that is True at the observations of each conversation: the tokens after the first sampled token of each context that
    the policy did not sample. They are what the environment and tools answered, in the words of the template.

    Args:
        conversations: N conversations.
        mask_truncated: As in `step_mask`.
    """
    lengths = [
        sum(part.sampled[part.num_context_tokens :].count(False) for part in row.segments)
        * (not (mask_truncated and row.ended_by == "length"))
        for row in conversations
    ]
    return torch.arange(max(lengths, default=0)) < torch.tensor(lengths, dtype=torch.int64)[:, None]


def plain_values(value: Any) -> Any:
    """A copy made of numbers, texts, pictures, None, lists and dicts, as checkpoints hold them. Other objects become their
    `repr`."""
    if value is None or isinstance(value, bool | int | float | str | Picture):
        return value
    if isinstance(value, dict):
        return {str(name): plain_values(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(part) for part in value]
    return value.item() if getattr(value, "shape", None) == () else repr(value)

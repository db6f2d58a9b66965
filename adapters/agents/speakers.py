"""Who speaks in a conversation: the trained model, frozen models, and plain functions, each in its seat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor

from adapters.llm import CompletionTexts, FinishReason, HFPolicy
from grpo import ExperienceBatch
from grpo.arguments import describe
from grpo.errors import ConfigError, ContractError

from .calls import read_turn
from .conversations import Conversation
from .messages import Message, pictures_of
from .templates import ChatTemplate
from .threads import OwnThread

Says: TypeAlias = Callable[[list[Message]], str | Message]
"""Returns what comes after some messages. May be `async def`."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a conversation: `await chat.reply(messages, seat="user")`, or the `model` of a request over HTTP.

    A seat without a policy is trained, and all trained seats share the policy that is trained. What the others say is context:
    it is read, and has no loss.

    Example:
        A support agent is trained, with a user that a frozen model plays::

            policy = AgentPolicy(model, play, seats=[Seat("agent"), Seat("user", policy=frozen)])

    Raises:
        ConfigError: The name is no text, or the policy is neither a language model nor a function.
    """

    name: str
    """Its name in rewards, metrics and transcripts."""
    policy: HFPolicy | Says | None = None
    """Who speaks: a frozen language model, or a function of the messages. None: the trained policy."""

    def __post_init__(self) -> None:
        """Check the name and the policy."""
        name: Any = self.name
        if not isinstance(name, str) or not name or name.startswith("turn-"):
            raise ConfigError(
                f"Seat: name must be a text that does not begin like the id of a reply, turn-; got {name!r}. Rename it."
            )
        if self.policy is not None and not isinstance(self.policy, HFPolicy) and not callable(self.policy):
            raise ConfigError(
                f"Seat {self.name!r}: policy must be a language model, an HFPolicy, or a function of the messages; got "
                f"{describe(self.policy)}. Leave it out for the trained policy."
            )

    @property
    def is_trained(self) -> bool:
        """Whether the trained policy speaks here."""
        return self.policy is None


class Speaker:
    """A language model that reads chats and speaks: its template, and how its tokens become messages."""

    def __init__(self, policy: HFPolicy) -> None:
        self.policy = policy
        self.template = ChatTemplate(
            policy.tokenizer,
            end_token_ids=policy.end_token_ids,
            options=policy.options.chat_template_options,
            reader=policy.picture_reader,
        )
        self._texts = CompletionTexts(
            policy.tokenizer,
            (*self.template.end_token_ids, *self.template.opening_token_ids),
            keeps_special_tokens=policy.options.keep_special_tokens,
            whose="AgentPolicy",
            text="message['content']",
            opened="message.get('opened', '')",
        )

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token. A text has at least its length divided by this number of tokens."""
        return max(map(len, self.policy.tokenizer.get_vocab()))

    def prompt(self, token_ids: list[int], messages: Sequence[Message]) -> Sequence[int]:
        """What the model reads: these token ids, with the pictures of the messages."""
        pictures = pictures_of(messages)
        reader = self.policy.picture_reader
        return token_ids if reader is None or not pictures else reader.prompt(token_ids, pictures)

    def message(
        self,
        history: Sequence[Message],
        context: list[int],
        token_ids: Sequence[int],
        finish_reason: FinishReason,
        tools: list[dict[str, Any]] | None,
        stop: tuple[str, ...],
    ) -> tuple[Message, bool, bool]:
        """A turn as a message, whether its end was cut off, and whether it has a malformed call."""
        [text] = self._texts.decode([token_ids])
        [opened] = self._texts.opened_by([context])
        begun: Message = {"opened": opened} if opened else {}
        if finish_reason == "length":  # a truncated call is not a malformed call
            self._texts.say_lost(token_ids)
            return {"role": "assistant", "content": text, **begun}, False, False
        stops = (*self.template.stop, *stop)  # the former begin a message of others
        shown = _before(text, stops)
        message, is_malformed = read_turn(
            self.policy.tokenizer,
            context,
            token_ids,
            shown,
            tools,
            number=sum(message["role"] == "assistant" for message in history),
            hidden=self._texts.hidden,
        )
        if "reasoning_content" in message:  # thoughts were read, so the content does not begin in a tag
            begun = {}
        elif not is_malformed and message.get("content") == shown:  # nothing else reads the tokens
            self._texts.say_lost(token_ids)
        return {**message, "content": _before(message["content"], stops), **begun}, shown != text, is_malformed


def _before(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stop strings."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


async def said_by(function: Says, messages: list[Message], thread: OwnThread) -> Message:
    """What a function says after these messages, as a message. The function may block: this thread, which then ends, calls it.

    Raises:
        ContractError: The function returned neither a text nor a message.
    """
    try:
        said = await thread.run(function, messages)
    finally:
        await thread.finish()
    message: Any = {"role": "assistant", "content": said} if isinstance(said, str) else said
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        raise ContractError(
            f"The function of a seat must return a text or a message {{'role': ..., 'content': ...}}; got {describe(said)}."
        )
    return cast(Message, message)


def seat_advantages(batch: ExperienceBatch) -> Float[Tensor, "N T"]:
    """Compare each seat with the same seat in the other conversations of the group, for `GRPOTrainer(advantages=...)`.

    A[n, t] = R[n, s] - mean of R[m, s] over the rows m of the group in which seat s spoke, where s is the seat of step t, and
    R[n, s] is the sum of the rewards of its steps in row n. A seat that spoke in one row alone has A = 0. With one seat,
    this is the advantage of Dr. GRPO (arXiv:2503.20783).

    Args:
        batch: Conversations with rewards per step, from `EnvironmentReward(per_turn=True)`.

    Raises:
        ContractError: The actions are no conversations, or there is one reward per row.
    """
    actions: Any = batch.actions
    if batch.rewards.dim() != 2 or not all(isinstance(action, Conversation) for action in actions):
        raise ContractError(
            "seat_advantages needs conversations with rewards per step; got rewards "
            f"{list(batch.rewards.shape)} of {describe(actions[0]) if len(actions) else 'no actions'}. Pass "
            "reward_model=EnvironmentReward(per_turn=True)."
        )
    names = sorted({turn.seat or "" for action in actions for turn in action.turns})
    seats = torch.full(batch.mask.shape, -1, dtype=torch.int64)  # the seat of each step
    for row, action in zip(seats, actions, strict=True):
        begin = 0
        for turn in action.turns:
            row[begin : begin + turn.num_tokens] = names.index(turn.seat or "")
            begin += turn.num_tokens
    advantages = torch.zeros(batch.mask.shape, dtype=torch.float64)
    mask, rewards = batch.mask.cpu(), batch.rewards.cpu().double()
    _, groups = batch.group_ids.cpu().unique(return_inverse=True)
    for seat in range(len(names)):
        own = (seats == seat) & mask
        spoke = own.any(1)
        total = torch.where(own, rewards, 0.0).sum(1)
        sums, counts = (
            torch.zeros(int(groups.max()) + 1, dtype=torch.float64).index_add(0, groups[spoke], values[spoke])
            for values in (total, torch.ones_like(total))
        )
        relative = total - (sums / counts.clamp(min=1))[groups]
        advantages += torch.where(own, relative[:, None], 0.0)
    return advantages.float()

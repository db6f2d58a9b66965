"""Chat templates: from messages to token ids, without tokenizing a sampled token again.

A context grows by appending. The policy samples a turn, the environment answers, and `ChatTemplate.bridge` gives the token ids
of the answer as the template writes them after the turn. Some templates rewrite the history instead: they drop earlier
thoughts, for example. Then `bridge` returns None, and the next turn has a context of its own, which the template renders from
all messages.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeAlias

from jinja2 import TemplateError

from adapters.llm import ControlTokens, Picture, special_tokens
from grpo.errors import ConfigError, ContractError

from .messages import Message, pictures_of, tool_message, with_names_as_ids

logger = logging.getLogger("grpo")

Role: TypeAlias = Literal["user", "tool"]

QUESTION, THOUGHT, ANSWER, RESULT = "question", "pondering", "fortytwo", "sunshine"
NAME, KEY, VALUE = "lookup", "topic", "weather"
ASKED: Message = {"role": "user", "content": QUESTION}
ANSWERED: Message = {"role": "assistant", "content": ANSWER}
CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": NAME, "arguments": {KEY: VALUE}}}],
}
RETURNED = tool_message(CALLED["tool_calls"][0], RESULT)
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {KEY: {"type": "string", "description": "What to look up."}},
            "required": [KEY],
        },
    },
}
MOST_KEPT = 64
"""Number of lists of tools of which the prompt is kept."""
HISTORIES: tuple[list[Message], ...] = ([ASKED], [ASKED, ANSWERED, ASKED], [ASKED, CALLED, RETURNED])
"""What comes before a turn in the proof: a question, a second question, and a tool's result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """A small conversation in which a message follows a turn of the assistant."""

    turn: Message
    """The assistant's turn."""
    own: tuple[int, ...]
    """Token ids of the turn as the template writes it, without the end-of-turn token."""
    tail: tuple[int, ...]
    """Token ids from the end-of-turn token on, up to the next turn."""


class ChatTemplate:
    """Renders messages as token ids, and knows after which messages the template only appends.

    The constructor renders small conversations: a user's message or a tool's result follows the assistant's turn, with and
    without thoughts, tools and earlier turns. The template appends after such a message if
    - the rendered conversation begins with the tokens of the assistant's prompt,
    - the assistant's text follows unchanged, and then an end-of-turn token, and
    - the tokens after the assistant's text are the same in all these conversations.

    Args:
        tokenizer: A tokenizer with a chat template.
        end_token_ids: Tokens that end a turn of the policy.
        options: Options of `tokenizer.apply_chat_template`, for example `enable_thinking=False`. `tokenize`,
            `add_generation_prompt` and `continue_final_message` are ignored: this class sets them itself.
        reader: Encodes texts with pictures: `HFPolicy.picture_reader`. None: messages have no pictures.

    Raises:
        ConfigError: The tokenizer has no chat template, or the template cannot render a question and an answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_token_ids: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
        reader: Any = None,
    ) -> None:
        if tokenizer.chat_template is None:
            raise ConfigError(
                "AgentPolicy: the tokenizer must have a chat template; got none. Set tokenizer.chat_template to the template "
                "of the model, or to one that you train."
            )
        self._tokenizer = tokenizer
        own = ("tokenize", "add_generation_prompt", "continue_final_message")
        self._options = {name: value for name, value in (options or {}).items() if name not in own}
        self._special = special_tokens(tokenizer)
        self._reader = reader
        mark = None if reader is None else reader.mark
        self._control = ControlTokens(tokenizer, self._options, picture_mark=mark)
        self._arguments_as_text, self._names_as_ids = False, False
        self._in_parts = self._needs_parts()
        spoken = self._text([ASKED, ANSWERED], None, turn_follows=False)
        following = self._encode(spoken[spoken.rfind(ANSWER) + len(ANSWER) :])[:1]
        self.end_token_ids = tuple(sorted({*end_token_ids, *(token for token in following if token in self._special)}))
        """Tokens that end a turn: the given ones, and the special token that the template writes after an answer."""
        self._end = [*(token for token in following if token in self._special), *end_token_ids][:1]
        self._ends = [tokenizer.convert_ids_to_tokens(token) for token in self.end_token_ids]
        self._describes_tools = True
        self.shows_tools = self._finds_tools()
        """Whether the template writes tool calls and their results. Some templates drop them, and some raise an error."""
        self._proven: dict[tuple[str, bool, bool], Message] = {}
        self._prompts: dict[str, str | Exception] = {}
        self._headers: set[str] = set()
        follows = []
        for role, with_tools, with_text in product(("user", "tool"), (False, True), (False, True)):
            if not self.shows_tools and (role == "tool" or with_tools):
                continue
            found = self._follows(role, [TOOL] if with_tools else None, with_text=with_text)
            follows += [follow for follow in found if follow is not None]
            if None not in found and len({follow.tail for follow in found if follow is not None}) == 1:
                self._proven[role, with_tools, with_text] = follows[-1].turn
        self._own = {token for follow in follows for token in follow.own}
        openings = {token for follow in follows for token in self._first_special(follow.tail[1:])}
        self.opening_token_ids = tuple(sorted(openings - self._own - {*self.end_token_ids}))
        """Special tokens that begin a message of someone else. A turn ends there, so the policy cannot speak for others."""
        self.stop = self._stop_strings(follows)
        """Texts with which a message of someone else begins, for templates that write it without special tokens."""

    def appends_after(self, role: Role, *, with_tools: bool = False, with_text: bool = False) -> bool:
        """Whether a context goes on after a message of this role. If not, the next turn has a context of its own.

        Args:
            role: Who speaks after the policy's turn.
            with_tools: Whether the conversation has tools.
            with_text: Whether the policy's turn has thoughts or, if it called tools, any text besides the calls.
        """
        return (role, with_tools, with_text) in self._proven

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Token ids of a whole conversation, up to the policy's next turn.

        Raises:
            ContractError: The template does not accept the messages, or does not show tools.
        """
        if not self.shows_tools and (tools or any(message["role"] == "tool" for message in messages)):
            raise ContractError(
                "The chat template must write tool calls and their results; this tokenizer's template drops or refuses them. "
                "Use a template with tools, or describe the tools and their results in messages of the user."
            )
        if tools and not self._describes_tools:
            self._describes_tools = True  # said once
            logger.warning(
                "AgentPolicy: the chat template writes tool calls and does not describe the tools, so the model is not told of "
                "its tools. Use a template that writes `tools`, or describe them in a message."
            )
        text = self._text_or_error(messages, tools)
        if isinstance(text, Exception):
            raise ContractError(
                f"The chat template must accept the conversation; got {text} for the roles "
                f"{[message['role'] for message in messages]}. Send other messages, or use another template."
            ) from text
        return self._encode(text, pictures_of(messages))

    def bridge(
        self,
        turn: Sequence[int],
        said: Message,
        new_messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
    ) -> list[int] | None:
        """Token ids to append to a context for new messages, up to the policy's next turn.

        Args:
            turn: Token ids of the policy's turn, with which the context ends.
            said: This turn as a message.
            new_messages: The messages after this turn, at least one.
            tools: Descriptions of the tools, as the context has them.

        Returns:
            The token ids. None if the template rewrites the history here, or if the turn ended in another way than the
            template writes it, so that only `render` gives what the template writes.
        """
        role = new_messages[0]["role"]
        content = said.get("content", "")
        with_text = bool(content.strip()) if role == "tool" else "</think>" in content
        probe = self._proven.get((role, bool(tools), with_text or "reasoning_content" in said))
        if probe is None or not {*turn[:-1]} & self._special.keys() <= self._own:  # special tokens may mark thoughts
            return None
        words = [ANSWER]
        if role == "tool":  # some templates look up the call that a result belongs to
            probe = {**probe, "tool_calls": said.get("tool_calls", [])}
            words = [call["function"]["name"] for call in said.get("tool_calls", [])]
        prompt, text = self._prompt(tools), self._text_or_error([ASKED, probe, *new_messages], tools)
        begin = self._end_of_turn(prompt, text, words)
        if begin is None or isinstance(text, Exception):
            return None
        end, *rest = self._encode(text[begin:], pictures_of(new_messages))
        if turn[-1] == end:
            return rest
        ended_otherwise = turn[-1] in self.end_token_ids or turn[-1] in self.opening_token_ids
        return None if ended_otherwise else [end, *rest]

    def turn(self, said: str | Message) -> list[int]:
        """Token ids of a turn of the policy, with the end-of-turn token.

        Args:
            said: The text as the policy would write it, tool calls included; or a message, which the template writes.

        Raises:
            ContractError: The template cannot write the message, or it is not known which token ends a turn.
        """
        written, end = (said, []) if isinstance(said, str) else self._written(said)
        token_ids = self._encode(written)
        if token_ids and token_ids[-1] in self.end_token_ids:
            return token_ids
        if not (end or self._end):
            raise ContractError(
                f"The template must write a special token at the end of a turn; none is known for the turn {written[:80]!r}. "
                "Pass options=HFOptions(end_token_ids=...), or end the text with the token."
            )
        return [*token_ids, *(end or self._end)]

    def write(self, said: Message, tools: Sequence[Any]) -> tuple[list[int], list[int], str]:
        """Token ids of a prompt and of the policy's turn after it, as the template writes them, and the text of the turn.

        Raises:
            ContractError: The template cannot write the message.
        """
        prompt, text = (
            self._text_or_error([ASKED], tools),
            self._text_or_error([ASKED, said], tools, turn_follows=False),
        )
        if not isinstance(prompt, str) or not isinstance(text, str):
            raise ContractError(
                f"The chat template must write a call of a tool; got the error {text!r}. Use another template."
            )
        begin = _num_shared(prompt, text)
        if begin < len(prompt):  # the template opens a thought in the prompt only: go back to the end of its header
            begin = max(prompt.rfind(mark, 0, begin) for mark in ">]\n") + 1
        return self._encode(prompt[:begin]), self._encode(text[begin:]), text[begin:]

    def _written(self, said: Message) -> tuple[str, list[int]]:
        """What the template writes for a message of the policy, and the token that ends it, if the template writes one."""
        calls = said.get("tool_calls", [])
        prompt = self._text_or_error([ASKED], [TOOL] if calls else None)
        text = self._text_or_error([ASKED, said], [TOOL] if calls else None, turn_follows=False)
        if not isinstance(prompt, str) or not isinstance(text, str) or not text.startswith(prompt):
            raise ContractError(
                "The chat template must write a scripted message after the prompt of a turn; got a prompt that ends with "
                f"{str(prompt)[-40:]!r}, and a conversation that ends with {str(text)[-80:]!r}. Pass the text that the policy "
                "would write, for example with a thought."
            )
        place = self._end_of_turn(prompt, text, [call["function"]["name"] for call in calls])
        return text[len(prompt) : place], [] if place is None else self._encode(text[place:])[:1]

    def _needs_parts(self) -> bool:
        """Whether the template reads a message's text from a list of parts, as templates of models with images do."""
        got: Any = None
        for in_parts in (False, True):
            self._in_parts = in_parts
            got = self._text_or_error([ASKED, ANSWERED], None, turn_follows=False)
            if isinstance(got, str) and QUESTION in got and ANSWER in got:
                return in_parts
        raise ConfigError(
            f"AgentPolicy: the chat template must render a question and an answer; got {str(got)[:200]!r}. Use "
            "another template."
        )

    def _finds_tools(self) -> bool:
        # some templates accept arguments as JSON text only, and Kimi K2's writes the id of a call in place of the name
        for self._names_as_ids, self._arguments_as_text in product((False, True), repeat=2):
            prompt, text = (str(self._text_or_error(said, [TOOL])) for said in (HISTORIES[0], HISTORIES[2]))
            said = text[_num_shared(prompt, text) :]  # the description of the tool has the words too
            if all(word in said for word in (NAME, KEY, VALUE, RESULT)):
                self._describes_tools = NAME in prompt
                return True
        return False

    def _follows(self, role: str, tools: Sequence[Any] | None, *, with_text: bool) -> list[Follow | None]:
        """Small conversations in which a message of `role` follows a turn. None where the template rewrites the turn."""
        new, said, words = (ASKED, ANSWERED, (ANSWER,)) if role == "user" else (RETURNED, CALLED, (NAME, KEY, VALUE))
        if with_text:
            said = {**said, "content": f"<think>\n{THOUGHT}\n</think>\n\n{said['content']}"}
            words = (THOUGHT, *words)
        found: list[Follow | None] = []
        for history in HISTORIES if self.shows_tools else HISTORIES[:2]:
            prompt = self._text_or_error(history, tools)
            if isinstance(prompt, Exception):
                continue  # the template refuses this history, so it does not occur
            text = self._text_or_error([*history, said, new], tools)
            begin = self._end_of_turn(prompt, text, words)
            if isinstance(text, str):
                self._headers.add(text[text.rfind(words[-1]) + len(words[-1]) : text.rfind(new["content"])])
            if begin is None or isinstance(text, Exception):
                found.append(None)
                continue
            written = text[len(prompt) : begin]
            head, own, tail = (self._encode(part) for part in (prompt, written, text[begin:]))
            is_split = self._encode(text[:begin]) + tail == self._encode(text)
            is_verbatim = role == "tool" or said["content"].endswith(written.strip())
            follow = Follow(turn=said, own=tuple(own), tail=tuple(tail))
            found.append(follow if head and is_split and is_verbatim else None)
        return found

    def _end_of_turn(self, prompt: str | Exception, text: str | Exception, words: Sequence[str]) -> int | None:
        """Place of the end-of-turn token behind the words that the assistant wrote. None if the text has something else."""
        if isinstance(prompt, Exception) or isinstance(text, Exception) or not text.startswith(prompt):
            return None
        place = len(prompt)
        for word in words:
            found = text.find(word, place)
            if found < 0:
                return None
            place = found + len(word)
        return min((found for end in self._ends if (found := text.find(end, place)) >= 0), default=None)

    def _first_special(self, token_ids: Sequence[int]) -> list[int]:
        return [token for token in token_ids if token in self._special][:1]

    def _stop_strings(self, follows: Sequence[Follow]) -> tuple[str, ...]:
        """Marks such as `<tool_response>` or `\\nUser:`, which the template writes before the messages of others only."""
        marks = sorted({*self._special.values()}, key=len, reverse=True)
        special = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        own = "\n".join(self._tokenizer.decode(list(follow.own)) for follow in follows)
        headers = [special.sub("\0", header).split(NAME)[0] for header in self._headers]
        tags = {
            mark.strip()
            for header in headers
            for mark in re.findall(r"<[a-z_][^\n\0]*|\[[A-Z_]+\]|###[^\n\0]+", header)
        }
        names = {mark.rstrip() for header in headers for mark in re.findall(r"\n[^\n\0]+:", header)}
        return tuple(sorted(mark for mark in tags | names if mark not in own))

    def _prompt(self, tools: Sequence[Any] | None) -> str | Exception:
        """The prompt of a turn after one question, or the template's error. It is kept: each bridge needs it again."""
        key, known = repr(tools), self._prompts
        if key not in known:
            self._prompts = known = {
                **(known if len(known) < MOST_KEPT else {}),
                key: self._text_or_error([ASKED], tools),
            }
        return known[key]

    def _text_or_error(self, messages: Sequence[Message], tools: Any, *, turn_follows: bool = True) -> str | Exception:
        try:
            return self._text(messages, tools, turn_follows=turn_follows)
        except (TemplateError, TypeError) as error:  # a template refuses messages with any of the two
            return error

    def _text(self, messages: Sequence[Message], tools: Any, *, turn_follows: bool = True) -> str:
        named = with_names_as_ids(messages) if self._names_as_ids else messages
        return self._tokenizer.apply_chat_template(
            [self._as_the_template_reads_it(message) for message in self._control.spell(named)],
            tools=self._control.spell_tools(tools),
            tokenize=False,
            add_generation_prompt=turn_follows,
            **self._options,
        )

    def _as_the_template_reads_it(self, message: Mapping[str, Any]) -> dict[str, Any]:
        read: dict[str, Any] = dict(message)
        if isinstance(read.get("content"), list):
            read["content"] = [{"type": "image"} if "image" in part else part for part in read["content"]]
        elif self._in_parts:
            read["content"] = [{"type": "text", "text": message.get("content", "")}]
        if self._arguments_as_text and "tool_calls" in message:
            read["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        return read

    def _encode(self, text: str, pictures: Sequence[Picture] = ()) -> list[int]:
        if not pictures:
            return self._control.encode(text)
        if self._reader is None:
            raise ContractError(
                f"A conversation has {len(pictures)} pictures, and the policy has a tokenizer and no processor. Pass the "
                "model's processor to HFPolicy in place of the tokenizer."
            )
        return self._reader.encoded(self._control.parts(text), pictures, "A conversation")


def _num_shared(one: str, other: str) -> int:
    """Number of characters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))

"""What a chat template does with small chats and with the chats of states, and what it does not write."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .control_tokens import SKELETON, special_tokens
from .said_once import SaidOnce
from .states import Message

_CALLING: list[Any] = [
    {"role": "user", "content": "question"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call00001", "type": "function", "function": {"name": "lookup", "arguments": {"topic": "rain"}}}
        ],
    },
    {"role": "tool", "content": "answer", "tool_call_id": "call00001"},
]


class TemplateChecks:
    """Tries the chat template of a tokenizer, and says once what it lacks."""

    def __init__(
        self,
        tokenizer: Any,
        options: Mapping[str, Any],
        ends: tuple[Sequence[int], Sequence[str]] | None,
        say: SaidOnce,
    ) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._ends = ends
        self._say = say
        self._beginning: str | None = None
        self._knows_parts: bool | None = None
        self._knows_calls: bool | None = None

    def reads_parts(self) -> bool:
        """Whether the template writes the text of a content that is a list of parts. Others write the list as Python does."""
        if self._knows_parts is None:
            text = self._plain([{"role": "user", "content": [{"type": "text", "text": "question"}]}])
            self._knows_parts = bool(text) and not re.search(r"""['"]type['"]""", text)
        return self._knows_parts

    def reads_pictures(self) -> bool:
        """Whether the template writes something for a part that is a picture."""
        text = {"type": "text", "text": "question"}
        plain, with_picture = (
            self._plain([{"role": "user", "content": parts}]) for parts in ([text], [{"type": "image"}, text])
        )
        return self.reads_parts() and len(with_picture) > len(plain)

    def _writes_calls(self) -> bool:
        """Whether the template writes the calls of a small chat, or refuses this chat, so that nothing is known."""
        if self._knows_calls is None:
            text = self._plain(_CALLING)
            self._knows_calls = not text or any(word in text for word in ("lookup", "rain"))
        return self._knows_calls

    def begin_of_chats(self) -> str:
        """The special token with which the template begins a chat."""
        if self._beginning is None:
            text = "" if self._tokenizer.chat_template is None else self._plain(SKELETON[:1])
            marks = special_tokens(self._tokenizer).values()
            self._beginning = next((mark for mark in sorted(marks, key=len, reverse=True) if text.startswith(mark)), "")
        return self._beginning

    def _plain(self, messages: Sequence[Message], **options: Any) -> str:
        """What the template writes for a small chat. Nothing if it refuses the chat."""
        try:
            text = self._tokenizer.apply_chat_template(list(messages), **{**self._options, **options})
        except Exception:  # some templates need other messages; then nothing is known of the template
            return ""
        return text if "question" in text else ""

    def check(self) -> None:
        """Say what the template lacks: a prompt for the answer, or an end that the sampler knows."""
        if self._options.get("continue_final_message"):
            return
        asked, plain = self._plain(SKELETON[:1]), self._plain(SKELETON[:1], add_generation_prompt=False)
        answered = self._plain(SKELETON[:2], add_generation_prompt=False)
        _, answer, rest = answered.rpartition("answer")
        header = answered[len(plain) : len(answered) - len(answer + rest)]
        if answer and asked == plain and self._options["add_generation_prompt"] and header.strip():
            self._say(
                f"the chat template writes {header!r} before an answer, and ignores add_generation_prompt, so the model is not "
                "told to answer and may write somebody else's message. Use a template with a generation prompt."
            )
        ends = self._tokenizer(rest, add_special_tokens=False)["input_ids"][:1] if answer and rest else []
        special = special_tokens(self._tokenizer)
        if self._ends is not None and ends and ends[0] in special and ends[0] not in self._ends[0]:
            mark = self._tokenizer.convert_ids_to_tokens(ends[0])
            if not any(mark in stop for stop in self._ends[1]):
                self._say(
                    f"the chat template ends an answer with {mark!r}, which ends no completion, so the model would go on after "
                    f"its answer. Pass options=HFOptions(end_token_ids=({ends[0]}, ...))."
                )

    def check_rendered(
        self, messages: Sequence[Message], tools: Sequence[Any], options: Mapping[str, Any], text: str, position: int
    ) -> None:
        """Say what the template does not write: a message, a tool, or an option that it does not read."""
        for message in messages:
            content = message["content"] if isinstance(message["content"], str) else ""
            word = max(re.findall(r"\w{3,}", content, re.ASCII), key=len, default="")
            if message["role"] != "assistant" and word not in text:
                self._say(
                    f"the chat template drops the message of the role {message['role']!r} of state {position}. Use a template "
                    "with this role, or write the text into a message of the user."
                )
        if any("tool_calls" in message for message in messages) and not self._writes_calls():
            self._say(
                f"the chat template does not write the calls of the assistant in state {position}. Use a template with tools, "
                "or write the calls into the assistant's text."
            )
        if missing := [name for name in names_of(tools) if name not in text]:
            self._say(
                f"the chat template does not write the tools of state {position}: {missing}. Use a template with tools."
            )
        source = str(self._tokenizer.chat_template)
        own = {"add_generation_prompt", "continue_final_message", "tokenize", "tools", "chat_template"}
        if unknown := [
            name for name in options if name not in own and not re.search(rf"\b{re.escape(name)}\b", source)
        ]:
            self._say(
                f"the chat template reads no option {unknown}, so it has no effect. Correct the name in chat_template_options "
                "or chat_template_kwargs, or remove it."
            )


def names_of(tools: Sequence[Any]) -> list[str]:
    """The names of tools that are schemas or functions."""
    schemas = [tool.get("function", tool) if isinstance(tool, Mapping) else {"name": tool.__name__} for tool in tools]
    return [str(schema["name"]) for schema in schemas if schema.get("name")]

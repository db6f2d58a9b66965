"""Control tokens: how the text of messages is kept from becoming the marks with which a chat template separates speakers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

CUT = "\ufdd0"
"""A noncharacter of Unicode, which no text contains. The parts before and after it are tokenized separately."""
THOUGHTS = re.compile("think|thought|reason", re.IGNORECASE)
OWN = re.compile(
    "think|thought|reason|tool|call|func|action|python|channel|message|constrain|args|answer", re.IGNORECASE
)
"""Marks that the model itself writes in a message."""
MOST_KEPT = 64
"""Number of lists of tools of which spelled copies are kept."""
SKELETON = [
    {"role": role, "content": content}
    for role, content in (("user", "question"), ("assistant", "answer"), ("user", "question"))
]


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The special tokens by id. A tokenizer names some of them, such as its end token. Others are only marked as special where
    they are added, as `<|start_header_id|>` of Llama 3."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    marked = added.items() if isinstance(added, Mapping) else ()
    named = zip(getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ()), strict=True)
    return {token_id: str(token) for token_id, token in marked if token.special} | dict(named)


class ControlTokens:
    """Encodes what a chat template writes, so that the text of a message cannot become a control token.

    A template writes a conversation as one text, and the tokenizer reads a mark such as `<|im_start|>` in it as one token,
    whoever wrote the mark. A tool's result or a data set could open a turn of the assistant in this way. So a mark in the text
    of a message is spelled out: the tokenizer sees `<` and `|im_start|>`, one after the other, and never the token. The text
    that the model reads is the same.

    Which marks are spelled out depends on who speaks:

    - in messages of a tool, in the descriptions of tools and in options of a row: all special tokens, and added tokens that the
      template writes
    - in messages of the assistant: the marks that separate messages, and not those that the model writes, such as `<think>`
    - in all other messages: the special tokens that the template writes, except marks of thoughts

    Args:
        tokenizer: The model's tokenizer.
        options: Options of `tokenizer.apply_chat_template`.
        picture_mark: What stands for a picture in a text. It is spelled out in all messages.
    """

    def __init__(
        self, tokenizer: Any, options: Mapping[str, Any] | None = None, *, picture_mark: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        special = set(special_tokens(tokenizer).values())
        added = set(tokenizer.get_added_vocab()) if hasattr(tokenizer, "get_added_vocab") else set()
        written = f"{tokenizer.chat_template}\n{self._skeleton(options or {})}"
        named = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token} & special
        marks = {mark for mark in special if mark in written}
        named |= set() if picture_mark is None else {picture_mark}
        self._of_tools = _pattern(named | special | {mark for mark in added if mark in written})
        self._of_others = _pattern(named | {mark for mark in marks if not THOUGHTS.search(mark)})
        self._of_assistant = _pattern(named | {mark for mark in marks if not OWN.search(mark)})
        self._spelled_tools: dict[str, list[Any]] = {}

    def _skeleton(self, options: Mapping[str, Any]) -> str:
        """What the template writes around plain messages. Some templates put the marks together from parts."""
        try:
            whole = {"add_generation_prompt": True, **options, "tokenize": False, "continue_final_message": False}
            return str(self._tokenizer.apply_chat_template(SKELETON, **whole))
        except Exception:  # a template that refuses these messages: its source has the marks
            return ""

    def spell(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages, with marks in their texts spelled out. Pass what the template makes of them to `encode`."""
        patterns = {"tool": self._of_tools, "ipython": self._of_tools, "assistant": self._of_assistant}
        return [
            _spelled(message, patterns.get(message["role"], self._of_others))
            | ({"role": message["role"]} if message["role"].isalnum() else {})  # a role may be a mark, and hold none
            for message in messages
        ]

    def spell_tools(self, tools: Sequence[Any] | None) -> list[Any] | None:
        """The descriptions of tools, with marks in their texts spelled out."""
        if not tools:
            return None
        key, known = repr(tools), self._spelled_tools  # all turns of a conversation have the same tools
        if key not in known:
            spelled = [_spelled(tool, self._of_tools) for tool in tools]
            self._spelled_tools = known = {**(known if len(known) < MOST_KEPT else {}), key: spelled}
        return known[key]

    def spell_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a row, such as documents, with marks in their texts spelled out. A template has marks of its own."""
        return {
            name: value if name == "chat_template" else _spelled(value, self._of_tools)
            for name, value in options.items()
        }

    def parts(self, text: str) -> list[str]:
        """What the template wrote, cut where no token may reach across."""
        text = whole_characters(text).replace("\\ufdd0", CUT)  # some templates write JSON in ASCII
        return [part for part in text.split(CUT) if part]

    def encode(self, text: str) -> list[int]:
        """Token ids of what the template wrote. No token is added at the beginning or the end."""
        return [
            token for part in self.parts(text) for token in self._tokenizer(part, add_special_tokens=False)["input_ids"]
        ]


def whole_characters(text: str) -> str:
    """The text with U+FFFD in place of half characters, which no tokenizer reads.

    A character beyond U+FFFF has two halves (surrogates) in the escapes of JSON, and a text that was cut between them has one.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _pattern(marks: set[str]) -> re.Pattern[str]:
    """Matches the first character of each mark that has several."""
    parts = [re.escape(mark) for mark in sorted(marks, key=len, reverse=True) if len(mark) > 1]
    return re.compile(f"(?=(?:{'|'.join(parts)}))(.)" if parts else r"((?!))", re.DOTALL)


def _spelled(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(rf"\1{CUT}", value)
    if isinstance(value, Mapping):
        return {_spelled(key, pattern): _spelled(part, pattern) for key, part in value.items()}
    return [_spelled(part, pattern) for part in value] if isinstance(value, list | tuple) else value

"""Conversion of prompts (texts, chats, token ids, data set rows) to token ids and columns."""

import json
import re
import unicodedata
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from grpo.arguments import describe
from grpo.errors import ContractError, warn_user

from .chat_messages import (
    readable_messages,
    readable_tools,
    with_arguments_as_text,
    with_contents_as_text,
    without_none,
)
from .control_tokens import CUT, SKELETON, ControlTokens, special_tokens

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]
"""Text, chat messages `[{"role": ..., "content": ...}, ...]`, or token ids, which are used as they are."""
PromptState: TypeAlias = Prompt | Mapping[str, Any]
"""A prompt, or a row of a data set with a prompt column."""


def prompt_of(state: PromptState, column: str = "prompt") -> Prompt:
    """The prompt of a state: the state itself, or the prompt column of a row.

    Raises:
        ContractError: The row does not have the column, or the prompt is neither text, nor chat messages, nor token ids.
    """
    prompt: Any = state
    if isinstance(state, Mapping):
        if column not in state:
            if "role" in state:
                raise ContractError(
                    "A chat is one state, a list of messages; got a message as a state. Pass a list of chats: [[{'role': ..., "
                    "'content': ...}]]."
                )
            raise ContractError(
                f"A state given as a row needs the prompt column {column!r}; got the columns {sorted(map(str, state))}. Rename "
                "the column, or pass options=HFOptions(prompt_column=...)."
            )
        prompt = state[column]
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes) and len(prompt) > 0
    is_chat = is_list and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    if not isinstance(prompt, str) and not is_chat and not (is_list and _is_token_ids(prompt)):
        raise ContractError(
            "A prompt must be text, a list of chat messages {'role': ..., 'content': ...}, or a list of token ids; got "
            f"{type(prompt).__name__}: {str(prompt)[:80]!r}."
        )
    if is_chat:
        _require_text(cast("Sequence[Message]", prompt))
    return cast("Prompt", prompt)


def _require_text(chat: Sequence[Message]) -> None:
    """Raise a `ContractError` if a message has a part that is not text."""
    parts = [
        part for message in chat if isinstance(message.get("content"), list | tuple) for part in message["content"]
    ]
    kinds = {part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in parts} - {"text"}
    if kinds:
        raise ContractError(
            "A chat must hold text only, because HFPolicy gives the model token ids only; got a part of type "
            f"{', '.join(sorted(map(repr, kinds)))}. Remove images, audio and videos from the messages."
        )


def _is_token_ids(prompt: Any) -> bool:
    return all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)


class PromptEncoder:
    """Encodes prompts as token ids, identically for sampling and scoring.

    Args:
        tokenizer: The model's tokenizer.
        vocabulary_size: Number of the model's token embeddings.
        column: Column with the prompt, for states that are rows of a data set.
        chat_template_options: Options of `tokenizer.apply_chat_template`, for example `enable_thinking=False`.
        ends: Tokens that end a completion, and stop strings. None: the user has chosen the tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocabulary_size: int,
        column: str,
        chat_template_options: Mapping[str, Any],
        ends: tuple[Sequence[int], Sequence[str]] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self.column = column
        """Column with the prompt."""
        self._options = {"add_generation_prompt": True, **chat_template_options, "tokenize": False}
        self._ends = ends
        self._control: ControlTokens | None = None
        self._beginning: str | None = None
        self._knows_parts: bool | None = None
        self._knows_calls: bool | None = None
        self._said: set[str] = set()
        self._known_characters: set[str] = set()

    def __call__(self, states: Sequence[PromptState]) -> list[list[int]]:
        """Token ids of each state's prompt. Repeated states are encoded once.

        Raises:
            ContractError: A prompt has no token or a token that the model does not have; or a chat has a part that is not text,
                ends with the assistant, or does not fit the chat template; or a column of the row has a wrong form.
        """
        held = list(states)  # a Dataset creates rows on access; keeping them keeps their ids different
        known: dict[Hashable, list[int]] = {}
        encoded = []
        for position, state in enumerate(held):
            key = state if isinstance(state, str) else id(state)
            if key not in known:
                row = state if isinstance(state, Mapping) else {}
                known[key] = self._encode(prompt_of(state, self.column), row, position)
            encoded.append(known[key])
        return encoded

    def _encode(self, prompt: Prompt, row: Mapping[str, Any], position: int) -> list[int]:
        if isinstance(prompt, str):
            # a text that begins as the template begins was rendered by the user, and has its special tokens
            begins = tuple(filter(None, (getattr(self._tokenizer, "bos_token", None), self._begin_of_chats())))
            own = {"add_special_tokens": False} if begins and prompt.startswith(begins) else {}
            token_ids = list(self._tokenizer(prompt, **own)["input_ids"])
            self._check_characters(prompt, token_ids, position)
            bos = getattr(self._tokenizer, "bos_token", None)
            if bos and not own and bos in prompt and token_ids[0] == self._tokenizer.bos_token_id:
                self._say(
                    f"the prompt of state {position} has the begin-of-sequence token {bos!r} inside, and the tokenizer writes "
                    "another one before the text. Remove what stands before the token, or the token."
                )
            if _JSON_CHAT.match(prompt):
                self._say(
                    f"the prompt of state {position} is a text that looks like a chat in JSON, so the model reads the JSON. "
                    "Pass json.loads(prompt)."
                )
        elif _is_token_ids(prompt):
            token_ids = self._without_padding(cast("Sequence[int]", prompt), row, position)
        else:
            text, token_ids = self._encode_chat(cast("Sequence[Message]", prompt), row, position)
            self._check_characters(text, token_ids, position)
        if row.get("tools") and (isinstance(prompt, str) or _is_token_ids(prompt)):
            names = _names(readable_tools(row["tools"], f"state {position}"))
            if not isinstance(prompt, str) or not all(name in prompt for name in names):
                self._say(
                    f"the column tools of state {position} has no effect, because its prompt is no chat. Pass the prompt as a "
                    "list of messages, or write the tools into the prompt and remove the column."
                )
        if not token_ids:
            raise ContractError(
                f"A prompt must have at least one token; the prompt of state {position} has none. Remove the state, or start "
                "its prompt with the tokenizer's bos_token."
            )
        self._check(token_ids, position)
        return token_ids

    def _encode_chat(self, chat: Sequence[Message], row: Mapping[str, Any], position: int) -> tuple[str, list[int]]:
        """What the template writes for a chat, and its token ids."""
        if self._tokenizer.chat_template is None:
            raise ContractError(
                f"A chat prompt needs a chat template; the prompt of state {position} is a chat, and the tokenizer has "
                "none. Set tokenizer.chat_template, or pass the prompt as text."
            )
        whose = f"state {position}"
        tools = readable_tools(row.get("tools"), whose)
        given: Any = row.get("chat_template_kwargs") or {}
        try:
            given = json.loads(given) if isinstance(given, str) else given
        except ValueError:  # refused in the next line
            given = row["chat_template_kwargs"]
        if not isinstance(given, Mapping):
            raise ContractError(
                f"The column chat_template_kwargs of {whose} must have options by name; got {describe(given)}. Pass a dict."
            )
        if self._control is None:
            self._control = ControlTokens(self._tokenizer, self._options)
            self._check_template()
        options = {**self._options, **self._control.spell_options(without_none(given)), "tokenize": False}
        options |= {"tools": tools} if tools else {}
        if chat[-1]["role"] == "assistant" and not options.get("continue_final_message"):
            raise ContractError(
                f"A chat must end with the message that the model answers; the chat of state {position} ends with the "
                "assistant. Remove the message if it is the answer. If the model should continue it, pass options="
                "HFOptions(chat_template_options={'continue_final_message': True, 'add_generation_prompt': False})."
            )
        if not (options["add_generation_prompt"] or options.get("continue_final_message")):
            self._say(
                f"the chat of {whose} has no generation prompt, because an option is add_generation_prompt=False, so the model "
                "is not told to answer. Remove the option."
            )
        messages, empty = readable_messages(chat, whose)
        if any(isinstance(message["content"], list) for message in messages) and not self._reads_parts():
            messages = with_contents_as_text(messages)
        if empty:
            self._say(
                f"arguments of calls that are None were left out in {whose}: {', '.join(empty[:4])}. A datasets.Dataset gives "
                "each call the arguments of all others. If a null is meant, pass the arguments as JSON text."
            )
        text = self._rendered(messages, options, position)
        self._check_rendered(messages, tools, options, text.replace(CUT, ""), position)
        return text.replace(CUT, ""), self._control.encode(text)

    def _rendered(self, messages: list[dict[str, Any]], options: dict[str, Any], position: int) -> str:
        assert self._control is not None
        if "tools" in options:
            options = {**options, "tools": self._control.spell_tools(options["tools"])}
        calls = [call.get("function", call) for message in messages for call in message.get("tool_calls", [])]
        found: Any = None
        for form in (messages, with_arguments_as_text(messages)) if calls else (messages,):
            try:
                text = self._tokenizer.apply_chat_template(self._control.spell(form), **options)
            except Exception as error:  # templates raise errors of many types
                found = found or error
                continue
            if form is not messages or not any(call["arguments"] and str(call["arguments"]) in text for call in calls):
                return text  # a template that writes a dict as Python does needs JSON text
        raise ContractError(
            f"A chat must fit the tokenizer's chat template; for the chat of state {position}, the template says: {found} "
            "Change the roles or the contents of the messages."
        ) from found

    def _reads_parts(self) -> bool:
        """Whether the template writes the text of a content that is a list of parts. Others write the list as Python does."""
        if self._knows_parts is None:
            text = self._plain([{"role": "user", "content": [{"type": "text", "text": "question"}]}])
            self._knows_parts = bool(text) and not re.search(r"""['"]type['"]""", text)
        return self._knows_parts

    def _writes_calls(self) -> bool:
        """Whether the template writes the calls of a small chat, or refuses this chat, so that nothing is known."""
        if self._knows_calls is None:
            text = self._plain(CALLING)
            self._knows_calls = not text or any(word in text for word in ("lookup", "rain"))
        return self._knows_calls

    def _begin_of_chats(self) -> str | None:
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

    def _check_template(self) -> None:
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

    def _check_rendered(
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
        if missing := [name for name in _names(tools) if name not in text]:
            self._say(
                f"the chat template does not write the tools of state {position}: {missing}. Use a template with tools."
            )
        source = str(self._tokenizer.chat_template)
        own = {"add_generation_prompt", "continue_final_message", "tokenize", "tools", "documents", "chat_template"}
        if unknown := [
            name for name in options if name not in own and not re.search(rf"\b{re.escape(name)}\b", source)
        ]:
            self._say(
                f"the chat template reads no option {unknown}, so it has no effect. Correct the name in chat_template_options "
                "or chat_template_kwargs, or remove it."
            )

    def _without_padding(self, token_ids: Sequence[int], row: Mapping[str, Any], position: int) -> list[int]:
        """Token ids without those that the row's attention_mask masks. Without a mask, padding at both ends is left out."""
        kept, mask = list(token_ids), row.get("attention_mask")
        if mask is not None:
            mask = [bool(value) for value in mask] if hasattr(mask, "__len__") else mask
            if not isinstance(mask, list) or len(mask) != len(kept):
                raise ContractError(
                    f"The attention_mask of state {position} must have one value per token ({len(kept)}); got "
                    f"{describe(mask)}. Pass the mask of this prompt, or remove the column."
                )
            kept = [token for token, is_kept in zip(kept, mask, strict=True) if is_kept]
        pad, bos = (getattr(self._tokenizer, name, None) for name in ("pad_token_id", "bos_token_id"))
        others = (bos, self._tokenizer.eos_token_id, getattr(self._tokenizer, "unk_token_id", None))
        if mask is None and pad is not None and pad not in others:
            while kept and kept[-1] == pad:
                kept.pop()
            while kept and kept[0] == pad:
                kept.pop(0)
            repeated = pad in kept
        else:
            repeated = pad is not None and mask is None and kept[:2] == [pad, pad]
        if repeated:
            self._say(
                f"the token ids of state {position} have padding tokens ({pad}), which the model reads as text. Remove them, "
                "or pass the column attention_mask."
            )
        if bos is not None and bos != pad and kept[:2] == [bos, bos]:
            self._say(
                f"the token ids of state {position} begin with two begin-of-sequence (BOS) tokens. Tokenize a rendered chat "
                "with add_special_tokens=False."
            )
        return kept

    def _check_characters(self, text: str, token_ids: Sequence[int], position: int) -> None:
        """Say once which characters the tokenizer does not know. It drops them, or writes its unknown token."""
        new = {
            c for c in set(text) - self._known_characters if not c.isspace() and unicodedata.category(c)[0] not in "CM"
        }
        self._known_characters |= new
        unknown_ids = _unknown_ids(self._tokenizer)
        for character in sorted(new) if hasattr(self._tokenizer, "backend_tokenizer") or unknown_ids else ():
            found = set(self._tokenizer(character, add_special_tokens=False)["input_ids"])
            if not found or (found & unknown_ids and not unknown_ids.isdisjoint(token_ids)):
                self._say(
                    f"the tokenizer has no token for {character!r} in the prompt of state {position}, so the model does not "
                    "read it. Use the model's tokenizer, or replace the character."
                )

    def _say(self, message: str) -> None:
        """Warn of each kind of mistake once."""
        kind = re.sub(r"state \d+|'.*?'|\d+|\[.*?\]", "", message)[:40]
        if kind not in self._said:
            self._said.add(kind)
            warn_user(f"HFPolicy: {message} (This warning is given once.)")

    def _check(self, token_ids: Sequence[int], position: int) -> None:
        """Refuse tokens that the model does not have, and warn once of a prompt that ends in the end token."""
        if min(token_ids) < 0:
            raise ContractError(
                f"The prompt of state {position} must have token ids of at least 0; got {min(token_ids)}. Remove the labels of "
                "ignored tokens, such as -100."
            )
        largest = max(token_ids)
        if largest >= self._vocabulary_size:
            raise ContractError(
                f"The prompt of state {position} must have token ids below {self._vocabulary_size}, the size of the model's "
                f"vocabulary; got {largest} ({self._tokenizer.convert_ids_to_tokens(largest)!r}). Use the model's tokenizer, "
                "or call model.resize_token_embeddings(len(tokenizer)) after adding tokens."
            )
        # a token that also begins texts may be a whole prompt (GPT-2)
        if len(token_ids) > 1 and token_ids[-1] == self._tokenizer.eos_token_id:
            self._say(
                f"the prompt of state {position} ends in the end-of-sequence token {self._tokenizer.eos_token!r}, so "
                "the model has to continue a text that has ended. Remove the token from the text or the chat template, or set "
                "tokenizer.add_eos_token = False."
            )


CALLING: list[Any] = [
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
_JSON_CHAT = re.compile(r'\s*\[\s*\{\s*"(?:role|content)"\s*:')


def _names(tools: Sequence[Any]) -> list[str]:
    schemas = [tool.get("function", tool) if isinstance(tool, Mapping) else {"name": tool.__name__} for tool in tools]
    return [str(schema["name"]) for schema in schemas if schema.get("name")]


def _unknown_ids(tokenizer: Any) -> set[int]:
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    unknown = getattr(model, "unk_token", None)
    ids = {getattr(tokenizer, "unk_token_id", None), tokenizer.convert_tokens_to_ids(unknown) if unknown else None}
    return {token for token in ids if token is not None}

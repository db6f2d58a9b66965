"""Conversion of prompts (texts, chats, token ids, data set rows) to token ids."""

import json
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

from grpo.arguments import describe
from grpo.errors import ContractError

from .chat_messages import (
    readable_messages,
    readable_tools,
    with_arguments_as_text,
    with_contents_as_text,
    without_none,
)
from .control_tokens import CUT, ControlTokens
from .said_once import SaidOnce
from .states import Message, Prompt, PromptState, is_token_ids, prompt_of
from .template_checks import TemplateChecks, names_of
from .token_checks import TokenChecks

_JSON_CHAT = re.compile(r'\s*\[\s*\{\s*"(?:role|content)"\s*:')


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
        self.column = column
        """Column with the prompt."""
        self._options = {"add_generation_prompt": True, **chat_template_options, "tokenize": False}
        self._say = SaidOnce()
        self._template = TemplateChecks(tokenizer, self._options, ends, self._say)
        self._tokens = TokenChecks(tokenizer, vocabulary_size, self._say)
        self._control: ControlTokens | None = None

    def __call__(self, states: Sequence[PromptState]) -> list[list[int]]:
        """Token ids of each state's prompt. Repeated states are encoded once."""
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
            begins = tuple(filter(None, (getattr(self._tokenizer, "bos_token", None), self._template.begin_of_chats())))
            own = {"add_special_tokens": False} if begins and prompt.startswith(begins) else {}
            token_ids = list(self._tokenizer(prompt, **own)["input_ids"])
            self._tokens.check_characters(prompt, token_ids, position)
            bos = getattr(self._tokenizer, "bos_token", None)
            if bos and not own and bos in prompt and token_ids[:1] == [self._tokenizer.bos_token_id]:
                self._say(
                    f"the prompt of state {position} has the begin-of-sequence token {bos!r} inside, and the tokenizer writes "
                    "another one before the text. Remove what stands before the token, or the token."
                )
            if _JSON_CHAT.match(prompt):
                self._say(
                    f"the prompt of state {position} is a text that looks like a chat in JSON, so the model reads the JSON. "
                    "Pass json.loads(prompt)."
                )
        elif is_token_ids(prompt):
            token_ids = self._tokens.without_padding(cast("Sequence[int]", prompt), row, position)
        else:
            text, token_ids = self._encode_chat(cast("Sequence[Message]", prompt), row, position)
            self._tokens.check_characters(text, token_ids, position)
        if row.get("tools") and (isinstance(prompt, str) or is_token_ids(prompt)):
            names = names_of(readable_tools(row["tools"], f"state {position}"))
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
        self._tokens.check(token_ids, position)
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
            self._template.check()
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
        if any(isinstance(message["content"], list) for message in messages) and not self._template.reads_parts():
            messages = with_contents_as_text(messages)
        if empty:
            self._say(
                f"arguments of calls that are None were left out in {whose}: {', '.join(empty[:4])}. A datasets.Dataset gives "
                "each call the arguments of all others. If a null is meant, pass the arguments as JSON text."
            )
        text = self._rendered(messages, options, position)
        self._template.check_rendered(messages, tools, options, text.replace(CUT, ""), position)
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

"""Conversion of prompts (texts, chats, token ids, data set rows) to token ids, and to fields where they have pictures."""

import json
import re
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from adapters.llm.picture_prompts import Ids, PicturePrompt
from grpo.arguments import describe
from grpo.errors import ContractError, GRPOWarning

from .chat_messages import (
    readable_messages,
    readable_tools,
    with_arguments_as_text,
    with_contents_as_text,
    without_none,
)
from .control_tokens import CUT, ControlTokens, whole_characters
from .pictures import COLUMNS, PICTURE_PARTS, kinds_of_parts, pictures_of_row, with_pictures
from .processor import Processor, drop_oldest
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
        processor: Encodes prompts with pictures. None: prompts have no pictures.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocabulary_size: int,
        column: str,
        chat_template_options: Mapping[str, Any],
        ends: tuple[Sequence[int], Sequence[str]] | None = None,
        processor: Processor | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._processor = processor
        self._kept: dict[int, tuple[PromptState, PicturePrompt]] = {}
        """Prompts with pictures by the ids of their states, the oldest first."""
        self.column = column
        """Column with the prompt."""
        self._options = {"add_generation_prompt": True, **chat_template_options, "tokenize": False}
        self._say = SaidOnce()
        self._template = TemplateChecks(tokenizer, self._options, ends, self._say)
        self._tokens = TokenChecks(tokenizer, vocabulary_size, self._say)
        self._control: ControlTokens | None = None

    def __call__(self, states: Sequence[PromptState]) -> list[Ids]:
        """Token ids of each state's prompt, or a `PicturePrompt`. Repeated states are encoded once, and states with pictures
        once while they are used, so do not change them."""
        held = list(states)  # a Dataset creates rows on access; keeping them keeps their ids different
        known: dict[Hashable, Ids] = {}
        encoded = []
        for position, state in enumerate(held):
            key = state if isinstance(state, str) else id(state)
            if key not in known:
                kept = self._kept.get(id(state))
                known[key] = self._encoded(state, position) if kept is None else kept[1]
            encoded.append(known[key])
        return encoded

    @property
    def reads_pictures(self) -> bool:
        """Whether the chat template writes something for a part that is a picture."""
        return self._template.reads_pictures()

    def _encoded(self, state: PromptState, position: int) -> Ids:
        row = state if isinstance(state, Mapping) else {}
        prompt = prompt_of(state, self.column)
        if isinstance(prompt, PicturePrompt):  # encoded before
            return prompt
        found = self._encode(prompt, row, position)
        if isinstance(found, PicturePrompt):
            self._kept[id(state)] = state, found
            drop_oldest(self._kept, {key: kept.num_bytes for key, (_, kept) in self._kept.items()})
        return found

    def _encode(self, prompt: Prompt, row: Mapping[str, Any], position: int) -> Ids:
        token_ids: Ids
        pictures = self._pictures_of(row, position)
        if isinstance(prompt, str):
            # a text that begins as the template begins was rendered by the user, and has its special tokens
            begins = tuple(filter(None, (getattr(self._tokenizer, "bos_token", None), self._template.begin_of_chats())))
            own = {"add_special_tokens": False} if begins and prompt.startswith(begins) else {}
            readable = whole_characters(prompt)
            if pictures:
                assert self._processor is not None
                token_ids = self._processor([readable], pictures, f"The prompt of state {position}", **own)
            else:
                token_ids = list(self._tokenizer(readable, **own)["input_ids"])
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
            if pictures:
                raise ContractError(
                    f"The prompt of state {position} must be a text or a chat, because it has pictures; got token ids. Pass "
                    "what the token ids were made from."
                )
            token_ids = self._tokens.without_padding(cast("Sequence[int]", prompt), row, position)
        else:
            text, token_ids = self._encode_chat(cast("Sequence[Message]", prompt), row, pictures, position)
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
        if self._processor is not None and not isinstance(token_ids, PicturePrompt):
            marks = sum(token in self._processor.token_ids for token in token_ids)
            if marks:
                raise ContractError(
                    f"The prompt of state {position} has {marks} tokens that stand for pictures, and no picture. Pass the "
                    f"pictures in the column {COLUMNS[0]!r} or in the messages, or remove {self._processor.mark!r} from the "
                    "text."
                )
        return token_ids

    def _pictures_of(self, row: Mapping[str, Any], position: int) -> list[Any]:
        if self._processor is not None:
            return pictures_of_row(row, f"state {position}")
        unread = [column for column in COLUMNS if row.get(column) is not None]
        if unread:
            self._say(
                f"the column {unread[0]!r} of state {position} has no effect, because the policy has a tokenizer and no "
                "processor. If it has pictures, pass the model's processor in place of the tokenizer."
            )
        return []

    def _require_readable(self, chat: Sequence[Message], position: int) -> None:
        """Refuse parts of messages that the model does not get."""
        kinds = set(kinds_of_parts(chat)) - {"text"}
        if self._processor is None and kinds:
            raise ContractError(
                "A chat must hold text only, because HFPolicy has a tokenizer and no processor; the chat of state "
                f"{position} has a part of type {', '.join(sorted(map(repr, kinds)))}. For pictures, pass the processor of an "
                "image-text model in place of its tokenizer, or from_pretrained(..., pictures=True). Remove all else."
            )
        if strange := kinds - {*PICTURE_PARTS}:
            raise ContractError(
                f"A chat must hold texts and pictures only; the chat of state {position} has a part of type "
                f"{', '.join(sorted(map(repr, strange)))}. Pass frames of a video as pictures, and sound as a text."
            )

    def _encode_chat(
        self, chat: Sequence[Message], row: Mapping[str, Any], pictures: list[Any], position: int
    ) -> tuple[str, Ids]:
        """What the template writes for a chat, and its token ids."""
        self._require_readable(chat, position)
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
            mark = None if self._processor is None else self._processor.mark
            self._control = ControlTokens(self._tokenizer, self._options, picture_mark=mark)
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
        if self._processor is not None:
            chat, pictures = with_pictures(chat, pictures, f"the chat of {whose}")
        if pictures and not self._template.reads_parts():
            raise ContractError(
                f"A chat with pictures needs a chat template that reads parts of messages; the chat of {whose} has "
                f"{len(pictures)} pictures. Use the chat template of the processor."
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
        plain = text.replace(CUT, "")
        if not pictures:
            return plain, self._control.encode(text)
        assert self._processor is not None
        parts = self._control.parts(text)
        return plain, self._processor(parts, pictures, f"The chat of {whose}", add_special_tokens=False)

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


def trial_prompts(
    tokenizer: Any, vocabulary_size: int, chat_template_options: Mapping[str, Any], processor: Processor
) -> list[Ids]:
    """Prompts with pictures of different sizes, for a comparison before training. Their text is no user's, so nothing is said
    about it."""
    encode = PromptEncoder(tokenizer, vocabulary_size, "prompt", chat_template_options, processor=processor)
    sizes = (32, 48), (56, 40)
    pictures = [(np.arange(h * w * 3) % 251).astype(np.uint8).reshape(h, w, 3) for h, w in sizes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GRPOWarning)
        if not encode.reads_pictures:
            texts = (f"{processor.mark}{text}" for text in ("question", "a"))
            return encode([{"prompt": text, "images": [own]} for text, own in zip(texts, pictures, strict=True)])
        question = {"type": "text", "text": "question"}
        chats = (
            [*({"type": "image", "image": each} for each in own), question] for own in ([pictures[0]], pictures[1:], [])
        )
        return encode([[{"role": "user", "content": parts}] for parts in chats])

"""Conversion of prompts (texts, chats, token ids, data set rows) to token ids and columns."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from grpo.errors import ContractError, warn_user

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
    """

    def __init__(
        self, tokenizer: Any, vocabulary_size: int, column: str, chat_template_options: Mapping[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self.column = column
        """Column with the prompt."""
        self._options = {"add_generation_prompt": True, **chat_template_options, "tokenize": False}
        self._has_warned = False

    def __call__(self, states: Sequence[PromptState]) -> list[list[int]]:
        """Token ids of each state's prompt. Repeated states are encoded once.

        Raises:
            ContractError: A prompt has no token or a token that the model does not have; or a chat has a part that is not text,
                ends with the assistant, or does not fit the chat template.
        """
        held = list(states)  # a Dataset creates rows on access; keeping them keeps their ids different
        known: dict[Hashable, list[int]] = {}
        encoded = []
        for position, state in enumerate(held):
            key = state if isinstance(state, str) else id(state)
            if key not in known:
                known[key] = self._encode(prompt_of(state, self.column), position)
            encoded.append(known[key])
        return encoded

    def _encode(self, prompt: Prompt, position: int) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self._tokenizer(prompt)["input_ids"]
        elif _is_token_ids(prompt):
            token_ids = prompt
        else:
            if self._tokenizer.chat_template is None:
                raise ContractError(
                    f"A chat prompt needs a chat template; the prompt of state {position} is a chat, and the tokenizer has "
                    "none. Set tokenizer.chat_template, or pass the prompt as text."
                )
            chat = cast("Sequence[Message]", prompt)
            if chat[-1]["role"] == "assistant" and not self._options.get("continue_final_message"):
                raise ContractError(
                    f"A chat must end with the message that the model answers; the chat of state {position} ends with the "
                    "assistant. Remove the message if it is the answer. If the model should continue it, pass options="
                    "HFOptions(chat_template_options={'continue_final_message': True, 'add_generation_prompt': False})."
                )
            text = self._text_of(chat, position)
            token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has added them
        if not token_ids:
            raise ContractError(
                f"A prompt must have at least one token; the prompt of state {position} has none. Remove the state, or start "
                "its prompt with the tokenizer's bos_token."
            )
        self._check(token_ids, position)
        return list(token_ids)

    def _text_of(self, chat: Sequence[Message], position: int) -> str:
        from jinja2 import TemplateError  # transformers needs it for chat templates only

        try:
            return self._tokenizer.apply_chat_template(list(chat), **self._options)
        except TemplateError as error:
            raise ContractError(
                f"A chat must fit the tokenizer's chat template; for the chat of state {position}, the template says: {error} "
                "Change the roles or the contents of the messages."
            ) from error

    def _check(self, token_ids: Sequence[int], position: int) -> None:
        """Refuse tokens that the model does not have, and warn once of a prompt that ends in the end token."""
        largest = max(token_ids)
        if largest >= self._vocabulary_size:
            raise ContractError(
                f"The prompt of state {position} must have token ids below {self._vocabulary_size}, the size of the model's "
                f"vocabulary; got {largest} ({self._tokenizer.convert_ids_to_tokens(largest)!r}). Use the model's tokenizer, "
                "or call model.resize_token_embeddings(len(tokenizer)) after adding tokens."
            )
        # a token that also begins texts may be a whole prompt (GPT-2)
        if len(token_ids) > 1 and token_ids[-1] == self._tokenizer.eos_token_id and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"HFPolicy: the prompt of state {position} ends in the end-of-sequence token {self._tokenizer.eos_token!r}, so "
                "the model has to continue a text that has ended. Remove the token from the text or the chat template, or set "
                "tokenizer.add_eos_token = False. (This warning is given once.)"
            )

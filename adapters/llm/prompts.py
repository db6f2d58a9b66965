"""Conversion of prompts (texts, chats, data set rows) to token ids and columns."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from grpo.errors import ContractError

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[Message]
"""Text, or chat messages `[{"role": ..., "content": ...}, ...]`."""
PromptState: TypeAlias = Prompt | Mapping[str, Any]
"""A prompt, or a row of a data set with a prompt column."""


def prompt_of(state: PromptState, column: str = "prompt") -> Prompt:
    """The prompt of a state: the state itself, or the prompt column of a row.

    Raises:
        ContractError: The row does not have the column, or the prompt is neither text nor chat messages.
    """
    prompt: Any = state
    if isinstance(state, Mapping):
        if column not in state:
            raise ContractError(
                f"A state given as a row needs the prompt column {column!r}; got the columns {sorted(map(str, state))}. Rename "
                "the column, or pass prompt_column=..."
            )
        prompt = state[column]
    is_chat = (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )
    if not isinstance(prompt, str) and not is_chat:
        raise ContractError(
            "A prompt must be text, or a list of chat messages {'role': ..., 'content': ...}; got "
            f"{type(prompt).__name__}: {str(prompt)[:80]!r}."
        )
    return cast("Prompt", prompt)


class PromptEncoder:
    """Encodes prompts as token ids, identically for sampling and scoring.

    Args:
        tokenizer: The model's tokenizer.
        column: Column with the prompt, for states that are rows of a data set.
        chat_template_options: Options of `tokenizer.apply_chat_template`, for example `enable_thinking=False`.
    """

    def __init__(self, tokenizer: Any, column: str, chat_template_options: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._column = column
        self._options = dict(chat_template_options)

    def __call__(self, states: Sequence[PromptState]) -> list[list[int]]:
        """Token ids of each state's prompt. Repeated states are encoded once.

        Raises:
            ContractError: A prompt has no token, or a chat needs a chat template and the tokenizer has none.
        """
        held = list(states)  # a Dataset creates rows on access; keeping them keeps their ids different
        known: dict[Hashable, list[int]] = {}
        encoded = []
        for position, state in enumerate(held):
            key = state if isinstance(state, str) else id(state)
            if key not in known:
                known[key] = self._encode(prompt_of(state, self._column), position)
            encoded.append(known[key])
        return encoded

    def _encode(self, prompt: Prompt, position: int) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self._tokenizer(prompt)["input_ids"]
        else:
            if self._tokenizer.chat_template is None:
                raise ContractError(
                    f"A chat prompt needs a chat template; the prompt of state {position} is a chat, and the tokenizer has "
                    "none. Set tokenizer.chat_template, or pass the prompt as text."
                )
            text = self._tokenizer.apply_chat_template(
                list(prompt), tokenize=False, add_generation_prompt=True, **self._options
            )
            token_ids = self._tokenizer(text, add_special_tokens=False)[
                "input_ids"
            ]  # the template has added the special tokens
        if not token_ids:
            raise ContractError(
                f"A prompt must have at least one token; the prompt of state {position} has none. Remove the state, or start "
                "its prompt with the tokenizer's bos_token."
            )
        return list(token_ids)

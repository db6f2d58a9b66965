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
    """The prompt of a state.

    Raises:
        ContractError: a row without the column, or something that is neither text nor messages.
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
        tokenizer: of the model.
        column: where rows of a data set have their prompt.
        chat_template_options: passed to `tokenizer.apply_chat_template`, `enable_thinking=False` for instance.
    """

    def __init__(self, tokenizer: Any, column: str, chat_template_options: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._column = column
        self._options = dict(chat_template_options)

    def __call__(self, states: Sequence[PromptState]) -> list[list[int]]:
        """Token ids of each state's prompt; a state that stands here several times is encoded once.

        Raises:
            ContractError: a prompt without a token, or chat messages without a chat template.
        """
        held = list(states)  # a data set makes its rows as they are asked for: kept, so that no two have one id
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
                    f"The prompt of state {position} is a chat, and the tokenizer has no chat template. Set "
                    "tokenizer.chat_template, or pass the prompt as text."
                )
            text = self._tokenizer.apply_chat_template(
                list(prompt), tokenize=False, add_generation_prompt=True, **self._options
            )
            token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]  # the template wrote them
        if not token_ids:
            raise ContractError(
                f"The prompt of state {position} has no token, and there is nothing to continue. Leave it out, or begin it "
                "with the tokenizer's bos_token."
            )
        return list(token_ids)

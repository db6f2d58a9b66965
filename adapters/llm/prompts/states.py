"""States that are prompts: a text, a chat, token ids, or a row of a data set with one of them in a column."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from grpo.errors import ContractError

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]
"""Text, chat messages `[{"role": ..., "content": ...}, ...]`, or token ids, which are used as they are."""
PromptState: TypeAlias = Prompt | Mapping[str, Any]
"""A prompt, or a row of a data set with a prompt column."""


def prompt_of(state: PromptState, column: str = "prompt") -> Prompt:
    """The prompt of a state: the state itself, or the prompt column of a row."""
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
    if not isinstance(prompt, str) and not is_chat and not (is_list and is_token_ids(prompt)):
        raise ContractError(
            "A prompt must be text, a list of chat messages {'role': ..., 'content': ...}, or a list of token ids; got "
            f"{type(prompt).__name__}: {str(prompt)[:80]!r}."
        )
    return cast("Prompt", prompt)


def is_token_ids(prompt: Any) -> bool:
    """Whether the prompt is a list of integers."""
    return all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)

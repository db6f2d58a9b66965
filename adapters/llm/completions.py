"""Completions: the actions of a language model."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo.arguments import describe
from grpo.errors import ContractError

FinishReason: TypeAlias = Literal["end", "stop", "length"]
"""Why a completion ended: `end` at an end-of-sequence token, `stop` at a stop string, `length` at the limit of new tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled continuation of a prompt. Scoring uses the sampled token ids; text is never tokenized again."""

    token_ids: tuple[int, ...]
    """The sampled tokens, including an end-of-sequence token if there is one."""
    text: str
    """The decoded text, including a stop string. It has no special tokens, unless `HFOptions.keep_special_tokens`."""
    finish_reason: FinishReason
    """Why the completion ended. "length" means that it was truncated."""
    behaviour_log_probs: tuple[float, ...] | None = None
    """Log-prob of each token under the sampling distribution. None if the completion was not sampled by this policy."""
    sampled: tuple[bool, ...] | None = None
    """Which tokens the policy sampled. The others, such as tool results, are context and have no loss. None: all tokens."""
    forks: tuple[int, ...] = ()
    """Numbers of tokens, ascending, after which other completions of the prompt go on differently. Rows that are equal up to
    such a place compute these tokens once."""
    opened: str = ""
    """The tag in which the prompt ends, such as a `<think>` of the template. It stands before `text` and is not sampled."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ContractError: A value has the wrong type, or the numbers of tokens and log-probs differ.
        """
        token_ids, text, reason, log_probs = cast(
            "tuple[Any, ...]", (self.token_ids, self.text, self.finish_reason, self.behaviour_log_probs)
        )
        if type(token_ids) is not tuple or not all(type(token) is int and token >= 0 for token in token_ids):
            raise ContractError(
                f"Completion.token_ids must be a tuple of integers of at least 0; got {describe(token_ids)}. Convert them: "
                "tuple(map(int, token_ids))."
            )
        if not isinstance(text, str) or not isinstance(reason, str) or reason not in get_args(FinishReason):
            raise ContractError(
                "Completion.text must be a text, and Completion.finish_reason one of "
                f"{', '.join(get_args(FinishReason))}; got {describe(text)} and {describe(reason)}."
            )
        if log_probs is not None and (
            type(log_probs) is not tuple
            or len(log_probs) != len(token_ids)
            or not all(isinstance(value, float | int) for value in log_probs)
        ):
            raise ContractError(
                f"Completion.behaviour_log_probs must be None or a tuple with one number per token ({len(token_ids)}); got "
                f"{describe(log_probs)}."
            )

    def __str__(self) -> str:
        return self.text

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def is_truncated(self) -> bool:
        """Whether the limit of new tokens truncated the completion."""
        return self.finish_reason == "length"

    def to_state(self) -> dict[str, Any]:
        """Fields by name, for checkpoints."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Completion":
        """The inverse of `to_state`."""
        return cls(**state)


def completion_mask(completions: Sequence[Completion], *, mask_truncated: bool = False) -> Bool[Tensor, "N T"]:
    """Mask that is True at the sampled tokens of each completion. Its width T is the unmasked length of the longest row.

    Args:
        completions: N completions.
        mask_truncated: Whether to mask all tokens of truncated completions (DAPO's overlong filtering, arXiv:2503.14476,
            section 3.4).
    """
    lengths = torch.tensor([0 if mask_truncated and c.is_truncated else len(c) for c in completions], dtype=torch.int64)
    mask = torch.arange(max(lengths.tolist(), default=0)) < lengths[:, None]
    for row, completion in zip(mask, completions, strict=True):
        if completion.sampled is not None and row.any():
            row[: len(completion)] &= torch.tensor(completion.sampled)
    return mask


def padded(rows: Sequence[Sequence[float]], width: int) -> Float[Tensor, "N T"]:
    """The numbers of each row as float32, truncated to `width` and padded with 0 on the right."""
    values = np.zeros((len(rows), width), dtype=np.float32)
    for row, numbers in zip(values, rows, strict=True):
        row[: len(numbers)] = numbers[:width]
    return torch.from_numpy(values)

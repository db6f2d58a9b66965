"""What a language model wrote for a prompt: the action of this domain."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

FinishReason: TypeAlias = Literal["end", "stop", "length"]
"""The model ended it (an end-of-sequence token); a stop string came; or the limit of new tokens was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled continuation of a prompt. What was sampled is what is scored: text is never tokenized again."""

    token_ids: tuple[int, ...]
    """The sampled tokens, the end-of-sequence token included where the model wrote one."""
    text: str
    """What the tokens say, special tokens left out, a stop string included."""
    finish_reason: FinishReason
    """Why it ended; "length": it was cut off."""
    behaviour_log_probs: tuple[float, ...] | None = None
    """Of each token, under the distribution it was drawn from; None: not sampled here."""

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def is_truncated(self) -> bool:
        """It was cut off by the limit of new tokens."""
        return self.finish_reason == "length"


def completion_mask(completions: Sequence[Completion], *, mask_truncated: bool = False) -> Bool[Tensor, "N T"]:
    """True at the tokens of each completion, as wide as the longest that has any.

    Args:
        completions: N of them.
        mask_truncated: leave out all tokens of completions that were cut off (DAPO's overlong filtering,
            arXiv:2503.14476, section 3.4).
    """
    lengths = torch.tensor([0 if mask_truncated and c.is_truncated else len(c) for c in completions], dtype=torch.int64)
    return torch.arange(max(lengths.tolist(), default=0)) < lengths[:, None]


def padded(rows: Sequence[Sequence[float]], width: int) -> Float[Tensor, "N T"]:
    """Numbers per step as float32, padded on the right with 0, or cut."""
    values = np.zeros((len(rows), width), dtype=np.float32)
    for row, numbers in zip(values, rows, strict=True):
        row[: len(numbers)] = numbers[:width]
    return torch.from_numpy(values)

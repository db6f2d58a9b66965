"""What draws completions: the protocol that every sampler keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .completions import FinishReason
from .sampling_config import SamplingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """What a sampler drew for N rows, group by group: lists of N, each with one entry per token of its row."""

    token_ids: Sequence[Sequence[int]]
    """The tokens, the end-of-sequence token included where there is one."""
    finish_reasons: Sequence[FinishReason]
    """Why each row ended."""
    behaviour_log_probs: Sequence[Sequence[float]]
    """Under the distribution drawn from: temperature, penalties and truncation included."""
    policy_log_probs: Sequence[Sequence[float]] | None = None
    """What `score_actions` would say, to rounding; None: this sampler cannot tell."""
    entropies: Sequence[Sequence[float]] | None = None
    """Likewise; None: it was not asked for."""


class Sampler(Protocol):
    """Draws completions of prompts. It may hold weights of its own, which `sync` renews."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_per_prompt: int,
        config: SamplingConfig,
        *,
        end_token_ids: Sequence[int],
        seeds: Sequence[int],
    ) -> SampledTokens:
        """`num_per_prompt` completions of each of B prompts.

        Args:
            prompts: B lists of token ids, none of them empty.
            num_per_prompt: G.
            config: how tokens are drawn.
            end_token_ids: any of these ends a completion, and is its last token.
            seeds: N = B * G, below 2**63: a row's own randomness, whatever the batch it is in.
        """
        ...

    def sync(self, model: Any) -> None:
        """Take over the weights of the (PEFT or plain) causal language model that is trained."""
        ...

"""Sampling settings."""

from dataclasses import dataclass
from typing import Any

from adapters.llm.prompts.control_tokens import whole_characters
from grpo.arguments import Settings, setting
from grpo.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig(Settings):
    """Sampling settings, applied in this order: penalties, temperature, top-k, top-p, min-p, XTC (exclude top choices).

    The temperature is part of the policy. Every other setting changes only the distribution that tokens are drawn from,
    and not the scores. `objective.sampler_correction="truncate"` corrects for the difference by importance weights.
    By default, the difference is not corrected.
    """

    max_new_tokens: int = setting(256, at_least=1)
    """Maximum number of new tokens. Longer completions are truncated."""
    min_new_tokens: int = setting(0, at_least=0)
    """Minimum number of new tokens. Before it is reached, end-of-sequence tokens are excluded and stop strings are
    ignored."""
    temperature: float = setting(1.0, at_least=0.0)
    """Divides the logits in sampling and in scoring. A larger value gives more varied text. 0 takes the most likely token."""
    top_k: int | None = setting(None, at_least=1)
    """Keep only the k most likely tokens. None keeps all. Fan et al. 2018, arXiv:1805.04833."""
    top_p: float = setting(1.0, above=0.0, at_most=1.0)
    """Keep the smallest set of likely tokens with this total probability. Holtzman et al. 2019, arXiv:1904.09751."""
    min_p: float = setting(0.0, at_least=0.0, at_most=1.0)
    """Keep tokens with at least this share of the top token's probability. Nguyen et al. 2024, arXiv:2407.01082."""
    xtc_probability: float = setting(0.0, at_least=0.0, at_most=1.0)
    """Probability per step of excluding the most likely tokens ("exclude top choices")."""
    xtc_threshold: float = setting(0.1, above=0.0, at_most=0.5)
    """XTC (exclude top choices) excludes all tokens with at least this probability, except the least likely of them."""
    repetition_penalty: float = setting(1.0, above=0.0)
    """Divides positive logits, and multiplies negative logits, of tokens that already occur. A value above 1 reduces
    repetitions. Keskar et al. 2019, arXiv:1909.05858, section 4.1."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion. A stop string stays in the completion's text."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: A value is invalid. The message names the field.
        """
        super(SamplingConfig, self).__post_init__()  # slots=True creates a new class, so super() needs arguments
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"SamplingConfig.min_new_tokens must be at most max_new_tokens={self.max_new_tokens}; got "
                f"{self.min_new_tokens}."
            )
        if wrong := [string for string in self.stop if not self.can_stop(string)]:
            raise ConfigError(
                f"SamplingConfig.stop must have texts that are not empty and have no half characters; got {wrong[0]!r}. An "
                "empty text would end every completion at once, and no completion has a half character. Remove it."
            )

    @staticmethod
    def can_stop(text: Any) -> bool:
        """Whether a value may be a stop string: a text that is not empty, and that a completion may have."""
        return isinstance(text, str) and text != "" and text == whole_characters(text)

    @property
    def is_exact(self) -> bool:
        """Whether tokens are drawn from the policy itself: only the temperature is set, and it is above 0."""
        return (
            self.temperature > 0
            and self.min_new_tokens == 0
            and self.top_k is None
            and self.top_p == 1
            and self.min_p == 0
            and self.xtc_probability == 0
            and self.repetition_penalty == 1
        )

    @property
    def scoring_temperature(self) -> float:
        """Divides the logits in scoring: the sampling temperature, or 1 if the sampling temperature is 0."""
        return self.temperature or 1.0

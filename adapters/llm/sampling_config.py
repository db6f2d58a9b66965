"""How tokens are drawn."""

from dataclasses import dataclass

from grpo.errors import ConfigError
from grpo.writing import Settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig(Settings):
    """How tokens are drawn, in the order in which it is applied: penalties, temperature, top-k, top-p, min-p, XTC.

    The temperature is part of the policy. Every other setting changes only the distribution that tokens are drawn from;
    scoring does not repeat it. `objective.sampler_correction="truncate"` corrects for the difference by importance weights.
    By default nothing is corrected.
    """

    max_new_tokens: int = setting(256, at_least=1)
    """Tokens after which a completion is cut off."""
    min_new_tokens: int = setting(0, at_least=0)
    """Tokens before which none of the end-of-sequence tokens can be drawn. Stop strings are looked for from here on."""
    temperature: float = setting(1.0, at_least=0.0)
    """Divides the logits, in sampling and in scoring alike. Larger: more varied. 0: the likeliest token, for evaluation."""
    top_k: int | None = setting(None, at_least=1)
    """Only the k likeliest tokens; None: all. Fan et al. 2018, arXiv:1805.04833."""
    top_p: float = setting(1.0, above=0.0, at_most=1.0)
    """Only the smallest set of likeliest tokens that holds this probability. Holtzman et al. 2019, arXiv:1904.09751."""
    min_p: float = setting(0.0, at_least=0.0, at_most=1.0)
    """Only tokens at least this share as likely as the likeliest. Nguyen et al. 2024, arXiv:2407.01082."""
    xtc_probability: float = setting(0.0, at_least=0.0, at_most=1.0)
    """How often, per step, the likeliest tokens are left out ("exclude top choices")."""
    xtc_threshold: float = setting(0.1, above=0.0, at_most=0.5)
    """Of the tokens at least this likely, all but the least likely are what XTC leaves out. Above .5 it could do nothing."""
    repetition_penalty: float = setting(1.0, above=0.0)
    """Logits of tokens already in prompt or completion are divided by it where positive, multiplied where negative. Above 1:
    fewer repetitions. Keskar et al. 2019, arXiv:1909.05858, section 4.1."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they stay in its text."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: naming the field.
        """
        super(SamplingConfig, self).__post_init__()  # slots=True makes another class, which super() does not know
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"SamplingConfig.min_new_tokens must be at most max_new_tokens={self.max_new_tokens}; got "
                f"{self.min_new_tokens}."
            )
        if any(not string for string in self.stop):
            raise ConfigError("SamplingConfig.stop must not hold an empty string: it would end everything at once.")

    @property
    def is_exact(self) -> bool:
        """Nothing but the temperature shapes the distribution: what is drawn from is the policy itself."""
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
        """What scoring divides logits by: the sampling temperature, or 1 where that is 0 (the likeliest token)."""
        return self.temperature or 1.0

"""The settings of the loss."""

from dataclasses import dataclass
from typing import Literal

from .aggregation import Aggregation
from .divergence import KLEstimator
from .errors import ConfigError
from .off_policy import SamplerCorrection, SamplerRatioLevel
from .ratios import RatioLevel
from .settings import Settings, setting
from .surrogates import Surrogate

DEFAULT_KL_COEF = 0.04
"""Used when a reference policy is passed and no coefficient is set (DeepSeekMath, arXiv:2402.03300, sec. 4.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig(Settings):
    """What is minimised: surrogate + KL - entropy (+ value error). Every choice is independent of the others."""

    # The policy's term

    surrogate: Surrogate = "clip"
    """What becomes of a step whose probability has moved since it was sampled: one function in `grpo.surrogates` each."""
    ratio_level: RatioLevel = "step"
    """Whose probability ratio that is: the step's own, or the row's (see `grpo.ratios`). `gmpo` and `vespo` bring a level of
    their own."""
    clip_low: float = setting(0.2, at_least=0.0, at_most=1.0)
    """How far below 1 the ratio may go before the gradient stops. Larger: bad actions are dropped faster. 1: no bound."""
    clip_high: float = setting(0.2, at_least=0.0)
    """How far above 1 the ratio may go before the gradient stops. Larger: good actions are taken up faster."""
    delta: float | None = setting(None, above=1.0)
    """`clip`: bound on the ratio itself where A < 0. Smaller forgets more of what went badly wrong. None: no bound."""
    dual_clip: float | None = setting(None, above=1.0)
    """`clip`: the same idea as a bound on the loss, at this many times -A. None: no bound."""
    sapo_temperature_pos: float = setting(1.0, above=0.0)
    """`sapo`: larger lets good actions move less far."""
    sapo_temperature_neg: float = setting(1.05, above=0.0)
    """`sapo`: larger lets bad actions move less far."""
    vespo_k_pos: float = setting(2.0, above=0.0)
    """`vespo`, A >= 0: larger discounts rows more that have become rarer."""
    vespo_lambda_pos: float = setting(3.0, at_least=1e-4)
    """`vespo`, A >= 0: larger discounts rows more that have become more likely."""
    vespo_k_neg: float = setting(3.0, above=0.0)
    """`vespo`, A < 0: as `vespo_k_pos`."""
    vespo_lambda_neg: float = setting(2.0, at_least=1e-4)
    """`vespo`, A < 0: as `vespo_lambda_pos`."""
    dro_beta: float = setting(0.05, at_least=0.0)
    """`dro`: larger stays closer to the policy that sampled."""
    tv_limit: float = setting(0.2, above=0.0, at_most=1.0)
    """`dppo_tv`: how far a step's probability may move. Larger allows more."""
    cov_fraction: float = setting(2e-4, above=0.0, at_most=1.0)
    """`kl_cov`, `clip_cov`: the fraction of steps that is held back. Larger keeps more entropy, and learns less."""
    cov_low: float = 1.0
    """`clip_cov`: steps are drawn among those with a covariance above this."""
    cov_high: float = 5.0
    """`clip_cov`: and below this."""
    cov_kl_coef: float = setting(1.0, at_least=0.0)
    """`kl_cov`: how strongly the chosen steps are pulled back."""

    # Which steps and rows it counts

    top_entropy_fraction: float = setting(1.0, above=0.0, at_most=1.0)
    """Fraction of the update's steps, those of highest entropy, that the surrogate counts. Smaller: only the most open
    decisions are learned from. Needs an exact entropy."""
    off_policy_threshold: float | None = setting(None, at_least=0.0)
    """Rows with A < 0 count no more once the mean of sampled minus current log-probs exceeds this. Larger keeps more. None: all
    count."""
    sampler_correction: SamplerCorrection = "none"
    """What is done about actions that another distribution sampled (`behaviour_log_probs`): nothing, or their surrogate is
    weighed by the ratio to the policy's own probability, bounded (`truncate`) or left out beyond the bounds (`mask`)."""
    sampler_ratio_level: SamplerRatioLevel = "step"
    """Whose ratio that is: the step's, or the row's (exact without bounds, and of higher variance)."""
    sampler_ratio_low: float | None = setting(None, at_least=0.0)
    """Smallest such weight. None: no bound."""
    sampler_ratio_high: float | None = setting(3.0, above=0.0)
    """Largest such weight. Larger corrects more, and lets single steps weigh more. None: no bound."""

    # The other terms

    kl_coef: float | None = setting(None, at_least=0.0)
    """Weight of the divergence from the reference. Larger stays closer to it. None: 0.04 if a reference policy is passed,
    else 0."""
    kl_estimator: KLEstimator = "k3"
    """How the divergence is estimated from the sampled step; see `grpo.divergence`, above all the gradient notes. `exact`: the
    policy gives it."""
    entropy_coef: float = setting(0.0, at_least=0.0)
    """Weight of the entropy bonus. Larger keeps the policy more random. Entropies are per step: a policy that returns the
    log-prob of several decisions as one, [N], has one larger entropy where [N, T] has T smaller ones."""
    entropy_estimator: Literal["exact", "score_function"] = "exact"
    """`exact` needs a policy that gives it (`ActionScores.entropy`); `score_function` works for every policy, with noise."""
    entropy_aggregation: Aggregation | None = None
    """How the entropy term is aggregated. None: as `aggregation`."""
    value_coef: float = setting(0.5, at_least=0.0)
    """Weight of the squared error of a critic's values; read where `advantage.credit` is `gae`."""
    value_clip: float | None = setting(None, above=0.0)
    """How far a value may move from what it was at collection before its error has no gradient. None: no bound."""

    # How steps become one number

    aggregation: Aggregation = "row_mean"
    """How per-step losses become one number; read by the trainer, which turns it into weights (see `step_weights`)."""
    fixed_length: int | None = setting(None, at_least=1)
    """L of `fixed_length`: the same divisor for every row, whatever its length."""

    def __post_init__(self) -> None:
        """Check every value, and that bounds are in order and a length is given exactly where it is read."""
        Settings.__post_init__(self)
        uses_length = "fixed_length" in (self.aggregation, self.entropy_aggregation)
        if uses_length != (self.fixed_length is not None):
            raise ConfigError(
                f"ObjectiveConfig.fixed_length={self.fixed_length} with aggregation={self.aggregation!r}: 'fixed_length' needs "
                "fixed_length=the longest that a row can be, and the others need fixed_length=None."
            )
        if (self.delta, self.dual_clip) != (None, None) and self.surrogate not in ("clip", "clip_cov"):
            raise ConfigError(
                f"ObjectiveConfig.delta={self.delta} and dual_clip={self.dual_clip} bound the clipped surrogate, and "
                f"surrogate={self.surrogate!r} reads neither: leave them None."
            )
        low, high = self.sampler_ratio_low, self.sampler_ratio_high
        if low is not None and high is not None and low > high:
            raise ConfigError(f"ObjectiveConfig.sampler_ratio_low={low} must not exceed sampler_ratio_high={high}.")
        if self.cov_low > self.cov_high:
            raise ConfigError(f"ObjectiveConfig.cov_low={self.cov_low} must not exceed cov_high={self.cov_high}.")
        if self.delta is not None and self.delta <= 1.0 + self.clip_high:
            raise ConfigError(
                f"ObjectiveConfig.delta={self.delta} must be above 1 + clip_high = {1.0 + self.clip_high}: it bounds what "
                "clipping leaves unbounded."
            )

    @property
    def selects_across_rows(self) -> bool:
        """Whether which steps count depends on all rows of an update."""
        return self.top_entropy_fraction < 1.0 or self.surrogate in ("kl_cov", "clip_cov")

    @property
    def needs_an_advantage(self) -> bool:
        """Whether a row whose advantage is 0 has a gradient of 0, as far as the surrogate goes."""
        return self.surrogate not in ("dro", "kl_cov")

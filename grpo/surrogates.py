"""The policy's loss per step, unreduced: one small frozen class per paper, differentiated by autograd.

With rho = pi / pi_old the probability ratio and A the advantage, each class maps `Steps` to a loss per step [N, T] (or
[N, 1], the same for all steps of a row). Only `grpo_objective` sums. At rho = 1 a step has the gradient of REINFORCE,
-A grad log pi. (Exceptions: the steps that `ClipCov` leaves out, and `level="row_sum"`, where each step has the gradient of the
whole row.) The classes differ after the policy has moved.

Any function `Steps -> [N, T]` is a surrogate, too. `SurrogateTraits` lists optional attributes of a surrogate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import hardshrink

from ._common.settings import Settings, setting
from ._objective.ratios import MAX_LOG_RATIO, RatioLevel, bounded_exp, either, mean_over_steps, past_bounds
from ._objective.sampler import require_order
from ._objective.selection import Select, covariances, drawn_covariances, largest_covariances
from ._objective.steps import Steps
from .errors import ConfigError
from .types import zero_outside

ROUNDING = 1e-6
"""Log-ratios up to this size count as the rounding of two forward passes of the same policy."""

MIN_LOG_WEIGHT = math.log(1e-8)
"""VESPO clamps log importance weights to at least this value before it takes their powers."""


@runtime_checkable
class Surrogate(Protocol):
    """A loss per step, unreduced, differentiated by autograd."""

    def __call__(self, steps: Steps) -> Float[Tensor, "N #T"]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SurrogateTraits:
    """Optional attributes of a surrogate that tell the trainer how to treat it. The defaults are safe for any function."""

    level: RatioLevel = "step"
    """The level of the ratio in the metrics and in `k3_weighted`. Most surrogates use the same level in their loss."""
    reads_rows: bool = False
    """Whether the loss of a step depends on the row's other steps, so that rows cannot be split into steps. It is always True
    if `level` is a level of rows."""
    zero_advantage_is_inert: bool = False
    """Whether a row whose advantages are all 0 has no gradient, so that the trainer may skip the row."""
    uses_sampler_weights: bool = False
    """Whether the surrogate multiplies by `Steps.sampler_weights` itself. If not, the objective does."""
    for_probabilities: bool = False
    """Whether the surrogate compares probabilities. The trainer then refuses continuous actions, which have densities."""
    stopped: Callable[[Steps], tuple[Tensor, Tensor]] | None = None
    """The steps whose gradient has stopped at the lower and at the upper bound, for the clip metrics. None: no bounds."""
    select: Select | None = None
    """Chooses steps once per update, over all ranks. The choice arrives as `Steps.selected`. None: no choice."""


def traits_of(surrogate: Any) -> SurrogateTraits:
    """The traits of a surrogate. A trait that the surrogate does not define has its default.

    Raises:
        ConfigError: The surrogate's `level` does not exist.
    """
    level: RatioLevel = getattr(surrogate, "level", "step")
    if level not in get_args(RatioLevel):
        raise ConfigError(f"A surrogate's level must be one of {', '.join(get_args(RatioLevel))}; got {level!r}.")
    return SurrogateTraits(
        level=level,
        reads_rows=getattr(surrogate, "reads_rows", level not in ("step", "none")),  # a row's ratio reads all its steps
        zero_advantage_is_inert=getattr(surrogate, "zero_advantage_is_inert", False),
        uses_sampler_weights=getattr(surrogate, "uses_sampler_weights", False),
        for_probabilities=getattr(surrogate, "for_probabilities", False),
        stopped=getattr(surrogate, "stopped", None),
        select=getattr(surrogate, "select", None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _AtLevel(Settings):
    """Base of surrogates that use the ratio of the step or of the row."""

    level: RatioLevel = "step"
    """Which ratio the loss uses: `step` (one ratio per step), `row` (the geometric mean over the row), `row_sum` (the product
    over the row), `row_step` (value of `row`, gradient of `step`) or `none` (value 1, gradient of `step`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounded(_AtLevel):
    """Base of surrogates that bound the ratio around 1."""

    low: float = setting(0.2, at_least=0.0, at_most=1.0)
    """How far below 1 the ratio may go. Larger lets bad actions become rarer faster. 1: no lower bound."""
    high: float = setting(0.2, at_least=0.0)
    """How far above 1 the ratio may go: for a bound of 5, set 4. Larger lets good actions become more likely faster."""

    def stopped(self, steps: Steps) -> tuple[Bool[Tensor, "N #T"], Bool[Tensor, "N #T"]]:
        """Steps whose ratio is past the bound that their advantage pushes it towards."""
        return past_bounds(steps.ratio(self.level), steps.advantages, self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip(_Bounded):
    """PPO: the ratio, clipped to a trust region.

    l[n,t] = -min(rho[n,t] A[n,t], clip(rho[n,t], 1 - low, 1 + high) A[n,t])

    The gradient of a step is 0 once its ratio is past the bound that its advantage pushes it towards. If A < 0, the loss
    has no upper bound in rho. Two optional settings bound the loss: `delta` replaces the first rho by min(rho, delta), and
    `dual` bounds the loss by -dual A.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7; separate bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 8;
        delta: Prime Intellect 2025 (INTELLECT-2), arXiv:2505.07291; dual: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """

    zero_advantage_is_inert: ClassVar[bool] = True
    delta: float | None = setting(None, above=1.0)
    """Upper bound on the ratio where A < 0, above 1 + high. Smaller limits the push away from bad actions. None: no bound."""
    dual: float | None = setting(None, above=1.0)
    """Upper bound on the loss where A < 0, in units of -A. Smaller limits the push away from bad actions. None: no bound."""

    def __post_init__(self) -> None:
        """Check every value, and check that `delta` is outside the trust region."""
        Settings.__post_init__(self)
        if self.delta is not None and self.delta <= 1.0 + self.high:
            raise ConfigError(
                f"Clip.delta={self.delta} must be above 1 + high = {1.0 + self.high}: it bounds the ratios that clipping "
                "leaves unbounded."
            )

    def __call__(self, steps: Steps) -> Float[Tensor, "N #T"]:
        rho, A = steps.ratio(self.level), steps.advantages
        unclipped = rho if self.delta is None else rho.clamp(max=self.delta)  # binds where A < 0 only
        loss = -torch.minimum(unclipped * A, rho.clamp(1 - self.low, 1 + self.high) * A)
        return loss if self.dual is None else torch.where(A < 0, torch.minimum(loss, -self.dual * A), loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce(Settings):
    """REINFORCE: the policy gradient without an importance weight.

    l[n,t] = -A[n,t] log_probs[n,t]

    Source:
        Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning".
    """

    zero_advantage_is_inert: ClassVar[bool] = True

    def __call__(self, steps: Steps) -> Float[Tensor, "N T"]:
        return -steps.advantages * steps.log_probs


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo(_Bounded):
    """CISPO: REINFORCE with a clipped importance weight. Every step keeps a gradient.

    l[n,t] = -sg(clip(rho[n,t], 1 - low, 1 + high)) A[n,t] log_probs[n,t]

    Source:
        MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4 and 5.
    """

    zero_advantage_is_inert: ClassVar[bool] = True

    def __call__(self, steps: Steps) -> Float[Tensor, "N T"]:
        weight = steps.ratio(self.level).detach().clamp(1 - self.low, 1 + self.high)
        return -weight * steps.advantages * steps.log_probs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sapo(_AtLevel):
    """SAPO: a smooth gate in place of a hard clip.

    l[n,t] = -(4 / tau) sigmoid(tau (rho[n,t] - 1)) A[n,t],  tau = temperature_pos where A > 0, else temperature_neg

    Source:
        Gao et al. 2025 (SAPO), arXiv:2511.20347.
    """

    zero_advantage_is_inert: ClassVar[bool] = True
    temperature_pos: float = setting(1.0, above=0.0)
    """tau where A > 0. Larger closes the gate earlier, so the policy moves less far towards good actions."""
    temperature_neg: float = setting(1.05, above=0.0)
    """tau where A <= 0. Larger closes the gate earlier, so the policy moves less far away from bad actions."""

    def __call__(self, steps: Steps) -> Float[Tensor, "N #T"]:
        rho, A = steps.ratio(self.level), steps.advantages
        tau = either(A > 0, self.temperature_pos, self.temperature_neg, like=A)
        return -(4 / tau) * torch.sigmoid(tau * (rho - 1)) * A


@dataclass(frozen=True, slots=True, kw_only=True)
class Gmpo(Settings):
    """GMPO: the geometric mean of a row's clipped ratios, on which single outliers have little effect.

    l[n,t] = -A[n,t] exp(mean over steps s of c[n,s]),
      c = min(x, log(1 + high)) where A > 0, max(x, log(1 - low)) where A <= 0,  x = log_probs - old_log_probs

    Source:
        Zhao et al. 2025 (GMPO), arXiv:2507.20673.
    """

    zero_advantage_is_inert: ClassVar[bool] = True
    reads_rows: ClassVar[bool] = True
    low: float = setting(0.2, at_least=0.0, at_most=1.0)
    """How far below 1 each ratio may go; the paper's bound exp(-0.4) is `low=0.33`. Larger lets bad actions become rarer
    faster. 1: no bound."""
    high: float = setting(0.2, at_least=0.0)
    """How far above 1 each ratio may go; the paper's bound exp(0.4) is `high=0.49`. Larger lets good actions become more
    likely faster."""

    def __call__(self, steps: Steps) -> Float[Tensor, "N #T"]:
        x, A = steps.log_ratio("step"), steps.advantages
        lowest = math.log1p(-self.low) if self.low < 1 else -math.inf  # log 0
        c = torch.where(A > 0, x.clamp(max=math.log1p(self.high)), x.clamp(min=lowest))
        return -A * bounded_exp(mean_over_steps(zero_outside(c, steps.mask), steps.mask))

    def stopped(self, steps: Steps) -> tuple[Bool[Tensor, "N #T"], Bool[Tensor, "N #T"]]:
        """Steps whose ratio is past the bound that their advantage pushes it towards."""
        return past_bounds(steps.ratio("step"), steps.advantages, self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vespo(Settings):
    """VESPO: REINFORCE under a smooth kernel of the row's importance weight w, in place of a clip.

    l[n,t] = -sg(phi(w[n])) A[n,t] log_probs[n,t],  phi(w) = w^k exp(lambda (1 - w)), so that phi(1) = 1
    log w[n] = sum over steps of log_probs - old_log_probs, plus the log of the sampler's weights

    Source:
        Shen et al. 2026 (VESPO), arXiv:2602.10693.
    """

    zero_advantage_is_inert: ClassVar[bool] = True
    reads_rows: ClassVar[bool] = True
    uses_sampler_weights: ClassVar[bool] = True
    k_pos: float = setting(2.0, above=0.0)
    """k where A >= 0. Larger: less weight on rows that have become less likely."""
    lambda_pos: float = setting(3.0, at_least=1e-4)
    """lambda where A >= 0. Larger: less weight on rows that have become more likely."""
    k_neg: float = setting(3.0, above=0.0)
    """k where A < 0. Larger: less weight on rows that have become less likely."""
    lambda_neg: float = setting(2.0, at_least=1e-4)
    """lambda where A < 0. Larger: less weight on rows that have become more likely."""

    def __call__(self, steps: Steps) -> Float[Tensor, "N T"]:
        A, log_w = steps.advantages, self.log_weight(steps).detach()  # the kernel is a weight: no gradient through w
        k = either(A >= 0, self.k_pos, self.k_neg, like=A)
        lam = either(A >= 0, self.lambda_pos, self.lambda_neg, like=A)
        phi = (k * log_w + lam * (1 - log_w.exp())).exp()  # one exp, because w^k alone can overflow
        return -phi * A * steps.log_probs

    def log_weight(self, steps: Steps) -> Float[Tensor, "N 1"]:
        """log w of each row: the importance weight from the policy that sampled the row to the current policy."""
        log_w = steps.log_ratio("step").clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).sum(1, keepdim=True)
        if steps.sampler_weights is not None:
            log_u = steps.sampler_weights.log().clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
            if log_u.shape == steps.mask.shape:  # weights per step are added up; otherwise there is one weight per row
                log_u = zero_outside(log_u, steps.mask).sum(1, keepdim=True)
            log_w = log_w + log_u
        return log_w.clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dro(_AtLevel):
    """DRO per step: REINFORCE with a quadratic pull towards the old policy in place of an importance weight.

    l[n,t] = -A[n,t] log_probs[n,t] + beta / 2 (log rho[n,t])^2

    Source:
        Richemond et al. 2024 (DRO), arXiv:2405.19107, eq. 4, per step instead of per row, anchored to the old policy instead
        of a reference, and without its learned value.
    """

    beta: float = setting(0.05, at_least=0.0)
    """Weight of the pull towards the old policy. Larger: the policy moves less."""

    def __call__(self, steps: Steps) -> Float[Tensor, "N T"]:
        return -steps.advantages * steps.log_probs + self.beta / 2 * steps.log_ratio(self.level).square()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dppo(_AtLevel):
    """DPPO with binary total variation: a step leaves the loss when its *probability* has moved too far, not its ratio.

    l[n,t] = -m[n,t] rho[n,t] A[n,t],  m = 0 where pi - mu > limit and A > 0, and where mu - pi > limit and A < 0, else 1

    mu is the probability with which the step was sampled. DPPO is for probabilities only: a density may be above 1, and a
    difference of densities is not a distance. The ratio in the paper is pi / mu: if another distribution than the policy
    samples, set `sampler_correction`.

    Source:
        Qi et al. 2026 (DPPO), arXiv:2602.04879, eq. 12 and 13.
    """

    zero_advantage_is_inert: ClassVar[bool] = True
    for_probabilities: ClassVar[bool] = True
    tv_limit: float = setting(0.2, above=0.0, at_most=1.0)
    """How far the probability of a step may move. Larger allows larger changes."""

    def __call__(self, steps: Steps) -> Float[Tensor, "N #T"]:
        low, high = self.stopped(steps)
        return torch.where(low | high, 0.0, -steps.ratio(self.level) * steps.advantages)

    def stopped(self, steps: Steps) -> tuple[Bool[Tensor, "N T"], Bool[Tensor, "N T"]]:
        """Steps whose probability has moved past the limit that their advantage pushes it towards."""
        moved = steps.log_probs.detach().exp() - steps.sampled_log_probs.exp()  # a mask has no gradient
        return (steps.advantages < 0) & (moved < -self.tv_limit), (steps.advantages > 0) & (moved > self.tv_limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCov(_AtLevel):
    """KL-Cov: no clip, but a pull towards the old policy on the few steps that would lower the entropy most.

    l[n,t] = -rho[n,t] A[n,t] + coef |log rho[n,t]| for the selected steps, -rho[n,t] A[n,t] for the others

    The selected steps have the largest covariance between log pi and A.

    Source:
        Cui et al. 2025, arXiv:2505.22617.
    """

    fraction: float = setting(2e-4, above=0.0, at_most=1.0)
    """Fraction of the steps that are pulled back. Larger keeps more entropy and learns more slowly."""
    coef: float = setting(1.0, at_least=0.0)
    """Weight of the pull on the selected steps. Larger: the selected steps move less."""

    def __call__(self, steps: Steps) -> Float[Tensor, "N T"]:
        # a log-ratio that is only rounding has a sign, too, and would push; so it counts as 0
        moved = torch.where(steps.require_selected(), hardshrink(steps.log_ratio(self.level), ROUNDING), 0.0)
        return -steps.ratio(self.level) * steps.advantages + self.coef * moved.abs()

    def select(self, log_probs: Tensor, advantages: Tensor, generator: torch.Generator | None) -> Bool[Tensor, " S"]:
        """Select the steps with the largest covariance between log_probs [S] and advantages [S]."""
        return largest_covariances(covariances(log_probs, advantages), self.fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCov(_Bounded):
    """Clip-Cov: PPO's clip, with a few randomly drawn steps of high covariance left out of the loss.

    l[n,t] = 0 for the selected steps, PPO's clipped loss for the others

    The selected steps are drawn at random among the steps with cov_low < covariance of log pi and A < cov_high.

    Source:
        Cui et al. 2025, arXiv:2505.22617.
    """

    zero_advantage_is_inert: ClassVar[bool] = True
    fraction: float = setting(2e-4, above=0.0, at_most=1.0)
    """Fraction of the steps that are left out. Larger keeps more entropy and learns more slowly."""
    cov_low: float = 1.0
    """Lower bound on the covariance of the drawn steps. Larger: fewer steps can be drawn."""
    cov_high: float = 5.0
    """Upper bound on the covariance of the drawn steps. Larger: more steps can be drawn."""

    def __post_init__(self) -> None:
        """Check every value, and check that `cov_low` is at most `cov_high`."""
        Settings.__post_init__(self)
        require_order("ClipCov.cov_low", self.cov_low, "cov_high", self.cov_high)

    def __call__(self, steps: Steps) -> Float[Tensor, "N T"]:
        rho, A = steps.ratio(self.level), steps.advantages
        clipped = -torch.minimum(rho * A, rho.clamp(1 - self.low, 1 + self.high) * A)
        return torch.where(steps.require_selected(), 0.0, clipped)

    def select(self, log_probs: Tensor, advantages: Tensor, generator: torch.Generator | None) -> Bool[Tensor, " S"]:
        """Draw steps at random among the steps with a covariance between the two bounds. log_probs and advantages are [S]."""
        c = covariances(log_probs, advantages)
        return drawn_covariances(c, self.fraction, low=self.cov_low, high=self.cov_high, generator=generator)


SURROGATES: dict[str, type[Settings]] = {
    "clip": Clip, "reinforce": Reinforce, "cispo": Cispo, "sapo": Sapo, "gmpo": Gmpo, "vespo": Vespo, "dro": Dro,
    "dppo": Dppo, "kl_cov": KlCov, "clip_cov": ClipCov,
}  # fmt: skip
"""Maps the name of a surrogate in the settings to its class. A name means the class with its defaults."""

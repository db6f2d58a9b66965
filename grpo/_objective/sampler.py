"""Corrections for a sampler that differs from the policy: another engine, another precision, truncation, older weights."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo._common.settings import Settings, setting
from grpo._common.tensors import require_finite_values, require_tensors
from grpo.errors import ConfigError, ContractError

from .ratios import bounded_exp, mean_over_steps

SamplerRatioLevel = Literal["step", "row"]


@runtime_checkable
class SamplerCorrection(Protocol):
    """Importance weights from the sampler to the policy before this iteration's updates.

    The surrogate is multiplied by them, and the score-function estimate of the entropy.

    u = exp(old_log_probs - behaviour_log_probs), so that E_behaviour[u f] = E_old[f]: with unbounded weights the
    expected gradient is the same as with actions that the policy itself sampled.
    """

    def __call__(
        self, old_log_probs: Float[Tensor, "N T"], behaviour_log_probs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]
    ) -> Float[Tensor, "N #T"]:
        """Return one weight per step, or one per row, without gradient. A step with a NaN behaviour log-prob has weight 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds(Settings):
    """Base of the sampler corrections with a lower and an upper bound on the importance weight."""

    low: float | None = setting(None, at_least=0.0)
    """Smallest weight. Larger: more small weights are raised (`Truncate`) or left out (`Mask`). None: no bound."""
    high: float | None = setting(3.0, above=0.0)
    """Largest weight. Larger corrects more, and gives single steps more weight. None: no bound."""
    level: SamplerRatioLevel = "step"
    """`step`: one weight per step, which has a bias and low variance. `row`: one weight per row, the product over its steps. It
    has no bias if there are no bounds, and higher variance."""

    def __post_init__(self) -> None:
        """Check every value, and check that `low` is at most `high`."""
        Settings.__post_init__(self)
        require_order(f"{type(self).__name__}.low", self.low, "high", self.high)

    def ratio(
        self, old_log_probs: Float[Tensor, "N T"], behaviour_log_probs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]
    ) -> Float[Tensor, "N #T"]:
        """u[n,t], or the product of u over the steps of each row. Steps outside the mask, and steps not scored, have u = 1."""
        given = {"old_log_probs": old_log_probs, "behaviour_log_probs": behaviour_log_probs, "mask": mask}
        require_tensors(_Bounds.ratio, **given)
        log_ratio = _scored_log_ratio(old_log_probs, behaviour_log_probs, mask)
        return bounded_exp(log_ratio if self.level == "step" else log_ratio.sum(1, keepdim=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate(_Bounds):
    """Truncated importance sampling: u clipped to [low, high]. The clip bounds the variance and adds a bias.

    Example:
        >>> old, behaviour = torch.tensor([[0.8, 0.1]]).log(), torch.tensor([[0.2, 0.2]]).log()
        >>> Truncate(high=3.0)(old, behaviour, torch.ones(1, 2, dtype=torch.bool)).round(decimals=2).tolist()
        [[3.0, 0.5]]

    Source:
        Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; truncation: Ionides 2008.
    """

    def __call__(
        self, old_log_probs: Float[Tensor, "N T"], behaviour_log_probs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]
    ) -> Float[Tensor, "N #T"]:
        """Return the importance weights u, clipped to the bounds."""
        u = self.ratio(old_log_probs, behaviour_log_probs, mask)
        return u if self.low is None and self.high is None else u.clamp(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask(_Bounds):
    """Masked importance sampling: u where low <= u <= high, else 0. Steps (or rows) outside the bounds are left out.

    IcePop (arXiv:2510.18855) is `Mask(low=0.5, high=5.0)`.

    Example:
        >>> old, behaviour = torch.tensor([[0.8, 0.1]]).log(), torch.tensor([[0.2, 0.2]]).log()
        >>> Mask(high=3.0)(old, behaviour, torch.ones(1, 2, dtype=torch.bool)).round(decimals=2).tolist()
        [[0.0, 0.5]]

    Source:
        Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """

    def __call__(
        self, old_log_probs: Float[Tensor, "N T"], behaviour_log_probs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]
    ) -> Float[Tensor, "N #T"]:
        """Return the importance weights u, set to 0 where u is outside the bounds."""
        u = self.ratio(old_log_probs, behaviour_log_probs, mask)
        too_low = u < (-math.inf if self.low is None else self.low)
        return torch.where(too_low | (u > (math.inf if self.high is None else self.high)), 0.0, u)


@dataclass(frozen=True, slots=True, kw_only=True)
class KPop(Settings):
    """u where the step's probability has changed little in both directions, else 0. The bound on u follows the probability.

        D(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)),   p = exp(old_log_probs), q = exp(behaviour_log_probs)
        weight = u if D(p, q) <= threshold and D(q, p) <= threshold, else 0

    D is the KL between "this action" and "any other action" under policy and sampler. A fixed bound on u treats all actions
    alike; D bounds u narrowly for likely actions, and widely for rare ones, whose probability is noisy and matters little.
    Probabilities are kept in [1e-6, 1 - 1e-6], so that both KLs are finite.

    Example:
        >>> old, behaviour = torch.tensor([[0.9, 0.01]]).log(), torch.tensor([[0.6, 0.002]]).log()
        >>> KPop()(old, behaviour, torch.ones(1, 2, dtype=torch.bool)).round(decimals=2).tolist()  # D(.9, .6) = .226
        [[0.0, 5.0]]

    Source:
        Guo et al. 2026, "Taming training-inference mismatch in reinforcement learning with adaptive masking regions",
        https://ringtech.notion.site/kpop; with the importance weight of prime-rl, pull request 3283.
    """

    threshold: float = setting(0.1, above=0.0)
    """Largest divergence in nats, in both directions. Larger: fewer steps are left out."""

    def __call__(
        self, old_log_probs: Float[Tensor, "N T"], behaviour_log_probs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]
    ) -> Float[Tensor, "N T"]:
        """Return the importance weights u, set to 0 where a divergence exceeds the threshold.

        Raises:
            ContractError: A log-prob is above 0, as only those of densities are. Found on the CPU only.
        """
        given = {"old_log_probs": old_log_probs, "behaviour_log_probs": behaviour_log_probs, "mask": mask}
        require_tensors(KPop.__call__, **given)
        log_ratio = _scored_log_ratio(old_log_probs, behaviour_log_probs, mask)
        scored = mask & ~behaviour_log_probs.isnan()
        log_q = torch.where(scored, behaviour_log_probs, 0.0)
        log_p = log_q + log_ratio  # equal where the step is not scored
        if log_p.device.type == "cpu" and not torch.compiler.is_compiling():
            largest = torch.maximum(log_p, log_q).amax().item() if log_p.numel() else 0.0
            if largest > 1e-5:
                raise ContractError(
                    f"KPop needs log-probs of probabilities, at most 0; got {largest:.3g}, which only a density can have. Use "
                    "Truncate or Mask with continuous actions."
                )
        p, q = (values.exp().clamp(1e-6, 1 - 1e-6) for values in (log_p, log_q))
        is_near = torch.maximum(_binary_kl(p, q), _binary_kl(q, p)) <= self.threshold
        return torch.where(is_near, bounded_exp(log_ratio), 0.0)


def _binary_kl(p: Float[Tensor, "N T"], q: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def _scored_log_ratio(
    old_log_probs: Float[Tensor, "N T"], behaviour_log_probs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]
) -> Float[Tensor, "N T"]:
    """log u of each step, without gradient. 0 for steps outside the mask, and for steps that were not scored."""
    scored = mask & ~behaviour_log_probs.isnan()
    log_ratio = torch.where(scored, old_log_probs.detach() - behaviour_log_probs, 0.0)
    if log_ratio.device.type == "cpu" and not torch.compiler.is_compiling():  # other devices would have to wait
        require_finite_values("old_log_probs and behaviour_log_probs of sampled steps", log_ratio)
    return log_ratio


def require_order(low_name: str, low: float | None, high_name: str, high: float | None) -> None:
    """Check that a lower bound does not exceed its upper bound. None means that there is no bound."""
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{low_name}={low} must not exceed {high_name}={high}.")


def sampler_divergence(
    old_log_probs: Float[Tensor, "N T"], behaviour_log_probs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]
) -> tuple[Float[Tensor, "N T"], Bool[Tensor, "N T"]]:
    """The divergence of the policy from its sampler: KL(behaviour || old) is the mean of D over the scored steps.

    D[n,t] = behaviour_log_probs[n,t] - old_log_probs[n,t]

    Rounding changes the mean in second order only. Truncated sampling that keeps the fraction m of the policy's probability
    gives -log m.

    Args:
        old_log_probs: Before this iteration's updates; no gradient is taken through it.
        behaviour_log_probs: Under the distribution that sampled the steps. NaN: not scored, and not counted.
        mask: The valid steps.

    Returns:
        D, and the mask of the scored steps.
    """
    return behaviour_log_probs - old_log_probs.detach(), mask & ~behaviour_log_probs.isnan()


def near_policy_rows(
    log_probs: Float[Tensor, "N T"],
    sampled_log_probs: Float[Tensor, "N T"],
    advantages: Float[Tensor, "N #T"],
    mask: Bool[Tensor, "N T"],
    threshold: float,
) -> Bool[Tensor, "N #T"]:
    """Mask of the steps to learn from. Steps with A < 0 are left out if their row has become too unlikely since sampling.

    m[n,t] = A[n,t] >= 0 or mean over steps of (sampled_log_probs - log_probs) <= threshold

    A bad row that the policy has already moved away from is no longer a typical sample of the policy, and its gradient pushes
    the policy further away.

    Args:
        log_probs: The current log-probs; no gradient is taken through them.
        sampled_log_probs: The log-probs the steps were sampled with; NaN: not scored, no difference.
        advantages: A, per row or per step.
        mask: The valid steps.
        threshold: Larger keeps rows that are further from their sampler.

    Source:
        DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, sec. 3.1, eq. 9.
    """
    known = mask & ~sampled_log_probs.isnan()
    distance = torch.where(known, sampled_log_probs - log_probs.detach(), 0.0)
    return (advantages >= 0) | (mean_over_steps(distance, mask) <= threshold)

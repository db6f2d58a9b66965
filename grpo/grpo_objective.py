"""The loss: surrogate + KL - entropy, each summed with a weights tensor that holds the normalisation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .divergence import MAX_LOG_RATIO, KLEstimator, estimate_kl, score_function_entropy
from .errors import ConfigError
from .metrics import moments
from .off_policy import SamplerCorrection, sampler_weights
from .settings import Settings, setting
from .surrogates import clipped_surrogate
from .types import ObjectiveInputs, ObjectiveOutput

Aggregation = Literal["row_mean", "step_mean", "fixed_length", "row_sum", "group_mean"]

DEFAULT_KL_COEF = 0.04
"""Used when a reference policy is passed and no coefficient is set (DeepSeekMath, arXiv:2402.03300, sec. 4.2)."""

Objective = Callable[[ObjectiveInputs], ObjectiveOutput]
"""The extension point: any such callable can stand in for `grpo_objective`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig(Settings):
    """What is minimised."""

    clip_low: float = setting(0.2, at_least=0.0, at_most=1.0)
    """How far below 1 the ratio may go before the gradient stops. Larger: bad actions are dropped faster. 1: no bound."""
    clip_high: float = setting(0.2, at_least=0.0)
    """How far above 1 the ratio may go before the gradient stops. Larger: good actions are taken up faster."""
    kl_coef: float | None = setting(None, at_least=0.0)
    """Weight of the divergence from the reference. Larger stays closer to it. None: 0.04 if a reference policy is passed,
    else 0."""
    kl_estimator: KLEstimator = "k3"
    """How the divergence is estimated from the sampled step; see `grpo.divergence`, above all the gradient notes."""
    entropy_coef: float = setting(0.0, at_least=0.0)
    """Weight of the entropy bonus. Larger keeps the policy more random. Entropies are per step: a policy that returns the
    log-prob of several decisions as one, [N], has one larger entropy where [N, T] has T smaller ones."""
    entropy_estimator: Literal["exact", "score_function"] = "exact"
    """`exact` needs a policy that gives it (`ActionScores.entropy`); `score_function` works for every policy, with noise."""
    entropy_aggregation: Aggregation | None = None
    """How the entropy term is aggregated. None: as `aggregation`."""
    aggregation: Aggregation = "row_mean"
    """How per-step losses become one number; read by the trainer, which turns it into weights (see `step_weights`)."""
    fixed_length: int | None = setting(None, at_least=1)
    """L of `fixed_length`: the same divisor for every row, whatever its length."""
    sampler_correction: SamplerCorrection = "none"
    """What is done about actions that another distribution sampled (`behaviour_log_probs`): nothing, or their surrogate is
    weighed by the ratio to the policy's own probability, bounded (`truncate`) or left out beyond the bounds (`mask`)."""
    sampler_ratio_low: float | None = setting(None, at_least=0.0)
    """Smallest such weight. None: no bound."""
    sampler_ratio_high: float | None = setting(3.0, above=0.0)
    """Largest such weight. Larger corrects more, and lets single steps weigh more. None: no bound."""

    def __post_init__(self) -> None:
        """Check every value, and that a length is given exactly where it is read."""
        Settings.__post_init__(self)
        uses_length = "fixed_length" in (self.aggregation, self.entropy_aggregation)
        if uses_length != (self.fixed_length is not None):
            raise ConfigError(
                f"ObjectiveConfig.fixed_length={self.fixed_length} with aggregation={self.aggregation!r}: "
                "set a length exactly when an aggregation is 'fixed_length'."
            )
        low, high = self.sampler_ratio_low, self.sampler_ratio_high
        if low is not None and high is not None and low > high:
            raise ConfigError(f"ObjectiveConfig.sampler_ratio_low={low} must not exceed sampler_ratio_high={high}.")


def step_weights(
    mask: Bool[Tensor, "N T"],
    aggregation: Aggregation,
    *,
    fixed_length: int | None = None,
    group_ids: Int[Tensor, " N"] | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "N T"]:
    """The weight of each step in the loss sum(l * w): every normaliser of the GRPO family is a choice of these.

      row_mean      mask / (len_n N)            each row counts the same (GRPO, arXiv:2402.03300)
      step_mean     mask / sum(mask)            each step counts the same (DAPO, arXiv:2503.14476)
      fixed_length  mask / (N L)                no length bias (Dr. GRPO, arXiv:2503.20783)
      row_sum       mask / N                    the sum over a row is its loss (RLOO, arXiv:2402.14740)
      group_mean    mask / (len_group B)        each group counts the same, and its steps alike

    N counts rows without a valid step too. Computed once per update from the whole update's mask, so that micro-batches
    and ranks add up exactly.

    Args:
        mask: the valid steps of the whole update.
        aggregation: see above.
        fixed_length: L, for `fixed_length`.
        group_ids: for `group_mean`; a group's rows must be on one rank.
        reduce: sums a count tensor over ranks; None: there is one.

    Returns:
        Weights in float64, 0 off the mask.

    Raises:
        ConfigError: a length or group ids are missing.

    Example:
        >>> step_weights(torch.tensor([[True, True], [True, False]]), "row_mean").tolist()
        [[0.25, 0.25], [0.5, 0.0]]
    """
    lengths = mask.sum(1, keepdim=True).double()

    def total(count: int | Tensor) -> Tensor:
        local = torch.as_tensor(count, dtype=torch.float64, device=mask.device)
        return local if reduce is None else reduce(local)

    num_rows = mask.shape[0]
    divisors: Tensor
    match aggregation:
        case "row_mean":
            divisors = lengths * total(num_rows)
        case "step_mean":
            divisors = total(lengths.sum())
        case "fixed_length":
            if fixed_length is None:
                raise ConfigError("step_weights: aggregation='fixed_length' needs fixed_length=L, the common divisor.")
            divisors = total(num_rows) * fixed_length
        case "row_sum":
            divisors = total(num_rows)
        case "group_mean":
            if group_ids is None:
                raise ConfigError("step_weights: aggregation='group_mean' needs group_ids.")
            names, groups = group_ids.to(mask.device).unique(return_inverse=True)
            num_groups = len(names)
            steps = lengths.new_zeros(num_groups, 1).index_add_(0, groups, lengths)
            divisors = steps[groups] * total(num_groups)
        case _:
            assert_never(aggregation)
    return torch.where(mask, 1.0 / divisors, 0.0)


def grpo_objective(inputs: ObjectiveInputs, config: ObjectiveConfig) -> ObjectiveOutput:
    """The GRPO loss of one micro-batch.

    L = sum_{n,t} w[n,t] (l[n,t] + kl_coef d[n,t]) - entropy_coef sum_{n,t} w_H[n,t] H[n,t]

    with l the surrogate on rho = exp(log_probs - old_log_probs), d the estimate of the divergence from the reference, and
    H the entropy; `sampler_correction` weighs l alone. Without `old_log_probs` rho is exactly 1 and its gradient that of
    log_probs (REINFORCE).

    Args:
        inputs: see `ObjectiveInputs`; half precision is raised to float32.
        config: `aggregation` and `fixed_length` are not read here: they are in `inputs.weights`.

    Returns:
        The loss, and moments of `total_loss`, `policy_loss`, `kl_penalty`, `entropy_bonus` (shares that add up:
        total = policy + kl - entropy), `ratio`, `clip_fraction`, `clip_fraction_low`, `clip_fraction_high`,
        `ratio_clamped_fraction`, `entropy` (sampled where it is not known), with a reference `kl`, and
        with a correction `sampler_ratio`.

    Raises:
        ConfigError: a KL term without reference log-probs, an exact entropy bonus without an entropy, or a correction without
            behaviour log-probs.

    Source:
        Shao et al. 2024, arXiv:2402.03300, eq. 3.
    """
    mask = inputs.mask
    log_probs = _on_mask(inputs.log_probs, mask)
    weights = inputs.weights.to(log_probs.dtype)
    advantages = inputs.advantages if inputs.advantages.dim() == 2 else inputs.advantages.unsqueeze(1)
    advantages = torch.where(mask, advantages.to(log_probs.dtype), 0.0)

    spread: dict[str, Tensor] = {}
    log_ratio: Tensor | None = None
    if inputs.old_log_probs is None:  # the ratio is 1, and no bound is reached
        ratio = (log_probs - log_probs.detach()).exp()
        surrogate = ratio * -advantages
    else:
        log_ratio = log_probs - _on_mask(inputs.old_log_probs, mask)
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        surrogate = clipped_surrogate(ratio, advantages, clip_low=config.clip_low, clip_high=config.clip_high)
    if config.sampler_correction != "none":
        correction = _sampler_correction(inputs, config, log_probs)
        surrogate = surrogate * correction
        spread["sampler_ratio"] = torch.where(mask, correction, 0.0)
    policy_loss = (surrogate * weights).sum()
    shares = {"policy_loss": policy_loss}
    loss = policy_loss

    if inputs.ref_log_probs is not None:
        x = log_probs - _on_mask(inputs.ref_log_probs, mask)
        kl = estimate_kl(config.kl_estimator, x, ratio)
        shares["kl_penalty"] = _kl_coef(inputs, config) * (kl * weights).sum()
        loss = loss + shares["kl_penalty"]
        spread["kl"] = kl
    elif _kl_coef(inputs, config) > 0:
        raise ConfigError(
            f"objective.kl_coef={_kl_coef(inputs, config)} needs a reference. Pass reference_policy=..., or set kl_coef=0."
        )

    entropy = _entropy(inputs, config, log_probs, ratio)
    spread["entropy"] = entropy
    if config.entropy_coef > 0:
        entropy_weights = weights if inputs.entropy_weights is None else inputs.entropy_weights.to(log_probs.dtype)
        shares["entropy_bonus"] = config.entropy_coef * (entropy * entropy_weights).sum()
        loss = loss - shares["entropy_bonus"]

    with torch.no_grad():
        metrics = _metrics({**shares, "total_loss": loss}, spread, log_ratio, advantages, mask, config)
    return ObjectiveOutput(loss=loss, metrics=metrics)


def _sampler_correction(inputs: ObjectiveInputs, config: ObjectiveConfig, log_probs: Tensor) -> Tensor:
    if inputs.behaviour_log_probs is None:
        raise ConfigError(
            f"objective.sampler_correction={config.sampler_correction!r} needs behaviour_log_probs. Return them in "
            "SampledActions, pass them to ExperienceBatch.from_rows, or set sampler_correction='none'."
        )
    return sampler_weights(
        log_probs if inputs.old_log_probs is None else inputs.old_log_probs.to(log_probs.dtype),
        inputs.behaviour_log_probs.to(log_probs.dtype),
        inputs.mask,
        correction=config.sampler_correction,
        low=config.sampler_ratio_low,
        high=config.sampler_ratio_high,
    )


def _kl_coef(inputs: ObjectiveInputs, config: ObjectiveConfig) -> float:
    if inputs.kl_coef is not None:
        return inputs.kl_coef
    if config.kl_coef is not None:
        return config.kl_coef
    return DEFAULT_KL_COEF if inputs.ref_log_probs is not None else 0.0


def _entropy(inputs: ObjectiveInputs, config: ObjectiveConfig, log_probs: Tensor, ratio: Tensor) -> Tensor:
    """The entropy per step: exact where that is wanted and known, else the estimate, which without a bonus is a metric only."""
    match config.entropy_estimator:
        case "exact":
            if inputs.entropy is not None:
                return _on_mask(inputs.entropy, inputs.mask)
            if config.entropy_coef > 0:
                raise ConfigError(
                    f"objective.entropy_coef={config.entropy_coef} needs an exact entropy, and the policy gives none. "
                    "Return it in ActionScores.entropy, or set entropy_estimator='score_function'."
                )
            return (
                -log_probs.detach()
                if inputs.old_log_probs is None
                else score_function_entropy(log_probs, ratio).detach()
            )
        case "score_function":
            return score_function_entropy(log_probs, ratio)
        case _:
            assert_never(config.entropy_estimator)


def _on_mask(values: Tensor, mask: Bool[Tensor, "N T"]) -> Tensor:
    """Values with 0 off the mask, in float32 or better: what is off the mask (NaN, say) reaches no gradient."""
    clean = torch.where(mask, values, 0.0)
    return clean.float() if clean.element_size() < 4 else clean


def _metrics(
    shares: dict[str, Tensor],
    spread: dict[str, Tensor],
    log_ratio: Tensor | None,
    advantages: Tensor,
    mask: Bool[Tensor, "N T"],
    config: ObjectiveConfig,
) -> dict[str, Float[Tensor, "3"]]:
    """All metrics as rows (count, sum, sum of squares) of one float64 tensor: one transfer when they are read.

    Off the mask, every value is 0 already.

    Args:
        shares: terms of the loss.
        spread: [N, T] values that are averaged.
        log_ratio: None where it is 0 by construction: then nothing is clipped, and nothing need be counted.
        advantages: decide which bound counts.
        mask: the valid steps.
        config: the bounds.
    """
    count = mask.sum(dtype=torch.float64)
    zero = torch.zeros_like(count)
    cells = {name: (zero, share.detach().double(), zero) for name, share in shares.items()}
    cells |= {name: (count, *moments(values.detach())) for name, values in spread.items()}
    if log_ratio is not None:
        ratio = torch.where(mask, log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0.0)
        cells["ratio"] = (count, *moments(ratio))
        too_low = ((ratio < 1.0 - config.clip_low) & (advantages < 0)).sum(dtype=torch.float64)
        too_high = ((ratio > 1.0 + config.clip_high) & (advantages > 0)).sum(dtype=torch.float64)
        clamped = (log_ratio.abs() > MAX_LOG_RATIO).sum(dtype=torch.float64)
        for name, total in zip(CLIP_METRICS, (too_low, too_high, too_low + too_high, clamped), strict=True):
            cells[name] = (count, total, total)
    rows = torch.stack([cell for row in cells.values() for cell in row]).view(-1, 3).unbind(0)
    metrics = dict(zip(cells, rows, strict=True))
    if log_ratio is None:
        metrics["ratio"] = count.expand(3)
        metrics |= dict.fromkeys(CLIP_METRICS, torch.stack([count, zero, zero]))
    return metrics


CLIP_METRICS = ("clip_fraction_low", "clip_fraction_high", "clip_fraction", "ratio_clamped_fraction")
"""Fractions of steps whose ratio is past a bound its advantage pushes towards, and past what `exp` is given."""

"""Which steps of an update carry the policy's gradient: choices that need to see every row at once.

They are made once per update, from what was stored when the rows were collected, so that micro-batches and ranks agree.
The functions take the valid steps of the whole update, one after the other, [S].
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .errors import ConfigError
from .objective_config import ObjectiveConfig

Gather = Callable[[Tensor], tuple[Tensor, int]]
"""The values of all ranks, one after the other, and where this rank's begin."""


def select_steps(
    config: ObjectiveConfig,
    *,
    mask: Bool[Tensor, "N T"],
    log_probs: Float[Tensor, "N T"],
    advantages: Float[Tensor, " N"] | Float[Tensor, "N T"],
    entropy: Float[Tensor, "N T"] | None,
    generator: torch.Generator | None = None,
    gather: Gather | None = None,
) -> tuple[Bool[Tensor, "N T"] | None, Bool[Tensor, "N T"] | None]:
    """The steps whose surrogate counts, and those that KL-Cov pulls back; None: no such choice is configured.

    Args:
        config: `top_entropy_fraction`, and the surrogates `clip_cov` and `kl_cov`.
        mask: the valid steps of the update.
        log_probs: as they were at collection.
        advantages: how much better than its baseline.
        entropy: exact, as it was at collection.
        generator: of the random choice in `clip_cov`; the same on every rank.
        gather: brings the ranks' values together; None: there is one.

    Raises:
        ConfigError: top-entropy steps without an entropy.
    """

    def whole(choose: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """The choice among all ranks' steps, and of it what is here, [N, T]."""
        own = values[mask]
        everything, start = (own, 0) if gather is None else gather(own)
        chosen = torch.zeros_like(mask)
        chosen[mask] = choose(everything)[start : start + len(own)]
        return chosen

    keep: Tensor | None = None
    penalised: Tensor | None = None
    if config.top_entropy_fraction < 1.0:
        if entropy is None:
            raise ConfigError(
                f"objective.top_entropy_fraction={config.top_entropy_fraction} needs an exact entropy, and the policy gives "
                "none. Return it in ActionScores.entropy (some policies do on request: exact_entropy=True), or set "
                "top_entropy_fraction=1."
            )
        keep = whole(lambda all_steps: top_entropy_steps(all_steps, config.top_entropy_fraction), entropy)
    if config.surrogate in ("clip_cov", "kl_cov"):
        log_probs = log_probs.float() if log_probs.element_size() < 4 else log_probs
        per_step = advantages.to(log_probs) if advantages.dim() == 2 else advantages.to(log_probs).unsqueeze(1)
        pairs = torch.stack([log_probs, per_step.expand_as(log_probs)], dim=-1)
        if config.surrogate == "kl_cov":
            penalised = whole(
                lambda both: largest_covariances(covariances(*both.unbind(-1)), config.cov_fraction), pairs
            )
        else:
            held_back = whole(
                lambda both: drawn_covariances(
                    covariances(*both.unbind(-1)),
                    config.cov_fraction,
                    low=config.cov_low,
                    high=config.cov_high,
                    generator=generator,
                ),
                pairs,
            )
            keep = ~held_back if keep is None else keep & ~held_back
    return keep, penalised


def top_entropy_steps(entropy: Float[Tensor, " S"], fraction: float) -> Bool[Tensor, " S"]:
    """The steps whose entropy is at least the (1 - fraction) quantile; ties are kept.

    Args:
        entropy: exact, of every valid step of the update.
        fraction: of the steps that stay, in (0, 1]; 0.2 keeps the top fifth. Smaller learns from the most open decisions only.

    Example:
        >>> top_entropy_steps(torch.tensor([0.1, 0.5, 0.2, 0.9, 0.0]), 0.4).tolist()
        [False, True, False, True, False]

    Source:
        Wang et al. 2025, arXiv:2506.01939.
    """
    if not len(entropy):
        return torch.ones_like(entropy, dtype=torch.bool)
    ordered = entropy.sort().values  # torch.quantile takes no more than 16 million values
    place = round((1.0 - fraction) * (len(ordered) - 1), 9)  # 0.3 x 10 is 3, not a little more
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return entropy >= torch.lerp(ordered[below], ordered[above], place - below)


def covariances(log_probs: Float[Tensor, " S"], advantages: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
    """Each step's share in Cov(log pi, A), which is the rate at which a policy gradient lowers the entropy.

    c[s] = (log_probs[s] - mean log_probs) (A[s] - mean A)

    Source:
        Cui et al. 2025, arXiv:2505.22617.
    """
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


def largest_covariances(covariance: Float[Tensor, " S"], fraction: float) -> Bool[Tensor, " S"]:
    """KL-Cov: the given fraction of the steps, those of largest covariance; at least one.

    Source:
        Cui et al. 2025, arXiv:2505.22617.
    """
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    if len(covariance):
        chosen[covariance.topk(max(int(fraction * len(covariance)), 1)).indices] = True
    return chosen


def drawn_covariances(
    covariance: Float[Tensor, " S"],
    fraction: float,
    *,
    low: float,
    high: float,
    generator: torch.Generator | None = None,
) -> Bool[Tensor, " S"]:
    """Clip-Cov: the given fraction of the steps, drawn at random among those with low < covariance < high.

    At least one is drawn where there is one.

    Source:
        Cui et al. 2025, arXiv:2505.22617.
    """
    candidates = ((covariance > low) & (covariance < high)).nonzero().squeeze(1)
    count = max(int(fraction * len(covariance)), 1)
    drawn = torch.randperm(len(candidates), generator=generator)[:count].to(candidates.device)
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    chosen[candidates[drawn]] = True
    return chosen

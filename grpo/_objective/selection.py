"""Select the steps that the surrogate counts, or pulls back. A selection looks at all rows of an update at once.

The trainer selects once per update over all ranks, from values stored at collection, so that micro-batches and ranks agree. The
functions take the S valid steps of the whole update as a vector [S].
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo._common.conversion import as_float32
from grpo.errors import ConfigError

Gather: TypeAlias = Callable[[Tensor], tuple[Tensor, int]]
"""Returns the values of all ranks in rank order, and the index of this rank's first value."""

Select: TypeAlias = Callable[[Tensor, Tensor, torch.Generator | None], Tensor]
"""A surrogate's `select`: log_probs [S], advantages [S], generator -> bool [S]."""


def choose_steps(
    mask: Bool[Tensor, "N T"], choose: Callable[[Tensor], Tensor], values: Tensor, gather: Gather | None
) -> Bool[Tensor, "N T"]:
    """Choose among the valid steps of all ranks, and return the chosen steps of this rank.

    Args:
        mask: The valid steps of this rank.
        choose: Maps the values [S] (or [S, 2]) of all ranks to a bool [S].
        values: The values to choose by, [N, T] (or [N, T, 2]).
        gather: Brings the ranks' values together. None: there is one rank.
    """
    own = values[mask]
    everything, start = (own, 0) if gather is None else gather(own)
    chosen = torch.zeros_like(mask)
    chosen[mask] = choose(everything)[start : start + len(own)]
    return chosen


def kept_by_entropy(
    mask: Bool[Tensor, "N T"], entropy: Float[Tensor, "N T"] | None, fraction: float, gather: Gather | None = None
) -> Bool[Tensor, "N T"] | None:
    """The steps with the highest entropy among the update's steps. None: the fraction is 1, so all steps count."""
    if fraction >= 1.0:
        return None
    if entropy is None:
        raise ConfigError(
            f"objective.top_entropy_fraction={fraction} needs an exact entropy, and the policy gives none. Return it in "
            "ActionScores.entropy (some policies do on request: exact_entropy=True), or set top_entropy_fraction=1."
        )
    return choose_steps(mask, lambda steps: top_entropy_steps(steps, fraction), entropy.detach(), gather)


def selected_by(
    select: Select | None,
    mask: Bool[Tensor, "N T"],
    log_probs: Float[Tensor, "N T"],
    advantages: Float[Tensor, " N"] | Float[Tensor, "N T"],
    generator: torch.Generator | None = None,
    gather: Gather | None = None,
) -> Bool[Tensor, "N T"] | None:
    """The steps that a surrogate's own `select` chooses among the update's steps. None: it has no `select`."""
    if select is None:
        return None
    log_probs = as_float32(log_probs.detach())
    per_step = (advantages if advantages.dim() == 2 else advantages.unsqueeze(1)).to(log_probs).expand_as(log_probs)
    pairs = torch.stack([log_probs, per_step], dim=-1)
    return choose_steps(mask, lambda both: select(both[:, 0], both[:, 1], generator), pairs, gather)


def top_entropy_steps(entropy: Float[Tensor, " S"], fraction: float) -> Bool[Tensor, " S"]:
    """The steps whose entropy is at least the (1 - fraction) quantile; ties are kept.

    Args:
        entropy: Exact entropy of every valid step of the update.
        fraction: Fraction of the steps to keep, in (0, 1]; 0.2 keeps the top fifth. Smaller keeps the most uncertain decisions
            only.

    Example:
        >>> top_entropy_steps(torch.tensor([0.1, 0.5, 0.2, 0.9, 0.0]), 0.4).tolist()
        [False, True, False, True, False]

    Source:
        Wang et al. 2025, arXiv:2506.01939.
    """
    if not len(entropy):
        return torch.ones_like(entropy, dtype=torch.bool)
    ordered = entropy.sort().values  # torch.quantile accepts at most 16 million values
    place = round((1.0 - fraction) * (len(ordered) - 1), 9)  # 0.3 x 10 must be 3, not a little more
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return entropy >= torch.lerp(ordered[below], ordered[above], place - below)


def covariances(log_probs: Float[Tensor, " S"], advantages: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
    """Each step's share in Cov(log pi, A), the rate at which a policy gradient lowers the entropy.

    c[s] = (log_probs[s] - mean log_probs) (A[s] - mean A)

    Source:
        Cui et al. 2025, arXiv:2505.22617.
    """
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


def largest_covariances(covariance: Float[Tensor, " S"], fraction: float) -> Bool[Tensor, " S"]:
    """KL-Cov: choose the given fraction of the steps, with the largest covariance. At least one step is chosen.

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
    """Clip-Cov: draw the given fraction of the steps at random among the steps with low < covariance < high.

    At least one step is drawn if any step is in the range.

    Source:
        Cui et al. 2025, arXiv:2505.22617.
    """
    candidates = ((covariance > low) & (covariance < high)).nonzero().squeeze(1)
    count = max(int(fraction * len(covariance)), 1)
    drawn = torch.randperm(len(candidates), generator=generator)[:count].to(candidates.device)
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    chosen[candidates[drawn]] = True
    return chosen

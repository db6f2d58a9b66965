"""Per-step policy losses, unreduced.

Each takes the probability ratio rho = pi(step) / pi_old(step) [N, T] and the advantages (broadcast over steps) and
returns a loss per step [N, T]; only `grpo_objective` sums.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def clipped_surrogate(
    ratio: Float[Tensor, "N T"],
    advantages: Float[Tensor, "N #T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "N T"]:
    """Per-step PPO surrogate, clipped to a trust region.

    l[n,t] = -min(rho[n,t] A[n,t], clip(rho[n,t], 1 - low, 1 + high) A[n,t])

    The gradient is that of -rho A inside the region, and exactly 0 once the step has already moved past the bound
    its advantage pushes towards: above 1 + high for A > 0, below 1 - low for A < 0.

    Args:
        ratio: pi / pi_old, with gradient.
        advantages: how much better than its baseline; [N, 1] or [N, T].
        clip_low: distance below 1; larger lets bad actions become rarer within one iteration, 1 is no lower bound.
        clip_high: distance above 1; larger lets good actions become more likely within one iteration.

    Returns:
        The loss per step.

    Example:
        >>> ratio, advantages = torch.tensor([[1.5, 1.5], [0.5, 0.5]]), torch.tensor([[1.0, -1.0], [1.0, -1.0]])
        >>> clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.2).tolist()
        [[-1.2000000476837158, 1.5], [-0.5, 0.800000011920929]]

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7; separate bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 8.
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)

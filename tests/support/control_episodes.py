"""Episodes of control that no environment has played."""

from collections.abc import Sequence
from typing import Any

import torch

from adapters.control import Episode


def episode_of(
    rewards: Sequence[float],
    *,
    observations: Any = None,
    actions: Any = None,
    final: Any = None,
    terminated: bool = True,
) -> Episode:
    """Observations of two numbers, and actions, are 0 where they are not given."""
    count = len(rewards)
    return Episode(
        observations=torch.zeros(count, 2) if observations is None else torch.as_tensor(observations).float(),
        actions=torch.zeros(count, dtype=torch.int64) if actions is None else actions,
        rewards=torch.tensor(rewards, dtype=torch.float64),
        terminated=terminated,
        truncated=not terminated,
        final_observation=torch.zeros(2) if final is None else torch.as_tensor(final).float(),
        log_probs=torch.zeros(count),
    )

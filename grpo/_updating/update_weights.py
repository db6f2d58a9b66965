"""The weights of an update's steps in each term of the loss."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from grpo._common.conversion import widest_float
from grpo._objective.weights import Aggregation, step_weights
from grpo.config import ObjectiveConfig
from grpo.types import RowIndex

from .training_rows import TrainingRows


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeights:
    """The weights of an update's steps. Each term is averaged over its own steps, on all ranks."""

    steps: Float[Tensor, "n T"]
    """The weight of each sampled step in the loss. 0 at demonstrations."""
    entropy: Float[Tensor, "n T"] | None
    """The weight of each sampled step in the entropy term. None: `steps`."""
    demonstrations: Float[Tensor, "n T"] | None
    """The weight of each step of a demonstration in the cross-entropy. 0 at sampled rows. None: there are no demonstrations."""
    observations: Float[Tensor, "n O"] | None
    """The weight of each observation, of sampled rows and of demonstrations. None: there is no such term."""


def weights_of(
    rows: TrainingRows, selected: RowIndex, config: ObjectiveConfig, reduce: Callable[[Tensor], Tensor] | None = None
) -> UpdateWeights:
    """The weights of the rows of an update, from the masks of all its rows.

    Args:
        rows: The rows of the iteration.
        selected: The rows of the update.
        config: How per-step losses become one number.
        reduce: Sums a count over all ranks. It is called equally often on every rank. None: there is one rank.
    """
    batch = rows.batch
    mask, group_ids = batch.mask[selected], batch.group_ids[selected]
    flags = None if batch.is_demonstration is None else batch.is_demonstration[selected]

    weigh_rows = partial(step_weights, fixed_length=config.fixed_length, reduce=reduce)

    def weigh(aggregation: Aggregation, chosen: Tensor | None) -> Tensor:  # shapes would be made anew in each call
        if chosen is None:
            return weigh_rows(mask, aggregation, group_ids=group_ids)
        weights = torch.zeros(mask.shape, dtype=widest_float(mask.device), device=mask.device)
        weights[chosen] = weigh_rows(mask[chosen], aggregation, group_ids=group_ids[chosen])
        return weights

    sampled = None if flags is None else ~flags
    steps = weigh(config.aggregation, sampled)
    entropy = None if config.entropy_aggregation is None else weigh(config.entropy_aggregation, sampled)
    demonstrations = None if flags is None else weigh(config.aggregation, flags)
    if flags is None and reduce is not None:
        reduce(torch.zeros(()))  # other ranks may have demonstrations
    observations = None
    if config.observation_coef > 0:
        assert batch.observed_mask is not None
        observations = weigh_rows(batch.observed_mask[selected], config.aggregation, group_ids=group_ids)
    return UpdateWeights(steps=steps, entropy=entropy, demonstrations=demonstrations, observations=observations)

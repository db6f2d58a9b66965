"""The rows of a failed call are asked for part by part, and the answers are joined."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from grpo._common.conversion import as_rewards, join_steps
from grpo._rewarding.answers import AskedRows
from grpo.reward_model_base import Rewards


def joined(owner: str, answers: Sequence[Rewards], mask: Tensor | None) -> Rewards:
    """Join the answers for parts of the rows, which are of one kind. Rewards per step are padded to the steps of the mask.

    Raises:
        RewardError: Every row has one reward per step, and one step.
    """
    width = max(answer.values.shape[-1] for answer in answers) if mask is None else mask.shape[1]
    total = join_steps([answer.values for answer in answers], width)
    return Rewards(
        values=as_rewards(owner, total, len(total)),
        components={
            name: join_steps([answer.components[name] for answer in answers], width) for name in answers[0].components
        },
        weights=answers[0].weights,
    )


def smallest_parts(rows: AskedRows, *, compares_actions: bool) -> list[Tensor]:
    """The rows of each smallest part that can be rewarded by itself: a group if actions are compared, else one row."""
    if not compares_actions or rows.group_ids is None:
        return [*torch.arange(len(rows)).split(1)]
    counts = rows.group_ids.unique(return_counts=True)[1]
    return [*rows.group_ids.argsort(stable=True).split(counts.tolist())]


def spread(num_parts: int) -> list[int]:
    """All parts, in an order in which neighbours are far apart, so that a few parts in a row are a sample of all groups."""
    golden_ratio = (5**0.5 - 1) / 2
    return sorted(range(num_parts), key=lambda part: part * golden_ratio % 1)


def kind_of(answer: Rewards) -> Hashable:
    """The names of the parts, and whether there is one reward per row or one per step. Only equal kinds can be joined."""
    return answer.values.dim(), *sorted(answer.components)

"""Groups without differences teach nothing: leave them out, and draw other states in their place."""

from collections.abc import Callable
from dataclasses import replace

import torch

from .batches import join_batches, select_batch
from .group_advantages import live_rows
from .types import ExperienceBatch, Rows


def collect_live_groups(
    collect: Callable[[Rows], ExperienceBatch],
    states: Rows,
    more_states: Callable[[], Rows] | None,
    num_rounds: int,
    reward_clip: float | None = None,
) -> ExperienceBatch:
    """A batch of as many groups as there are states, all with differences between their rows' rewards.

    Further states are drawn up to `num_rounds` times. What is still missing then is missing; where no group at all has
    differences, the last batch is handed on as it is. Counted: `group_stats/{num_drawn,num_rounds,num_left_out}`; the mean
    reward of all that was drawn is `rewards/mean_drawn`, since that of the groups that stay is nearer to the middle.

    Args:
        collect: states -> a batch.
        states: B states.
        more_states: gives further states; None: there are none, and groups are only left out.
        num_rounds: bound on the further draws.
        reward_clip: bound on a reward's size, which may make rewards equal.

    Source:
        Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 11.
    """
    batch = collect(states)
    wanted, num_groups = len(states), _num_groups(batch)
    total, num_rows = float(_row_totals(batch).sum()), batch.num_rows
    live = [part for part in [_live_part(batch, reward_clip)] if part is not None]
    costs = [batch.metrics]
    rounds = 0
    while sum(_num_groups(part) for part in live) < wanted and rounds < num_rounds and more_states is not None:
        rounds += 1
        batch = collect(more_states())
        costs.append(batch.metrics)
        num_groups += _num_groups(batch)
        total, num_rows = total + float(_row_totals(batch).sum()), num_rows + batch.num_rows
        part = _live_part(batch, reward_clip)
        live += [] if part is None else [part]
    joined = _first_groups(join_batches(live), wanted) if live else batch
    return replace(
        joined,
        metrics={
            **{name: sum(cost.get(name, 0.0) for cost in costs) for name in joined.metrics},
            "group_stats/num_drawn": float(num_groups),
            "group_stats/num_rounds": float(rounds),
            "group_stats/num_left_out": float(num_groups - (_num_groups(joined) if live else 0)),
            "rewards/mean_drawn": total / num_rows,
        },
    )


def _row_totals(batch: ExperienceBatch) -> torch.Tensor:
    if batch.rewards.dim() == 1:
        return batch.rewards
    return torch.where(batch.mask.cpu(), batch.rewards, 0.0).sum(1)


def _num_groups(batch: ExperienceBatch) -> int:
    return int(batch.group_ids.unique().numel())


def _live_part(batch: ExperienceBatch, reward_clip: float | None) -> ExperienceBatch | None:
    rewards = batch.rewards if batch.rewards.dim() == 1 else torch.where(batch.mask.cpu(), batch.rewards, 0.0)
    rewards = rewards if reward_clip is None else rewards.clamp(-reward_clip, reward_clip)
    live = torch.from_numpy(live_rows(rewards, batch.group_ids))
    return select_batch(batch, live.nonzero().squeeze(1)) if bool(live.any()) else None


def _first_groups(batch: ExperienceBatch, count: int) -> ExperienceBatch:
    """The first `count` groups, in the order in which they were drawn (ids ascend from draw to draw)."""
    names = batch.group_ids.unique()
    if len(names) <= count:
        return batch
    return select_batch(batch, (batch.group_ids < names[count]).nonzero().squeeze(1))

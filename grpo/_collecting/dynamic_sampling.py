"""Dynamic sampling: leave out groups whose rewards are all equal, and draw other states in their place."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from grpo._advantages.groups import live_rows
from grpo._common.conversion import describe
from grpo.config import GRPOConfig
from grpo.errors import ConfigError
from grpo.types import ExperienceBatch, Rows

from .batches import add_metrics, join_batches, select_batch


def collect_live_groups(
    collect: Callable[[Rows], ExperienceBatch],
    states: Rows,
    more_states: Callable[[], Rows] | None,
    config: GRPOConfig,
    *,
    is_alone: bool = False,
) -> ExperienceBatch:
    """Collect a batch with one live group per state. A group is live if the rewards of its rows differ.

    More states are drawn up to `dynamic_sampling_rounds` times. The batch is smaller if live groups are still missing after
    that. If no group at all is live, the last batch is returned unchanged.

    Metrics: `group_stats/{num_drawn,num_rounds,num_left_out}`, and `rewards/mean_drawn`, the mean reward of all rows drawn.
    (The mean over live groups alone is biased: groups that always fail and groups that always succeed are left out.)

    Args:
        collect: States -> a batch.
        states: B states.
        more_states: Returns more states. None: groups are only left out.
        config: The largest number of further draws, and the bound on a reward's size. Clipping may make rewards equal.
            Without further draws, the first batch is returned as it is.
        is_alone: Whether dynamic sampling without `more_states` is refused. If not, groups are only left out.

    Raises:
        ConfigError: Further draws cannot be made, or every group is one row.

    Source:
        Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 11.
    """
    if more_states is not None and not callable(more_states):
        raise ConfigError(
            f"more_states must be a function that returns states; got {describe(more_states)}. Leave it out."
        )
    num_rounds, reward_clip = config.dynamic_sampling_rounds, config.advantage.reward_clip
    if num_rounds == 0:
        return collect(states)
    if more_states is None and is_alone:
        raise ConfigError(
            f"config.dynamic_sampling_rounds={num_rounds} draws further states: only GRPOTrainer.train does that by "
            "itself. Pass more_states=..., a function that returns states, or set dynamic_sampling_rounds=0."
        )
    draws = [collect(states)]
    if config.group_size == 1 and _num_groups(draws) == draws[0].num_rows:  # `group_by` may make larger groups
        raise ConfigError(
            f"config.dynamic_sampling_rounds={num_rounds} draws other states in place of groups whose rewards are equal, and "
            "with group_size=1 every group is one row. Set dynamic_sampling_rounds=0, or group_size to at least 2."
        )
    live = _live_part(draws[0], reward_clip)
    while more_states is not None and len(draws) <= num_rounds and _num_groups(live) < len(states):
        draws.append(collect(more_states()))
        live += _live_part(draws[-1], reward_clip)
    batch = draws[-1]
    if live:
        joined = join_batches(live)
        first_ids = joined.group_ids.unique()[: len(states)]  # ids ascend from draw to draw
        batch = select_batch(joined, torch.isin(joined.group_ids, first_ids).nonzero().squeeze(1))
    num_rows = sum(drawn.num_rows for drawn in draws)
    return replace(
        batch,
        metrics={
            **add_metrics([drawn.metrics for drawn in draws]),
            "group_stats/num_drawn": float(_num_groups(draws)),
            "group_stats/num_rounds": float(len(draws) - 1),
            "group_stats/num_left_out": float(_num_groups(draws) - (_num_groups([batch]) if live else 0)),
            "rewards/mean_drawn": sum(float(drawn.total_rewards.sum()) for drawn in draws) / num_rows,
        },
    )


def _num_groups(batches: Sequence[ExperienceBatch]) -> int:
    return sum(len(batch.group_ids.unique()) for batch in batches)


def _live_part(batch: ExperienceBatch, reward_clip: float | None) -> list[ExperienceBatch]:
    """Return a batch of the groups whose rewards differ. The batch is empty if every group has equal rewards."""
    rewards = batch.rewards if reward_clip is None else batch.rewards.clamp(-reward_clip, reward_clip)
    live = torch.from_numpy(live_rows(rewards, batch.group_ids))
    return [select_batch(batch, live.nonzero().squeeze(1))] if bool(live.any()) else []

"""The rows of an iteration as sinks record them."""

from grpo._updating.training_rows import TrainingRows
from grpo.sinks import Samples
from grpo.types import row_totals, select_rows, zero_outside


def samples_of(rows: TrainingRows) -> Samples:
    """The new rows of an iteration as sinks record them."""
    batch, mask = rows.batch, rows.batch.mask
    new = slice(0, batch.num_rows - rows.num_replayed)
    advantages = rows.advantages
    if advantages.dim() == 2:
        advantages = zero_outside(advantages, mask.to(advantages.device)).sum(1) / mask.sum(1).clamp(min=1).cpu()
    return Samples(
        kind="train",
        states=select_rows(batch.states, new),
        actions=select_rows(batch.actions, new),
        group_ids=batch.group_ids[new],
        rewards=batch.total_rewards[new],
        reward_components={name: row_totals(part, mask)[new] for name, part in batch.reward_components.items()},
        advantages=advantages[new],
        num_steps=mask.sum(1)[new],
    )

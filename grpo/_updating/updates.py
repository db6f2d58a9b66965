"""From a batch to the rows of its updates: scores, advantages, and rows of earlier iterations."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from grpo._collecting.batches import apart
from grpo._collecting.update_plan import num_updates_per_epoch
from grpo.types import ExperienceBatch

from .requirements import (
    refuse_probabilities,
    require_batches,
    require_demonstrated_steps,
    require_observations,
)
from .training_rows import ReplayBuffer, with_advantages
from .update_context import UpdateContext
from .update_rows import UpdateRows


class Updates:
    """Prepares the updates of each iteration."""

    def __init__(self, context: UpdateContext, advantages: Callable[[ExperienceBatch], Tensor]) -> None:
        self.context, self._advantages = context, advantages
        self.replay = ReplayBuffer(context.config.replay_iterations)
        self._completed: ExperienceBatch | None = None

    def completed(self, batch: ExperienceBatch) -> ExperienceBatch:
        """The batch with the scores that its updates read. A batch that this method returned last is complete already."""
        if batch is not self._completed:
            num_updates = self.context.engine.equal_count(self._num_updates(batch))
            self._completed = self.context.collector.complete(batch, several_updates=num_updates > 1)
        return self._completed

    def prepared(self, batches: Sequence[ExperienceBatch]) -> UpdateRows:
        """Compute advantages, and add rows of earlier iterations and demonstrations. With `split_steps`, each step becomes a
        row."""
        require_batches(batches)
        batch, demonstrations = apart(batches)
        if batch.behaviour_log_probs is not None:
            refuse_probabilities(batch.behaviour_log_probs[batch.mask], batch.actions)
        if batch.num_rows:
            batch, self._completed = self.completed(batch), None
        rows, all_ranks = with_advantages(batch, self._advantages, self.context.engine)
        is_fresh = self.context.collector.scores_itself and self._num_updates(batch) == 1
        rows = self.replay.join(replace(rows, old_is_current=is_fresh))
        if rows.num_replayed:  # a reference that has moved has to score them again
            rows, self._completed = replace(rows, batch=self.completed(rows.batch)), None
        rows = rows.with_demonstrations([self.context.collector.with_steps(part) for part in demonstrations])
        require_demonstrated_steps(self.context.policy_name, rows.batch)
        require_observations(self.context.config, self.context.policy_name, rows.batch)
        return UpdateRows(rows, self.context, all_ranks)

    def _num_updates(self, batch: ExperienceBatch) -> int:
        """Number of updates that this rank's rows need."""
        num_rows = batch.num_rows if self.context.splitter is None else int(batch.mask.sum())
        config = self.context.config
        return num_updates_per_epoch(num_rows, config.batch_size) * config.num_epochs_per_update

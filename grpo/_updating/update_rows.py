"""The rows of one iteration, divided into updates."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from grpo._advantages.groups import has_advantage
from grpo._collecting.update_plan import epoch_of_updates
from grpo.types import RowIndex

from .requirements import require_discrete
from .training_rows import TrainingRows, split_steps
from .update import Update, counts_of
from .update_context import UpdateContext


class UpdateRows:
    """The rows of one iteration as its updates read them."""

    def __init__(
        self,
        rows: TrainingRows,
        context: UpdateContext,
        all_ranks: TrainingRows,
        row_order: Tensor | None = None,
        counts: list[list[float]] | None = None,
    ) -> None:
        self.all_ranks = all_ranks
        """The rows of all ranks, for the report."""
        self.given = rows
        """The rows of this rank, before they are split into steps."""
        has_other_terms = rows.returns is not None or context.coefficients.may_be_positive
        has_other_terms |= context.config.objective.observation_coef > 0
        skips = context.traits.zero_advantage_is_inert and not has_other_terms
        live = has_advantage(rows.advantages) | ~rows.is_sampled if skips else None
        self.num_skipped = 0 if live is None else int((~live).sum())
        """Number of rows without an advantage, which no update forwards."""
        self.num_demonstrations = rows.num_demonstrations
        """Number of demonstrations."""
        if context.splitter is not None:
            rows = split_steps(rows, context.splitter)
            live = has_advantage(rows.advantages) | ~rows.is_sampled if skips else None
        if context.traits.for_probabilities:
            require_discrete(context.config.objective.surrogate, rows.batch.actions)
        if live is not None and not bool(live.all()):
            rows = replace(rows, live=live)
        self.data = rows
        """The rows of this rank. With `split_steps`, each step is a row."""
        self.num_planned = 0
        """Number of updates so far, over all epochs, including the current one."""
        self.num_dead = 0
        """Number of updates that were skipped before the forward pass, because none of their rows has an advantage."""
        self._context = context
        self.row_order = context.row_order.get_state() if row_order is None else row_order
        """The state of the generator before it drew the order of these rows."""
        self.planned = self._plan(counts)
        """This rank's rows of each update, and `counts_of` the update, summed over all ranks. None: there is one rank."""

    def updates(self) -> Iterator[Update]:
        """Yield each update, epoch by epoch. The rows of a group stay adjacent. An update is left out if none of its rows, on
        any rank, can have a gradient. The first `num_planned` updates are not repeated."""
        self._context.between()
        for position in range(self.num_planned, len(self.planned)):
            self.num_planned = position + 1
            selected, counts = self.planned[position]
            if not self._is_live(selected, counts):
                self.num_dead += 1
                continue
            yield Update(self.data, selected, self._context, counts, is_first=position == 0)
            self._context.between()

    def _is_live(self, selected: RowIndex, counts: list[float] | None) -> bool:
        """Whether any rank has a row in this update that may have a gradient."""
        if counts is not None:
            return counts[0] > 0
        return self.data.live is None or bool(self.data.live[selected].any())

    def _plan(self, counts: list[list[float]] | None) -> list[tuple[RowIndex, list[float] | None]]:
        context, batch = self._context, self.data.batch
        context.row_order.set_state(self.row_order)
        epochs = [
            list(
                epoch_of_updates(batch.group_ids, context.config.batch_size, context.row_order, batch.is_demonstration)
            )
            for _ in range(context.config.num_epochs_per_update)
        ]
        if context.engine.num_ranks == 1:
            return [(selected, None) for epoch in epochs for selected in epoch]
        if counts is None:
            own = [[counts_of(self.data, selected, context) for selected in epoch] for epoch in epochs]
            counts = _added_up(context.engine.gather_objects(own))
        longest = len(counts) // len(epochs)
        # a rank without further rows makes an empty update with the others
        selections = [[*epoch, *[slice(0, 0)] * (longest - len(epoch))] for epoch in epochs]
        return list(zip([selected for epoch in selections for selected in epoch], counts, strict=True))


def _added_up(of_ranks: Sequence[Sequence[Sequence[Sequence[float]]]]) -> list[list[float]]:
    """The counts of each update, summed over the ranks that have rows in it. A rank tells its counts epoch by epoch."""
    totals = []
    for epochs in zip(*of_ranks, strict=True):
        for place in range(max(map(len, epochs))):
            found = [of_rank[place] for of_rank in epochs if place < len(of_rank)]
            totals.append([sum(column) for column in zip(*found, strict=True)])
    return totals

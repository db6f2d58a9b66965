"""The iteration whose updates are being made."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from grpo._collecting.batches import without_content
from grpo._updating.training_rows import TrainingRows
from grpo._updating.update_context import UpdateContext
from grpo._updating.update_rows import UpdateRows
from grpo.errors import warn_user
from grpo.metrics import Meter


class IterationInProgress:
    """The rows of the iteration whose updates are being made, and the metrics of its updates so far."""

    def __init__(self, context: UpdateContext, meter: Meter) -> None:
        self.rows: UpdateRows | None = None
        """The rows. None: no updates are under way."""
        self._context, self._meter = context, meter

    @property
    def num_planned(self) -> int | None:
        """Number of updates so far. None: no updates are under way."""
        return None if self.rows is None else self.rows.num_planned

    def give_up(self, *, is_loaded: bool) -> None:
        """Forget an iteration that is not finished. Warn if updates of a checkpoint are left out."""
        if self.rows is not None and is_loaded:
            warn_user(
                f"The checkpoint was written after update {self.rows.num_planned} of an iteration, and the other updates of "
                "this iteration are left out now. Call train() after load_checkpoint() to finish the iteration first."
            )
        self.rows = None

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """The rows, which never change, and a copy of the metrics. The device is not synchronised."""
        if self.rows is None:
            return lambda: {"rows": None}
        rows, meter = _state_of(self.rows), self._meter.copy()
        return lambda: {"rows": rows, "meter": meter.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """The rows and the metrics."""
        return self.snapshot()()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.rows = None
        if state["rows"] is not None:
            self.rows = _restored(state["rows"], self._context)
            self._meter.load_state_dict(state["meter"])


def _state_of(rows: UpdateRows) -> dict[str, Any]:
    """The rows, their plan, and the number of updates so far. No tensor is copied."""
    counts = [counts for _, counts in rows.planned if counts is not None]
    for_metrics = replace(rows.all_ranks, batch=without_content(rows.all_ranks.batch))
    return {
        "rows": rows.given.state_dict(),
        "all_ranks": for_metrics.state_dict(),
        "num_planned": rows.num_planned,
        "num_dead": rows.num_dead,
        "row_order": rows.row_order,
        "counts": counts or None,
    }


def _restored(state: Mapping[str, Any], context: UpdateContext) -> UpdateRows:
    """The rows that `_state_of` described. Their next update follows the last one before."""
    given, all_ranks = (TrainingRows.from_state_dict(state[name]) for name in ("rows", "all_ranks"))
    rows = UpdateRows(given, context, all_ranks, state["row_order"], state["counts"])
    rows.num_planned, rows.num_dead = state["num_planned"], state["num_dead"]
    return rows

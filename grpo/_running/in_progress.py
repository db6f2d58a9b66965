"""The iteration whose updates are being made."""

from collections.abc import Callable, Mapping
from typing import Any

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
        rows, meter = self.rows.state_dict(), self._meter.copy()
        return lambda: {"rows": rows, "meter": meter.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """The rows and the metrics."""
        return self.snapshot()()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.rows = None
        if state["rows"] is not None:
            self.rows = UpdateRows.from_state_dict(state["rows"], self._context)
            self._meter.load_state_dict(state["meter"])

"""Rows of recent iterations, used again beside new ones until they are too old."""

from collections import deque
from dataclasses import fields, replace
from typing import Any

import torch

from grpo._collecting.batches import join_batches, join_steps
from grpo.types import ExperienceBatch
from grpo.writing import pad_steps

from .training_rows import TrainingRows


class ReplayBuffer:
    """The rows of the last `limit` iterations, with the advantages they had. Older rows are dropped.

    A replayed row's ratio is to the policy that scored it when it was collected, so clipping bounds how far the policy has
    moved since then, however many iterations ago that was.

    Args:
        limit: iterations; 0 keeps nothing.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._recent: deque[TrainingRows] = deque(maxlen=limit)

    def join(self, rows: TrainingRows) -> TrainingRows:
        """`rows`, then the rows of recent iterations, newest first. Keeps `rows` for the next iterations."""
        if self._limit == 0:
            return rows
        iterations = [rows, *reversed(self._recent)]
        self._recent.append(rows)
        if len(iterations) == 1:
            return rows
        batch = join_batches([part.batch for part in iterations])
        width = batch.mask.shape[1]
        returns = [part.returns for part in iterations if part.returns is not None]
        per_step = any(part.advantages.dim() == 2 for part in iterations)
        advantages = [_per_step(part) if per_step else part.advantages for part in iterations]
        return replace(
            rows,
            batch=batch,
            advantages=join_steps(advantages, width),
            returns=join_steps(returns, width) if len(returns) == len(iterations) else None,
            old_is_current=False,
            num_replayed=batch.num_rows - rows.batch.num_rows,
        )

    def forget_reference(self) -> None:
        """Drop the reference log-probs of the kept rows: the reference has moved."""
        kept = [replace(rows, batch=replace(rows.batch, ref_log_probs=None)) for rows in self._recent]
        self._recent = deque(kept, maxlen=self._limit)

    def state_dict(self) -> dict[str, Any]:
        """All kept rows."""
        return {"rows": [_as_dict(rows) for rows in self._recent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._recent.clear()
        self._recent.extend(
            TrainingRows(**{**saved, "batch": ExperienceBatch(**saved["batch"])}) for saved in state["rows"]
        )


def _per_step(rows: TrainingRows) -> torch.Tensor:
    advantages = rows.advantages
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1).expand(rows.batch.mask.shape)
    return pad_steps(advantages, rows.batch.mask.shape[1], 0.0)


def _as_dict(value: Any) -> Any:
    parts = {field.name: getattr(value, field.name) for field in fields(value)}
    return parts | ({"batch": _as_dict(parts["batch"])} if isinstance(value, TrainingRows) else {})

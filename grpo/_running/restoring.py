"""Restore a trainer from a checkpoint."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo._storage.kinds import LARGEST
from grpo._storage.manifest import LARGEST_COUNT
from grpo.checkpoint import Checkpoint, SavedTensor, open_checkpoint
from grpo.engine import Engine
from grpo.errors import CheckpointError, DamagedCheckpointError

from .other_ranks import for_other_ranks
from .state import RunState

logger = logging.getLogger("grpo")


def load_into(run_state: RunState, path: str | Path, engine: Engine, policy: Any, *, at_least: int = 0) -> None:
    """Restore a trainer from a checkpoint, or from the newest intact one of a folder. All ranks call this function.

    Args:
        run_state: The state of the trainer.
        path: The checkpoint, or the folder.
        engine: Joins the ranks.
        policy: The policy, whose tensors are in memory already when its own state is read.
        at_least: Refuse a checkpoint of an earlier iteration.
    """

    def check(checkpoint: Checkpoint) -> None:
        require_sound(checkpoint)
        if checkpoint.iteration < at_least:
            raise CheckpointError(
                f"{checkpoint.path} is behind this trainer, which is at iteration {at_least}. resume='auto' is for a new "
                "trainer. Leave resume out to go on with this one."
            )

    checkpoint = open_checkpoint(path, engine, check)
    state, parameters = run_state.with_rows(for_other_ranks(checkpoint, engine)), policy.get_parameters()

    def load_part(part: Any) -> Any:
        known = {saved.name: parameters[name] for name, saved in state["parameters"].items()}
        return checkpoint.load(_with_known(part, known))

    run_state.load_state_dict(state, checkpoint.load, load_part)
    if checkpoint.skipped:
        problems = " ".join(checkpoint.skipped)
        logger.warning("%s was loaded, because newer checkpoints are damaged: %s", checkpoint.path, problems)


def require_sound(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose counters or learning rates are not numbers that a run can have."""
    if wrong := list(_wrong_numbers(checkpoint.state.get("parts"))):
        raise DamagedCheckpointError(
            f"{checkpoint.path}: counters must be integers of at least 0, the optimizer's settings finite, and learning rates "
            "at least 0; got "
            f"{', '.join(wrong)}. Use another checkpoint."
        )


def _wrong_numbers(parts: Any) -> Iterator[str]:
    if not isinstance(parts, Mapping):
        return  # another kind of state, which `RunState.load_state_dict` refuses
    for part in ("counters", "optimizer_step", "progress"):
        counts = parts.get(part)
        for name, value in counts.items() if isinstance(counts, Mapping) else ():
            is_count = part != "progress" or name == "num_draws"
            most = LARGEST if name == "data_seed" else LARGEST_COUNT
            if is_count and (type(value) is not int or not 0 <= value < most):
                yield f"{part}.{name}={value!r}"
    optimizer = parts.get("optimizer")
    groups = optimizer.get("param_groups", []) if isinstance(optimizer, Mapping) else []
    for group in groups if isinstance(groups, list) else ():
        for name, value in group.items() if isinstance(group, Mapping) else ():
            least = 0 if name in ("lr", "initial_lr") else 1 - LARGEST
            if isinstance(value, int | float) and not least <= value < LARGEST:
                yield f"{name}={value!r}"


def _with_known(value: Any, known: Mapping[str, Tensor]) -> Any:
    """Replace placeholders of tensors that are in memory already."""
    if isinstance(value, SavedTensor):
        return known.get(value.name, value)
    if isinstance(value, Mapping):
        return {key: _with_known(entry, known) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_known(entry, known) for entry in value]
    return tuple(_with_known(entry, known) for entry in value) if type(value) is tuple else value

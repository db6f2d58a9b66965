"""Restore the state of a `GRPOTrainer` from a checkpoint, all or nothing."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo._common.conversion import describe
from grpo._common.global_state import restore_random_state
from grpo._common.settings import flattened
from grpo._sharding.tensors import copy_into, is_sharded
from grpo._updating.update_rows import UpdateRows
from grpo.checkpoint import Checkpoint, SavedRows, SavedTensor, open_checkpoint
from grpo.errors import CheckpointError, DamagedCheckpointError, warn_user
from grpo.reward_model_base import restore_state

from .other_ranks import for_other_ranks
from .trainer_state import LASTING, capture, stateful_parts

logger = logging.getLogger("grpo")

Load = Callable[[Any], Any]
"""Returns a part of a state with its tensors read from the disk."""

WITHOUT_EFFECT = ("seed", "device")
"""Settings that may differ when a run is resumed: the checkpoint holds the random generators, and any device will do."""


def require_sound(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose counters or learning rates are not numbers that a run can have.

    Raises:
        DamagedCheckpointError: names the value.
    """
    counters = checkpoint.state.get("counters")
    optimizer = (checkpoint.state.get("stateful") or {}).get("optimizer")
    groups = optimizer.get("param_groups", []) if isinstance(optimizer, Mapping) else []
    if not isinstance(counters, Mapping) or not isinstance(groups, list):
        return  # another kind of state, which `restore` refuses
    counts = {f"counters.{name}": value for name, value in counters.items()}
    wrong = {name: value for name, value in counts.items() if not isinstance(value, int) or value < 0}
    for group in groups:
        hyperparameters = group.items() if isinstance(group, Mapping) else ()
        wrong |= {
            name: value for name, value in hyperparameters if isinstance(value, float) and not math.isfinite(value)
        }
    if wrong:
        described = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        raise DamagedCheckpointError(
            f"{checkpoint.path}: counters must be integers of at least 0, and the optimizer's settings finite; got "
            f"{described}. Use another checkpoint."
        )


def load_into(trainer: Any, path: str | Path, *, at_least: int = 0) -> None:
    """Restore a trainer from a checkpoint, or from the newest intact one of a folder. All ranks call this function.

    Args:
        trainer: the trainer to restore.
        path: the checkpoint, or the folder.
        at_least: refuse a checkpoint of an earlier iteration.
    """

    def check(checkpoint: Checkpoint) -> None:
        require_sound(checkpoint)
        if checkpoint.iteration < at_least:
            raise CheckpointError(
                f"{checkpoint.path} is behind this trainer, which is at iteration {at_least}. resume='auto' is for a new "
                "trainer. Leave resume out to go on with this one."
            )

    checkpoint = open_checkpoint(path, trainer.engine, check)
    restore(trainer, for_other_ranks(checkpoint, trainer.engine), checkpoint.load)
    trainer.progress.is_loaded = trainer.sampler.is_stale = True
    trainer.sampler.sync()
    trainer.engine.agree()  # no rank goes on if another could not load
    if checkpoint.skipped:
        problems = " ".join(checkpoint.skipped)
        logger.warning("%s was loaded, because newer checkpoints are damaged: %s", checkpoint.path, problems)


def restore(trainer: Any, state: Mapping[str, Any], load: Load = lambda part: part) -> None:
    """Restore what `capture` returned, all or nothing. Names and shapes are checked before a tensor is read.

    Memory holds at most one more copy of the weights and of the optimizer's state.

    Args:
        trainer: the trainer to restore.
        state: the state, or a checkpoint's state with placeholders for tensors.
        load: replaces the placeholders in a part of the state. The default is for a state without placeholders.

    Raises:
        CheckpointError: names the item that is missing, has another type, or has another shape. The trainer is unchanged.
    """
    present = capture(trainer)
    _require_fit(trainer, present, state)
    saved = load({name: state[name] for name in ("parameters", "reference")})
    weights = [dict(saved["parameters"]), dict(saved["reference"].get("parameters", {}))]
    del saved
    _exchange(trainer, weights)
    try:
        _put(trainer, state, load)
    except Exception as error:
        _exchange(trainer, weights)
        _put(trainer, present, lambda part: part)
        raise CheckpointError(
            f"The checkpoint does not fit this trainer, which is unchanged: {error!r}. Build the trainer as when it was saved."
        ) from error
    _warn_of_changes(state["config"], present["config"])


def _exchange(trainer: Any, weights: Sequence[dict[str, Tensor]]) -> None:
    """Put the weights into the policy and the reference, and their present weights into `weights`, tensor by tensor."""
    policies = [policy for policy in (trainer.policy, trainer.reference_policy) if policy is not None]
    with torch.no_grad():
        for policy, others in zip(policies, weights, strict=False):
            for name, value in policy.get_parameters().items():
                before = value.detach().clone()
                copy_into(value, others[name])
                others[name] = before


def _put(trainer: Any, state: Mapping[str, Any], load: Load) -> None:
    """Restore everything but the weights, which the trainer has already."""
    parameters = trainer.policy.get_parameters()
    known = {
        saved.name: parameters[name] for name, saved in state["parameters"].items() if isinstance(saved, SavedTensor)
    }
    put_passing(trainer, {**state, "stateful": _with_known(state["stateful"], known)}, load)
    for name, value in stateful_parts(trainer).items():
        if name in LASTING:
            _load_part(name, value.load_state_dict, load(state["stateful"][name]))


def put_passing(trainer: Any, state: Mapping[str, Any], load: Load = lambda part: part) -> None:
    """Restore what `passing_state` returned: everything that an optimizer step does not change."""
    loaders = {name: value.load_state_dict for name, value in stateful_parts(trainer).items() if name not in LASTING}
    loaders["reward_model"] = lambda saved: restore_state(trainer.reward_model, saved)
    for name, put in loaders.items():
        _load_part(name, put, load(state["stateful"][name]))
    counters, progress, step = state["counters"], trainer.progress, trainer.optimizer_step
    trainer.iteration, trainer.data_seed = counters["iteration"], counters["data_seed"]
    progress.position, progress.num_draws = counters["run_position"], counters["num_draws"]
    progress.best_score, progress.unrecorded = state["best_score"], state["unrecorded"]
    progress.loaded_callbacks = load(state["callbacks"])
    step.skipped_in_a_row, step.num_applied = counters["skipped_in_a_row"], counters["num_applied"]
    one_step = counters["decides_once_per_row"]
    trainer.collector.scorer.one_step_device = step.device if one_step else None
    unfinished = load(state["unfinished"])
    progress.unfinished = None
    if unfinished is not None:
        progress.unfinished = UpdateRows.from_state_dict(unfinished["rows"], trainer.setup)
        trainer.meter.load_state_dict(unfinished["meter"])
    progress.ahead = trainer.ahead.restored(load(state["ahead"]))
    generators = load({name: state[name] for name in ("row_order", "step_choice", "random")})
    trainer.setup.row_order.set_state(generators["row_order"])
    trainer.setup.step_choice.set_state(generators["step_choice"])
    restore_random_state(generators["random"])


def _load_part(name: str, load_state_dict: Callable[[Any], object], saved: Any) -> None:
    try:
        load_state_dict(saved)
    except Exception as error:
        raise CheckpointError(f"{name}: {error}") from error


def _with_known(value: Any, known: Mapping[str, Tensor]) -> Any:
    """Replace placeholders of tensors that are in memory already."""
    if isinstance(value, SavedTensor):
        return known.get(value.name, value)
    if isinstance(value, Mapping):
        return {key: _with_known(entry, known) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_known(entry, known) for entry in value]
    return tuple(_with_known(entry, known) for entry in value) if type(value) is tuple else value


def _require_fit(trainer: Any, present: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Require the same parts, names, kinds and shapes as the trainer has."""
    _require_same_names("The checkpoint", present, state)
    if not isinstance(state["config"], Mapping):
        raise CheckpointError(
            f"The checkpoint's config must be a dict; got {describe(state['config'])}. Use another checkpoint."
        )
    for part in ("reference", "kinds", "stateful", "counters", "random"):
        _require_same_names(f"The checkpoint's {part!r}", present[part], state[part])
    for name, kind in state["kinds"].items():
        if kind != present["kinds"][name]:
            raise CheckpointError(
                f"The checkpoint's {name} is a {kind}; this trainer's is a {present['kinds'][name]}. "
                "Build the trainer as it was when it was saved."
            )
    owner = type(trainer.policy).__name__
    _require_same_tensors(owner, present["parameters"], state["parameters"])
    references = (part["reference"].get("parameters", {}) for part in (present, state))
    _require_same_tensors(f"reference {owner}", *references)


def _require_same_names(where: str, expected: Any, found: Any) -> None:
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where} must be a dict; got {type(found).__name__}. Use another checkpoint.")
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        raise CheckpointError(
            f"{where} must match this trainer; missing: {missing or 'nothing'}, unexpected: {extra or 'nothing'}. "
            "Build the trainer with the same kinds of policy, reward model, optimizer and scheduler as when it was saved."
        )


def _require_same_tensors(owner: str, present: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    _require_same_names(f"{owner}'s parameters in the checkpoint", present, saved)
    for name, value in present.items():
        found = saved[name]
        if not isinstance(found, Tensor | SavedTensor) or not torch.can_cast(found.dtype, value.dtype):
            raise CheckpointError(
                f"{owner}: {name} is a tensor of {value.dtype}, but {getattr(found, 'dtype', type(found).__name__)} in the "
                "checkpoint. Build the policy as it was when it was saved."
            )
        if is_sharded(value) and not (
            isinstance(found, SavedRows) or (isinstance(found, Tensor) and is_sharded(found))
        ):
            raise CheckpointError(
                f"{owner}: {name} is divided among the ranks, and the checkpoint has it whole. Load the weights alone with "
                "grpo.load_weights(path, policy), before the trainer is built."
            )
        if tuple(value.shape) != tuple(found.shape):
            raise CheckpointError(
                f"{owner}: {name} has shape {list(value.shape)}, but {list(found.shape)} in the checkpoint. "
                "Build the policy as it was when it was saved."
            )


def _warn_of_changes(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Warn about settings that differ from the settings of the saved run. The run goes on with the new settings."""
    before, now = flattened(saved), flattened(present)
    changed = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted({*before, *now})
        if name not in WITHOUT_EFFECT and before.get(name) != now.get(name)
    ]
    if changed:
        warn_user(
            f"The run is resumed with changed settings: {'; '.join(changed)}. The new settings count. Build the trainer with "
            "the old settings if the run should continue as if it had never stopped."
        )

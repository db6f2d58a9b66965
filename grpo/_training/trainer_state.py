"""Capture and restore the state of a `GRPOTrainer` that an exact resume needs, as one nested value."""

import copy
import warnings
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.distributed import Engine
from grpo.errors import CheckpointError, GRPOWarning
from grpo.policy_base import HasState
from grpo.reward_model_base import kept_state, restore_state
from grpo.writing import capture_random_state, restore_random_state

from .update_rows import UpdateRows

LASTING = ("optimizer", "lr_scheduler", "scaler")
"""Parts that change in an optimizer step only, together with the weights."""


def capture(trainer: Any, passing: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything that an exact resume needs. Tensors are not copied.

    Args:
        trainer: the trainer. Its weights, optimizer and scheduler are captured as they are now.
        passing: what `passing_state` returned at the last safe point, for a trainer that has stopped after it. None: now.
    """
    reference, passing = trainer.reference_policy, passing or passing_state(trainer)
    lasting = {name: value.state_dict() for name, value in _stateful(trainer).items() if name in LASTING}
    unfinished = passing["unfinished"]
    return {
        **passing,
        "parameters": dict(trainer.policy.get_parameters()),
        "reference": {} if reference is None else {"parameters": dict(reference.get_parameters())},
        "config": trainer.config.to_dict(),
        "kinds": {name: type(value).__name__ for name, value in _stateful(trainer).items()}
        | {"reward_model": type(trainer.reward_model).__name__},
        "stateful": {**passing["stateful"], **lasting},
        "unfinished": None if unfinished is None else {**unfinished, "meter": unfinished["meter"].state_dict()},
    }


def passing_state(trainer: Any) -> dict[str, Any]:
    """The part of the state that may change before the next optimizer step, copied: generators, counters, rows, environments.

    Weights and rows are not copied. Weights do not change before the next optimizer step, and rows never change.
    """
    weights = _addresses(trainer)
    parts = {name: value for name, value in _stateful(trainer).items() if name not in LASTING}
    progress, rows = trainer.progress, trainer.progress.unfinished
    return {
        "stateful": {name: value.state_dict() for name, value in parts.items() if name == "replay"}
        | {name: _copied(value.state_dict(), weights) for name, value in parts.items() if name != "replay"}
        | {"reward_model": _copied(kept_state(trainer.reward_model), weights)},
        "counters": {
            "iteration": trainer.iteration,
            "run_position": progress.position,
            "num_draws": progress.num_draws,
            "best_score": progress.best_score,
            "data_seed": trainer.data_seed,
            "skipped_in_a_row": trainer.optimizer_step.skipped_in_a_row,
            "num_applied": trainer.optimizer_step.num_applied,
            "decides_once_per_row": trainer.collector.scorer.one_step_device is not None,
        },
        "unfinished": None if rows is None else {"rows": rows.state_dict(), "meter": trainer.meter.copy()},
        "unrecorded": progress.unrecorded,
        "row_order": trainer.setup.row_order.get_state(),
        "step_choice": trainer.setup.step_choice.get_state(),
        "random": capture_random_state(),
    }


def restore(trainer: Any, state: dict[str, Any]) -> None:
    """Restore what `capture` returned, all or nothing.

    Raises:
        CheckpointError: names the item that is missing, has another type, or has another shape. The trainer is unchanged.
    """
    present = capture(trainer)
    _require_same_names("The checkpoint", present, state)
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
    before = copy.deepcopy(present)
    try:
        _put(trainer, state)
    except Exception as error:
        _put(trainer, before)
        raise CheckpointError(
            f"The checkpoint does not fit this trainer, which is unchanged: {error!r}. Build the trainer as when it was saved."
        ) from error
    _warn_of_changes(state["config"], present["config"])


def require_same_iteration(engine: Engine, state: dict[str, Any], path: str | Path) -> None:
    """Raise a `CheckpointError` if the checkpoints of the ranks are not from the same iteration."""
    iterations = engine.gather_objects(state["counters"]["iteration"]) if engine.num_ranks > 1 else []
    if len(set(iterations)) > 1:
        raise CheckpointError(
            f"All ranks must resume from the same iteration; {path} has checkpoints of iterations {iterations}, one per rank. "
            "Pass the path of an iteration that all ranks have saved."
        )


def _put(trainer: Any, state: dict[str, Any]) -> None:
    copies = [(trainer.policy, state["parameters"])]
    if trainer.reference_policy is not None:
        copies.append((trainer.reference_policy, state["reference"]["parameters"]))
    with torch.no_grad():
        for policy, saved in copies:
            for name, value in policy.get_parameters().items():
                value.copy_(saved[name])
    loaders = {name: value.load_state_dict for name, value in _stateful(trainer).items()}
    loaders["reward_model"] = lambda saved: restore_state(trainer.reward_model, saved)
    for name, load in loaders.items():
        try:
            load(state["stateful"][name])
        except Exception as error:
            raise CheckpointError(f"{name}: {error}") from error
    counters, progress, step = state["counters"], trainer.progress, trainer.optimizer_step
    trainer.iteration, trainer.data_seed = counters["iteration"], counters["data_seed"]
    progress.position, progress.num_draws = counters["run_position"], counters["num_draws"]
    progress.best_score, progress.unrecorded = counters["best_score"], state["unrecorded"]
    progress.unfinished = None
    if state["unfinished"] is not None:
        progress.unfinished = UpdateRows.from_state_dict(state["unfinished"]["rows"], trainer.setup)
        trainer.meter.load_state_dict(state["unfinished"]["meter"])
    step.skipped_in_a_row, step.num_applied = counters["skipped_in_a_row"], counters["num_applied"]
    one_step = counters["decides_once_per_row"]
    trainer.collector.scorer.one_step_device = trainer.optimizer_step.device if one_step else None
    trainer.setup.row_order.set_state(state["row_order"])
    trainer.setup.step_choice.set_state(state["step_choice"])
    restore_random_state(state["random"])


WITHOUT_EFFECT = ("seed", "device")
"""Settings that may differ when a run is resumed: the checkpoint holds the random generators, and any device will do."""


def _warn_of_changes(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Warn about settings that differ from the settings of the saved run. The run goes on with the new settings."""
    before, now = flattened(saved), flattened(present)
    changed = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted({*before, *now})
        if name not in WITHOUT_EFFECT and before.get(name) != now.get(name)
    ]
    if changed:
        warnings.warn(
            f"The run is resumed with changed settings: {'; '.join(changed)}. The new settings count. Build the trainer with "
            "the old settings if the run should continue as if it had never stopped.",
            GRPOWarning,
            stacklevel=4,
        )


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one dict: {"objective": {"kl_coef": 0.1}} becomes {"objective.kl_coef": 0.1}."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _stateful(trainer: Any) -> dict[str, Any]:
    """Return the parts of the trainer that have a `state_dict`, by name."""
    scaler = trainer.optimizer_step.scaler
    candidates = {
        "policy": trainer.policy,
        "advantages": trainer.advantages,
        "collector": trainer.collector,
        "coefficients": trainer.coefficients,
        "replay": trainer.replay,
        "optimizer": trainer.optimizer_step.optimizer,
        "lr_scheduler": trainer.optimizer_step.lr_scheduler,
        "scaler": scaler if scaler.is_enabled() else None,
    }
    return {name: value for name, value in candidates.items() if isinstance(value, HasState)}


def _require_same_names(where: str, expected: Any, found: Any) -> None:
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        raise CheckpointError(
            f"{where} must match this trainer; missing: {missing or 'nothing'}, unexpected: {extra or 'nothing'}. "
            "Build the trainer with the same kinds of policy, reward model, optimizer and scheduler as when it was saved."
        )


def _require_same_tensors(owner: str, present: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    _require_same_names(f"{owner}'s parameters in the checkpoint", present, saved)
    for name, value in present.items():
        if value.shape != saved[name].shape:
            raise CheckpointError(
                f"{owner}: {name} has shape {list(value.shape)}, but {list(saved[name].shape)} in the checkpoint. "
                "Build the policy as it was when it was saved."
            )


def _addresses(trainer: Any) -> set[int]:
    """The addresses of all weights, which only an optimizer step changes."""
    modules = [value for value in (trainer.policy, trainer.reward_model) if isinstance(value, torch.nn.Module)]
    weights = [*trainer.policy.get_parameters().values(), *(w for module in modules for w in module.parameters())]
    return {weight.data_ptr() for weight in weights}


def _copied(value: Any, weights: Container[int]) -> Any:
    """Copy nested state. Tensors at the addresses of `weights` are not copied, and neither are objects of other types."""
    if isinstance(value, Tensor):
        return value if value.data_ptr() in weights else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: _copied(entry, weights) for key, entry in value.items()}
    if isinstance(value, list):
        return [_copied(entry, weights) for entry in value]
    if type(value) is tuple:
        return tuple(_copied(entry, weights) for entry in value)
    return value

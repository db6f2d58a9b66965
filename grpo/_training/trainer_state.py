"""Capture and restore the state of a `GRPOTrainer` that an exact resume needs, as one nested value."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo.distributed import Engine
from grpo.errors import CheckpointError
from grpo.policy_base import HasState
from grpo.reward_model_base import kept_state, restore_state
from grpo.writing import capture_random_state, restore_random_state


def capture(trainer: Any) -> dict[str, Any]:
    """Parameters, optimizer, scheduler, scaler, generators, counters, and the state of every object with a `HasState`."""
    reference, stateful = trainer.reference_policy, _stateful(trainer)
    return {
        "parameters": dict(trainer.policy.get_parameters()),
        "reference": {} if reference is None else {"parameters": dict(reference.get_parameters())},
        "kinds": {name: type(value).__name__ for name, value in stateful.items()}
        | {"reward_model": type(trainer.reward_model).__name__},
        "stateful": {name: value.state_dict() for name, value in stateful.items()}
        | {"reward_model": kept_state(trainer.reward_model)},
        "counters": {
            "iteration": trainer.iteration,
            "run_position": trainer.progress.position,
            "num_draws": trainer.progress.num_draws,
            "data_seed": trainer.data_seed,
            "skipped_in_a_row": trainer.optimizer_step.skipped_in_a_row,
            "decides_once_per_row": trainer.collector.scorer.one_step_device is not None,
        },
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
    counters = state["counters"]
    trainer.iteration, trainer.data_seed = counters["iteration"], counters["data_seed"]
    trainer.progress.position, trainer.progress.num_draws = counters["run_position"], counters["num_draws"]
    trainer.optimizer_step.skipped_in_a_row = counters["skipped_in_a_row"]
    one_step = counters["decides_once_per_row"]
    trainer.collector.scorer.one_step_device = trainer.optimizer_step.device if one_step else None
    trainer.setup.row_order.set_state(state["row_order"])
    trainer.setup.step_choice.set_state(state["step_choice"])
    restore_random_state(state["random"])


def _stateful(trainer: Any) -> dict[str, Any]:
    """Return the parts of the trainer that have a `state_dict`, by name."""
    scaler = trainer.optimizer_step.scaler
    candidates = {
        "policy": trainer.policy,
        "advantages": trainer.advantages,
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

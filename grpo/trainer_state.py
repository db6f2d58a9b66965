"""What an exact resume needs of a trainer, as one nested value; and putting it back."""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import CheckpointError
from .policy_base import HasState
from .random_state import put_random_state, take_random_state
from .reward_model_base import kept_state, restore_state

if TYPE_CHECKING:
    from .trainer import GRPOTrainer


def take_trainer_state(trainer: "GRPOTrainer") -> dict[str, Any]:
    """Parameters, optimizer, scheduler, scaler, generators, counters, and the `HasState` of everything that has one."""
    reference = trainer.reference_policy
    reward = ("reward_model", trainer.reward_model)
    return {
        "parameters": dict(trainer.policy.get_parameters()),
        "reference": {} if reference is None else {"parameters": dict(reference.get_parameters())},
        "kinds": {name: type(value).__name__ for name, value in (reward, *_stateful(trainer).items())},
        "stateful": {
            "reward_model": kept_state(trainer.reward_model),
            **{name: value.state_dict() for name, value in _stateful(trainer).items()},
        },
        "counters": {
            "iteration": trainer.iteration,
            "run_position": trainer.run_position,
            "num_draws": trainer.num_draws,
            "data_seed": trainer.data_seed,
            "skipped_in_a_row": trainer.policy_update.skipped_in_a_row,
            "decides_once_per_row": trainer.collector.scorer.one_step_device is not None,
        },
        "row_order": trainer.policy_update.generator.get_state(),
        "step_choice": trainer.policy_update.choice_generator.get_state(),
        "random": take_random_state(),
    }


def put_trainer_state(trainer: "GRPOTrainer", state: dict[str, Any]) -> None:
    """Restore what `take_trainer_state` took, all or nothing.

    Raises:
        CheckpointError: naming what is missing, of another kind, or of another shape; the trainer is as it was.
    """
    present = take_trainer_state(trainer)
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
    if present["reference"]:
        _require_same_tensors(
            f"reference {owner}", present["reference"]["parameters"], state["reference"]["parameters"]
        )
    before = copy.deepcopy(present)
    try:
        _put(trainer, state)
    except Exception as error:
        _put(trainer, before)
        raise CheckpointError(f"The checkpoint does not fit, and the trainer is as it was: {error!r}") from error


def _put(trainer: "GRPOTrainer", state: dict[str, Any]) -> None:
    _copy(trainer.policy.get_parameters(), state["parameters"])
    if trainer.reference_policy is not None:
        _copy(trainer.reference_policy.get_parameters(), state["reference"]["parameters"])
    loaders = {name: value.load_state_dict for name, value in _stateful(trainer).items()}
    loaders["reward_model"] = lambda saved: restore_state(trainer.reward_model, saved)
    for name, load in loaders.items():
        try:
            load(state["stateful"][name])
        except Exception as error:
            raise CheckpointError(f"{name}: {error}") from error
    counters = state["counters"]
    trainer.iteration, trainer.run_position = counters["iteration"], counters["run_position"]
    trainer.data_seed, trainer.num_draws = counters["data_seed"], counters["num_draws"]
    trainer.policy_update.skipped_in_a_row = counters["skipped_in_a_row"]
    known = counters["decides_once_per_row"]
    trainer.collector.scorer.one_step_device = trainer.gradient.device if known else None
    trainer.policy_update.generator.set_state(state["row_order"])
    trainer.policy_update.choice_generator.set_state(state["step_choice"])
    put_random_state(state["random"])


def _stateful(trainer: "GRPOTrainer") -> dict[str, Any]:
    """Everything else with a `state_dict`, by name."""
    candidates = {
        "policy": trainer.policy,
        "advantages": trainer.advantages,
        "coefficients": trainer.coefficients,
        "recent_rows": trainer.recent,
        "optimizer": trainer.gradient.optimizer,
        "lr_scheduler": trainer.lr_scheduler,
        "scaler": trainer.gradient.scaler if trainer.gradient.scaler.is_enabled() else None,
    }
    return {name: value for name, value in candidates.items() if isinstance(value, HasState)}


def _require_same_names(where: str, expected: Any, found: Any) -> None:
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        raise CheckpointError(
            f"{where} lacks {missing or 'nothing'} and has {extra or 'nothing'} that this trainer has not. "
            "Build the trainer with the same kinds of policy, reward model, optimizer and scheduler as when it was saved."
        )


def _require_same_tensors(owner: str, present: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    _require_same_names(f"{owner}'s parameters in the checkpoint", present, saved)
    for name, value in present.items():
        if value.shape != saved[name].shape:
            raise CheckpointError(
                f"{owner}: {name} has shape {list(value.shape)}, and {list(saved[name].shape)} in the checkpoint. "
                "Build the policy as it was when it was saved."
            )


def _copy(present: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in present.items():
            value.copy_(saved[name])

"""Capture the state of a `GRPOTrainer` that an exact resume needs, as one nested value."""

from collections.abc import Container, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo._common.conversion import is_dense
from grpo._common.global_state import capture_random_state
from grpo._sharding.tensors import address_of
from grpo.policy_base import HasState
from grpo.reward_model_base import kept_state

LASTING = ("optimizer", "lr_scheduler", "scaler", "reference")
"""Parts that change only together with the weights of the policy or of the reference."""


def capture(trainer: Any, passing: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything that an exact resume needs. Tensors are not copied.

    Args:
        trainer: the trainer. Its weights, optimizer and scheduler are captured as they are now.
        passing: what `passing_state` returned at the last safe point, for a trainer that has stopped after it. None: now.
    """
    reference, passing = trainer.reference_policy, passing or passing_state(trainer)
    lasting = {name: value.state_dict() for name, value in stateful_parts(trainer).items() if name in LASTING}
    unfinished = passing["unfinished"]
    return {
        **passing,
        "parameters": dict(trainer.policy.get_parameters()),
        "reference": {} if reference is None else {"parameters": dict(reference.get_parameters())},
        "config": trainer.config.to_dict(),
        "kinds": {name: type(value).__name__ for name, value in stateful_parts(trainer).items()}
        | {"reward_model": type(trainer.reward_model).__name__},
        "stateful": {**passing["stateful"], **lasting},
        "unfinished": None if unfinished is None else {**unfinished, "meter": unfinished["meter"].state_dict()},
        "ahead": [pending.state_dict() for pending in passing["ahead"]],
    }


def passing_state(trainer: Any) -> dict[str, Any]:
    """The part of the state that may change before the next optimizer step, copied: generators, counters, rows, environments.

    Weights and rows are not copied. Weights do not change before the next optimizer step, and rows never change.
    """
    weights = _addresses(trainer)
    parts = {name: value for name, value in stateful_parts(trainer).items() if name not in LASTING}
    progress, rows = trainer.progress, trainer.progress.unfinished
    return {
        "stateful": {name: value.state_dict() for name, value in parts.items() if name == "replay"}
        | {name: _copied(value.state_dict(), weights) for name, value in parts.items() if name != "replay"}
        | {"reward_model": _copied(kept_state(trainer.reward_model), weights)},
        "counters": {
            "iteration": trainer.iteration,
            "run_position": progress.position,
            "num_draws": progress.num_draws,
            "data_seed": trainer.data_seed,
            "skipped_in_a_row": trainer.optimizer_step.skipped_in_a_row,
            "num_applied": trainer.optimizer_step.num_applied,
            "decides_once_per_row": trainer.collector.scorer.one_step_device is not None,
        },
        "unfinished": None if rows is None else {"rows": rows.state_dict(), "meter": trainer.meter.copy()},
        "ahead": [*progress.ahead],
        "best_score": progress.best_score,
        "unrecorded": progress.unrecorded,
        "callbacks": progress.loaded_callbacks if progress.is_loaded else progress.callbacks.state_dict(),
        "row_order": trainer.setup.row_order.get_state(),
        "step_choice": trainer.setup.step_choice.get_state(),
        "random": capture_random_state(),
    }


def stateful_parts(trainer: Any) -> dict[str, Any]:
    """Return the parts of the trainer that have a `state_dict`, by name."""
    scaler = trainer.optimizer_step.scaler
    candidates = {
        "policy": trainer.policy,
        "advantages": trainer.advantages,
        "collector": trainer.collector,
        "coefficients": trainer.coefficients,
        "replay": trainer.replay,
        "optimizer": trainer.optimizer_step.optimizer,
        "reference": trainer.moving_reference,
        "lr_scheduler": trainer.optimizer_step.lr_scheduler,
        "scaler": scaler if scaler.is_enabled() else None,
    }
    return {name: value for name, value in candidates.items() if _has_state(value.__class__)}


@cache
def _has_state(kind: type) -> bool:
    """Whether objects of a class have a `state_dict`. Asking a protocol is slow, and each update asks."""
    return issubclass(kind, HasState)


def _addresses(trainer: Any) -> set[int]:
    """The addresses of all weights, which only an optimizer step changes."""
    modules = [value for value in (trainer.policy, trainer.reward_model) if isinstance(value, torch.nn.Module)]
    weights = [*trainer.policy.get_parameters().values(), *(w for module in modules for w in module.parameters())]
    return {address_of(weight) for weight in weights}


def _copied(value: Any, weights: Container[int]) -> Any:
    """Copy nested state. Tensors at the addresses of `weights` are not copied, and neither are objects of other types."""
    if isinstance(value, Tensor):
        is_weight = is_dense(value) and address_of(value) in weights
        return value if is_weight else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: _copied(entry, weights) for key, entry in value.items()}
    if isinstance(value, list):
        return [_copied(entry, weights) for entry in value]
    if type(value) is tuple:
        return tuple(_copied(entry, weights) for entry in value)
    return value

"""The state of a trainer: captured between two changes of the weights, and restored completely or not at all."""

from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo._common.conversion import describe, is_dense
from grpo._common.global_state import capture_random_state, restore_random_state
from grpo._common.settings_by_name import flattened
from grpo._storage.kinds import unlike
from grpo._updating.parts import Parts
from grpo.checkpoint import SavedTensor
from grpo.config import GRPOConfig
from grpo.engine import Engine
from grpo.errors import CheckpointError, warn_user

from .other_ranks import with_rows

Load = Callable[[Any], Any]
"""Returns a part of a state with its tensors read from the disk."""

WITHOUT_EFFECT = ("seed", "device")
"""Settings that may differ when a run is resumed: the checkpoint holds the random generators, and any device will do."""


class RunState:
    """The state of a trainer, which is captured between two changes of the weights, and restored completely or not at all.

    Args:
        parts: The parts of the trainer.
        config: Its settings.
        engine: Joins the ranks.
        snapshots: For parts that know what of their state has to be copied: a function that returns the state as it is now,
            whatever changes later, or a further function that returns it and may copy from the device.
    """

    def __init__(
        self, parts: Parts, config: GRPOConfig, engine: Engine, snapshots: Mapping[str, Callable[[], Any]]
    ) -> None:
        self._parts, self._config, self._engine, self._snapshots = parts, config, engine, snapshots

    def state_dict(self, passing: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Everything that an exact resume needs. Tensors are not copied.

        Args:
            passing: What `passing_state` returned earlier, after the last change of a weight. None: now.
        """
        passing = passing or self.passing_state()
        parts = {name: state() if callable(state) else state for name, state in passing["parts"].items()}
        lasting = {
            name: self._parts.by_name[name].state_dict() for name in self._parts.by_name if name in self._parts.lasting
        }
        return {
            "config": self._config.to_dict(),
            "kinds": {name: self._kind(name) for name in self._parts.by_name},
            **self._parts.weights(),
            "parts": {**parts, **lasting},
            "random": passing["random"],
        }

    def passing_state(self) -> dict[str, Any]:
        """The part of the state that may change before the next optimizer step, copied: generators, counters, environments.

        Weights are not copied, because only an optimizer step changes them.
        """
        weights = self._addresses()

        def is_weight(value: Tensor) -> bool:
            return is_dense(value) and self._address_of(value) in weights

        states = {
            name: self._snapshots[name]() if name in self._snapshots else _copied(part.state_dict(), is_weight)
            for name, part in self._parts.by_name.items()
            if name not in self._parts.lasting
        }
        return {"parts": states, "random": capture_random_state()}

    def load_state_dict(
        self, state: Mapping[str, Any], load: Load = lambda part: part, load_part: Load | None = None
    ) -> None:
        """Restore what `state_dict` returned, all or nothing. Names and shapes are checked before a tensor is read.

        Memory holds at most one more copy of the weights and of the optimizer's state. Changed settings give a GRPOWarning.

        Args:
            state: The state, or a checkpoint's state with placeholders for tensors.
            load: Replaces the placeholders among the weights. The default is for a state without placeholders.
            load_part: Replaces the placeholders in the state of a part, when the weights are in place. None: `load`.
        """
        present = self.state_dict()
        self._require_fit(present, state)
        saved = load({name: state[name] for name in ("parameters", "reference")})
        weights = {kind: dict(tensors) for kind, tensors in saved.items()}
        del saved  # `_exchange` frees each tensor that it has copied, unless somebody else holds it
        self._exchange(weights)
        try:
            self._put(state, load_part or load, self._parts.by_name)
        except Exception as error:
            self._exchange(weights)
            self._put(present, lambda part: part, self._parts.by_name)
            raise CheckpointError(
                f"The checkpoint does not fit this trainer, which is unchanged: {error!r}. Build the trainer as when it was "
                "saved."
            ) from error
        if state["config"].get("learning_rate") != present["config"]["learning_rate"]:
            self._keep_learning_rates(present["parts"])
        _warn_of_changes(state["config"], present["config"])

    def _keep_learning_rates(self, parts: Mapping[str, Any]) -> None:
        """Give the loaded optimizer the learning rates that it had before, because the new setting counts."""
        optimizer = self._parts.by_name.get("optimizer")
        if isinstance(optimizer, torch.optim.Optimizer) and "lr_scheduler" not in self._parts.by_name:
            for group, before in zip(optimizer.param_groups, parts["optimizer"]["param_groups"], strict=True):
                group.pop("initial_lr", None)
                group |= {name: before[name] for name in ("lr", "initial_lr") if name in before}

    def with_rows(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A checkpoint's state with rows in place of whole tensors, where the ranks have divided the tensor."""
        return with_rows(state, self._parts.weights(), self._parts.by_name.get("optimizer"))

    def put_back(self, passing: Mapping[str, Any]) -> None:
        """Restore what `passing_state` returned: everything that an optimizer step does not change."""
        states = {name: state() if callable(state) else state for name, state in passing["parts"].items()}
        self._put({**passing, "parts": states}, lambda part: part, states)

    def _put(self, state: Mapping[str, Any], load: Load, names: Container[str]) -> None:
        """Restore the states of these parts, and last the generators."""
        for name, part in self._parts.by_name.items():
            if name in names:
                try:
                    part.load_state_dict(load(state["parts"][name]))
                except Exception as error:
                    raise CheckpointError(f"{name}: {error}") from error
        restore_random_state(load(state["random"]))  # last, because a part may draw while it is restored

    def _exchange(self, weights: dict[str, dict[str, Tensor]]) -> None:
        """Put the weights into the policy and the reference, and their present weights into `weights`, tensor by tensor."""
        with torch.no_grad():
            for kind, present in self._parts.weights().items():
                for name, value in present.items():
                    before = value.detach().clone()
                    self._engine.copy_into(value, weights[kind][name])
                    weights[kind][name] = before

    def _kind(self, name: str) -> str:
        part = self._parts.reward_model if name == "reward_model" else self._parts.by_name[name]
        return type(part).__name__

    def _addresses(self) -> set[int]:
        """The addresses of all weights, which only an optimizer step changes."""
        policy, reward_model = self._parts.policy, self._parts.reward_model
        modules = [value for value in (policy, reward_model) if isinstance(value, torch.nn.Module)]
        weights = [*policy.get_parameters().values(), *(w for module in modules for w in module.parameters())]
        return {self._address_of(weight) for weight in weights}

    def _address_of(self, tensor: Tensor) -> int:
        """The address of the first value. A part without rows has one, too, if it belongs to a weight."""
        own = self._engine.part(tensor)
        return own.data_ptr() if own.numel() else own.untyped_storage().data_ptr()

    def _require_fit(self, present: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Require the same parts, names, kinds and shapes as there are."""
        _require_same_names("The checkpoint", present, state)
        if not isinstance(state["config"], Mapping) or not state["config"]:
            raise CheckpointError(
                f"The checkpoint's config must be a dict of settings; got {describe(state['config'])}. Use another checkpoint."
            )
        for part in ("kinds", "parts", "random"):
            _require_same_names(f"The checkpoint's {part!r}", present[part], state[part])
        for name, kind in state["kinds"].items():
            if kind != present["kinds"][name]:
                raise CheckpointError(
                    f"The checkpoint's {name} is a {kind}; this trainer's is a {present['kinds'][name]}. "
                    "Build the trainer as it was when it was saved."
                )
        own = present["parts"].keys() - {"policy", "reward_model"}  # which look at their states themselves
        found = (
            unlike(name, present["parts"][name], state["parts"][name], may_lack=name != "optimizer")
            for name in sorted(own)
        )
        if wrong := [one for part in found for one in part]:
            raise CheckpointError(
                f"The checkpoint must hold values as a trainer writes them; got {'; '.join(wrong[:3])}. Use another checkpoint."
            )
        owner = type(self._parts.policy).__name__
        _require_same_tensors(owner, present["parameters"], state["parameters"])
        _require_same_tensors(f"reference {owner}", present["reference"], state["reference"])


def _copied(value: Any, is_weight: Callable[[Tensor], bool]) -> Any:
    """Copy nested state. Weights are not copied, and neither are objects of other types."""
    if isinstance(value, Tensor):
        return value if is_weight(value) else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: _copied(entry, is_weight) for key, entry in value.items()}
    if isinstance(value, list):
        return [_copied(entry, is_weight) for entry in value]
    if type(value) is tuple:
        return tuple(_copied(entry, is_weight) for entry in value)
    return value


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

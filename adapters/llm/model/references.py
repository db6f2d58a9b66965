"""The reference of a model that trains a part of its weights: the model as training began, or without its adapter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grpo.errors import ConfigError

from .causal_lm import CausalLM, is_adapted

KEEP_BASE = (True, False, "gaussian", "eva", "mica", "orthogonal")
"""Initialisations of LoRA that leave the base weights as they are. Others, such as PiSSA, change them."""


class OwnReference:
    """The reference that a model with an adapter gives without a second model.

    A new LoRA changes nothing at first, so the model without it is the model as training began. For any other adapter, and
    where weights outside the adapter are trained, a copy of the trained weights is kept, as TRL keeps a copy of an adapter
    that was loaded.

    Args:
        lm: The model, as training begins.
        kind: "start": the model as it is now. "base": the model without its adapter.
    """

    def __init__(self, lm: CausalLM, kind: Literal["start", "base"]) -> None:
        self._lm = lm
        outside = list(trained_outside(lm.model))
        if kind == "base":
            _require_base(lm, outside)
        self._start: dict[str, Tensor] = {}
        if kind == "start" and (outside or not _changes_nothing(lm.model)):
            self._start = {name: value.detach().clone() for name, value in trained(lm.model).items()}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the model is the reference, in evaluation mode. Do not train the model in it."""
        if not self._start:
            with self._lm.without_adapter():
                yield
            return
        live = dict(self._lm.model.named_parameters())
        now = {name: live[name].detach().clone() for name in self._start}
        with torch.no_grad(), self._lm.evaluating():
            try:
                self._set(live, self._start)
                yield
            finally:
                self._set(live, now)

    def _set(self, live: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            target: Any = live[name].data
            if hasattr(target, "device_mesh") and not hasattr(value, "device_mesh"):  # `Sharded` divided it later
                from torch.distributed.tensor import distribute_tensor

                value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
            target.copy_(value)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def trained_outside(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters that are no part of an adapter, by name."""
    inside = _adapter_ids(model)
    return {name: value for name, value in trained(model).items() if id(value) not in inside}


def _adapter_ids(model: nn.Module) -> set[int]:
    """The parameters that are switched off with the adapter."""
    found: set[int] = set()
    for module in model.modules():
        for name in (*getattr(module, "adapter_layer_names", ()), *_WRAPPED):
            part = getattr(module, name, None) if _is_adapter(module) else None
            if isinstance(part, nn.Module):
                found |= {id(value) for value in part.parameters()}
            elif isinstance(part, Tensor):
                found.add(id(part))
        if type(module).__name__.startswith("AdaptedAttention"):
            found |= {id(module.adaption_prompt), id(module.adaption_gate)}
    return found


_WRAPPED = ("modules_to_save", "token_adapter")
"""Attributes of PEFT's wrappers with copies of whole modules and of embeddings of some tokens."""


def _is_adapter(module: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def _changes_nothing(model: nn.Module) -> bool:
    """Whether the adapter is plain LoRA with B = 0, and copies of whole modules are equal to their originals."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    def is_zero(module: Any) -> bool:
        up = [*module.lora_B.values(), *module.lora_embedding_B.values()]
        return not module.lora_variant and not any(
            value.any() for part in up for value in ([part] if isinstance(part, Tensor) else part.parameters())
        )

    def is_copy(module: Any) -> bool:
        original = dict(module.original_module.named_parameters())
        return all(
            torch.equal(value, original[name])
            for copy in module.modules_to_save.values()
            for name, value in copy.named_parameters()
        )

    for module in filter(_is_adapter, model.modules()):
        if isinstance(module, LoraLayer):
            if not is_zero(module):
                return False
        elif not isinstance(module, ModulesToSaveWrapper) or not is_copy(module):
            return False
    return not any(type(module).__name__.startswith("AdaptedAttention") for module in model.modules())


def _require_base(lm: CausalLM, outside: list[str]) -> None:
    """Refuse a base model that is not left when the adapter is switched off."""
    changed = [
        f"init_lora_weights={config.init_lora_weights!r}"
        for config in lm.adapters.values()
        if getattr(config, "init_lora_weights", True) not in KEEP_BASE
    ]
    if not is_adapted(lm.model) or outside or changed:
        cause = (
            "this model has no adapter"
            if not is_adapted(lm.model)
            else f"{', '.join(outside[:3])}{' ...' if len(outside) > 3 else ''} is trained outside the adapter"
            if outside
            else f"{', '.join(changed)} has changed the base weights"
        )
        raise ConfigError(
            f"HFPolicy: options.reference='base' needs an adapter that leaves the base model as it was; {cause}. Use "
            "'start', the policy as training began, or pass reference_model=..., a second model."
        )

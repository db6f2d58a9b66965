"""What a recording needs from the model: whether it can be recorded, what it depends on, and weights at fixed addresses."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.model.merged_weights import is_divided
from adapters.llm.model.token_log_probs import is_intercepted

RECORDABLE = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers whose cache can have a fixed shape. The mask keeps windows and chunks."""


def obstacle(lm: CausalLM) -> str | None:
    """Why the steps of this model cannot be recorded, as far as its class and its weights tell. None if nothing is known."""
    plain = lm.plain
    if not lm.shares_prompts or not getattr(plain, "_can_compile_fullgraph", False):
        return "transformers has no cache of fixed shape for it"
    if not set(getattr(lm.config, "layer_types", None) or ()) <= RECORDABLE:
        return "its layers have states"
    if getattr(plain, "is_quantized", False):
        return "its weights are quantised"
    if is_divided(plain):
        return "its weights are divided among ranks"
    return "its weights are on several devices" if len({weight.device for weight in plain.parameters()}) > 1 else None


def dependencies(lm: CausalLM) -> list[Any]:
    """What recordings of the model depend on. If it changes, recordings would go on with what was there before."""
    plain, device = lm.plain, lm.device.type
    adapters = [
        (part.disable_adapters, list(part.active_adapters))
        + ((list(part.merged_adapters), dict(getattr(part, "scaling", {}))) if isinstance(part, BaseTunerLayer) else ())
        for part in plain.modules()
        if isinstance(part, BaseTunerLayer | AuxiliaryTrainingWrapper)
    ]
    tensors = [value for values in (plain.parameters(), plain.buffers()) for value in values]
    return [
        [(value.data_ptr(), value.dtype, value.shape) for value in tensors],
        adapters,
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
        [part.config._attn_implementation for part in _parts(lm)],
    ]


class NarrowWeights:
    """Copies of the linear layers' float32 weights in autocast's type, at fixed addresses. Empty without autocast.

    Torch's own copies under autocast would be those of the first update, because a recording does not convert them again.
    """

    def __init__(self, lm: CausalLM) -> None:
        device = lm.device.type
        self._copies: list[tuple[nn.Module, str, nn.Parameter]] = []
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            self._copies = [
                (layer, name, nn.Parameter(weight.detach().to(dtype), requires_grad=False))
                for layer in lm.plain.modules()
                if type(layer) is nn.Linear
                for name, weight in layer.named_parameters(recurse=False)
                if weight.dtype == torch.float32
            ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the layers have the copies, with the values that their weights have now."""
        weights = [layer._parameters[name] for layer, name, _ in self._copies]
        for (layer, name, copy), weight in zip(self._copies, weights, strict=True):
            assert weight is not None
            copy.copy_(weight)
            layer._parameters[name] = copy
        try:
            yield
        finally:
            for (layer, name, _), weight in zip(self._copies, weights, strict=True):
                layer._parameters[name] = weight


class FusedNorms:
    """The model's norms that are torch's `rms_norm`, computed by it: one kernel in place of eight. Others stay as they are."""

    def __init__(self, lm: CausalLM) -> None:
        constants = ((layer, _rms_constant(layer)) for layer in lm.plain.modules())
        self._norms = [
            (layer, partial(_fused_norm, layer, constant)) for layer, constant in constants if constant is not None
        ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the norms are fused."""
        for layer, fused in self._norms:
            layer.forward = fused
        try:
            yield
        finally:
            for layer, _ in self._norms:
                del layer.forward


def _fused_norm(layer: Any, constant: float, hidden: Tensor) -> Tensor:
    weight = layer.weight
    dtype = torch.promote_types(hidden.dtype, weight.dtype)  # as the product of the two
    with torch.autocast(hidden.device.type, enabled=False):
        return nn.functional.rms_norm(hidden.to(dtype), weight.shape, weight.to(dtype), constant)


def _rms_constant(layer: nn.Module) -> float | None:
    """The constant with which `layer` equals `rms_norm` for random inputs, small and large. None if it is something else."""
    constants = [value for value in vars(layer).values() if isinstance(value, float)]
    shapes = {name: weight.shape for name, weight in layer.named_parameters()}
    is_norm = "Norm" in type(layer).__name__ and shapes.keys() == {"weight"} and len(shapes["weight"]) == 1
    if not is_norm or len(constants) != 1 or is_intercepted(layer) or len(signature(layer.forward).parameters) > 1:
        return None
    random = torch.Generator().manual_seed(0)  # on the CPU, whatever the default device is
    weight = torch.rand(shapes["weight"], generator=random, device="cpu")
    hidden = torch.randn(2, 3, *weight.shape, generator=random, device="cpu")
    hidden *= torch.tensor([1e-3, 1.0], device="cpu")[:, None, None]
    try:
        found = torch.func.functional_call(layer, {"weight": weight}, (hidden,))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    expected = nn.functional.rms_norm(hidden, weight.shape, weight, constants[0])
    is_same = isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4)
    return constants[0] if is_same else None


@contextmanager
def fixed_experts(lm: CausalLM) -> Iterator[None]:
    """Context in which a mixture of experts has operations of fixed shape. The loop over the chosen experts has none."""
    parts = [part for part in _parts(lm) if part._can_set_experts_implementation()]  # the others may raise
    given = [(part.config, part.config._experts_implementation) for part in parts]
    for part in parts:
        part.set_experts_implementation(_experts_of_fixed_shape(lm))
    try:
        yield
    finally:
        for config, kind in given:
            config._experts_implementation_internal = kind


def _experts_of_fixed_shape(lm: CausalLM) -> str:
    """Torch's grouped_mm reads the groups' sizes on the host, except for bfloat16 on Hopper and Blackwell."""
    is_recorded = (
        lm.device.type == "cuda"
        and lm.plain.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(lm.device)[0] in (9, 10)
    )
    return "grouped_mm" if is_recorded else "batched_mm"


@contextmanager
def without_cached_casts(lm: CausalLM) -> Iterator[None]:
    """Context in which autocast, if it is on, converts weights whenever they are used, and keeps no converted weights."""
    device = lm.device.type
    with torch.autocast(
        device,
        dtype=torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=False,
    ):
        yield


def _parts(lm: CausalLM) -> list[Any]:
    """The model, and its parts that are models with a configuration of their own."""
    parts = [part for part in lm.plain.modules() if isinstance(part, PreTrainedModel)]
    return list({id(part.config): part for part in parts}.values())

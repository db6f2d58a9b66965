"""Limits of the time steps of Mamba 2 layers, kept in decoding too."""

import math
from typing import Any

import torch
from torch import Tensor, nn

NO_LIMIT = (0.0, math.inf)


def keep_time_step_limits(decoder: nn.Module) -> None:
    """Let layers with limits of their time step, dt = softplus(projection + dt_bias), keep them in all forward passes.

    Transformers clips dt to [low, high] where a pass reads several tokens, and not where it decodes one, so that sampling and
    scoring differ as soon as weights give a smaller or larger dt. A hook therefore clips the projection to the same limits:
    softplus^-1(dt) = dt + log(1 - exp(-dt)). Passes of several tokens do not change.
    """
    for mixer in decoder.modules():
        limits = getattr(mixer, "time_step_limit", None) or NO_LIMIT
        if tuple(limits) != NO_LIMIT:
            projection: Any = mixer.in_proj
            for part in projection.modules():  # an adapter may have wrapped a layer that has a hook
                for key in [key for key, hook in part._forward_hooks.items() if isinstance(hook, _Limits)]:
                    del part._forward_hooks[key]
            projection.register_forward_hook(_Limits(mixer, *limits))


class _Limits:
    """Hook of a layer's projection, whose last outputs are those of the time steps, one per head."""

    def __init__(self, mixer: Any, low: float, high: float) -> None:
        self._mixer = mixer
        self._low, self._high = (before_softplus(limit) for limit in (low, high))

    def __call__(self, layer: nn.Module, args: Any, projected: Tensor) -> Tensor:
        bias = self._mixer.dt_bias.detach()
        rest, steps = projected.split([projected.shape[-1] - len(bias), len(bias)], -1)
        scale = self._mixer.mup_vector[..., -len(bias) :] if hasattr(self._mixer, "mup_vector") else 1
        low, high = (((limit - bias) / scale).to(steps.dtype) for limit in (self._low, self._high))
        return torch.cat([rest, steps.maximum(low).minimum(high)], -1)


def before_softplus(value: float) -> float:
    """The number whose softplus is `value`."""
    return -math.inf if value == 0 else value + math.log(-math.expm1(-value))

"""Small networks in NumPy for single decisions, because torch's dispatch costs more than their arithmetic."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from .networks import SharedStd
from .observations import MAX_DEVIATION, RunningNormalizer

SINGLE_THREADED = 2**18
"""Maximum multiply-adds of a matrix product for which OpenBLAS uses one thread. More threads would cost more time."""

KNOWN = (nn.Sequential, nn.Linear, nn.Tanh, nn.ReLU, SharedStd, RunningNormalizer)

Step = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""One layer as a NumPy function. It may overwrite its input."""


class FastForward:
    """A sequence of modules as NumPy functions that use the current weights. `fast_forward` creates it."""

    def __init__(self, steps: Sequence[Step], max_rows: int) -> None:
        self._steps = steps
        self.max_rows = max_rows
        """Largest batch for which NumPy is faster than torch."""

    def __call__(self, values: Float[np.ndarray, "n inputs"]) -> Float[np.ndarray, "n outputs"]:
        """Outputs of the last module."""
        values = values.copy()
        for step in self._steps:
            values = step(values)
        return values


def fast_forward(*modules: nn.Module | None) -> FastForward | None:
    """Convert the modules to NumPy (None entries are skipped). Returns None if a module is not supported.

    The supported modules are `Sequential`, `Linear`, `Tanh`, `ReLU`, `SharedStd` and `RunningNormalizer`, with float32 weights
    on the CPU and without hooks. The functions share the weights' memory, so they see an optimizer's in-place changes.
    Results differ from torch's by rounding.
    """
    steps: list[Step] = []
    present = [module for module in modules if module is not None]
    if not all(_add(steps, module) for module in present):
        return None
    sizes = [parameter.numel() for module in present for parameter in module.parameters()]
    return FastForward(steps, SINGLE_THREADED // max(sizes, default=1))


def _add(steps: list[Step], module: nn.Module) -> bool:
    """Append the module's functions. Returns False if the module is not supported."""
    arrays = [module.shift, module.scale] if isinstance(module, RunningNormalizer) else list(module.parameters())
    if module._forward_hooks or module._forward_pre_hooks or not all(map(_is_plain, arrays)):
        return False
    if type(module) not in KNOWN:  # a subclass may compute something else
        return False
    match module:
        case nn.Sequential():
            return all(_add(steps, part) for part in module)
        case nn.Linear():
            steps.append(_linear(module))
        case nn.Tanh():
            steps.append(lambda values: np.tanh(values, out=values))
        case nn.ReLU():
            steps.append(lambda values: np.maximum(values, 0.0, out=values))
        case SharedStd():
            steps.append(_shared_std(module))
        case RunningNormalizer():
            steps.append(_normalized(module))
    return True


def _is_plain(values: Tensor) -> bool:
    return values.device.type == "cpu" and values.dtype == torch.float32


def _array(values: Tensor) -> NDArray[np.float32]:
    """A NumPy array that shares the tensor's memory."""
    # shared, and not copied: an update of the weights is in effect at once
    shared: NDArray[Any] = values.detach().numpy()
    return shared


def _linear(layer: nn.Linear) -> Step:
    weight, bias = _array(layer.weight).T, dict(layer.named_parameters()).get("bias")
    if bias is None:
        return lambda values: values @ weight
    added = _array(bias)

    def forward(values: NDArray[np.float32]) -> NDArray[np.float32]:
        product = values @ weight
        product += added
        return product

    return forward


def _shared_std(head: SharedStd) -> Step:
    mean, log_std = _linear(head.mean), _array(head.log_std)
    num_actions = len(log_std)

    def forward(features: NDArray[np.float32]) -> NDArray[np.float32]:
        parameters = np.empty((len(features), 2 * num_actions), dtype=np.float32)
        parameters[:, :num_actions] = mean(features)
        parameters[:, num_actions:] = log_std
        return parameters

    return forward


def _normalized(normalizer: RunningNormalizer) -> Step:
    shift, scale = _array(normalizer.shift), _array(normalizer.scale)

    def forward(observations: NDArray[np.float32]) -> NDArray[np.float32]:
        observations -= shift
        observations *= scale
        return np.clip(observations, -MAX_DEVIATION, MAX_DEVIATION, out=observations)

    return forward

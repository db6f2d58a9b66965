"""A loss that is a sum over rows, evaluated in blocks of rows that stay in the processor's cache, with its gradient."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.autograd.function import once_differentiable

from .masking import reads_at_once
from .types import ObjectiveInputs, ObjectiveOutput

STEPS_PER_BLOCK = {"cpu": 2**17}
"""How many steps are evaluated at a time, by device: few enough that temporaries stay in the cache."""

STEPS_PER_BLOCK_ELSEWHERE = 2**23
"""On an accelerator a block has to keep the whole device busy; there it only bounds the memory that temporaries take."""

DIFFERENTIABLE = ("log_probs", "entropy", "kl", "values")
"""The inputs that may carry a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What is known of some rows: their loss, and its gradient in closed form."""

    loss: Float64[Tensor, ""]
    gradients: Mapping[str, Float[Tensor, "N T"]]
    """By input, of those that were asked for and that a term reads; 0 off the mask."""
    names: tuple[str, ...]
    """Of the metrics."""
    moments: Float64[Tensor, "M 3"]
    """Their (count, sum, sum of squares)."""


Evaluate = Callable[[ObjectiveInputs, Collection[str]], Evaluated]
"""Rows, and the names of inputs whose gradient is wanted -> the loss of these rows."""


def in_blocks(evaluate: Evaluate, inputs: ObjectiveInputs) -> ObjectiveOutput:
    """`evaluate`, block of rows by block of rows; for an objective that is a sum over rows.

    Dozens of operations on [N, T] read and write main memory as often; on a block they stay in the cache. There is no graph:
    `evaluate` gives the gradient beside the loss, and that is all that is kept for the backward pass. Small inputs are one
    block, and so are those being compiled. A second derivative is not to be had.
    """
    num_rows, width = inputs.log_probs.shape
    limit = STEPS_PER_BLOCK.get(inputs.log_probs.device.type, STEPS_PER_BLOCK_ELSEWHERE)
    rows = max(limit // max(width, 1), 1)
    wanted = _wanted(inputs)
    with torch.no_grad():
        if num_rows < 2 * rows or torch.compiler.is_compiling():
            whole = evaluate(inputs, wanted)
        else:
            whole = _sum_of_blocks(evaluate, inputs, wanted, rows)
        dtype = torch.promote_types(inputs.log_probs.dtype, torch.float32)
        loss = whole.loss.to(dtype)
    names = list(whole.gradients)
    if names:
        leaves = [getattr(inputs, name) for name in names]
        gradients = [whole.gradients[name].to(leaf.dtype) for name, leaf in zip(names, leaves, strict=True)]
        loss = _WithGradients.apply(loss, gradients, *leaves)  # type: ignore[no-untyped-call]
    return ObjectiveOutput(loss=loss, metrics=dict(zip(whole.names, whole.moments.unbind(0), strict=True)))


def _wanted(inputs: ObjectiveInputs) -> tuple[str, ...]:
    """The inputs that carry a gradient."""
    if not torch.is_grad_enabled():
        return ()
    values = [(name, getattr(inputs, name)) for name in DIFFERENTIABLE]
    return tuple(name for name, value in values if value is not None and value.requires_grad)


def _sum_of_blocks(
    evaluate: Evaluate, inputs: ObjectiveInputs, wanted: Collection[str], rows: int
) -> Evaluated:
    """All rows, from blocks of so many."""
    gradients: dict[str, Tensor] = {}  # an input that no block looks at has none
    blocks: list[Evaluated] = []
    for start in range(0, len(inputs.mask), rows):
        here = slice(start, start + rows)
        block = evaluate(_rows_of(inputs, here), wanted)
        for name, gradient in block.gradients.items():
            if name not in gradients:
                gradients[name] = torch.empty_like(getattr(inputs, name))
            gradients[name][here] = gradient
        blocks.append(replace(block, gradients={}))
    return Evaluated(
        loss=torch.stack([block.loss for block in blocks]).sum(),
        gradients=gradients,
        names=blocks[0].names,
        moments=torch.stack([block.moments for block in blocks]).sum(0),
    )


class _WithGradients(torch.autograd.Function):
    """A loss whose gradient is known already; backward hands it out, scaled."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *leaves: Tensor) -> Tensor:
        """The loss; `leaves` tell autograd what it depends on."""
        del leaves
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The stored gradients, times what comes from above (1, as a rule)."""
        (scale,) = upstream
        if reads_at_once(scale) and scale.item() == 1.0:
            return None, None, *ctx.gradients
        return None, None, *(gradient * scale for gradient in ctx.gradients)


def _rows_of(inputs: ObjectiveInputs, rows: slice) -> ObjectiveInputs:
    """Some rows of everything."""
    parts: dict[str, Any] = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor):
            parts[field.name] = value[rows]
    return replace(inputs, **parts)

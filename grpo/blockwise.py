"""A loss that is a sum over rows, evaluated in blocks of rows that stay in the processor's cache, with its gradient."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from .masking import reads_at_once
from .metrics import Number, StepSums
from .types import ObjectiveInputs

STEPS_PER_BLOCK = {"cpu": 2**18}
"""How many steps are evaluated at a time, by device: few enough that temporaries stay in the cache."""

STEPS_PER_BLOCK_ELSEWHERE = 2**23
"""On an accelerator a block has to keep the whole device busy; there it only bounds the memory that temporaries take."""

DIFFERENTIABLE = ("log_probs", "entropy", "kl", "values")
"""The inputs that may carry a gradient."""


Gradients = dict[str, Float[Tensor, "N T"]]
"""By input: 0 off the mask."""

Evaluate = Callable[[ObjectiveInputs, Collection[str], StepSums], Gradients]
"""Some rows, the names of inputs whose gradient is wanted, and where to add up -> the gradients of those that a term reads."""


def in_blocks(evaluate: Evaluate, inputs: ObjectiveInputs) -> tuple[dict[str, Number], Gradients]:
    """`evaluate`, block of rows by block of rows; for an objective that is a sum over rows.

    Dozens of operations on [N, T] read and write main memory as often; on a block they stay in the cache. There is no graph:
    `evaluate` gives the gradient beside the loss, and that is all that is kept. Small inputs are one block, and so are those
    being compiled.

    Returns:
        The sums over all rows, and the gradients.
    """
    num_rows, width = inputs.log_probs.shape
    limit = STEPS_PER_BLOCK.get(inputs.log_probs.device.type, STEPS_PER_BLOCK_ELSEWHERE)
    rows = max(limit // max(width, 1), 1)
    dtype = torch.promote_types(inputs.log_probs.dtype, torch.float32)
    wanted = _wanted(inputs)
    with torch.no_grad():
        if num_rows < 2 * rows or torch.compiler.is_compiling():
            sums = StepSums(width)
            found = evaluate(inputs, wanted, sums)
            gradients = {name: gradient.to(getattr(inputs, name).dtype) for name, gradient in found.items()}
            return StepSums.total(*sums.table(dtype)), gradients
        gradients, tables = {}, []
        names: tuple[str, ...] = ()
        for start, block in zip(range(0, num_rows, rows), _blocks_of(inputs, rows), strict=True):
            sums = StepSums(width)
            for name, gradient in evaluate(block, wanted, sums).items():
                if name not in gradients:
                    gradients[name] = torch.empty_like(getattr(inputs, name))
                gradients[name][start : start + rows] = gradient
            names, table = sums.table(dtype)
            tables.append(table)
        return StepSums.total(names, *tables), gradients


def with_gradients(loss: Float[Tensor, ""], gradients: Gradients, inputs: ObjectiveInputs) -> Float[Tensor, ""]:
    """The loss, to be differentiated with respect to what it has gradients for. A second derivative is not to be had."""
    if not gradients:
        return loss
    leaves = [getattr(inputs, name) for name in gradients]
    attached: Tensor = _WithGradients.apply(loss, list(gradients.values()), *leaves)  # type: ignore[no-untyped-call]
    return attached


def _wanted(inputs: ObjectiveInputs) -> tuple[str, ...]:
    """The inputs that carry a gradient."""
    if not torch.is_grad_enabled():
        return ()
    values = [(name, getattr(inputs, name)) for name in DIFFERENTIABLE]
    return tuple(name for name, value in values if value is not None and value.requires_grad)


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


def _blocks_of(inputs: ObjectiveInputs, rows: int) -> Iterator[ObjectiveInputs]:
    """The inputs, so many rows at a time."""
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    parts = {name: value.detach().split(rows) for name, value in values.items() if isinstance(value, Tensor)}
    for block in zip(*parts.values(), strict=True):
        yield ObjectiveInputs(**values | dict(zip(parts, block, strict=True)))

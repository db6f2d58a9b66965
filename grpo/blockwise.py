"""A loss that is a sum over rows, evaluated in blocks of rows that stay in the processor's cache."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .types import ObjectiveInputs, ObjectiveOutput

STEPS_PER_BLOCK = {"cpu": 2**18}
"""How many steps are evaluated at a time, by device: few enough that temporaries stay in the last cache."""

STEPS_PER_BLOCK_ELSEWHERE = 2**23
"""On an accelerator a block has to keep the whole device busy; there it only bounds the memory that temporaries take."""

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers as wide as a float, by bytes."""

DIFFERENTIABLE = ("log_probs", "entropy", "kl", "values")
"""The inputs that carry a gradient."""


def in_blocks(objective: Callable[[ObjectiveInputs], ObjectiveOutput], inputs: ObjectiveInputs) -> ObjectiveOutput:
    """`objective(inputs)`, block of rows by block of rows, each with its gradient; for an objective that is a sum over rows.

    A dozen operations on [N, T] read and write main memory a dozen times; on a block they stay in the cache, and nothing but
    the gradient is kept for the backward pass. Small inputs, and those being compiled, are evaluated as a whole.

    Blocks have no second derivative. What carries a gradient reaches `objective` with 0 off the mask, in float32 or better.
    """
    num_rows, width = inputs.log_probs.shape
    limit = STEPS_PER_BLOCK.get(inputs.log_probs.device.type, STEPS_PER_BLOCK_ELSEWHERE)
    rows = max(limit // max(width, 1), 1)
    if num_rows < 2 * rows or torch.compiler.is_compiling():
        return objective(_masked(inputs))
    metrics: dict[str, Tensor] = {}
    leaves = [getattr(inputs, name) for name in DIFFERENTIABLE]
    if not torch.is_grad_enabled():
        leaves = [None if leaf is None else leaf.detach() for leaf in leaves]
    loss: Tensor = _Blocks.apply(objective, inputs, rows, metrics, *leaves)  # type: ignore[no-untyped-call]
    return ObjectiveOutput(loss=loss, metrics=metrics)


class _Blocks(torch.autograd.Function):
    """Forward computes each block's gradient as well; backward hands them out, scaled."""

    @staticmethod
    def forward(ctx: Any, objective: Any, inputs: ObjectiveInputs, rows: int, metrics: Any, *leaves: Any) -> Tensor:
        """The sum of the blocks' losses; `metrics` is filled with the sums of theirs."""
        del leaves  # they are in `inputs`; here they tell autograd what this depends on
        wanted = dict(zip(DIFFERENTIABLE, ctx.needs_input_grad[4:], strict=True))
        names = [name for name in DIFFERENTIABLE if wanted[name]]
        gradients: dict[str, Tensor] = {}  # an input that no block looks at has none
        losses = []
        for start in range(0, len(inputs.mask), rows):
            here = slice(start, start + rows)
            block = _rows_of(inputs, here, names)
            with torch.set_grad_enabled(bool(names)):
                output = objective(block)
            if names:
                found: Sequence[Tensor | None] = [None] * len(names)
                if output.loss.requires_grad:  # else no term looks at what carries a gradient
                    found = torch.autograd.grad(
                        output.loss, [getattr(block, name) for name in names], allow_unused=True
                    )
                for name, gradient in zip(names, found, strict=True):
                    if gradient is not None:
                        whole = gradients[name] if name in gradients else torch.zeros_like(getattr(inputs, name))
                        gradients[name] = whole
                        # where the mask does not hold nothing was read, whatever a sum over steps says
                        whole[here] = on_mask(gradient, block.mask)
            losses.append(output.loss.detach())
            for name, moments in output.metrics.items():
                metrics[name] = metrics[name] + moments if name in metrics else moments
        ctx.gradients = [gradients.get(name) for name in DIFFERENTIABLE]
        total = (
            torch.stack(losses).sum(dtype=torch.float64)
            if losses[0].device.type == "cpu"
            else torch.stack(losses).sum()
        )
        return total.to(losses[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The stored gradients, times what comes from above (1, as a rule)."""
        (scale,) = upstream
        if scale.device.type == "cpu" and scale.item() == 1.0:
            scaled = ctx.gradients
        else:
            scaled = [None if gradient is None else gradient * scale for gradient in ctx.gradients]
        return None, None, None, None, *scaled


def _rows_of(inputs: ObjectiveInputs, rows: slice, differentiable: list[str]) -> ObjectiveInputs:
    """Some rows of everything; leaves of a graph of their own, masked before it begins: that costs no backward pass."""
    parts: dict[str, Any] = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor):
            parts[field.name] = value[rows].detach()
    block = _masked(replace(inputs, **parts))
    for name in differentiable:
        getattr(block, name).requires_grad_()
    return block


def _masked(inputs: ObjectiveInputs) -> ObjectiveInputs:
    """Everything that may carry a gradient is 0 off the mask."""
    values = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
    masked: dict[str, Any] = {name: on_mask(value, inputs.mask) for name, value in values.items() if value is not None}
    return replace(inputs, **masked)


def on_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Values with 0 off the mask, in float32 or better: what is off the mask (NaN, say) reaches no gradient.

    On the CPU, where no gradient is wanted, by multiplying bit patterns: NaN x 0 is NaN, its bits x 0 are 0. That takes a third
    of the time of a selection.
    """
    needs_grad = values.requires_grad and torch.is_grad_enabled()
    if needs_grad or values.device.type != "cpu" or torch.compiler.is_compiling():
        clean = torch.where(mask, values, 0.0)
    else:
        bits = INTEGERS[values.element_size()]
        clean = (values.view(bits) * mask.view(torch.uint8).to(bits)).view(values.dtype)
    return clean.float() if clean.element_size() < 4 else clean

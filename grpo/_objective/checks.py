"""Checks of the loss: what a surrogate or a sampler correction returns, and inputs that make the loss NaN."""

from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo._common.conversion import describe, is_dense
from grpo.errors import ContractError
from grpo.types import ObjectiveInputs


def require_step_loss(function: Any, value: Any, mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N #T"]:
    """Check that a surrogate or a sampler correction has returned one number per step, or one per row: [N, T] or [N, 1]."""
    shapes = (tuple(mask.shape), (len(mask), 1))
    is_number = isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1 and is_dense(value)
    if not is_number or tuple(value.shape) not in shapes:
        name = getattr(function, "__name__", type(function).__name__)
        raise ContractError(
            f"{name} must return a dense floating-point tensor [N, T] = {list(mask.shape)} or [N, 1]; got {describe(value)}. "
            "Return one number per step, not their sum."
        )
    return value  # type: ignore[no-any-return]


def require_finite_inputs(loss: Float[Tensor, ""], inputs: ObjectiveInputs) -> None:
    """Check that NaN or infinity in the inputs have not reached the loss. Other devices than the CPU would have to wait."""
    if torch.compiler.is_compiling() or loss.device.type != "cpu" or bool(loss.isfinite()):
        return
    for field in fields(inputs):
        values = getattr(inputs, field.name)
        if not isinstance(values, Tensor) or not values.is_floating_point():
            continue
        wrong = values.isinf() if field.name == "behaviour_log_probs" else ~values.isfinite()
        if bool((wrong.unsqueeze(1) & inputs.mask if wrong.dim() == 1 else wrong & inputs.mask).any()):
            raise ContractError(
                f"ObjectiveInputs.{field.name} must be finite at sampled steps; got NaN or infinity, so that the loss is "
                f"{loss.item()}. Mask logits with torch.finfo(dtype).min, not -inf, and look for 0/0."
            )

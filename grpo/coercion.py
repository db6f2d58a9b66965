"""What users hand in, as tensors of a known shape and dtype, or an error that says what came instead."""

import math
from collections.abc import Sized
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .errors import ContractError, RewardError


def describe(value: Any) -> str:
    """A value as an error message shows it: its shape where it has one, else its type."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {value!r}"[:120]


def require_lengths(owner: str, num_rows: int, **named: Any) -> None:
    """Every named value has `num_rows` entries.

    Raises:
        ContractError: naming the first that has not.
    """
    for name, value in named.items():
        if not isinstance(value, Sized) or len(value) != num_rows:
            raise ContractError(f"{owner}: {name} must have one entry per row = {num_rows}; got {describe(value)}.")


def as_rewards(
    owner: str, value: Any, num_rows: int, *, one_step_is_a_step: bool = False
) -> Float[Tensor, " N"] | Float[Tensor, "N T"]:
    """Rewards as a new CPU tensor [N], or [N, T] with T > 1; values are not looked at.

    Lists, integers and booleans become float64, float32 stays float32: nothing loses a digit.

    Raises:
        RewardError: another length, shape or kind. [N, 1] is refused, unless `one_step_is_a_step`: subtracting [N] from
            it would give [N, N].
    """
    expected = f"{owner} must return one number per row, [N] = [{num_rows}], or one per step, [N, T] with T > 1"
    try:
        if isinstance(value, list | tuple) and value and all(isinstance(entry, Tensor) for entry in value):
            value = torch.stack(list(value))
        rewards = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(f"{expected}; got {describe(value)}. Return a list, array or tensor of numbers.") from error
    if rewards.is_complex():
        raise RewardError(f"{expected}; got {describe(value)}. Return real numbers.")
    is_column = rewards.dim() == 2 and rewards.shape[1] == 1 and not one_step_is_a_step
    if rewards.dim() not in (1, 2) or len(rewards) != num_rows or is_column:
        hint = " Squeeze the last axis." if rewards.shape[1:] == (1,) else ""
        raise RewardError(f"{expected}; got {describe(value)}.{hint}")
    if not rewards.is_floating_point():
        return rewards.cpu().double()
    return rewards.to("cpu", torch.promote_types(rewards.dtype, torch.float32), copy=True)


def as_log_probs(owner: str, value: Any, num_rows: int) -> Float[Tensor, "N T"]:
    """Log-probabilities [N] or [N, T] as [N, T], in float32 or better, gradient kept.

    Raises:
        ContractError: not a floating tensor of that shape.
    """
    required = f"{owner} must return [N] = [{num_rows}] or [N, T]"
    if not isinstance(value, Tensor) or value.dim() not in (1, 2) or value.shape[0] != num_rows:
        raise ContractError(f"{required}; got {describe(value)}. Return one log-probability per (state, action) pair.")
    if not value.is_floating_point():
        raise ContractError(f"{required}, floating; got {describe(value)}. Return log-probabilities, not indices.")
    lifted = value.unsqueeze(1) if value.dim() == 1 else value
    return lifted.float() if lifted.element_size() < 4 else lifted


def as_advantages(value: Any, mask: Bool[Tensor, "N T"]) -> Float[Tensor, " N"] | Float[Tensor, "N T"]:
    """Advantages [N] or [N, T] as a detached CPU tensor of finite numbers, 0 off the mask.

    Raises:
        ContractError: another shape, or a number that is not finite where the mask holds.
    """
    required = f"advantages must be a tensor [N] = [{mask.shape[0]}] or [N, T] = {list(mask.shape)}, finite"
    if not isinstance(value, Tensor) or value.shape not in (mask.shape[:1], mask.shape):
        raise ContractError(f"{required}; got {describe(value)}.")
    advantages = value.detach().cpu()
    advantages = advantages.float() if advantages.element_size() < 4 else advantages
    if advantages.dim() == 2:
        advantages = torch.where(mask.cpu(), advantages, 0.0)
    total = np.add.reduce(advantages.numpy(), axis=None, dtype=np.float64)
    if not math.isfinite(total):  # one NaN or infinity is enough to show in the sum
        raise ContractError(f"{required}; got NaN or infinity. Look for 0/0 in the callable passed as advantages=.")
    return advantages


def pad_steps(values: Tensor, width: int, fill: float | bool) -> Tensor:
    """[N, t] as [N, width], with `fill` in the new columns on the right; the tensor itself where t = width."""
    missing = width - values.shape[1]
    return torch.nn.functional.pad(values, (0, missing), value=fill) if missing else values

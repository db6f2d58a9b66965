"""Conversion of what users return and pass, and how errors describe it."""

import math
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.data import DataLoader

from grpo.errors import ContractError, GRPOError, RewardError


def describe(value: Any) -> str:
    """A short description of a value for error messages: the container with its size and what it holds, or the type."""
    if isinstance(value, Tensor | np.ndarray):
        dtype = str(value.dtype).removeprefix("torch.")
        if isinstance(value, Tensor) and value.is_nested:
            return f"a nested tensor of {dtype}"
        shape = f"{list(value.shape)} {dtype}"
        return shape + _layout(value) if isinstance(value, Tensor) else f"a numpy array {shape}"
    if isinstance(value, list | tuple):
        kinds = {type(entry).__name__ for entry in value}
        return f"a {type(value).__name__} of {len(value)}" + (f" {kinds.pop()}" if len(kinds) == 1 else "")
    return f"{type(value).__name__} {value!r}"[:120]


def reward_name(reward_model: Any) -> str:
    """The name of a reward model in error messages: the name of a function, or `Class.compute_rewards`."""
    name: str = getattr(reward_model, "__name__", f"{type(reward_model).__name__}.compute_rewards")
    return name


def is_dense(value: Tensor) -> bool:
    """Whether a tensor is an ordinary one: not sparse, nested or quantized. On the device meta, it is a shape only."""
    return value.layout == torch.strided and not (value.is_nested or value.is_quantized)


def has_values(value: Tensor) -> bool:
    """Whether a tensor is dense, and not on the device meta, whose tensors have no values."""
    return is_dense(value) and not value.is_meta


def _layout(value: Tensor) -> str:
    """What is not ordinary about a tensor, in words."""
    kinds = {
        ", without data": value.is_meta,
        ", quantized": value.is_quantized,
        f", {value.layout}": not is_dense(value),
    }
    return next((words for words, applies in kinds.items() if applies), "")


def are_rows(value: Any) -> bool:
    """Whether states or actions are a list, or a tensor or array with the rows on its first axis.

    Not rows are the entries of text, of a mapping, a set or an iterator, of a table (pandas, polars and pyarrow iterate over
    columns and find rows by labels), and of a tensor or array without an axis, without data, or with masked entries.
    """
    if isinstance(value, Tensor):
        return has_values(value) and value.dim() > 0
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and not np.ma.is_masked(value)
    is_other = (
        isinstance(value, str | bytes | bytearray | Mapping) or hasattr(value, "columns") or hasattr(value, "iloc")
    )
    return isinstance(value, Sized) and hasattr(type(value), "__getitem__") and not is_other


def require_rows(owner: str, value: Any) -> None:
    """Check that states or actions are what `are_rows` says.

    Raises:
        ContractError: They are not.
    """
    if not are_rows(value):
        remedy = "list(...), or the values of a table: frame.to_numpy(), frame.to_dict('records')"
        if isinstance(value, DataLoader):
            remedy = "its data set, loader.dataset, because its entries are batches"
        raise ContractError(
            f"{owner} must be a list with one entry per row, or a tensor or array with the rows on its first axis; "
            f"got {describe(value)}. Pass {remedy}."
        )


def require_lengths(owner: str, num_rows: int, **named: Any) -> None:
    """Check that every named value has `num_rows` entries.

    Raises:
        ContractError: A value has another number of entries. The message names the first such value.
    """
    for name, value in named.items():
        if not isinstance(value, Sized) or len(value) != num_rows:
            raise ContractError(f"{owner}: {name} must have one entry per row = {num_rows}; got {describe(value)}.")


def require_like_mask(owner: str, mask: Bool[Tensor, "N T"], **named: Tensor) -> None:
    """Check that every named value has the shape of the mask.

    Raises:
        ContractError: A value has another shape. The message names the first such value.
    """
    for name, values in named.items():
        if values.shape != mask.shape:
            raise ContractError(
                f"{owner}: {name} must be like mask, {list(mask.shape)}; got {describe(values)}. Pass one value per step."
            )


def as_float32(values: Tensor) -> Tensor:
    """Convert half precision to float32, and keep the gradient. float32 and float64 are returned unchanged."""
    return values.float() if values.element_size() < 4 else values


def as_tensor(required: str, value: Any, error: type[GRPOError] = ContractError) -> Tensor:
    """Convert a dense tensor, an array, or lists of numbers or tensors to a tensor. Arrays and lists are copied.

    Args:
        required: The beginning of the message of an error: what the value must be.
        value: The value.
        error: The type of an error.

    Raises:
        GRPOError: Of the given type, if `value` is anything else, or an array with masked entries.
    """
    cause: Exception | None = None
    if not np.ma.is_masked(value):
        try:
            if isinstance(value, list | tuple) and value and all(isinstance(entry, Tensor) for entry in value):
                value = torch.stack(list(value))
            tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
            if has_values(tensor):
                return tensor
        except (TypeError, ValueError, RuntimeError, OverflowError) as failure:
            cause = failure
    raise error(f"{required}; got {describe(value)}. Use a list, array or tensor of numbers.") from cause


def as_rewards(
    owner: str, value: Any, num_rows: int, *, one_step_is_a_step: bool = False
) -> Float[Tensor, " N"] | Float[Tensor, "N T"]:
    """Copy rewards to a CPU tensor [N], or [N, T] with T > 1. NaN and infinity are allowed, and the caller handles them.

    Lists, integers and booleans become float64, and float32 stays float32, so no digit is lost.

    Raises:
        RewardError: `value` has a wrong length, shape or type. [N, 1] is refused unless `one_step_is_a_step`, because
            [N, 1] - [N] would broadcast to [N, N].
    """
    expected = f"{owner} must return one number per row, [N] = [{num_rows}], or one per step, [N, T] with T > 1"
    rewards = as_reward_values(expected, value)
    is_column = rewards.dim() == 2 and rewards.shape[1] == 1 and not one_step_is_a_step
    if rewards.dim() not in (1, 2) or len(rewards) != num_rows or is_column:
        hint = " Squeeze the last axis." if rewards.shape[1:] == (1,) else ""
        raise RewardError(f"{expected}; got {describe(value)}.{hint}")
    return rewards


def as_reward_values(required: str, value: Any) -> Float[Tensor, "..."]:
    """Copy real numbers of any shape to a CPU tensor, as `as_rewards` does. `required` begins the message of an error."""
    rewards = as_tensor(required, value, RewardError)
    if rewards.requires_grad:
        raise RewardError(f"{required}, without a gradient, which GRPO would not follow. Return rewards.detach().")
    if rewards.is_complex():
        raise RewardError(f"{required}; got {describe(value)}. Return real numbers.")
    if not rewards.is_floating_point():
        return rewards.cpu().double()
    # a reward model may return a buffer that its next call fills
    return as_float32(rewards).to("cpu", copy=True)


def as_log_probs(owner: str, value: Any, num_rows: int) -> Float[Tensor, "N T"]:
    """Convert log-probabilities [N] or [N, T] to [N, T], in float32 or float64, and keep the gradient.

    Raises:
        ContractError: `value` is not a floating-point tensor of one of these shapes.
    """
    required = f"{owner} must return [N] = [{num_rows}] or [N, T]"
    if not isinstance(value, Tensor) or not has_values(value) or value.dim() not in (1, 2) or len(value) != num_rows:
        raise ContractError(f"{required}; got {describe(value)}. Return one log-probability per (state, action) pair.")
    if not value.is_floating_point():
        raise ContractError(
            f"{required}, floating-point; got {describe(value)}. Return log-probabilities, not indices."
        )
    return as_float32(value.unsqueeze(1) if value.dim() == 1 else value)


def as_advantages(value: Any, mask: Bool[Tensor, "N T"]) -> Float[Tensor, " N"] | Float[Tensor, "N T"]:
    """Convert advantages [N] or [N, T] to a detached CPU tensor of finite numbers, 0 outside the mask.

    Raises:
        ContractError: `value` has another shape, or has NaN or infinity inside the mask.
    """
    required = f"advantages must be a tensor [N] = [{mask.shape[0]}] or [N, T] = {list(mask.shape)}, finite"
    is_number = isinstance(value, Tensor) and has_values(value) and not value.is_complex()
    if not is_number or value.shape not in (mask.shape[:1], mask.shape):
        raise ContractError(f"{required}; got {describe(value)}. Return one number per row, or one per step.")
    advantages = as_float32(value.detach().cpu())
    if advantages.dim() == 2:
        advantages = torch.where(mask.cpu(), advantages, 0.0)
    total = np.add.reduce(advantages.numpy(), axis=None, dtype=np.float64)
    if not math.isfinite(total):  # a single NaN or infinity makes the sum NaN or infinite
        raise ContractError(f"{required}; got NaN or infinity. Look for 0/0 in the callable passed as advantages=.")
    return advantages


def as_mask(owner: str, value: Any, default_shape: tuple[int, ...]) -> Bool[Tensor, "N T"]:
    """Convert a mask of the policy's own steps to a bool tensor [N, T]. None: every step of the default shape.

    Raises:
        ContractError: `value` has another dtype or number of rows.
    """
    required = f"{owner}: mask must be bool [N, T] with N = {default_shape[0]}"
    mask = torch.ones(default_shape, dtype=torch.bool) if value is None else as_tensor(required, value)
    if mask.dtype != torch.bool or mask.dim() != 2 or mask.shape[0] != default_shape[0]:
        raise ContractError(f"{required}; got {describe(mask)}. Pass mask.bool().")
    return mask


def as_state_keys(owner: str, value: Any) -> Int[Tensor, "N T"]:
    """Convert state keys to an integer tensor [N, T].

    Raises:
        ContractError: `value` has another dtype or number of axes.
    """
    required = f"{owner}: state_keys must be integers [N, T], like mask"
    keys = as_tensor(required, value)
    if keys.dim() != 2 or keys.is_floating_point() or keys.is_complex():
        raise ContractError(f"{required}; got {describe(keys)}. Pass one integer per step.")
    return keys.to(torch.int64)


def pad_steps(values: Tensor, width: int, fill: float | bool) -> Tensor:
    """Pad [N, t] on the right to [N, width] with `fill`. Return the tensor itself if t = width."""
    missing = width - values.shape[1]
    return torch.nn.functional.pad(values, (0, missing), value=fill) if missing else values


def join_steps(parts: Sequence[Tensor], width: int) -> Tensor:
    """Concatenate [N] or [N, t] tensors along the rows. [N, t] is padded to `width` steps with 0 or False."""
    return torch.cat([pad_steps(part, width, 0) if part.dim() == 2 else part for part in parts])


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices that have no float64 (Apple's MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64

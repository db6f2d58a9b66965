"""One optimizer step, safely: unscale, check, clip, step, schedule; or leave every weight as it was."""

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, assert_never

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .config import GRPOConfig
from .distributed import Engine, OneProcess
from .errors import ConfigError, ContractError, GRPOWarning


class GradientStep:
    """Applies accumulated gradients, or skips the update when they are not finite.

    Args:
        policy_name: for error messages.
        parameters: what `policy.get_parameters()` returned.
        optimizer: the caller's; None: AdamW without weight decay at `learning_rate`.
        lr_scheduler: stepped once per applied update.
        learning_rate: for the default optimizer.
        max_grad_norm: the total norm gradients are scaled down to; None: no bound.
        use_scaler: scale the loss (float16 on CUDA), so that small gradients do not vanish.
        engine: adds up the gradients of several ranks; None: there is one.

    Raises:
        ConfigError: an optimizer that holds none of the policy's parameters.
    """

    def __init__(
        self,
        *,
        policy_name: str,
        parameters: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: Any,
        learning_rate: float,
        max_grad_norm: float | None,
        use_scaler: bool,
        engine: Engine | None = None,
    ) -> None:
        self.policy_name = policy_name
        self.parameters = {name: value for name, value in parameters.items() if value.requires_grad}
        self._engine = engine or OneProcess()
        self.lr_scheduler = lr_scheduler
        self.max_grad_norm = max_grad_norm
        if optimizer is None and self.parameters:
            optimizer = _default_optimizer(self.parameters.values(), learning_rate)
        self.optimizer = optimizer
        self._require_parameters_in_optimizer()
        device = self.device.type
        self.scaler = torch.amp.GradScaler(device, enabled=use_scaler and device == "cuda")

    @property
    def device(self) -> torch.device:
        """Where the first parameter is; the CPU without parameters."""
        return next((value.device for value in self.parameters.values()), torch.device("cpu"))

    @property
    def is_searching_scale(self) -> bool:
        """The loss scale (float16) is still above 1, so a gradient that overflowed says nothing about the policy."""
        return self.scaler.is_enabled() and self.scaler.get_scale() > 1.0

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group, now; 0 without an optimizer."""
        return 0.0 if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradient; a policy without trainable parameters has none to add.

        Raises:
            ContractError: the loss has no gradient although there are parameters to train, or the other way round.
        """
        if bool(self.parameters) != loss.requires_grad:
            found, wanted = (
                ("carry", "no tensor that requires") if loss.requires_grad else ("do not carry", "tensors that require")
            )
            raise ContractError(
                f"{self.policy_name}: log-probabilities {found} a gradient, but get_parameters() holds {wanted} one. "
                "Compute log-probabilities without no_grad(), detach() or item(), and return the parameters themselves: "
                "dict(self.named_parameters()), not copies and not state_dict()."
            )
        if self.parameters:
            self.scaler.scale(loss).backward()

    def total_norm(self) -> Tensor:
        """The norm of all gradients, unscaled, on the device.

        Raises:
            ContractError: no parameter has received a gradient.
        """
        self._add_up_ranks()
        gradients = [tensor.grad for tensor in self._moved() if tensor.grad is not None]
        if not gradients:
            raise ContractError(
                f"{self.policy_name}: no gradient reached get_parameters(). Return the very tensors that "
                "get_log_probabilities() computes with: dict(self.named_parameters()), not copies and not state_dict()."
            )
        if self.optimizer is not None:
            self.scaler.unscale_(self.optimizer)
        return get_total_norm(gradients)

    def apply(self, total_norm: Tensor, norm: float) -> None:
        """Clip, and step optimizer and scheduler. `norm` is `total_norm` on the host, and finite."""
        if self.max_grad_norm is not None and norm > self.max_grad_norm:
            clip_grads_with_norm_(self._moved(), self.max_grad_norm, total_norm)
        if self.optimizer is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.clear()

    def skip(self) -> None:
        """Leave every weight and the optimizer's state as they are; a loss scale comes down."""
        if self.scaler.is_enabled():
            self.scaler.update(self.scaler.get_scale() * self.scaler.get_backoff_factor())
        self.clear()

    def abandon(self) -> None:
        """Forget an update that ends in an error, and that its gradients were unscaled; the loss scale stays."""
        if self.scaler.is_enabled():
            self.scaler.update(self.scaler.get_scale())
        self.clear()

    def clear(self) -> None:
        """Forget the gradients."""
        for tensor in (*self.parameters.values(), *self._moved()):
            tensor.grad = None

    def schedule(self, factor: float) -> None:
        """Set every learning rate to `factor` times its initial one."""
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def _moved(self) -> list[Tensor]:
        """What the optimizer moves, which may be more than the policy's parameters, and may grow."""
        return [] if self.optimizer is None else [p for group in self.optimizer.param_groups for p in group["params"]]

    def _add_up_ranks(self) -> None:
        """The sum of all ranks' gradients, in one call per dtype; where a rank has none, it adds zeros."""
        if self._engine.num_ranks == 1:
            return
        everything = {id(tensor): tensor for tensor in (*self.parameters.values(), *self._moved())}.values()
        reached = self._engine.sum(torch.tensor([float(tensor.grad is not None) for tensor in everything])).tolist()
        tensors = [tensor for tensor, count in zip(everything, reached, strict=True) if count]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = [torch.zeros_like(t).flatten() if t.grad is None else t.grad.flatten() for t in alike]
            total = self._engine.sum(torch.cat(flat)).split([tensor.numel() for tensor in alike])
            for tensor, gradient in zip(alike, total, strict=True):
                tensor.grad = gradient.view_as(tensor)

    def _require_parameters_in_optimizer(self) -> None:
        moved = {id(tensor) for tensor in self._moved()}
        left_out = [name for name, tensor in self.parameters.items() if id(tensor) not in moved]
        if self.parameters and len(left_out) == len(self.parameters):
            raise ConfigError(
                f"optimizer holds none of the {len(left_out)} trainable tensors of {self.policy_name}.get_parameters(): "
                "it would never train the policy. Build it from policy.get_parameters().values()."
            )
        if left_out:
            warnings.warn(
                f"optimizer does not hold {', '.join(left_out[:4])}{' ...' if len(left_out) > 4 else ''}, so "
                f"{len(left_out)} of {len(self.parameters)} trainable tensors of {self.policy_name} stay as they are. "
                "If that is meant, set requires_grad_(False) on them.",
                GRPOWarning,
                stacklevel=4,
            )


def _default_optimizer(parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
    """AdamW without weight decay; the fused one, several times faster for small networks, where the device has it."""
    tensors = list(parameters)
    fused = all(tensor.is_floating_point() and tensor.device.type in ("cpu", "cuda") for tensor in tensors)
    return torch.optim.AdamW(tensors, lr=learning_rate, weight_decay=0.0, fused=fused)


def schedule_factor(config: GRPOConfig, position: int, num_iterations: int) -> float:
    """What the learning rate is multiplied by at iteration `position` (from 0) of a run.

    It rises linearly over `warmup_ratio` of the run, then stays, or falls to 0 linearly or along half a cosine.
    """
    num_warmup = math.ceil(config.warmup_ratio * num_iterations)
    if position < num_warmup:
        return (position + 1) / num_warmup
    progress = (position - num_warmup) / max(num_iterations - num_warmup, 1)
    match config.lr_schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            assert_never(config.lr_schedule)

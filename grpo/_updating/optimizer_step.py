"""One safe optimizer step: unscale, check, clip, step, schedule. If a check fails, every weight stays as it was."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo._common.conversion import describe, widest_float
from grpo.config import GRPOConfig
from grpo.engine import Engine
from grpo.errors import ConfigError, ContractError, NonFiniteGradientError, warn_user
from grpo.metrics import Meter
from grpo.policy_base import HasPenalty

from .requirements import is_function, require_optimizer


class OptimizerStep:
    """Accumulates gradients and applies them, or skips the update when they are not finite.

    Args:
        config: Learning rate, bound on the gradient norm, precision.
        policy: The policy whose parameters are trained.
        optimizer: The user's optimizer, or a function that builds it from the list of trained tensors. None: AdamW without
            weight decay.
        lr_scheduler: Stepped once per applied update. A function builds it from the optimizer.
        engine: Adds up the gradients of several ranks.
        meter: Records the gradient norm and the learning rate of each update.
    """

    def __init__(
        self, config: GRPOConfig, policy: Any, optimizer: Any, lr_scheduler: Any, engine: Engine, meter: Meter
    ) -> None:
        self.policy_name = type(policy).__name__
        self.parameters = {name: value for name, value in policy.get_parameters().items() if value.requires_grad}
        self.num_begun = 0
        """Number of optimizer steps that have begun, over all iterations: the weights are new whenever it is."""
        self.num_applied = 0
        """Number of updates since `begin` that changed the weights."""
        self.skipped_in_a_row = 0
        """Number of latest updates in a row whose gradient was not finite."""
        self.is_stepping = False
        """Whether the optimizer is changing the weights. True after an error means that only some weights may have changed."""
        self._config, self._engine, self._meter = config, engine, meter
        self._penalised = policy if isinstance(policy, HasPenalty) else None
        if self._penalised is not None and engine.divides_weights:
            raise ConfigError(
                f"{self.policy_name}.penalty() cannot be used with {type(engine).__name__}, because no rank holds all weights. "
                "Use Replicated."
            )
        tensors = list(self.parameters.values())
        if optimizer is None and tensors:
            # the fused AdamW is several times faster for small networks; it exists on these devices
            fused = all(value.is_floating_point() and value.device.type in ("cpu", "cuda") for value in tensors)
            optimizer = torch.optim.AdamW(tensors, lr=config.learning_rate, weight_decay=0.0, fused=fused)
        elif is_function(optimizer):
            optimizer = optimizer(tensors)
            require_optimizer(optimizer)
        self.optimizer: torch.optim.Optimizer | None = optimizer
        self.lr_scheduler = lr_scheduler(optimizer) if is_function(lr_scheduler) else lr_scheduler
        self._require_parameters_in_optimizer()
        engine.require_same(self.policy_name, {**self.settings(), "lr_scheduler": self.lr_scheduler})
        use_scaler = config.autocast_dtype == "float16"
        if use_scaler and engine.divides_weights:
            raise ConfigError(
                f"config.autocast_dtype='float16' cannot be used with {type(engine).__name__}, because torch's loss scale does "
                "not work on divided weights. Use 'bfloat16'."
            )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=use_scaler)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, or the CPU if there are no parameters."""
        return next((value.device for value in self.parameters.values()), torch.device("cpu"))

    @property
    def learning_rate(self) -> float:
        """The current learning rate of the first parameter group, or 0 if there is no optimizer."""
        return 0.0 if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])

    @property
    def stepped(self) -> dict[str, Any]:
        """The parts whose states change only in an optimizer step, by name."""
        scaler = self.scaler if self.scaler.is_enabled() else None
        return {"optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler, "scaler": scaler}

    def settings(self) -> dict[str, Any]:
        """The settings of the optimizer's groups by name, with the number of tensors of each group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {
            f"optimizer.param_groups[{n}]": {**group, "params": len(group["params"])} for n, group in enumerate(groups)
        }

    def begin(self) -> None:
        """Begin an iteration: drop gradients that other code left behind."""
        self.num_applied = 0
        self._engine.require_same_soon(self.settings())
        self.clear()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this micro-batch. Do nothing if the policy has no trainable parameters."""
        if bool(self.parameters) != loss.requires_grad:
            found = "carry" if loss.requires_grad else "do not carry"
            wanted = "no tensor that requires" if loss.requires_grad else "tensors that require"
            raise ContractError(
                f"{self.policy_name}: log-probabilities {found} a gradient, but get_parameters() holds {wanted} one. "
                "Compute log-probabilities without no_grad(), detach() or item(), and return the parameters themselves: "
                "dict(self.named_parameters()), not copies and not state_dict()."
            )
        if self.parameters:
            self.scaler.scale(loss).backward()

    def apply(self, sum_of_scores: Float[Tensor, ""]) -> None:
        """Step the optimizer if everything is finite. All checks need one transfer to the host.

        Args:
            sum_of_scores: The sum over the update's steps on this rank. It is finite only if every score is finite.
        """
        if not self.parameters:
            self._require_finite(self._engine.sum(sum_of_scores).item())
            return
        # the penalty belongs to no micro-batch: an update has several of them, or none on some ranks
        if self._penalised is not None:
            sum_of_scores = sum_of_scores + self._add_penalty(self._penalised.penalty()).to(sum_of_scores)
        scores = self._engine.sum_gradients(self._trained(), sum_of_scores)
        total_norm = self._total_norm()
        scores_sum, norm = torch.stack([scores, total_norm.to(scores)]).tolist()
        self._require_finite(scores_sum)
        if not math.isfinite(norm):
            self._skip(norm)
            return
        self._meter.add_value("grad_norm", norm)
        self._meter.add_value("zero_gradients", float(norm == 0))
        self._meter.add_value("learning_rate", self.learning_rate)
        max_norm = self._config.max_grad_norm
        if max_norm is not None and norm > max_norm:
            self._engine.clip_gradients(self._moved(), max_norm, total_norm)
        self.is_stepping = True
        self.num_begun += 1
        if self.optimizer is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.is_stepping = False
        self.clear()
        self.skipped_in_a_row = 0
        self.num_applied += 1

    def _add_penalty(self, penalty: Any) -> Tensor:
        """Add the gradient of this rank's share of the policy's penalty, and return the share. The ranks' shares sum to it."""
        is_scalar = isinstance(penalty, Tensor) and penalty.dim() == 0 and penalty.is_floating_point()
        if not is_scalar or not penalty.requires_grad:
            raise ContractError(
                f"{self.policy_name}.penalty must return a scalar with gradient; got {describe(penalty)}. Compute it from the "
                "tensors of get_parameters() without no_grad(), detach() or item(), and sum it up."
            )
        share: Tensor = penalty / self._engine.num_ranks
        self.scaler.scale(share).backward()
        value = share.detach().to(widest_float(share.device))
        self._meter.add({"penalty": torch.stack([torch.zeros_like(value), value, torch.zeros_like(value)])})
        return value

    def clear(self) -> None:
        """Drop the gradients."""
        for tensor in self._trained():
            tensor.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The counts. Optimizer, scheduler and loss scale are parts of their own."""
        return {"num_applied": self.num_applied, "skipped_in_a_row": self.skipped_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.num_applied, self.skipped_in_a_row = state["num_applied"], state["skipped_in_a_row"]

    def _total_norm(self) -> Tensor:
        """The norm of all gradients, unscaled, on the device."""
        gradients = [tensor.grad for tensor in self._moved() if tensor.grad is not None]
        if not gradients:
            raise ContractError(
                f"{self.policy_name}: no gradient reached get_parameters(). Return the same tensors that "
                "get_log_probabilities() computes with: dict(self.named_parameters()), not copies and not state_dict()."
            )
        if self.optimizer is not None:
            self.scaler.unscale_(self.optimizer)
        return self._engine.total_norm(gradients)

    def _require_finite(self, sum_of_scores: float) -> None:
        if math.isfinite(sum_of_scores):
            return
        if self.scaler.is_enabled():
            self.scaler.update(self.scaler.get_scale())  # reset its state for this update; the loss scale stays
        self.clear()
        raise ContractError(
            f"{self.policy_name}: log-probabilities of steps and observations must be finite, and so must exact entropy, "
            "KL, values and a penalty; some are not. What was sampled, demonstrated or observed cannot have probability 0, and "
            "an entropy with logits of -inf is 0 times infinity: mask logits with torch.finfo(dtype).min, not -inf. A teacher "
            "that gives an action the probability 0 makes a KL infinite."
        )

    def _skip(self, norm: float) -> None:
        """Skip the update: weights and optimizer state stay unchanged. With float16, the loss scale is lowered."""
        self.clear()
        if self.scaler.is_enabled():
            self.scaler.update(self.scaler.get_scale() * self.scaler.get_backoff_factor())
            if self.scaler.get_scale() > 1.0:
                return  # an overflow of the scaled loss says nothing about the policy
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self._config.max_skipped_updates:
            raise NonFiniteGradientError(
                f"{self.skipped_in_a_row} updates in a row had a gradient of norm {norm}. They were skipped and changed "
                "no weight. Lower the learning rate, and look for log(0), 0/0 or sqrt(0) in the policy; "
                "torch.autograd.set_detect_anomaly(True) names the operation."
            )

    def _moved(self) -> list[Tensor]:
        """Return all tensors of the optimizer, which may have more tensors than the policy and may gain tensors later."""
        return [] if self.optimizer is None else [p for group in self.optimizer.param_groups for p in group["params"]]

    def _trained(self) -> list[Tensor]:
        """All tensors that may have a gradient: the policy's and the optimizer's, each once."""
        return [*{id(tensor): tensor for tensor in (*self.parameters.values(), *self._moved())}.values()]

    def _require_parameters_in_optimizer(self) -> None:
        moved = {id(tensor) for tensor in self._moved()}
        scheduled = getattr(self.lr_scheduler, "optimizer", None)
        if scheduled is not None and scheduled.param_groups is not getattr(self.optimizer, "param_groups", None):
            raise ConfigError(
                "lr_scheduler was built from another optimizer, so the learning rate would never change. Build it from the "
                "optimizer that you pass as optimizer=..., or pass a function of the optimizer that builds it."
            )
        left_out = [name for name, tensor in self.parameters.items() if id(tensor) not in moved]
        if self.parameters and len(left_out) == len(self.parameters):
            raise ConfigError(
                f"optimizer holds none of the {len(left_out)} trainable tensors of {self.policy_name}.get_parameters(): "
                "it would never train the policy. Build it from policy.get_parameters().values()."
            )
        if left_out:
            warn_user(
                f"optimizer does not hold {', '.join(left_out[:4])}{' ...' if len(left_out) > 4 else ''}, so "
                f"{len(left_out)} of {len(self.parameters)} trainable tensors of {self.policy_name} stay as they are. "
                "If that is intended, set requires_grad_(False) on them."
            )

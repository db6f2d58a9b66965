"""What an engine of several processes does with its exchanges of values, whatever sends them."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from grpo._sharding.tensors import is_sharded
from grpo.engine import OneProcess, SharesStatistics
from grpo.errors import ConfigError, RankError

from .equality import comparable_settings, differing_values, differing_weights, printed, weights_of
from .shared_errors import same_error, shared_by_all


class SeveralProcesses(OneProcess):
    """Base of engines that implement `rank`, `num_ranks`, `sum`, `gather`, `gather_objects` and `agree`. Each rank holds all
    weights."""

    due: dict[str, str] | None = None
    """What the next exchange compares. None: nothing."""

    def together(self, doing: str = "") -> AbstractContextManager[None]:
        """If an error leaves the block on one rank, every rank raises the same error."""
        return same_error(self, doing)

    def require_same(self, owner: str, values: Mapping[str, Any]) -> None:
        """Raise a `ConfigError` that names values that are not the same on all ranks."""
        differing = differing_values(self.gather_objects(printed(values)))
        if differing:
            error = f"{owner} needs the same arguments on all ranks; {differing}. Pass the same values."
            if "reward_model is" in differing:
                error += (
                    " If a reward model may differ, give it settings(), a function that returns what must be equal."
                )
            raise shared_by_all(ConfigError(error))

    def require_same_soon(self, values: Mapping[str, Any]) -> None:
        """Let the next exchange raise a `RankError` that names values that are not the same on all ranks."""
        self.due = (self.due or {}) | printed(values)

    def require_none_differs(self, due: Mapping[str, str]) -> None:
        """Raise a `RankError` that names which of these values are not the same on all ranks."""
        differing = differing_values(self.gather_objects(due))
        if differing:
            error = (
                f"Ranks have become different; {differing}. Change weights and settings in the same way on every rank."
            )
            raise shared_by_all(RankError(error))

    def require_same_arguments(self, owner: str, arguments: Mapping[str, Any]) -> None:
        """Raise a `ConfigError` if the ranks build learners with different settings or kinds of arguments."""
        self.require_same(owner, comparable_settings(arguments))

    def require_equal_weights(self, policy: Any, reference_policy: Any) -> None:
        """Raise a `ConfigError` if the ranks have different weights or persistent buffers, because training would never make
        them equal. Statistics that only some ranks have collected are shared first."""
        models = {"": policy} if reference_policy is None else {"": policy, "reference: ": reference_policy}
        for model in models.values():
            if isinstance(model, SharesStatistics):
                model.share_statistics(self.gather_objects(model.collected_statistics()))
        found = {
            f"{prefix}{name}": value for prefix, model in models.items() for name, value in weights_of(model).items()
        }
        differing = differing_weights(self.gather_objects(printed(found)))
        if differing:
            error = (
                f"Ranks must start from the same weights; {differing}. Build the policy after torch.manual_seed(the same "
                "number), or load the same file on every rank."
            )
            raise shared_by_all(ConfigError(error))

    def sum_gradients(self, tensors: Sequence[Tensor], value: Tensor) -> Tensor:
        """Add up the gradients of all ranks, with one meeting, and one collective operation per dtype.

        Gradients of divided tensors are added up already. A gradient that no rank has reached is dropped.
        """
        kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in (*tensors, value)]
        of_ranks = self.gather_objects((kinds, self.reached(tensors)))
        if any(others != kinds for others, _ in of_ranks):
            error = "Gradients need tensors of the same shapes and dtypes on all ranks. Build equal policies and optimizers."
            raise shared_by_all(RankError(error))
        whole = []
        for tensor, *has_gradient in zip(tensors, *(reached for _, reached in of_ranks), strict=True):
            if not is_sharded(tensor):
                # without a gradient from any rank, it stays None, and the optimizer leaves the tensor alone
                whole += [tensor] if any(has_gradient) else []
            elif not any(has_gradient):
                tensor.grad = None
        for dtype in dict.fromkeys(tensor.dtype for tensor in whole):
            alike = [tensor for tensor in whole if tensor.dtype == dtype]
            flat = [torch.zeros_like(t).flatten() if t.grad is None else t.grad.flatten() for t in alike]
            total = self.add_up(torch.cat(flat)).split([tensor.numel() for tensor in alike])
            for tensor, gradient in zip(alike, total, strict=True):
                tensor.grad = gradient.view_as(tensor)
        return self.add_up(value)

    def reached(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Whether a gradient of this rank has reached each tensor."""
        return [tensor.grad is not None for tensor in tensors]

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over all ranks of tensors of which all ranks know that they have the same shape and dtype."""
        return self.sum(values)

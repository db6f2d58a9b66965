"""Reward models whose calls run in a process of their own."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .calls import Call, call_in_process


class RewardsInProcess:
    """A reward model whose every call runs in a process of its own, which is killed at the deadline.

    Args:
        reward_model: a `RewardModel`.
        name: its name in messages.
        timeout: seconds per call.
    """

    def __init__(self, reward_model: Any, *, name: str, timeout: float) -> None:
        self.reward_model, self.timeout = reward_model, timeout
        self.__name__ = name

    def compute_rewards(self, states: Any, actions: Any) -> Any:
        """Call `compute_rewards` of the reward model in another process."""
        return self._call("compute_rewards", states, actions)

    def train(self) -> "RewardsInProcess":
        """Switch the reward model to training mode."""
        self.reward_model.train()
        return self

    def eval(self) -> "RewardsInProcess":
        """Switch the reward model to evaluation mode."""
        self.reward_model.eval()
        return self

    def to(self, device: torch.device | str) -> "RewardsInProcess":
        """Move the reward model to a device."""
        self.reward_model.to(device)
        return self

    def _call(self, method: str, *arguments: Any) -> Any:
        call = Call(name=self.__name__, function=getattr(self.reward_model, method), arguments=arguments)
        return call_in_process([call], timeout=self.timeout)[0]


class ComponentsInProcess(RewardsInProcess):
    """The same for a reward model that reports components."""

    def compute_components(self, states: Any, actions: Any) -> Any:
        """Call `compute_components` of the reward model in another process."""
        return self._call("compute_components", states, actions)

    def combine(self, components: Mapping[str, Tensor]) -> Any:
        """Call `combine` of the reward model in another process."""
        return self._call("combine", components)


def gpus_of(value: Any) -> list[str]:
    """The devices, other than the CPU, of a module or object: of its parameters, buffers, and attributes one level deep."""
    values = (value, *getattr(value, "__dict__", {}).values())
    return sorted({str(tensor.device) for tensor in _tensors_among(values) if tensor.device.type != "cpu"})


def _tensors_among(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, torch.nn.Module):
            yield from (*value.parameters(), *value.buffers())
        elif isinstance(value, Tensor):
            yield value

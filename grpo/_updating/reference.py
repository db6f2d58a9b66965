"""A reference that follows the policy."""

from typing import Any

import torch
from torch import Tensor

from grpo.config import GRPOConfig
from grpo.engine import Engine


class MovingReference:
    """Moves the reference towards the policy every `config.reference_sync_every` iterations.

    reference <- (1 - mix) reference + mix policy

    The average of a parameter in half precision is kept in float32 beside it: a small step would be rounded away every time.

    Source:
        Gorbatovski et al. 2024 (TR-DPO), arXiv:2404.09656.
    """

    def __init__(self, config: GRPOConfig, policy: Any, reference_policy: Any, engine: Engine) -> None:
        self._config, self._policy, self._reference, self._engine = config, policy, reference_policy, engine
        self._averages: dict[str, Tensor] = {}

    def move(self, iteration: int) -> bool:
        """Move the reference if it is due after `iteration` iterations. Return whether it was moved."""
        if self._config.reference_sync_every is None or iteration % self._config.reference_sync_every:
            return False
        parameters = self._policy.get_parameters()
        with torch.no_grad():
            for name, whole in self._reference.get_parameters().items():
                value = self._engine.part(whole)
                average = self._average(name, value)
                average.lerp_(self._engine.part(parameters[name]).detach().to(average), self._config.reference_mix)
                if average is not value:
                    value.copy_(average)
        return True

    def _average(self, name: str, value: Tensor) -> Tensor:
        """The average in at least float32. It begins anew where other code has changed the parameter."""
        if not value.is_floating_point() or value.element_size() >= 4:
            return value
        average = self._averages.get(name)
        if average is None or not torch.equal(average.to(value), value):
            average = self._averages[name] = value.detach().float()
        return average

    def state_dict(self) -> dict[str, Any]:
        """The float32 averages of parameters in half precision, by name."""
        return dict(self._averages)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        devices = {name: value.device for name, value in self._reference.get_parameters().items()} if state else {}
        self._averages = {name: average.to(devices[name], copy=True) for name, average in state.items()}

"""Seeds, devices, precision, and updates of the sampler's and the reference's weights."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from grpo._common.global_state import seed_everything
from grpo._sharding.tensors import local
from grpo.config import GRPOConfig
from grpo.distributed import Engine
from grpo.policy_base import SyncsSampler


def prepare(config: GRPOConfig, engine: Engine, *models: Any) -> int:
    """Seed the global generators, and move the models that are not None to a device, if the settings say so.

    Returns:
        The seed for the order of rows and states. It is equal on all ranks.
    """
    drawn = int(torch.randint(2**31, ())) if config.seed is None else config.seed
    seed = int(engine.gather_objects(drawn)[0])
    if config.seed is not None or engine.num_ranks > 1:
        # ranks with the same random numbers would sample the same actions
        seed_everything((seed + engine.rank) % 2**64)
    for model in models:
        if config.device is not None and model is not None:
            model.to(config.device)
    return seed


def autocast(config: GRPOConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return the `torch.autocast` context of `config.autocast_dtype`, or a context that does nothing."""
    if config.autocast_dtype is None:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, config.autocast_dtype))


class SamplerSync:
    """Keeps the weights of a policy's separate sampler up to date. Does nothing if the policy has no `sync_sampler`."""

    def __init__(self, policy: Any) -> None:
        self.is_stale = True
        """Whether the weights have changed since the last sync, or there was no sync yet."""
        self._syncer = policy if isinstance(policy, SyncsSampler) else None
        self.finish: Callable[[], None] = lambda: None
        """Waits until no actions are being sampled in another thread."""

    def sync(self) -> None:
        """Copy the weights if they have changed. No actions are being sampled then, and when this method returns."""
        self.finish()
        if self.is_stale and self._syncer is not None:
            self._syncer.sync_sampler()
        self.is_stale = False


class MovingReference:
    """Moves the reference towards the policy every `config.reference_sync_every` iterations.

    reference <- (1 - mix) reference + mix policy

    The average of a parameter in half precision is kept in float32 beside it: a small step would be rounded away every time.

    Source:
        Gorbatovski et al. 2024 (TR-DPO), arXiv:2404.09656.
    """

    def __init__(self, config: GRPOConfig, policy: Any, reference_policy: Any) -> None:
        self._config, self._policy, self._reference = config, policy, reference_policy
        self._averages: dict[str, Tensor] = {}

    def move(self, iteration: int) -> bool:
        """Move the reference if it is due after `iteration` iterations. Return whether it was moved."""
        if self._config.reference_sync_every is None or iteration % self._config.reference_sync_every:
            return False
        parameters = self._policy.get_parameters()
        with torch.no_grad():
            for name, whole in self._reference.get_parameters().items():
                value = local(whole)
                average = self._average(name, value)
                average.lerp_(local(parameters[name]).detach().to(average), self._config.reference_mix)
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

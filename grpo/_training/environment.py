"""Seeds, devices, precision, and updates of the sampler's and the reference's weights."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from grpo.config import GRPOConfig
from grpo.distributed import Engine
from grpo.policy_base import SyncsSampler
from grpo.writing import seed_everything


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

    def sync(self) -> None:
        """Copy the weights if they have changed."""
        if self.is_stale and self._syncer is not None:
            self._syncer.sync_sampler()
        self.is_stale = False


def move_reference(config: GRPOConfig, policy: Any, reference_policy: Any, iteration: int) -> bool:
    """Move the reference towards the policy every `config.reference_sync_every` iterations. Return whether it was moved.

    reference <- (1 - mix) reference + mix policy

    Source:
        Gorbatovski et al. 2024 (TR-DPO), arXiv:2404.09656.
    """
    if config.reference_sync_every is None or iteration % config.reference_sync_every:
        return False
    parameters = policy.get_parameters()
    with torch.no_grad():
        for name, value in reference_policy.get_parameters().items():
            value.lerp_(parameters[name].detach().to(value), config.reference_mix)
    return True

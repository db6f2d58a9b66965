"""What surrounds the policy: seeds, devices, precision, folders of ranks, and what follows its weights."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from grpo.config import GRPOConfig
from grpo.distributed import Engine
from grpo.policy_base import SyncsSampler
from grpo.writing import seed_everything


def prepare(config: GRPOConfig, engine: Engine, *models: Any) -> int:
    """Seed the global generators, and move the models that are not None, where the settings ask for it.

    Returns:
        The seed of rows and states, equal on all ranks.
    """
    drawn = int(torch.randint(2**31, ())) if config.seed is None else config.seed
    seed = int(engine.gather_objects(drawn)[0])
    if config.seed is not None or engine.num_ranks > 1:
        # ranks that draw the same numbers would sample the same actions
        seed_everything((seed + engine.rank) % 2**64)
    for model in models:
        if config.device is not None and model is not None:
            model.to(config.device)
    return seed


def autocast(config: GRPOConfig, device: torch.device) -> AbstractContextManager[Any]:
    """The precision in which the policy computes."""
    if config.autocast_dtype is None:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, config.autocast_dtype))


def folder_of_rank(path: str | Path, engine: Engine) -> Path:
    """Each of several ranks has a folder of its own: every rank has its own random generators to restore."""
    return Path(path) if engine.num_ranks == 1 else Path(path) / f"rank-{engine.rank}"


class SamplerSync:
    """Keeps the weights of a policy's separate sampler up to date. Does nothing for a policy that is no `SyncsSampler`."""

    def __init__(self, policy: Any) -> None:
        self.is_stale = True
        """The weights have changed since the last sync, or there was none."""
        self._syncer = policy if isinstance(policy, SyncsSampler) else None

    def sync(self) -> None:
        """Copy the weights if they have changed."""
        if self.is_stale and self._syncer is not None:
            self._syncer.sync_sampler()
        self.is_stale = False


def move_reference(config: GRPOConfig, policy: Any, reference_policy: Any, iteration: int) -> bool:
    """Move the reference towards the policy, every `config.reference_sync_every` iterations. Says whether it moved.

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

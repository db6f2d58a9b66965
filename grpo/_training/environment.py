"""What a trainer sets up around the policy: seeds, devices, precision, folders of ranks, and a separate sampler."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from grpo.config import GRPOConfig
from grpo.distributed import Engine
from grpo.policy_base import SyncsSampler
from grpo.writing import seed_everything


def shared_seed(config: GRPOConfig, engine: Engine) -> int:
    """Seed the global generators where the settings ask for it. Returns the seed of rows and states, equal on all ranks."""
    drawn = int(torch.randint(2**31, ())) if config.seed is None else config.seed
    seed = int(engine.gather_objects(drawn)[0])
    if config.seed is not None or engine.num_ranks > 1:
        # ranks that draw the same numbers would sample the same actions
        seed_everything((seed + engine.rank) % 2**64)
    return seed


def move_to_device(config: GRPOConfig, *models: Any) -> None:
    """Move policies and reward models to the configured device. None among them is left out."""
    for model in models:
        if config.device is not None and model is not None:
            model.to(config.device)


def autocast(config: GRPOConfig, device: torch.device) -> AbstractContextManager[Any]:
    """The precision in which the policy computes."""
    if config.autocast_dtype is None:
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if config.autocast_dtype == "bfloat16" else torch.float16)


def folder_of_rank(path: str | Path, engine: Engine) -> Path:
    """Each of several ranks has a folder of its own: every rank has its own random generators to restore."""
    return Path(path) if engine.num_ranks == 1 else Path(path) / f"rank-{engine.rank}"


class SamplerSync:
    """Gives a separate sampler the weights before it is used with others.

    Args:
        policy: synced if it is a `SyncsSampler`; otherwise there is nothing to do.
    """

    def __init__(self, policy: Any) -> None:
        self.is_stale = True
        """The weights have changed since the last sync, or there was none."""
        self._syncer = policy if isinstance(policy, SyncsSampler) else None

    def sync(self) -> None:
        """Copy the weights if they have changed."""
        if self.is_stale and self._syncer is not None:
            self._syncer.sync_sampler()
        self.is_stale = False

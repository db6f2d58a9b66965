"""Seeds, devices and precision."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from grpo._common.global_state import seed_everything
from grpo.config import GRPOConfig
from grpo.engine import Engine
from grpo.errors import ConfigError
from grpo.policy_base import HasShardUnits

from .requirements import require_reference


def prepare(config: GRPOConfig, engine: Engine, policy: Any, reward_model: Any, reference_policy: Any) -> int:
    """Seed the global generators and move the models to a device, if the settings say so. Divide the weights, if the engine
    does that.

    Returns:
        The seed for the order of rows and states. It is equal on all ranks.
    """
    require_reference(config, policy, reference_policy)
    policies = [policy] if reference_policy is None else [policy, reference_policy]
    drawn = int(torch.randint(2**31, ())) if config.seed is None else config.seed
    seed = int(engine.gather_objects(drawn)[0])
    if config.seed is not None or engine.num_ranks > 1:
        # ranks with the same random numbers would sample the same actions
        seed_everything((seed + engine.rank) % 2**64)
    try:
        torch.empty(0, device=config.device)
    except (AssertionError, RuntimeError) as error:  # what torch raises for a device that this build or computer lacks
        raise ConfigError(f"config.device must be a device of this computer; got {config.device!r}: {error}") from error
    for model in (*policies, reward_model):
        if config.device is not None:
            model.to(config.device)
    engine.require_equal_weights(policy, reference_policy)
    engine.divide(policy)
    # a teacher that only scores may be a table, a service, or the policy with a hint: it stays as it is on every rank
    if config.reference_sync_every is not None or isinstance(reference_policy, torch.nn.Module | HasShardUnits):
        engine.divide(reference_policy)
    return seed


def autocast(config: GRPOConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return the `torch.autocast` context of `config.autocast_dtype`, or a context that does nothing."""
    if config.autocast_dtype is None:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, config.autocast_dtype))

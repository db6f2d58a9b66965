"""State outside of a trainer that is put back: the global random generators, and the mode of a policy."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def preserved_mode(model: Any) -> Iterator[None]:
    """Restore the mode of a policy after the block, because sampling calls `eval()`. The mode is read from `training`."""
    was_training = getattr(model, "training", None) is True
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    modes = {module: module.training for module in modules}
    try:
        yield
    finally:
        if was_training:
            model.train()
        for module, mode in modes.items():  # one by one: a user may have frozen a submodule in eval()
            module.training = mode


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - users' policies draw from the global generator
    torch.manual_seed(seed)


def capture_random_state() -> dict[str, Any]:
    """State of the global generators of Python, numpy and torch, and of CUDA if it is in use."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore what `capture_random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    for device, generator_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator_state, device)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the global random generators after the block."""
    state = capture_random_state()
    try:
        yield
    finally:
        restore_random_state(state)

"""The global random generators of Python, numpy and torch."""

import random
from typing import Any

import numpy as np
import torch


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

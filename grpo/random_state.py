"""The state of every global random number generator: taken, put back, or left untouched by a block of code."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is what users' policies draw from
    torch.manual_seed(seed)


def take_random_state() -> dict[str, Any]:
    """State of the generators of Python, numpy, torch, and CUDA where it is in use."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def put_random_state(state: dict[str, Any]) -> None:
    """Restore what `take_random_state` took."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    for device, generator_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator_state, device)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """What runs inside draws random numbers without changing those drawn after."""
    state = take_random_state()
    try:
        yield
    finally:
        put_random_state(state)

"""State outside of a learner that is put back after a block: the global random generators, and the mode of a policy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .global_state import capture_random_state, restore_random_state


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


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the global random generators after the block."""
    state = capture_random_state()
    try:
        yield
    finally:
        restore_random_state(state)

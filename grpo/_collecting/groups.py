"""Which states share a group."""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from grpo._common.conversion import describe
from grpo.errors import ConfigError
from grpo.types import Rows


def groups_of(states: Rows, group_by: Callable[[Any], Hashable] | None) -> Int[Tensor, " B"]:
    """The group of each state: its position, or the position of the first state with the same key."""
    if group_by is None:
        return torch.arange(len(states))
    first: dict[Hashable, int] = {}
    keys = [group_by(states[position]) for position in range(len(states))]
    for position, key in enumerate(keys):
        if isinstance(key, Tensor | np.ndarray) or not isinstance(key, Hashable):
            raise ConfigError(
                f"group_by must return a hashable value, such as a text or a number; got {describe(key)} for state "
                f"{position}. Return str(...), tuple(...) or .item()."
            )
        first.setdefault(key, position)
    return torch.tensor([first[key] for key in keys])

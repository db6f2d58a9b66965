"""What must be equal on all ranks: values, compared by what they print, and weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo._common.settings_by_name import flattened
from grpo.config import GRPOConfig


def printed(values: Mapping[str, Any]) -> dict[str, str]:
    """The `repr` of each value, to be compared with the other ranks."""
    return {name: repr(value) for name, value in values.items()}


def differing_values(of_ranks: Sequence[Mapping[str, str]]) -> str:
    """Name each value that is not the same on all ranks, with the value of each rank. Empty: all are the same."""
    differing = []
    for name in dict.fromkeys(name for values in of_ranks for name in values):
        found = [values.get(name, "absent") for values in of_ranks]
        if len(set(found)) > 1:
            differing.append(f"{name} is {', '.join(f'{value} on rank {rank}' for rank, value in enumerate(found))}")
    return "; ".join(differing)


def fingerprints(parameters: Mapping[str, Tensor]) -> list[tuple[str, float]]:
    """A number for each parameter: the sum of its values, each weighted by its position, so that swapped values are found."""
    return [(name, _fingerprint(value)) for name, value in parameters.items()]


def _fingerprint(values: Tensor) -> float:
    flat = values.detach().flatten().cpu().double()
    return float((flat * torch.arange(1, len(flat) + 1)).sum())


def differing_weights(of_ranks: Sequence[Sequence[tuple[str, float]]]) -> str:
    """Name the first rank whose fingerprints differ from those of rank 0, and its first parameters that differ. Empty: none."""
    first, *others = of_ranks
    for rank, found in enumerate(others, start=1):
        if found != first:
            differing = [a[0] for a, b in zip(found, first, strict=False) if a != b] or ["their number"]
            return f"rank {rank} differs from rank 0 in {', '.join(differing[:3])}"
    return ""


def comparable_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks among the arguments of a trainer: settings, and the kinds of the other objects.

    The device may differ, and the reward model. An optimizer's settings are compared, too.
    """
    config, optimizer = arguments.get("config"), arguments.get("optimizer")
    compared = {
        name: kind_of(value) for name, value in arguments.items() if name not in ("config", "engine", "reward_model")
    }
    if isinstance(config, GRPOConfig):
        compared |= {f"config.{name}": value for name, value in flattened(config.to_dict()).items() if name != "device"}
    if isinstance(optimizer, torch.optim.Optimizer):
        for number, group in enumerate(optimizer.param_groups):
            settings = {name: value for name, value in group.items() if name != "params"}
            compared |= {f"optimizer.param_groups[{number}].{name}": value for name, value in settings.items()}
    return compared


def kind_of(value: Any) -> str | None:
    """The name of a function, or of the class of another object."""
    return None if value is None else str(getattr(value, "__qualname__", type(value).__qualname__))

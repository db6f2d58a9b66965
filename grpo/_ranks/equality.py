"""What must be equal on all ranks: values, compared by how they are described, and weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from grpo._common.settings_by_name import flattened
from grpo.config import GRPOConfig

from .description import described, kind_of, settings_of

MAX_NAMED = 5
"""Number of different values that an error names."""


def printed(values: Mapping[str, Any]) -> dict[str, str]:
    """A text for each value, to be compared with the other ranks. Values in a dict have names of their own: `optimizer.lr`."""
    return {name: described(value) for name, value in flattened(values).items()}


def differing_values(of_ranks: Sequence[Mapping[str, str]]) -> str:
    """Name values that are not the same on all ranks, with the value of each rank. Empty: all are the same."""
    differing = []
    for name in dict.fromkeys(name for values in of_ranks for name in values):
        found = [values.get(name, "absent") for values in of_ranks]
        if len(set(found)) > 1:
            differing.append(f"{name} is {', '.join(f'{value} on rank {rank}' for rank, value in enumerate(found))}")
    more = [f"and {len(differing) - MAX_NAMED} more"] if len(differing) > MAX_NAMED else []
    return "; ".join([*differing[:MAX_NAMED], *more])


def weights_of(policy: Any) -> dict[str, Tensor]:
    """A policy's parameters, and the frozen parameters and persistent buffers of its modules, by name."""
    found: dict[str, Tensor] = dict(policy.get_parameters())
    known = {id(value) for value in found.values()}
    attributes = {"": policy} if isinstance(policy, nn.Module) else getattr(policy, "__dict__", {})
    for prefix, module in attributes.items():
        for path, part in module.named_modules(prefix=prefix) if isinstance(module, nn.Module) else ():
            for name, value in {**part._parameters, **part._buffers}.items():
                is_kept = value is not None and name not in part._non_persistent_buffers_set and id(value) not in known
                found |= {f"{path}.{name}".lstrip("."): value} if is_kept else {}
    return found


def differing_weights(of_ranks: Sequence[Mapping[str, str]]) -> str:
    """Name the first rank whose weights differ from those of rank 0, and the first that do. Empty: all are the same."""
    first, *others = of_ranks
    for rank, found in enumerate(others, start=1):
        both = [(name, first.get(name, "absent"), found.get(name, "absent")) for name in {**first, **found}]
        named = [f"{name} ({own} on rank 0, {other} on rank {rank})" for name, own, other in both if own != other]
        if named:
            return f"rank {rank} differs from rank 0 in {', '.join(named[:3])}"
    return ""


def comparable_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks among the arguments of a learner: settings, functions, and the kinds of other objects.

    The device may differ. Weights are compared on their device, and the optimizer's groups when the optimizer is built.
    """
    config = arguments.get("config")
    compared: dict[str, Any] = {}
    for name, value in arguments.items():
        if (own := settings_of(value)) is not None:
            compared |= {name: kind_of(value), f"{name}.settings()": own}
        elif name in ("policy", "reference_policy") or isinstance(value, Optimizer):
            compared[name] = kind_of(value)
        elif name not in ("config", "engine"):
            compared[name] = value
    if isinstance(config, GRPOConfig):
        compared |= {f"config.{name}": value for name, value in flattened(config.to_dict()).items() if name != "device"}
    return compared

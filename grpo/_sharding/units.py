"""The modules whose weights are gathered together."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from grpo._common.conversion import describe
from grpo.errors import ConfigError, ContractError
from grpo.policy_base import HasShardUnits


def units_of(policy: Any) -> tuple[list[nn.Module], list[nn.Module]]:
    """The inner units of a policy, inside out, and the modules around them, whose other weights are one unit.

    Without `shard_units`, a policy that is a module is one unit.

    Raises:
        ConfigError: The policy is not a module and has no `shard_units`, or it has weights that cannot be divided.
        ContractError: `shard_units` returned anything but modules.
    """
    name = type(policy).__name__
    given: Any = policy.shard_units() if isinstance(policy, HasShardUnits) else []
    if not isinstance(given, list | tuple) or not all(isinstance(unit, nn.Module) for unit in given):
        raise ContractError(
            f"{name}.shard_units must return a list of modules; got {describe(given)}. Return [*self.layers]."
        )
    units = list({id(unit): unit for unit in [*given, *([policy] if isinstance(policy, nn.Module) else [])]}.values())
    if not units:
        raise ConfigError(
            f"Sharded divides the weights of modules, and {name} is no torch.nn.Module. Add a method shard_units() that "
            "returns its modules, or use Replicated."
        )
    contained = {id(part) for unit in units for part in unit.modules() if part is not unit}
    # inside out, because `fully_shard` gives a module the weights that no module inside has taken
    inner = sorted((unit for unit in units if id(unit) in contained), key=lambda unit: len(list(unit.modules())))
    outer = [unit for unit in units if id(unit) not in contained]
    _require_divisible(name, inner, outer)
    return inner, outer


def undivided(modules: Sequence[nn.Module]) -> set[nn.Parameter]:
    """The parameters that have no axis to divide. Each rank holds them whole."""
    return {parameter for module in modules for parameter in module.parameters() if parameter.dim() == 0}


def _require_divisible(name: str, inner: Sequence[nn.Module], outer: Sequence[nn.Module]) -> None:
    """Refuse quantised weights, weights that two units share, and trained weights of several dtypes in one unit."""
    seen: set[int] = set()
    for unit in [*inner, None]:
        found = list(unit.named_parameters()) if unit is not None else [p for m in outer for p in m.named_parameters()]
        own = {id(value): (path, value) for path, value in found if id(value) not in seen}
        for path, value in own.values():
            if not value.is_floating_point():
                raise ConfigError(
                    f"Sharded cannot divide quantised weights; {path} of {name} is {value.dtype}. Use Replicated."
                )
        dtypes = {str(value.dtype) for _, value in own.values() if value.requires_grad and value.dim()}
        if len(dtypes) > 1:
            raise ConfigError(
                f"Sharded needs trained weights of one dtype in each unit of {name}; one unit has {', '.join(sorted(dtypes))}. "
                "Convert the policy to one dtype, or return the modules of each dtype as units of their own in shard_units()."
            )
        seen |= own.keys()
    _require_unshared(name, inner)


def _require_unshared(name: str, inner: Sequence[nn.Module]) -> None:
    """Refuse a weight that occurs in two units of which neither contains the other."""
    owner: dict[int, nn.Module] = {}
    for unit in inner:
        for path, value in unit.named_parameters():
            first = owner.setdefault(id(value), unit)
            if first is not unit and all(part is not first for part in unit.modules()):
                raise ConfigError(
                    f"Sharded needs each weight in one unit; {path} of {name} is in two of its shard_units(). Leave both out: "
                    "the weights of the modules around the units are one unit."
                )

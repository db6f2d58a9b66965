"""Checks of objects that have to have the methods of a protocol."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from grpo.errors import ConfigError, ContractError, ProtocolError

from .checks import is_one_letter_off
from .conversion import describe, has_values

if TYPE_CHECKING:

    class AnyPolicy(Protocol):
        """`PolicyModel` with any arguments, for type checkers: states may be tensors, or narrower than `Sequence`."""

        def generate_actions(self, *args: Any, **kwargs: Any) -> Any: ...
        def get_log_probabilities(self, *args: Any, **kwargs: Any) -> Tensor: ...
        def get_parameters(self, *args: Any, **kwargs: Any) -> Any: ...
        def train(self, *args: Any, **kwargs: Any) -> Any: ...
        def eval(self, *args: Any, **kwargs: Any) -> Any: ...
        def to(self, *args: Any, **kwargs: Any) -> Any: ...

else:
    AnyPolicy = Any  # at run time `require_methods` names the missing methods, also where tests check types


def has_method(value: Any, name: str) -> bool:
    """Whether an object has an optional method. An attribute of this name that cannot be called is the object's own."""
    return callable(getattr(value, name, None))


def require_methods(value: Any, methods: Sequence[str], role: str, protocol: str) -> None:
    """Check that `value` is an instance with all of `methods`."""
    if isinstance(value, type):
        raise ProtocolError(f"{role} must be an instance; got the class {value.__name__}. Pass {value.__name__}(...).")
    missing = [name for name in methods if not has_method(value, name)]
    if missing:
        listed = ", ".join(f"{name}()" for name in missing)
        raise ProtocolError(
            f"{role} must implement {protocol}; {type(value).__name__} lacks {listed}. "
            f"Add the missing methods. There is no base class to inherit from."
        )


def refuse_near_misses(value: Any, role: str, capabilities: Sequence[type]) -> None:
    """Refuse a method that is one letter off an optional method of seven letters or more, because nothing would call it."""
    names = sorted(name for name in {*dir(type(value)), *getattr(value, "__dict__", {})} if name[0] != "_")
    wanted = [(name, capability) for capability in capabilities for name in vars(capability) if len(name) >= 7]
    for right, capability in wanted:
        # one letter changes the beginning of a name or its end, not both
        for name in (name for name in names if name[:3] == right[:3] or name[-3:] == right[-3:]):
            if is_one_letter_off(name, right) and callable(getattr(value, name, None)) and not hasattr(value, right):
                owner = next((each for each in type(value).__mro__ if name in vars(each)), type(value)).__name__
                raise ProtocolError(
                    f"{role}: {owner} has {name}(), which nothing calls, and lacks {right}() of {capability.__name__}: "
                    f"{capability.__doc__} Rename {name} to {right}, or to a name that differs by more than one letter."
                )


def parameters_of(policy: Any) -> Mapping[str, Tensor]:
    """Return the policy's parameters by name."""
    found = policy.get_parameters()
    entries = found.items() if isinstance(found, Mapping) else [("the result", found)]
    for name, value in entries:
        has_data = isinstance(value, Tensor) and has_values(value)
        if not isinstance(found, Mapping) or not isinstance(name, str) or not has_data:
            raise ContractError(
                f"{type(policy).__name__}.get_parameters must return a dict of dense tensors by name; {name} is "
                f"{describe(value)}. Return dict(self.named_parameters()), or {{}} if there is nothing to train."
            )
    return found  # type: ignore[no-any-return]


def kept_state(value: Any) -> dict[str, Any]:
    """Return the state of a reward model for checkpoints. For a network, this is the state of its buffers, because training
    never changes its weights."""
    if isinstance(value, torch.nn.Module):
        return dict(value.named_buffers())
    return dict(value.state_dict()) if hasattr(value, "state_dict") else {}


def restore_state(value: Any, state: dict[str, Any]) -> None:
    """Restore what `kept_state` returned. Raise a ConfigError if `value` has no `load_state_dict`."""
    if isinstance(value, torch.nn.Module):
        for name, buffer in value.named_buffers():
            buffer.copy_(state[name])
    elif hasattr(value, "load_state_dict"):
        value.load_state_dict(state)
    elif state:
        raise ConfigError(
            f"{type(value).__name__} must have load_state_dict() to restore {sorted(state)}. Add this method."
        )

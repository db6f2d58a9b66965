"""Calls of functions of users: whether a function takes the arguments that it will get, and a call that is made later."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo.errors import ProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a function, and its name in messages."""

    name: str
    """What messages call it, such as `judge at row 3`."""
    function: Callable[..., Any]
    """The function. `await_all` needs an `async def`."""
    arguments: tuple[Any, ...] = ()
    """Positional arguments."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by name."""

    def __call__(self) -> Any:
        """Call the function with its arguments."""
        return self.function(*self.arguments, **self.keywords)


def takes(function: Callable[..., Any], num_arguments: int) -> bool:
    """Whether a function can be called with so many positional arguments."""
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:  # recovery: a function without a readable signature is called as it is
        return True
    return True


def require_states_and_actions(name: str, function: Callable[..., Any]) -> None:
    """Refuse a function that cannot be called as `function(states, actions)`, and one that takes TRL's arguments by name."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # recovery: a function without a readable signature is called as it is
        return
    names = list(signature.parameters)
    takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    # The second argument may be called `completions`: these are our actions. TRL also gives columns by name.
    is_of_trl = "completions" in names and (takes_any_name or names[1:2] != ["completions"])
    if takes(function, 2) and not is_of_trl:
        return
    raise ProtocolError(
        f"reward_model must be a function of (states, actions); got {name}{signature}. "
        "A function of prompts, completions and columns by name, as in TRL, belongs in "
        "adapters.llm.CompletionRewards(function). Give any other function these two arguments."
    )

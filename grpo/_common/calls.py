"""A call that is made later, or elsewhere."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


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

"""Annotations of a tool's function, and the values that they say the function receives.

This module imports nothing from this package, because worker processes load it without the package.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

_JSON_TYPES = (str, int, float, bool, types.NoneType, list, dict, object, typing.Any)


def named_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Annotations of the parameters that can be passed by name.

    Raises:
        ValueError: The annotations cannot be read: the function is built in, or a name is defined under `TYPE_CHECKING`.
    """
    own = unwrapped(function)
    own = own if inspect.isroutine(own) or inspect.isclass(own) else type(own).__call__
    try:
        parameters = inspect.signature(function).parameters.values()
        hints = typing.get_type_hints(own, include_extras=True)
    except (TypeError, ValueError, NameError, AttributeError, SyntaxError) as error:
        raise ValueError(f"the function's annotations cannot be read: {error}") from error
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name: hints[each.name] for each in parameters if each.kind in kinds and each.name in hints}


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Unwrap `functools.partial` to the function that has the docstring and annotations."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def are_json(hint: Any, *others: type) -> bool:
    """Whether an annotation consists of types of JSON and of `others`, in lists, dicts by text, unions and literals."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict and inner[:1] not in ((), (str,)):
        return False
    if origin in (list, dict, typing.Union, types.UnionType):
        return all(are_json(each, *others) for each in inner)
    return origin is typing.Literal or hint in (*_JSON_TYPES, *others)


def import_pydantic() -> Any:
    """Import pydantic, which is only needed for annotations."""
    try:
        import pydantic
    except ImportError as error:
        raise ImportError('Annotations of tools need pydantic: pip install "model-agnostic-grpo[tools]"') from error
    return pydantic

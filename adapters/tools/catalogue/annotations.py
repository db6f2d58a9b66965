"""Convert a function's annotations to the JSON Schema of its arguments."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from grpo.errors import ConfigError

from .calls import same_json

_JSON_TYPES: Mapping[Any, Mapping[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    Path: {"type": "string", "format": "path"},
}
_LITERALS = (str, int, bool, type(None))


def written(function: Callable[..., Any]) -> Callable[..., Any]:
    """Unwrap `functools.partial` to the function that has the docstring and annotations."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def schema_of(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON Schema object for a function's arguments.

    Args:
        name: Tool name, used in error messages.
        function: Function with an annotation on every parameter.

    Raises:
        ConfigError: A parameter has no annotation, or an annotation that cannot be converted to a schema.
    """
    own = written(function)
    has_annotations = inspect.isroutine(own) or inspect.isclass(own)
    try:
        hints = get_type_hints(own if has_annotations else type(own).__call__)
        parameters = inspect.signature(function).parameters
    # Built-in functions have no signature; annotations under TYPE_CHECKING cannot be resolved.
    except (TypeError, ValueError, NameError, AttributeError, SyntaxError) as error:
        raise ConfigError(
            f"{name}: the function's annotations cannot be read: {error}. Correct them, or pass Tool(parameters=...)."
        ) from error
    properties, required = {}, []
    for key, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"{name}: it must be possible to pass every parameter by name; got {parameter}. Change the function, or pass "
                "Tool(function=..., parameters=...)."
            )
        schema = _json_type(hints.get(key))
        if schema is None:
            raise ConfigError(
                f"{name}: parameter {key} must have a supported annotation: str, int, float, bool, Path, Literal of texts and "
                f"numbers, dict, list, or list[...] and dict[str, ...] of these; got {hints.get(key)}. Change the annotation, "
                "or write the schema yourself: Tool(parameters=...)."
            )
        if parameter.default is parameter.empty:
            required.append(key)
        elif parameter.default is not None:
            default = str(parameter.default) if isinstance(parameter.default, Path) else parameter.default
            if same_json(default, default):  # JSON can represent the default
                schema["default"] = default
        properties[key] = schema
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _json_type(hint: Any) -> dict[str, Any] | None:
    """Schema of an annotation, or None if the annotation is not supported."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)} if all(type(value) in _LITERALS for value in arguments) else None
    if hint is dict or origin is dict:
        key, values = (arguments[0], _json_item(arguments[1])) if arguments else (str, {})
        if key is not str or values is None:
            return None
        return {"type": "object", "additionalProperties": values} if values else {"type": "object"}
    if hint is list or origin is list:
        items = _json_item(arguments[0]) if arguments else {}
        return None if items is None else {"type": "array", "items": items}
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in arguments if kind is not type(None)]
        return _json_type(kinds[0]) if len(kinds) == 1 else None
    return dict(_JSON_TYPES[hint]) if hint in _JSON_TYPES else None


def _json_item(hint: Any) -> dict[str, Any] | None:
    """Schema of a list item or dict value. Unlike a parameter, an item may be `Any`, and null is a valid value."""
    if hint in (Any, object):
        return {}
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    if get_origin(hint) not in (Union, types.UnionType) or len(kinds) != 1:
        return _json_type(hint)
    schema = _json_item(kinds[0])
    if not schema:
        return schema
    return schema | ({"enum": [*schema["enum"], None]} if "enum" in schema else {"type": [schema["type"], "null"]})

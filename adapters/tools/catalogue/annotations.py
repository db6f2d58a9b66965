"""Convert a function's annotations to the JSON Schema of its arguments, with pydantic."""

import inspect
import json
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

from grpo.errors import ConfigError

from .calls import same_json
from .hints import import_pydantic, named_hints
from .schemas import parts_of

_MUST_EXIST = ("file-path", "directory-path")
"""pydantic's formats of paths that must exist. They are confined like other paths."""


def schema_of(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON Schema object for a function's arguments.

    A default of None means that the parameter is omitted, so its `| None` adds no value. The titles that pydantic makes up
    from names are left out, because a title is part of the text by which the policy chooses a value.

    Args:
        name: Tool name, used in error messages.
        function: Function with an annotation on every parameter.

    Raises:
        ConfigError: A parameter has no annotation, or an annotation that cannot be converted to a schema.
        ImportError: pydantic is not installed.
    """
    try:
        hints = named_hints(function)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}. Correct the function, or pass Tool(parameters=...).") from error
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"{name}: it must be possible to pass every parameter by name; got {parameter}. Change the function, or pass "
                "Tool(function=..., parameters=...)."
            )
    adapters = {key: _adapter(name, key, hints.get(key)) for key in parameters}
    inputs = [(key, "validation", adapter) for key, adapter in adapters.items()]
    found, definitions = import_pydantic().TypeAdapter.json_schemas(inputs)
    for _, part in parts_of(definitions):
        part.pop("title", None)
    properties = {
        key: _with_default(found[key, "validation"], parameters[key].default, adapters[key]) for key in adapters
    }
    for _, part in parts_of([*properties.values(), definitions]):
        if part.get("format") in _MUST_EXIST:
            part["format"] = "path"
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return schema | definitions


def _adapter(name: str, key: str, hint: Any) -> Any:
    """pydantic's converter of an annotation, which has a JSON Schema."""
    advice = "Change the annotation, or write the schema yourself: Tool(parameters=...)."
    if hint is None:
        raise ConfigError(f"{name}: parameter {key} must have an annotation; it has none. {advice}")
    if not _has_json_literals(hint):
        raise ConfigError(
            f"{name}: parameter {key}: a Literal must have values that JSON can represent; got {hint}. Annotate the parameter "
            "with an Enum class itself. " + advice
        )
    type_adapter = import_pydantic().TypeAdapter
    try:
        adapter = type_adapter(hint)
        adapter.json_schema()
    except Exception as error:  # pydantic's errors, or what the annotated class raises
        raise ConfigError(
            f"{name}: parameter {key} must have an annotation that pydantic converts to JSON Schema; got {hint}. {advice} "
            f"pydantic says: {error}"
        ) from error
    return adapter


def _has_json_literals(hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return all(same_json(value, value) and type(value).__module__ == "builtins" for value in get_args(hint))
    return all(map(_has_json_literals, get_args(hint)))


def _with_default(schema: dict[str, Any], default: Any, adapter: Any) -> dict[str, Any]:
    """Schema of a parameter with its default, unless JSON cannot represent the default."""
    if default is inspect.Parameter.empty:
        return schema
    if default is None:
        rest = [part for part in schema.get("anyOf", ()) if part != {"type": "null"}]
        others = {key: part for key, part in schema.items() if key != "anyOf"}
        return rest[0] | others if len(rest) == 1 else schema | ({"anyOf": rest} if rest else {})
    try:
        text = adapter.dump_json(default, warnings=False)
        adapter.validate_json(text)
    except ValueError:  # JSON cannot represent the default, or it has another type than the annotation
        return schema
    return schema | {"default": json.loads(text)}

"""Annotations of a tool's function. pydantic makes the JSON Schema of the arguments, and converts them to the annotated types.

This module imports only `schemas` from this package, because worker processes load it without the package.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import pydantic

from .schemas import parts_of


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON Schema object for a function's arguments.

    The titles that pydantic makes up from names are left out, because the policy chooses values by their titles.

    Raises:
        ValueError: A parameter has no annotation, or an annotation that has no JSON Schema.
    """
    parameters = parameters_of(function)
    adapters = {name: adapter_of(parameter) for name, parameter in parameters.items()}
    # pydantic reads every annotation; a list of our own was never complete
    found, definitions = pydantic.TypeAdapter.json_schemas(
        [(name, "validation", adapter) for name, adapter in adapters.items()]
    )
    for part in parts_of(definitions):
        if isinstance(part.get("title"), str):
            del part["title"]
    properties = {
        name: _with_default(found[name, "validation"], parameters[name].default, adapters[name]) for name in adapters
    }
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return schema | definitions


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The function's parameters, with annotations that are not texts.

    Raises:
        ValueError: The annotations cannot be read: the function is built in, or a name is defined under `TYPE_CHECKING`.
    """
    try:
        return inspect.signature(function, eval_str=True).parameters
    except Exception as error:  # evaluating an annotation may raise anything
        raise ValueError(f"the function's annotations cannot be read: {error}") from error


def adapter_of(parameter: inspect.Parameter) -> pydantic.TypeAdapter[Any]:
    """pydantic's converter from JSON to the parameter's annotation.

    Raises:
        ValueError: The parameter cannot be passed by name, or its annotation has no JSON Schema.
    """
    by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    if parameter.annotation is parameter.empty or not by_name:
        raise ValueError(f"each parameter must have an annotation, and it must be passed by name; got {parameter}")
    try:
        adapter = pydantic.TypeAdapter(parameter.annotation)
        schema = adapter.json_schema()
        for value in schema.get("enum", [schema["const"]] if "const" in schema else []):
            adapter.validate_python(value, strict=False)  # a Literal can have values that JSON cannot represent
    except Exception as error:  # pydantic's errors, or what the annotated class raises
        raise ValueError(
            f"each parameter must have an annotation that pydantic converts from JSON; got {parameter}: {error}"
        ) from error
    return adapter


def _with_default(schema: dict[str, Any], default: Any, adapter: pydantic.TypeAdapter[Any]) -> dict[str, Any]:
    """Schema of a parameter with its default. A default of None means that the parameter is omitted, so it removes `null`."""
    if default is None and "anyOf" in schema:
        rest = [part for part in schema.pop("anyOf") if part != {"type": "null"}]
        return rest[0] | schema if len(rest) == 1 else {"anyOf": rest} | schema
    if default is None or default is inspect.Parameter.empty:
        return schema
    try:
        plain = json.loads(adapter.dump_json(default, warnings=False))
        adapter.validate_python(plain, strict=False)
    except ValueError:  # JSON cannot represent the default, or it has another type than the annotation
        return schema
    return schema | {"default": plain}

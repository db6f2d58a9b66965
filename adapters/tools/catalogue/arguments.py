"""Validation of tool arguments: JSON values that match the tool's schema, with paths confined to one folder.

This module imports only `hints` and `schemas` from this package, because a worker process loads these files without it.
"""

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import referencing

from .hints import are_json, import_pydantic, named_hints
from .schemas import (
    check_path_formats,
    describing,
    plain_schema,
    schema_of_items,
    schema_of_value,
    slow_keyword,
)

MAX_BYTES = 100_000
"""Maximum size of one call's arguments as JSON."""
MAX_DEPTH = 32
"""Maximum nesting depth of lists and objects in the arguments."""
_MAX_MESSAGE = 500
_INTEGER: Any = ("integer", ["integer", "null"], ["null", "integer"])
_ENCODE = json.JSONEncoder(allow_nan=False).encode  # `json.dumps` would build a new encoder per call


class RefusedArgumentsError(ValueError):
    """The arguments are invalid, so the tool is not called. `error` is the name of the `ToolError` to report."""

    def __init__(self, message: str, error: str = "InvalidArgumentsError") -> None:
        super().__init__(message)
        self.error = error


def encode_arguments(arguments: Any) -> str:
    """Encode arguments as JSON.

    Raises:
        RefusedArgumentsError: The arguments are not an object with string keys, hold a value that JSON cannot represent, hold
            NaN or infinity, are too large or too deeply nested, or raise while they are read.
    """
    try:
        if not isinstance(arguments, Mapping):
            raise RefusedArgumentsError(f"arguments must be an object of values by parameter; got {_kind(arguments)}.")
        plain = _plain(arguments, MAX_DEPTH, [MAX_BYTES])
    except RefusedArgumentsError:
        raise
    except BaseException as error:  # a value's methods may raise anything; only the user's Ctrl-C passes
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise RefusedArgumentsError(f"arguments cannot be read: reading them raises {_kind(error)}.") from error
    try:
        text = _ENCODE(plain)
    except ValueError as error:  # an integer with more digits than Python converts to text
        raise RefusedArgumentsError(str(error)) from error
    if len(text) > MAX_BYTES:
        raise RefusedArgumentsError(f"arguments must take at most {MAX_BYTES} bytes as JSON; got {len(text)}.")
    return text


def json_arguments(arguments: Any) -> dict[str, Any] | None:
    """Copy arguments through JSON. Returns None if the arguments are invalid."""
    try:
        parsed: dict[str, Any] = json.loads(encode_arguments(arguments))
    except RefusedArgumentsError:
        return None
    return parsed


def _plain(value: Any, depth: int, left: list[int]) -> Any:
    """Copy a value to plain JSON types. `left` holds the remaining size budget."""
    left[0] -= 1 + (len(value) if isinstance(value, str) else 0)
    if left[0] < 0:
        raise RefusedArgumentsError(f"arguments must take at most {MAX_BYTES} bytes as JSON; got more.")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RefusedArgumentsError(f"numbers in arguments must be finite; got {value}.")
        return value
    if not isinstance(value, Mapping | list | tuple):
        raise RefusedArgumentsError(f"arguments must be values that JSON can represent; got {_kind(value)}.")
    if depth == 0:
        raise RefusedArgumentsError(
            f"arguments must be nested at most {MAX_DEPTH} lists or objects deep; got more levels."
        )
    if not isinstance(value, Mapping):
        return [_plain(item, depth - 1, left) for item in value]
    return {_key(key, left): _plain(item, depth - 1, left) for key, item in value.items()}


def _key(key: Any, left: list[int]) -> Any:
    if not isinstance(key, str):
        raise RefusedArgumentsError(f"keys of objects must be text; got {_kind(key)}.")
    return _plain(key, 0, left)


class ArgumentChecker:
    """Validate arguments and convert them to the values that the tool's function receives.

    Schema: arguments are validated against JSON Schema draft 2020-12; a `$schema` keyword is ignored. Unknown keys are
    rejected unless the schema sets `additionalProperties`. A `$ref` is never fetched. A `default` is not filled in; the
    function's own default applies.

    Paths: every string that the schema marks with `"format": "path"` is resolved relative to `root` with links followed. The
    resolved path must lie in `root`, and it replaces the string.

    Integers: where the schema allows integers and no other numbers, 2.0 is converted to 2, because JSON does not distinguish
    the two and Python does.

    Annotations: the function receives what its annotation says, for example a `Path`, an Enum member or a `date`. pydantic
    converts the values. It is only imported for annotations that are not `Path` and not types of JSON.

    A tool that can create links can change a path's target after the check. Such a tool has to be trusted.

    Args:
        function: The tool's function. Its annotations are read.
        parameters: The tool's JSON Schema.
        root: Existing folder that paths are resolved against.

    Raises:
        UncertainPathError: It is not certain which strings are paths (see `check_path_formats`).
    """

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Any], root: str) -> None:
        check_path_formats(parameters)
        self._schema = {"additionalProperties": False} | plain_schema(parameters)
        self._root = os.path.realpath(root)
        self._validator = jsonschema.Draft202012Validator(self._schema, registry=referencing.Registry())
        hints: dict[str, Any] = {}
        with contextlib.suppress(ValueError):  # the function receives JSON values
            hints = {name: hint for name, hint in named_hints(function).items() if not are_json(hint)}
        self._paths = {name for name, hint in hints.items() if are_json(hint, Path)}
        self._converters = {name: _converter(hint) for name, hint in hints.items() if name not in self._paths}
        self.is_slow = slow_keyword(parameters) is not None

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Check and convert arguments, given as `json.loads` returns them.

        Raises:
            RefusedArgumentsError: The arguments are invalid. `error` is `InvalidArgumentsError` or `PathOutsideRootError`.
        """
        try:
            error = jsonschema.exceptions.best_match(self._validator.iter_errors(arguments))
            where = "" if error is None else f"at {_cut(error.json_path)}: {_cut(error.message)}."
        except Exception as problem:  # an unresolvable `$ref`, an invalid pattern, a number too large
            raise RefusedArgumentsError(f"the tool's schema cannot be applied: {_cut(repr(problem))}") from problem
        if error is not None:
            raise RefusedArgumentsError(where)
        return self.convert(arguments)

    def convert(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Convert arguments that were already validated against this schema.

        Raises:
            RefusedArgumentsError: A path leaves `root`, or a value does not fit its annotation.
        """
        for part in describing(self._schema, "object"):
            arguments = {
                name: self._confined(value, schema_of_value(part, name), Path if name in self._paths else str)
                for name, value in arguments.items()
            }
        return {
            name: self._converters[name](name, value) if name in self._converters else value
            for name, value in arguments.items()
        }

    def _confined(self, value: Any, schema: Any, path_type: type) -> Any:
        """Copy a value that matches a schema, with its paths confined and its integral numbers converted."""
        if isinstance(value, str):
            is_path = any(part.get("format") == "path" for part in describing(schema, "string"))
            return path_type(confine(value, self._root)) if is_path else value
        if isinstance(value, float):
            is_integer = value.is_integer() and any(
                part.get("type") in _INTEGER for part in describing(schema, "integer")
            )
            return int(value) if is_integer else value
        if isinstance(value, list):
            for items in map(schema_of_items, describing(schema, "array")):
                value = [self._confined(item, items, path_type) for item in value]
        if isinstance(value, dict):
            for part in describing(schema, "object"):
                value = {name: self._confined(v, schema_of_value(part, name), path_type) for name, v in value.items()}
        return value


def _converter(hint: Any) -> Callable[[str, Any], Any]:
    """Function from a parameter's name and JSON value to the value of the annotated type."""
    pydantic = import_pydantic()

    def convert(name: str, value: Any) -> Any:
        try:
            return validate(_ENCODE(value))
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = "".join(f"[{part!r}]" for part in first["loc"])
            raise RefusedArgumentsError(f"at $.{name}{_cut(where)}: {_cut(first['msg'])}.") from error
        except Exception as error:  # the annotated class may raise anything
            raise RefusedArgumentsError(f"at $.{name}: the value cannot be converted: {_cut(repr(error))}.") from error

    try:
        validate = pydantic.TypeAdapter(hint).validate_json
    except pydantic.PydanticUserError:  # not a type of JSON values; the schema was written by hand
        validate = json.loads
    return convert


def confine(value: str, root: str) -> Path:
    """Resolve `value` relative to `root`, with links followed.

    Raises:
        RefusedArgumentsError: The path lies outside `root` (`PathOutsideRootError`), or cannot be resolved.
    """
    if "\0" in value:
        raise RefusedArgumentsError(f"a path must not contain the null character; got {_cut(ascii(value))}.")
    try:
        path = (Path(root) / value).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or text that is not a valid path
        raise RefusedArgumentsError(f"the path {_cut(ascii(value))} cannot be resolved: {_cut(str(error))}.") from error
    if not path.is_relative_to(root):
        raise RefusedArgumentsError(
            f"the path {_cut(ascii(value))} must lie in the tools' folder.", "PathOutsideRootError"
        )
    return path


def bounded_text(value: Any, max_length: int) -> str:
    """A value as JSON in ASCII, truncated to `max_length`. A value that JSON cannot represent shows its type."""
    try:
        text = encode_arguments({"": value})[len('{"": ') : -1]
    except RefusedArgumentsError:
        text = f"<{_kind(value)}>"
    return text if len(text) <= max_length else f"{text[:max_length]}..."


def _kind(value: object) -> str:
    """Name of the value's type, read without calling a metaclass."""
    return ascii(_cut(_NAME(type(value))))[1:-1]


_NAME = type.__dict__["__name__"].__get__


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."

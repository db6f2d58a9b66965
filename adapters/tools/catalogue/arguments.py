"""Validation of tool arguments: JSON values that match the tool's schema, with paths confined to one folder.

This module imports only `annotations` and `schemas` from this package, because worker processes load it without the package.
"""

import contextlib
import copy
import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import jsonschema
import pydantic
import referencing

from .annotations import adapter_of, parameters_of
from .schemas import PATHS, describing, describing_at, paths_in, plain_schema, slow_keyword

MAX_BYTES = 100_000
"""Maximum size of one call's arguments as JSON."""
MAX_DEPTH = 32
"""Maximum nesting depth of lists and objects in the arguments."""
_INTEGER: Any = ("integer", ["integer", "null"], ["null", "integer"])


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
        text = json.dumps(_plain(arguments, MAX_DEPTH, [MAX_BYTES]))
    except RefusedArgumentsError:
        raise
    except BaseException as error:  # a value's methods may raise anything; only the user's Ctrl-C passes
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise RefusedArgumentsError(f"arguments cannot be read: reading them raises {_kind(error)}.") from error
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
    if isinstance(value, float) and not math.isfinite(value):
        raise RefusedArgumentsError("numbers in arguments must be finite.")
    if value is None or isinstance(value, int | float | str):
        return value
    if not isinstance(value, Mapping | list | tuple):
        raise RefusedArgumentsError(f"arguments must be values that JSON can represent; got {_kind(value)}.")
    if depth == 0:
        raise RefusedArgumentsError(f"arguments must be nested at most {MAX_DEPTH} lists or objects deep; got more.")
    if not isinstance(value, Mapping):
        return [_plain(item, depth - 1, left) for item in value]
    plain = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise RefusedArgumentsError(f"keys of objects must be text; got {_kind(key)}.")
        plain[_plain(key, 0, left)] = _plain(item, depth - 1, left)
    return plain


class ArgumentChecker:
    """Validate arguments, and convert them to the values that the tool's function receives.

    1. They are validated against the schema (draft 2020-12). Unknown names are rejected unless the schema sets
       `additionalProperties`. A `$ref` is never fetched, and a `default` is not filled in.
    2. Each string with `"format": "path"` is resolved relative to `root`, with links followed, and must lie in `root`. A tool
       that can create links can change a path's target after this check, so such a tool has to be trusted.
    3. Where the schema allows integers and no other numbers, 2.0 becomes 2.
    4. pydantic converts each value to its annotation, if the annotation has a JSON Schema, and if the tool's schema marks every
       path of the annotation.

    Args:
        function: The tool's function. Its annotations are read.
        parameters: The tool's JSON Schema.
        root: Existing folder that paths are resolved against.

    Raises:
        ValueError: It is not certain which strings are paths (see `plain_schema`).
    """

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Any], root: str) -> None:
        self._schema = {"additionalProperties": False} | plain_schema(parameters)
        self._root = os.path.realpath(root)
        self._validator = jsonschema.Draft202012Validator(self._schema, registry=referencing.Registry())
        self._adapters: dict[str, pydantic.TypeAdapter[Any]] = {}
        with contextlib.suppress(ValueError):  # the annotations cannot be read
            for name, parameter in parameters_of(function).items():
                with contextlib.suppress(ValueError):  # this annotation has no JSON Schema
                    adapter = adapter_of(parameter)
                    # A text that the tool's schema does not mark is not confined, so it must not become a `Path`.
                    if len(paths_in(plain_schema(adapter.json_schema()))) <= len(
                        paths_in(describing_at(self._schema, name))
                    ):
                        self._adapters[name] = adapter
        self.is_slow = slow_keyword(self._schema) is not None

    def at(self, root: str) -> Self:
        """The checker of the same tool for another folder."""
        other = copy.copy(self)
        other._root = os.path.realpath(root)
        return other

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Check and convert arguments, given as `json.loads` returns them.

        Raises:
            RefusedArgumentsError: The arguments are invalid. `error` is `InvalidArgumentsError` or `PathOutsideRootError`.
        """
        try:
            error = jsonschema.exceptions.best_match(self._validator.iter_errors(arguments))
        except Exception as problem:  # an unresolvable `$ref`, an invalid pattern
            raise RefusedArgumentsError(f"the tool's schema cannot be applied: {problem!r:.500}") from problem
        if error is not None:
            raise RefusedArgumentsError(f"at {error.json_path:.500}: {error.message:.500}.")
        return self.convert(arguments)

    def convert(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Convert arguments that were already validated against this schema.

        Raises:
            RefusedArgumentsError: A path leaves `root`, or a value does not fit its annotation.
        """
        confined = self._confined(arguments, self._schema)
        return {name: self._converted(name, value) for name, value in confined.items()}

    def _confined(self, value: Any, schema: Any) -> Any:
        """Copy a value that matches a schema, with its paths confined and its integral numbers converted."""
        if isinstance(value, dict | list):
            copied: Any = value.copy()
            for key in value if isinstance(value, dict) else range(len(value)):
                for part in describing_at(schema, key):
                    copied[key] = self._confined(copied[key], part)
            return copied
        if isinstance(value, str) and any(part.get("format") in PATHS for part in describing(schema, "string")):
            return str(confine(value, self._root))
        if isinstance(value, float) and value.is_integer():
            return int(value) if any(part.get("type") in _INTEGER for part in describing(schema, "integer")) else value
        return value

    def _converted(self, name: str, value: Any) -> Any:
        if name not in self._adapters:
            return value
        try:
            return self._adapters[name].validate_python(value, strict=False)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = "".join(f"[{part!r}]" for part in first["loc"])
            raise RefusedArgumentsError(f"at $.{name}{where:.500}: {first['msg']:.500}.") from error
        except Exception as error:  # the annotated class may raise anything
            raise RefusedArgumentsError(f"at $.{name}: the value cannot be converted: {error!r:.500}.") from error


def confine(value: str, root: str) -> Path:
    """Resolve `value` relative to `root`, with links followed.

    Raises:
        RefusedArgumentsError: The path lies outside `root` (`PathOutsideRootError`), or cannot be resolved.
    """
    try:
        path = (Path(root) / value).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or a text that is no path
        raise RefusedArgumentsError(f"the path {value!a:.500} cannot be resolved: {error!s:.500}.") from error
    if not path.is_relative_to(root):
        raise RefusedArgumentsError(f"the path {value!a:.500} must lie in the tools' folder.", "PathOutsideRootError")
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
    name = type.__dict__["__name__"].__get__(type(value))
    return ascii(name)[1:-1][:500]

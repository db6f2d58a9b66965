"""Validation of tool arguments: JSON values that match the tool's schema, with paths confined to one folder.

This module imports only `schemas` from this package, because a worker process loads these two files without the package.
"""

import json
import math
import os
import threading
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import referencing

from .schemas import has_integers_only, kinds, names_path_format, slow_keyword, without_drafts

MAX_BYTES = 100_000
"""Maximum size of one call's arguments as JSON."""
MAX_DEPTH = 32
"""Maximum nesting depth of lists and objects in the arguments."""
_MAX_MESSAGE = 500
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

    Paths: every string that the schema marks with `"format": "path"`, at any depth, is resolved relative to `root` with links
    followed. The resolved path must lie in `root`, and it replaces the string. The function receives a `Path` if the
    parameter's annotation contains `Path`, otherwise a `str`. Call `check_path_formats` on the schema first: if it raises,
    this class could let paths through unchecked.

    Integers: where the schema allows integers and no other numbers, 2.0 is converted to 2, because JSON does not distinguish
    the two and Python does. Schemas behind a `$ref` are not inspected for this.

    A tool that can create links can change a path's target after the check. Such a tool has to be trusted.

    Args:
        function: The tool's function. Its annotations are read.
        parameters: The tool's JSON Schema.
        root: Existing folder that paths are resolved against.
    """

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Any], root: str) -> None:
        self._schema = without_drafts(parameters)
        self._schema.setdefault("additionalProperties", False)
        self._root = os.path.realpath(root)
        self._paths: set[int] | None = set() if names_path_format(parameters) else None
        formats = jsonschema.FormatChecker(formats=())
        formats.checks("path")(self._note)
        self._validator = jsonschema.Draft202012Validator(
            self._schema, registry=referencing.Registry(), format_checker=formats if self._paths is not None else None
        )
        self._as_path = _path_parameters(function) if self._paths is not None else frozenset()
        self.is_slow = slow_keyword(parameters) is not None

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Check and convert arguments, given as `json.loads` returns them.

        Raises:
            RefusedArgumentsError: The arguments are invalid. `error` is `InvalidArgumentsError` or `PathOutsideRootError`.
        """
        if self._paths is None:
            self._validate(arguments)
            return self.convert(arguments)
        # Make each string a distinct object, so that the validator can report by identity which strings are paths.
        marked = {name: _marked(value) for name, value in arguments.items()}
        self._paths.clear()
        self._validate(marked)
        return self.convert({name: self._confined(value, name in self._as_path) for name, value in marked.items()})

    def convert(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Convert arguments that were already validated against this schema. The schema must have no paths."""
        return _with_integers(arguments, self._schema)

    def _validate(self, arguments: dict[str, Any]) -> None:
        try:
            error = jsonschema.exceptions.best_match(self._validator.iter_errors(arguments))
            where = "" if error is None else f"at {_cut(error.json_path)}: {_cut(error.message)}."
        except Exception as problem:  # an unresolvable `$ref`, an invalid pattern, a number too large
            raise RefusedArgumentsError(f"the tool's schema cannot be applied: {_cut(repr(problem))}") from problem
        if error is not None:
            raise RefusedArgumentsError(where)

    def _note(self, value: object) -> bool:
        if isinstance(value, _Text) and self._paths is not None:
            self._paths.add(id(value))
        return True

    def _confined(self, value: Any, as_path: bool) -> Any:
        if isinstance(value, list):
            return [self._confined(item, as_path) for item in value]
        if isinstance(value, dict):
            return {key: self._confined(item, as_path) for key, item in value.items()}
        if not isinstance(value, _Text):
            return value
        if id(value) not in (self._paths or ()):
            return str(value)
        path = confine(str(value), self._root)
        return path if as_path else str(path)


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


class _Text(str):
    """A copy of a string, with an identity of its own. It can be told apart from an equal string elsewhere in the arguments."""

    __slots__ = ()


def _marked(value: Any) -> Any:
    if isinstance(value, str):
        return _Text(value)
    if isinstance(value, list):
        return [_marked(item) for item in value]
    if isinstance(value, dict):
        return {key: _marked(item) for key, item in value.items()}
    return value


def _with_integers(value: Any, schema: Any) -> Any:
    """Copy a value, with floats converted to integers where the schema allows integers only."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and has_integers_only(schema) else value
    if not isinstance(value, list | dict) or not isinstance(schema, dict):
        return value
    kind = "array" if isinstance(value, list) else "object"
    branches = [part for key in ("anyOf", "oneOf") for part in schema.get(key, ()) if kind in kinds(part)]
    if len(branches) == 1:  # for example `list[int] | None`
        value = _with_integers(value, branches[0])
    if isinstance(value, list):
        return [_with_integers(item, schema.get("items")) for item in value] if "items" in schema else value
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    return {name: _with_integers(item, properties.get(name, others)) for name, item in value.items()}


def _path_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the parameters with `Path` in their annotation."""
    try:
        hints = typing.get_type_hints(function)
    except (
        TypeError,
        NameError,
        AttributeError,
        SyntaxError,
    ):  # no annotations, or annotations under TYPE_CHECKING
        return frozenset()
    return frozenset(name for name, hint in hints.items() if _holds_path([hint]))


def _holds_path(hints: Iterable[Any]) -> bool:
    return any(hint is Path or _holds_path(typing.get_args(hint)) for hint in hints)


def bounded_text(value: Any, max_length: int) -> str:
    """Render a value as ASCII, as `repr` would, truncated to `max_length`. Values that are not JSON types show their type.

    This function calls no method of the value and reads only the part that is shown, so it terminates and does not raise.
    """
    text = ""
    try:
        for part in _written(value, max_length, MAX_DEPTH):
            text += part
            if len(text) > max_length:
                return f"{text[:max_length]}..."
    except RuntimeError:  # a dictionary that another thread changes
        text += "..."
    return text


def _written(value: Any, max_length: int, depth: int) -> Iterator[str]:
    kind = type(value)
    if kind is str or kind is bytes:
        yield ascii(value[: max_length + 1])
    elif value is None or kind is bool or kind is float or (kind is int and value.bit_length() < 1024):
        yield repr(value)
    elif depth > 0 and kind in (list, tuple):
        yield "["
        for i, item in enumerate(value):
            yield ", " if i else ""
            yield from _written(item, max_length, depth - 1)
        yield "]"
    elif depth > 0 and kind is dict:
        yield "{"
        for i, (key, item) in enumerate(value.items()):
            yield ", " if i else ""
            yield from _written(key, max_length, depth - 1)
            yield ": "
            yield from _written(item, max_length, depth - 1)
        yield "}"
    else:
        yield f"<{_kind(value)}>"


def _kind(value: object) -> str:
    """Name of the value's type, read without calling a metaclass."""
    return ascii(_cut(_NAME(type(value))))[1:-1]


_NAME = type.__dict__["__name__"].__get__


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."

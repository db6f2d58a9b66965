"""What a tool may be called with: values that JSON can hold, that its schema allows, with paths that stay inside one folder.

Imports nothing of this package: a worker process loads this file alone, without all that the package imports.
"""

import json
import math
import os
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import referencing
import referencing.exceptions

MAX_BYTES = 100_000
"""Of the arguments of one call, as JSON."""
MAX_DEPTH = 32
"""Of lists and objects in one another."""
_MAX_MESSAGE = 500
_ENCODE = json.JSONEncoder(allow_nan=False).encode  # made once, which `json.dumps` does for each text


class RefusedArgumentsError(ValueError):
    """Arguments that no tool is called with; `error` names the `ToolError` that says so."""

    def __init__(self, message: str, error: str = "InvalidArgumentsError") -> None:
        super().__init__(message)
        self.error = error


def encode_arguments(arguments: Any) -> str:
    """Arguments as JSON.

    Raises:
        RefusedArgumentsError: no object with text as keys, something that JSON cannot hold, NaN or infinity, too large or deep.
    """
    if not isinstance(arguments, Mapping):
        raise RefusedArgumentsError(f"arguments must be an object, parameter to value; got {type(arguments).__name__}.")
    try:
        text = _ENCODE(_plain(arguments, MAX_DEPTH, [MAX_BYTES]))
    except ValueError as error:  # an integer of more digits than Python writes
        raise RefusedArgumentsError(str(error)) from error
    if len(text) > MAX_BYTES:
        raise RefusedArgumentsError(f"arguments must take at most {MAX_BYTES} bytes as JSON; got {len(text)}.")
    return text


def _plain(value: Any, depth: int, left: list[int]) -> Any:
    """A copy of exact types, each kind of value as JSON's own; `left` counts down what may still come."""
    left[0] -= 1 + (len(value) if isinstance(value, str) else 0)
    if left[0] < 0:
        raise RefusedArgumentsError(f"arguments must take at most {MAX_BYTES} bytes as JSON; these take more.")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RefusedArgumentsError(f"arguments must hold finite numbers; got {value}.")
        return value
    if not isinstance(value, Mapping | list | tuple):
        raise RefusedArgumentsError(f"arguments must be values that JSON can hold; got {type(value).__name__}.")
    if depth == 0:
        raise RefusedArgumentsError(f"arguments must be at most {MAX_DEPTH} lists or objects deep.")
    if not isinstance(value, Mapping):
        return [_plain(item, depth - 1, left) for item in value]
    for key in value:
        if not isinstance(key, str):
            raise RefusedArgumentsError(f"keys of objects must be text; got {type(key).__name__}.")
    return {_plain(key, 0, left): _plain(item, depth - 1, left) for key, item in value.items()}


class ArgumentChecker:
    """Arguments -> what a tool's function is called with.

    They have to be what the schema allows (draft 2020-12; keys that are not among its `properties` are refused unless it says
    `additionalProperties` itself; nothing is fetched for a `$ref`; a `default` is not filled in, the function's own holds).
    Every string to which the schema applies `"format": "path"`, at any depth, is read as a path from `root` on and replaced by
    the absolute one it leads to, links followed; it has to lie in `root`. It is a `Path` where the annotation of the function's
    parameter names `Path`, else a `str`.

    What the path leads to may be changed after the check by a tool that can make links: such a tool has to be trusted.

    Args:
        function: the tool's; its annotations are read.
        parameters: its JSON Schema.
        root: of paths; exists.
    """

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Any], root: str) -> None:
        schema = dict(parameters)
        schema.setdefault("additionalProperties", False)
        self._root = os.path.realpath(root)
        self._paths: set[int] | None = set() if _names_path_format(parameters) else None
        formats = jsonschema.FormatChecker(formats=())
        formats.checks("path")(self._note)
        self._validator = jsonschema.Draft202012Validator(
            schema, registry=referencing.Registry(), format_checker=formats if self._paths is not None else None
        )
        self._as_path = _path_parameters(function) if self._paths is not None else frozenset()

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Check values as `json.loads` returns them.

        Raises:
            RefusedArgumentsError: with the name of the error, `InvalidArgumentsError` or `PathOutsideRootError`.
        """
        if self._paths is None:
            self._validate(arguments)
            return arguments
        # Each text becomes an object of its own, so that the validator can say which ones it took for paths.
        marked = {name: _marked(value) for name, value in arguments.items()}
        self._paths.clear()
        self._validate(marked)
        return {name: self._confined(value, name in self._as_path) for name, value in marked.items()}

    def _validate(self, arguments: dict[str, Any]) -> None:
        try:
            error = jsonschema.exceptions.best_match(self._validator.iter_errors(arguments))
        except (referencing.exceptions.Unresolvable, re.error, RecursionError, ArithmeticError) as problem:
            raise RefusedArgumentsError(f"the schema cannot be applied: {_cut(repr(problem))}") from problem
        if error is not None:
            raise RefusedArgumentsError(f"at {_cut(error.json_path)}: {_cut(error.message)}.")

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
    """The absolute path, links followed, to which `value` leads from `root`.

    Raises:
        RefusedArgumentsError: it lies outside (`PathOutsideRootError`), or it is none.
    """
    if "\0" in value:
        raise RefusedArgumentsError(f"a path must not hold the character 0; got {_cut(ascii(value))}.")
    try:
        path = (Path(root) / value).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle; text that no file system holds
        raise RefusedArgumentsError(f"{_cut(ascii(value))} cannot be followed: {_cut(str(error))}.") from error
    if not path.is_relative_to(root):
        raise RefusedArgumentsError(f"{_cut(ascii(value))} must lead into the tools' folder.", "PathOutsideRootError")
    return path


class _Text(str):
    """A text that is told apart from an equal one by its identity."""

    __slots__ = ()


def _marked(value: Any) -> Any:
    if isinstance(value, str):
        return _Text(value)
    if isinstance(value, list):
        return [_marked(item) for item in value]
    if isinstance(value, dict):
        return {key: _marked(item) for key, item in value.items()}
    return value


def _names_path_format(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return schema.get("format") == "path" or any(_names_path_format(part) for part in schema.values())
    return isinstance(schema, list | tuple) and any(_names_path_format(part) for part in schema)


def _path_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of parameters whose annotation is or holds `Path`."""
    try:
        hints = typing.get_type_hints(function)
    except (
        TypeError,
        NameError,
        AttributeError,
        SyntaxError,
    ):  # no annotations, or some that are for type checkers only
        return frozenset()
    return frozenset(name for name, hint in hints.items() if _holds_path([hint]))


def _holds_path(hints: Iterable[Any]) -> bool:
    return any(hint is Path or _holds_path(typing.get_args(hint)) for hint in hints)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."

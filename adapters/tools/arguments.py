"""What a tool may be called with: values that JSON can hold, that its schema allows, with paths that stay inside one folder.

Imports nothing of this package but `schemas`: a worker process loads these files alone, without all that the package imports.
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
        RefusedArgumentsError: no object with text as keys, something that JSON cannot hold, NaN or infinity, too large or deep,
            or something that raises while it is read.
    """
    try:
        if not isinstance(arguments, Mapping):
            raise RefusedArgumentsError(f"arguments must be an object, parameter to value; got {_kind(arguments)}.")
        plain = _plain(arguments, MAX_DEPTH, [MAX_BYTES])
    except RefusedArgumentsError:
        raise
    except BaseException as error:  # whatever a value's own methods raise; but an interrupt is the user's
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise RefusedArgumentsError(f"arguments cannot be read, which raises {_kind(error)}.") from error
    try:
        text = _ENCODE(plain)
    except ValueError as error:  # an integer of more digits than Python writes
        raise RefusedArgumentsError(str(error)) from error
    if len(text) > MAX_BYTES:
        raise RefusedArgumentsError(f"arguments must take at most {MAX_BYTES} bytes as JSON; got {len(text)}.")
    return text


def json_arguments(arguments: Any) -> dict[str, Any] | None:
    """A copy, as JSON reads it; None: no tool is called with such arguments."""
    try:
        parsed: dict[str, Any] = json.loads(encode_arguments(arguments))
    except RefusedArgumentsError:
        return None
    return parsed


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
        raise RefusedArgumentsError(f"arguments must be values that JSON can hold; got {_kind(value)}.")
    if depth == 0:
        raise RefusedArgumentsError(f"arguments must be at most {MAX_DEPTH} lists or objects deep.")
    if not isinstance(value, Mapping):
        return [_plain(item, depth - 1, left) for item in value]
    return {_key(key, left): _plain(item, depth - 1, left) for key, item in value.items()}


def _key(key: Any, left: list[int]) -> Any:
    if not isinstance(key, str):
        raise RefusedArgumentsError(f"keys of objects must be text; got {_kind(key)}.")
    return _plain(key, 0, left)


class ArgumentChecker:
    """Arguments -> what a tool's function is called with.

    They have to be what the schema allows (draft 2020-12, whatever a `$schema` in it says; keys that are not among its
    `properties` are refused unless it says `additionalProperties` itself; nothing is fetched for a `$ref`; a `default` is not
    filled in, the function's own holds). Every string to which the schema applies `"format": "path"`, at any depth, is read as
    a path from `root` on and replaced by the absolute one it leads to, links followed; it has to lie in `root`. It is a `Path`
    where the annotation of the function's parameter names `Path`, else a `str`. A schema for which `check_path_formats` raises
    must not come here: paths could pass as they are.

    Where of all numbers only integers are allowed, 2.0 comes as 2: JSON knows no difference, Python does. (A `$ref` is not
    looked through for this.)

    What the path leads to may be changed after the check by a tool that can make links: such a tool has to be trusted.

    Args:
        function: the tool's; its annotations are read.
        parameters: its JSON Schema.
        root: of paths; exists.
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
        """Check values as `json.loads` returns them.

        Raises:
            RefusedArgumentsError: with the name of the error, `InvalidArgumentsError` or `PathOutsideRootError`.
        """
        if self._paths is None:
            self._validate(arguments)
            return self.convert(arguments)
        # Each text becomes an object of its own, so that the validator can say which ones it took for paths.
        marked = {name: _marked(value) for name, value in arguments.items()}
        self._paths.clear()
        self._validate(marked)
        return self.convert({name: self._confined(value, name in self._as_path) for name, value in marked.items()})

    def convert(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """What another checker of the same schema, which has no paths, has let through, as the function is to get it."""
        return _with_integers(arguments, self._schema)

    def _validate(self, arguments: dict[str, Any]) -> None:
        try:
            error = jsonschema.exceptions.best_match(self._validator.iter_errors(arguments))
            where = "" if error is None else f"at {_cut(error.json_path)}: {_cut(error.message)}."
        except (
            Exception
        ) as problem:  # a `$ref` to nothing or to what is no schema, a pattern that is none, a number too large
            raise RefusedArgumentsError(f"the schema cannot be applied: {_cut(repr(problem))}") from problem
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


def _with_integers(value: Any, schema: Any) -> Any:
    """A copy in which numbers are integers where the schema allows no others."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and has_integers_only(schema) else value
    if not isinstance(value, list | dict) or not isinstance(schema, dict):
        return value
    kind = "array" if isinstance(value, list) else "object"
    branches = [part for key in ("anyOf", "oneOf") for part in schema.get(key, ()) if kind in kinds(part)]
    if len(branches) == 1:  # `list[int] | None`, say
        value = _with_integers(value, branches[0])
    if isinstance(value, list):
        return [_with_integers(item, schema.get("items")) for item in value] if "items" in schema else value
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    return {name: _with_integers(item, properties.get(name, others)) for name, item in value.items()}


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


def bounded_text(value: Any, max_length: int) -> str:
    """A value in ASCII, as Python writes it, or the first part of it; of one that is none of JSON's, the type.

    No method of the value is called, and no more of it is read than is shown: this ends, and does not raise.
    """
    text = ""
    try:
        for part in _written(value, max_length, MAX_DEPTH):
            text += part
            if len(text) > max_length:
                return f"{text[:max_length]}..."
    except RuntimeError:  # a dictionary that changes meanwhile
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
    """The name of its type, which cannot be asked otherwise of a type that has a type of its own."""
    return ascii(_cut(_NAME(type(value))))[1:-1]


_NAME = type.__dict__["__name__"].__get__


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."

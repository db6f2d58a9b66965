"""Reading of JSON Schemas (draft 2020-12): validity, references, paths, slow keywords, and possible types.

This module imports nothing from this package, because worker processes load it without the package.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import jsonschema

_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
"""Keywords whose values are schemas by name."""
_DATA = frozenset({"default", "examples", "enum", "const"})
"""Keywords whose values are not schemas."""
_ANNOTATIONS = _DATA - {"enum", "const"} | {"title", "description", "deprecated", "readOnly", "writeOnly", "$comment"}
"""Keywords that do not affect validation."""
_REFERENCES = ("$ref", "$dynamicRef")
_DRAFT = jsonschema.Draft202012Validator
_SCHEMAS = _DRAFT(_DRAFT.META_SCHEMA, format_checker=_DRAFT.FORMAT_CHECKER)
_MAX_PARTS = 10_000
"""Maximum number of parts of a schema whose references are replaced."""


def schema_problem(schema: Any) -> str | None:
    """Why a value is not a JSON Schema. None if it is one."""
    error = jsonschema.exceptions.best_match(_SCHEMAS.iter_errors(schema))
    return None if error is None else f"at {error.json_path}: {error.message}."


class UncertainPathError(ValueError):
    """It is not certain that a string that the schema marks as a path is a path."""


def plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a schema to an equivalent one without `$schema`, with each `$ref` replaced by the part that it points to.

    A `$ref` stays if it is recursive, or points to nothing in the schema. Every `$ref` stays if a part has an `$id`, or if the
    result would have more than 10,000 parts. Definitions are left out if no reference is left.
    """
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    body = {key: part for key, part in schema.items() if key not in definitions}
    has_ids = any(isinstance(part.get("$id"), str) for where, part in parts_of(schema) if where != "$")
    try:
        plain = _Copy(None if has_ids else schema).of(body)
    except OverflowError:
        plain = _Copy(None).of(body)
    return plain | _Copy(None).of(definitions) if _remaining_reference(plain) else plain


class _Copy:
    """Copies parts of a schema. References are replaced if they point into `root`."""

    def __init__(self, root: Mapping[str, Any] | None) -> None:
        self.root = root
        self.num_parts = 0

    def of(self, part: Any, inside: frozenset[str] = frozenset()) -> Any:
        """Copy a part, within the targets `inside`."""
        if isinstance(part, list):
            return [self.of(each, inside) for each in part]
        if not isinstance(part, Mapping):
            return part
        self.num_parts += 1
        if self.root is not None and self.num_parts > _MAX_PARTS:
            raise OverflowError
        reference: Any = part.get("$ref")
        target = None if reference in inside else self._target(reference)
        copied = {}
        for key, value in part.items():
            if key in _BY_NAME and isinstance(value, Mapping):
                copied[key] = {name: self.of(each, inside) for name, each in value.items()}
            elif not (key == "$schema" and isinstance(value, str)) and not (key == "$ref" and target is not None):
                copied[key] = value if key in _DATA else self.of(value, inside)
        if target is None:
            return copied
        found = self.of(target, inside | {reference})
        if isinstance(found, dict) and copied.keys() <= _ANNOTATIONS:
            return found | copied
        return copied | {"allOf": [*copied.get("allOf", ()), found]}

    def _target(self, reference: Any) -> Any:
        if self.root is None or not isinstance(reference, str) or not f"{reference}/".startswith("#/"):
            return None
        found: Any = self.root
        for name in unquote(reference).split("/")[1:]:
            if isinstance(found, list):
                found = {str(i): part for i, part in enumerate(found)}
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping | bool) else None


def parts_of(schema: Any, where: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part of a schema that is an object, with its place; the first is the schema itself. Data are no parts."""
    if isinstance(schema, list):
        for i, part in enumerate(schema):
            yield from parts_of(part, f"{where}[{i}]")
    if isinstance(schema, dict):
        yield where, schema
        for key, value in schema.items():
            if key in _BY_NAME and isinstance(value, Mapping):
                for name, part in value.items():
                    yield from parts_of(part, f"{where}.{key}.{name}")
            elif key not in _DATA:
                yield from parts_of(value, f"{where}.{key}")


def names_path_format(schema: Any) -> bool:
    """Whether `"format": "path"` occurs anywhere in the schema."""
    return any(part.get("format") == "path" for _, part in parts_of(schema))


def slow_keyword(schema: Mapping[str, Any]) -> str | None:
    """A keyword in the schema that can be very slow to check, or None.

    A pattern can backtrack, `uniqueItems` compares all pairs, and a recursive `$ref` can try several branches at each level.
    """
    plain = plain_schema(schema)
    for _, part in parts_of(plain):
        if isinstance(part.get("pattern"), str):
            return "pattern"
        if part.get("patternProperties"):
            return "patternProperties"
        if part.get("uniqueItems") is True:
            return "uniqueItems"
    return _remaining_reference(plain)


def _remaining_reference(schema: Mapping[str, Any]) -> str | None:
    found = (key for _, part in parts_of(schema) for key in _REFERENCES if isinstance(part.get(key), str))
    return next(found, None)


def describing(schema: Any, kind: str) -> list[Mapping[str, Any]]:
    """Parts of a schema that every value of a JSON type must match: the schema, `allOf`, and its only branch for the type.

    A choice (`anyOf` or `oneOf`) counts if each of its branches states one type, and no two branches state the same.
    """
    if not isinstance(schema, Mapping):
        return []
    branches = [part for key in ("anyOf", "oneOf") for part in schema.get(key, ())]
    types = [str(part.get("type")) if isinstance(part, Mapping) else "None" for part in branches]
    is_certain = len(set(types)) == len(types) and set(types) <= _TYPES
    chosen = [branches[types.index(kind)]] if is_certain and kind in types else []
    return [schema, *(found for part in (*schema.get("allOf", ()), *chosen) for found in describing(part, kind))]


def schema_of_value(part: Mapping[str, Any], name: str) -> Any:
    """Schema that `part` gives the value `name` of an object. None if there is no schema, or if a pattern decides."""
    others = None if part.get("patternProperties") else part.get("additionalProperties")
    return part.get("properties", {}).get(name, others)


def schema_of_items(part: Mapping[str, Any]) -> Any:
    """Schema that `part` gives the items of a list. None if there is no schema, or if the first items have their own."""
    return None if "prefixItems" in part else part.get("items")


def check_path_formats(parameters: Mapping[str, Any]) -> None:
    """Check that it is certain which strings are paths, so that each of them is confined (see `ArgumentChecker`).

    Raises:
        UncertainPathError: `"format": "path"` occurs in another place. The message says what to write instead.
    """
    if not names_path_format(parameters):
        return
    schema = plain_schema(parameters)
    reference = _remaining_reference(schema)
    if reference is not None:
        raise UncertainPathError(
            f'"format": "path" must not be in a schema with a recursive or unknown `{reference}`. Write the schema without it.'
        )
    certain = {id(part) for part in _certain(schema)}
    for where, part in parts_of(schema):
        if part.get("format") == "path" and id(part) not in certain:
            raise UncertainPathError(
                f'"format": "path" must not be at {where}, because it is not certain that every such text is a path. Write it '
                "at a parameter, in `items`, in `properties`, in `additionalProperties`, or in a branch of `anyOf` or `oneOf`. "
                "Give each branch a type that no other branch has, or use two parameters or two tools."
            )


def _certain(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Parts that describe strings which `ArgumentChecker` finds."""
    yield from describing(schema, "string")
    for part in describing(schema, "array"):
        yield from _certain(schema_of_items(part))
    for part in describing(schema, "object"):
        for name in part.get("properties", {}):
            yield from _certain(schema_of_value(part, name))
        yield from _certain(schema_of_value(part, ""))

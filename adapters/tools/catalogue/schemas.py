"""JSON Schemas (draft 2020-12) of tools' arguments: references, paths, and keywords that are slow to check.

This module imports nothing from this package, because worker processes load it without the package.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

PATHS = ("path", "file-path", "directory-path")
"""Formats of strings that are paths. pydantic has three of them."""
_BESIDE = {"$ref", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
"""Keywords that may stand beside a `$ref` that is replaced. They do not affect validation."""
_REFERENCES: Mapping[str, Any] = {"$ref": str, "$dynamicRef": str}
_UNEVALUATED: Mapping[str, Any] = dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (bool, dict))
_SLOW: Mapping[str, Any] = {
    "pattern": str,
    "patternProperties": dict,
    "uniqueItems": bool,
    **_UNEVALUATED,
    **_REFERENCES,
}
_MAX_REPLACED = 1_000


def plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a schema to an equivalent one without `$schema`, with each `$ref` to a definition replaced by the definition.

    A `$ref` stays if it is recursive, or if a keyword beside it affects validation. After 1,000 replacements, or if a part has
    an `$id`, every other `$ref` stays too. Definitions are left out if no `$ref` stays.

    Raises:
        ValueError: It is not certain which strings are paths.
    """
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    targets = {f"#/{key}/{name}": part for key, parts in definitions.items() for name, part in parts.items()}
    if any(isinstance(part.get("$id"), str) for part in parts_of(list(schema.values()))):
        targets = {}
    num_replaced = itertools.count(1)

    def copy(part: Any, inside: frozenset[Any]) -> Any:
        if isinstance(part, list):
            return [copy(each, inside) for each in part]
        if not isinstance(part, dict):
            return part
        # A property may be called `$schema` too.
        copied = {k: copy(each, inside) for k, each in part.items() if k != "$schema" or not isinstance(each, str)}
        reference = part.get("$ref")
        target = targets.get(reference) if isinstance(reference, str) and reference not in inside else None
        if not isinstance(target, dict) or not part.keys() <= _BESIDE or next(num_replaced) > _MAX_REPLACED:
            return copied
        del copied["$ref"]
        return copy(target, inside | {reference}) | copied

    body = {key: part for key, part in schema.items() if key not in definitions}
    plain: dict[str, Any] = copy(body, frozenset())
    if slow_keyword(plain, _REFERENCES):
        plain |= definitions
    _check_paths(plain)
    return plain


def parts_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object within a schema, at any depth; the first is the schema itself."""
    if isinstance(schema, dict):
        yield schema
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from parts_of(each)


def paths_in(schema: Any) -> list[dict[str, Any]]:
    """The parts of a schema that mark strings as paths."""
    return [part for part in parts_of(schema) if part.get("format") in PATHS]


def slow_keyword(schema: Any, keywords: Mapping[str, Any] = _SLOW) -> str | None:
    """A keyword in a plain schema that can be very slow to check, or None.

    A pattern can backtrack, `uniqueItems` and `unevaluatedItems` compare all pairs, and a recursive `$ref` can try several
    branches at each level.
    """
    for part in parts_of(schema):
        for key, kind in keywords.items():
            if isinstance(part.get(key), kind) and (part[key] or key in _UNEVALUATED):
                return key
    return None


def describing(schema: Any, kind: str) -> list[Mapping[str, Any]]:
    """Parts of a schema that every value of a JSON type must match: the schema, and the only branch that allows the type.

    A choice (`anyOf` or `oneOf`) counts if each of its branches states one type.
    """
    if not isinstance(schema, Mapping):
        return []
    branches = [part for key in ("anyOf", "oneOf") for part in schema.get(key, ())]
    types = [part.get("type") if isinstance(part, Mapping) else None for part in branches]
    if types.count(kind) != 1 or not all(isinstance(each, str) for each in types):
        return [schema]
    return [schema, *describing(branches[types.index(kind)], kind)]


def describing_at(schema: Any, key: str | int) -> list[Any]:
    """Schemas that the value at `key` must match. `key` is a name in an object, or an index of a list."""
    if isinstance(key, int):
        return [part.get("items") for part in describing(schema, "array") if "prefixItems" not in part]
    found = []
    for part in describing(schema, "object"):
        others = None if part.get("patternProperties") else part.get("additionalProperties")
        found.append(part.get("properties", {}).get(key, others))
    return found


def _check_paths(schema: Mapping[str, Any]) -> None:
    """Check that `describing` and `describing_at` lead to each part that marks strings as paths."""
    paths, certain = paths_in(schema), {id(part) for part in _certain(schema)}
    if paths and (slow_keyword(schema, _REFERENCES) or any(id(part) not in certain for part in paths)):
        raise ValueError(
            '"format": "path" must be where it is certain that every such text is a path: at a parameter, in `items`, in '
            "`properties`, in `additionalProperties`, or in a branch of `anyOf` or `oneOf` whose type no other branch has. The "
            "schema must have no recursive or unknown `$ref`. Otherwise, use two parameters or two tools."
        )


def _certain(schema: Any) -> Iterator[Mapping[str, Any]]:
    yield from describing(schema, "string")
    names = [name for part in describing(schema, "object") for name in part.get("properties", {})]
    for key in (*names, "", 0):
        for part in describing_at(schema, key):
            yield from _certain(part)

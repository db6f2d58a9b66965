"""Static analysis of a JSON Schema (draft 2020-12): path formats, slow keywords, and possible types.

This module imports nothing from this package, because worker processes load it without the package.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import referencing
from referencing.jsonschema import DRAFT202012

_NUMBER = frozenset({"integer", "fraction"})
_KINDS = _NUMBER | {"null", "boolean", "string", "array", "object"}
_MAX_DEPTH = 16
_CHOICES = ("anyOf", "oneOf")
_APPLIED = ("items", "additionalProperties", "prefixItems", "allOf")
_APPLIED_BY_NAME = ("properties", "patternProperties", "dependentSchemas")
"""Keywords whose subschemas are always applied to the values they describe."""
_INSTEAD = {
    "not": "remove it there",
    "if": "write it in `then` or `else`",
    "contains": "write it in `items`",
    "propertyNames": "keys are not checked as paths, so take paths as values",
    "unevaluatedProperties": "write it in `additionalProperties`",
    "unevaluatedItems": "write it in `items`",
}
"""Keywords whose subschemas are not always applied, each with an alternative to suggest."""
_NO_SCHEMAS = frozenset({"$defs", "definitions", "default", "examples", "enum", "const"})
"""Keywords whose values are not applied as schemas, unless a `$ref` points to them."""


def without_drafts(schema: Any) -> Any:
    """Copy a schema to dicts and lists, without any `$schema` keyword."""
    if isinstance(schema, Mapping):
        kept = {key: part for key, part in schema.items() if key != "$schema" or not isinstance(part, str)}
        return {key: part if key in ("const", "enum") else without_drafts(part) for key, part in kept.items()}
    return [without_drafts(part) for part in schema] if isinstance(schema, list | tuple) else schema


def names_path_format(schema: Any) -> bool:
    """Whether `"format": "path"` occurs anywhere in the schema."""
    return any(part.get("format") == "path" for part in _objects(schema))


def slow_keyword(schema: Any) -> str | None:
    """A keyword in the schema that can be very slow to check, or None.

    A pattern can backtrack, `uniqueItems` compares all pairs, and a recursive `$ref` can try several branches at each level.
    """
    for part in _objects(schema):
        if isinstance(part.get("pattern"), str):
            return "pattern"
        if part.get("patternProperties"):
            return "patternProperties"
        if part.get("uniqueItems") is True:
            return "uniqueItems"
        if isinstance(part.get("$dynamicRef"), str):
            return "$dynamicRef"
    return "$ref" if _leads_back(schema) else None


def kinds(schema: Any, resolver: Any = None, depth: int = _MAX_DEPTH) -> frozenset[str]:
    """JSON types that a schema may accept. A `number` counts as `integer` or `fraction`.

    Args:
        schema: The schema.
        resolver: Resolver of `$ref`. None assumes that a reference accepts every type.
        depth: Maximum number of nested references and `allOf`, `anyOf` or `oneOf` to follow.
    """
    if not isinstance(schema, Mapping):
        return _KINDS if schema else frozenset()
    found = _KINDS
    if "type" in schema:
        stated = {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
        found &= stated | (_NUMBER if "number" in stated else set())
    if "const" in schema:
        found &= _kinds_of(schema["const"])
    if "enum" in schema:
        found &= frozenset().union(*map(_kinds_of, schema["enum"]))
    if depth > 0:
        for part in schema.get("allOf", ()):
            found &= kinds(part, resolver, depth - 1)
        for choice in _CHOICES:
            if choice in schema:
                found &= frozenset().union(*(kinds(part, resolver, depth - 1) for part in schema[choice]))
        target = None if resolver is None else _target(schema, resolver)
        if target is not None:
            found &= kinds(target.contents, target.resolver, depth - 1)
    return found


def has_integers_only(schema: Any) -> bool:
    """Whether the only numbers that a schema accepts are integers."""
    return kinds(schema) & _NUMBER == {"integer"}


def check_path_formats(parameters: Any) -> None:
    """Check that every string that `"format": "path"` describes is checked as a path before arguments are accepted.

    The validator may skip a subschema. For example, it stops at the first branch of `anyOf` that matches.

    Raises:
        ValueError: A path might be skipped. The message says what to write instead.
    """
    if not names_path_format(parameters):
        return
    schema = without_drafts(parameters)
    if any(isinstance(part.get("$dynamicRef"), str) for part in _objects(schema)):
        raise ValueError(
            '"format": "path" must not be in a schema with `$dynamicRef`, which is not supported; write `$ref`.'
        )
    resource = DRAFT202012.create_resource(schema)
    applied: set[int] = set()
    try:
        _apply(schema, referencing.Registry().resolver_with_root(resource), applied)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"every `$ref` must point to a schema; one of them does not ({error}).") from error
    for part in _objects(schema, _NO_SCHEMAS):
        if part.get("format") == "path" and id(part) not in applied:
            raise ValueError(
                '"format": "path" must not be inside a keyword that JSON Schema draft 2020-12 does not define; remove it there.'
            )


def _apply(schema: Any, resolver: Any, applied: set[int]) -> None:
    """Collect the parts of a schema that are always applied.

    Raises:
        ValueError: `"format": "path"` occurs in a part that may be skipped.
    """
    if not isinstance(schema, dict) or id(schema) in applied:
        return
    applied.add(id(schema))
    resolver = _within(schema, resolver)
    for key, instead in _INSTEAD.items():
        if key in schema and _leads_to_path(schema[key], resolver):
            raise ValueError(f'"format": "path" must not be in `{key}`, which also accepts other strings; {instead}.')
    if schema.get("patternProperties") and _leads_to_path(schema.get("additionalProperties"), resolver):
        raise ValueError(
            '"format": "path" must not be in `additionalProperties` of a schema with `patternProperties`; add a pattern.'
        )
    for key in _CHOICES:
        for one, other in combinations(schema.get(key, ()), 2):
            shared = kinds(one, resolver) & kinds(other, resolver)
            if shared and (_leads_to_path(one, resolver) or _leads_to_path(other, resolver)):
                raise ValueError(
                    f'"format": "path" must not be in a branch of `{key}` if another branch may accept the same value (both '
                    f"accept {', '.join(sorted(shared - {'fraction'}))}), because the path might then not be checked. Give "
                    'each branch a "type" that no other branch has, or use two parameters or two tools.'
                )
    parts = [schema[key] for key in _APPLIED if key in schema]
    parts += [schema[key] for key in ("then", "else") if key in schema and "if" in schema]
    parts += [part for key in _APPLIED_BY_NAME for part in schema.get(key, {}).values()]
    parts += [part for key in _CHOICES for part in schema.get(key, ())]
    for part in parts:
        for each in part if isinstance(part, list) else [part]:
            _apply(each, resolver, applied)
    target = _target(schema, resolver)
    if target is not None:
        _apply(target.contents, target.resolver, applied)


def _leads_to_path(schema: Any, resolver: Any, seen: set[int] | None = None) -> bool:
    """Whether `"format": "path"` occurs in the schema or in the target of a reference."""
    seen = set() if seen is None else seen
    if isinstance(schema, list):
        return any(_leads_to_path(part, resolver, seen) for part in schema)
    if not isinstance(schema, dict) or id(schema) in seen:
        return False
    seen.add(id(schema))
    resolver = _within(schema, resolver)
    target = _target(schema, resolver)
    return (
        schema.get("format") == "path"
        or any(_leads_to_path(part, resolver, seen) for part in schema.values())
        or (target is not None and _leads_to_path(target.contents, target.resolver, seen))
    )


def _leads_back(schema: Any) -> bool:
    """Whether a reference leads to a schema that contains the reference."""
    above: set[int] = set()
    done: set[int] = set()

    def comes_back(part: Any, resolver: Any) -> bool:
        if not isinstance(part, dict | list) or id(part) in done:
            return False
        if id(part) in above:
            return True
        above.add(id(part))
        if isinstance(part, list):
            found = any(comes_back(each, resolver) for each in part)
        else:
            resolver = _within(part, resolver)
            target = _target(part, resolver)
            found = any(comes_back(each, resolver) for each in part.values()) or (
                target is not None and comes_back(target.contents, target.resolver)
            )
        above.discard(id(part))
        done.add(id(part))
        return found

    plain = without_drafts(schema)
    return comes_back(plain, referencing.Registry().resolver_with_root(DRAFT202012.create_resource(plain)))


def _target(schema: Mapping[str, Any], resolver: Any) -> Any:
    """Target of the schema's `$ref`. None without a `$ref`, or if it cannot be resolved (then all arguments are rejected)."""
    if not isinstance(schema.get("$ref"), str):
        return None
    try:
        return resolver.lookup(schema["$ref"])
    except Exception:  # the library's errors, or any error from a pointer into a non-schema
        return None


def _within(schema: Mapping[str, Any], resolver: Any) -> Any:
    """Resolver for the schema's parts."""
    return (
        resolver.in_subresource(DRAFT202012.create_resource(schema)) if isinstance(schema.get("$id"), str) else resolver
    )


def _objects(schema: Any, passed_over: frozenset[str] = frozenset()) -> Iterator[Mapping[str, Any]]:
    """All objects within a schema, itself included."""
    if isinstance(schema, Mapping):
        yield schema
        for key, part in schema.items():
            if key not in passed_over:
                yield from _objects(part, passed_over)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from _objects(part, passed_over)


def _kinds_of(value: Any) -> frozenset[str]:
    for kind, types in (("null", type(None)), ("boolean", bool), ("string", str), ("array", list | tuple)):
        if isinstance(value, types):
            return frozenset({kind})
    if isinstance(value, int | float):
        return frozenset({"integer" if value == value // 1 else "fraction"})
    return frozenset({"object"})

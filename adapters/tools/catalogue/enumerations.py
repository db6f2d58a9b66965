"""The values that a JSON Schema enumerates."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any


def enumerated_values(schema: Any) -> list[tuple[Any, str]] | None:
    """The different values that a schema enumerates, each with its text. None if the schema enumerates no values.

    A schema enumerates values by `enum`, `const`, type boolean or null, or `oneOf` or `anyOf` of constants. Each constant may
    have a `title` and a `description`. Values that JSON cannot represent are left out.
    """
    if isinstance(schema, bool):
        return None if schema else []
    for key in ("oneOf", "anyOf"):
        parts = [enumerated_values(part) for part in schema.get(key, ())]
        if parts and all(part is not None for part in parts):
            found = [pair for part in parts if part for pair in part]
            times = Counter(_json_key(value) for value, _ in found)
            # `oneOf` rejects a value that two branches accept.
            return _different(pair for pair in found if key == "anyOf" or times[_json_key(pair[0])] == 1)
    if "enum" in schema:
        values = schema["enum"]
    elif "const" in schema:
        values = [schema["const"]]
    elif schema.get("type") in ("boolean", "null"):
        values = [False, True] if schema["type"] == "boolean" else [None]
    else:
        return None
    about = " ".join(str(schema[key]) for key in ("title", "description") if key in schema)
    values = [value for value in values if _json_key(value) is not None]
    return _different((v, f"{v if isinstance(v, str) else json.dumps(v)} {about}".strip()) for v in values)


def _different(pairs: Iterable[tuple[Any, str]]) -> list[tuple[Any, str]]:
    """The first pair of each value."""
    first: dict[str | None, tuple[Any, str]] = {}
    for pair in pairs:
        first.setdefault(_json_key(pair[0]), pair)
    return list(first.values())


def _json_key(value: Any) -> str | None:
    """A text that is the same for values that are equal as JSON. None if JSON cannot represent the value."""
    try:
        return json.dumps(_with_integers(value), allow_nan=False, sort_keys=True)
    except (TypeError, ValueError):
        return None


def _with_integers(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value

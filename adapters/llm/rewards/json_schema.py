"""A reward for JSON completions. Requires jsonschema (`pip install ".[llm]"`)."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from grpo.arguments import describe, install_command
from grpo.errors import ConfigError

MAX_CHARS = 1_000_000
"""Maximum number of characters. Longer text is not parsed and gets reward 0."""


class JSONSchemaMatch:
    """1 if the completion is JSON that matches a schema, else 0.

    References must point into the schema itself, because nothing is fetched. A `pattern` in the schema can backtrack like any
    Python regular expression (see `RegexMatch`).

    Args:
        schema: Schema in the dialect that its `$schema` names, or in the latest dialect.
        extract: Maps the text to the part that must be JSON, or to None for reward 0. If `extract` is None, the whole text must
            be JSON.

    Raises:
        ConfigError: The schema is invalid.
        ImportError: The package jsonschema is not installed.

    Example:
        >>> JSONSchemaMatch({"type": "object", "required": ["city"]})('{"city": "Oslo"}')
        1.0
    """

    def __init__(self, schema: Mapping[str, Any], extract: Callable[[str], str | None] | None = None) -> None:
        try:
            import jsonschema
            import referencing
        except ImportError as error:
            raise ImportError(f"JSONSchemaMatch needs jsonschema: {install_command('llm')}") from error
        given: Any = schema
        if not isinstance(given, Mapping) or not (extract is None or callable(extract)):
            raise ConfigError(
                "JSONSchemaMatch needs a JSON schema as a mapping, and extract a function or None; got "
                f"{describe(given)} and {describe(extract)}."
            )
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ConfigError(f"JSONSchemaMatch needs a JSON schema; at {error.json_path}: {error.message}.") from error
        self.schema = schema
        self.extract = extract
        self._validator = kind(schema, registry=referencing.Registry())

    def __call__(self, completion: str) -> float:
        """Parse the completion and validate it against the schema."""
        text = completion if self.extract is None else self.extract(completion)
        if text is None or len(text) > MAX_CHARS:
            return 0.0
        try:
            value = json.loads(text, parse_float=_finite, parse_int=_integer, parse_constant=_finite)
        except (ValueError, RecursionError):  # not JSON, or nested too deeply: a wrong completion, not an error
            return 0.0
        try:
            return float(self._validator.is_valid(value))
        except RecursionError:
            return 0.0


def _finite(text: str) -> float:
    """Parse a number. NaN and infinity are not JSON, although Python parses them, and huge numbers do not fit into a float."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a JSON number")
    return number


def _integer(text: str) -> int:
    """Parse an integer exactly. It must fit into a float, because `multipleOf` computes with floats."""
    _finite(text)
    return int(text)

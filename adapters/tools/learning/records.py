"""Conversion of frozen records to JSON values and back."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, ClassVar, Self

from grpo.errors import GRPOError


class Record:
    """Base of a dataclass whose `__post_init__` accepts the JSON values of its fields."""

    __slots__ = ()
    error: ClassVar[type[GRPOError]]
    """The error that is raised for values that are not a record."""

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, as JSON values."""
        return {each.name: _json_value(getattr(self, each.name)) for each in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """The inverse of `to_dict`. The class's own error names a field that is missing, unknown or invalid."""
        known = {each.name: each for each in fields(cls)}  # type: ignore[arg-type]
        if not isinstance(values, Mapping):
            raise cls.error(f"a {cls.__name__} must be an object with {', '.join(known)}; got {values!r:.120}.")
        needed = {name for name, each in known.items() if each.default is each.default_factory is MISSING}
        for what, wrong in (("lacks", needed - values.keys()), ("has unknown", values.keys() - known.keys())):
            if wrong:
                listed = ", ".join(sorted(map(repr, wrong)))
                raise cls.error(f"a {cls.__name__} {what} {listed}; its fields are {', '.join(known)}.")
        return cls(**values)

    def to_json(self) -> str:
        """The record as one line of JSON. Floats are read back bit for bit. NaN and infinity raise a ValueError."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The inverse of `to_json`. Raises the class's own error if the text is not JSON, or not a record."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise cls.error(f"a {cls.__name__} must be JSON: {error}. Write one object per line.") from error
        return cls.from_dict(values)


def _json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_json_value(entry) for entry in value]
    if isinstance(value, Mapping):
        return dict(value)
    return value.to_dict() if hasattr(value, "to_dict") else value

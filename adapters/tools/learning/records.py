"""Frozen records that check their fields, and convert to JSON values and back."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, ClassVar, Self, get_type_hints

import pydantic

from adapters.tools.catalogue.calls import ToolCall
from grpo.errors import GRPOError

Number = Annotated[float, pydantic.Field(strict=True, allow_inf_nan=False)]
"""A finite number."""
Steps = tuple[Number, ...]
"""One number per decision: the tool, then each enumerated parameter of the tool."""


def _json_copy(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


JSONObject = Annotated[Mapping[str, Any], pydantic.BeforeValidator(_json_copy)]
"""Values that JSON can represent, copied through JSON: lists in place of tuples, and string keys."""


class Record:
    """Base of a frozen dataclass. pydantic converts its fields to the types of their annotations: a list to a tuple, an integer
    to a float, an object to a record. A sample therefore equals its copy read from JSON."""

    __slots__ = ()
    error: ClassVar[type[GRPOError]]
    """The error that is raised for values that are not a record."""

    def __init_subclass__(cls) -> None:
        """Give each class the two methods as its own: checkpoints hold only objects of classes that define them."""
        cls.to_state = Record.to_dict  # type: ignore[attr-defined]
        cls.from_state = classmethod(Record.from_dict.__func__)  # type: ignore[attr-defined]

    def __post_init__(self) -> None:
        """Check and convert the fields."""
        for name, adapter in _adapters(type(self)).items():  # type: ignore[arg-type]  # mypy takes __hash__ for an instance method
            try:
                object.__setattr__(self, name, adapter.validate_python(getattr(self, name)))
            except pydantic.ValidationError as error:
                first = error.errors(include_url=False)[0]
                raise self.error(
                    f"{type(self).__name__}.{name}: {first['msg'].removeprefix('Value error, ')}; got {first['input']!r:.120}."
                ) from error

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


@cache
def _adapters(kind: type[Record]) -> dict[str, pydantic.TypeAdapter[Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: pydantic.TypeAdapter(hints[each.name]) for each in fields(kind)}  # type: ignore[arg-type]


def _json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_json_value(entry) for entry in value]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Record):
        return value.to_dict()
    return value.to_state() if isinstance(value, ToolCall) else value

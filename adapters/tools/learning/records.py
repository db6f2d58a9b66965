"""Frozen records that check their fields, and convert to JSON values and back."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, field
from functools import wraps
from typing import Annotated, Any, ClassVar, Self, TypeVar, dataclass_transform

import pydantic

from grpo.errors import GRPOError

RecordT = TypeVar("RecordT", bound="Record")


def _json_copy(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


Number = Annotated[float, pydantic.Field(strict=True, allow_inf_nan=False)]
"""A finite number."""
Steps = tuple[Number, ...]
"""One number per decision: the tool, then each enumerated parameter of the tool."""
JSONObject = Annotated[Mapping[str, Any], pydantic.BeforeValidator(_json_copy)]
"""Values that JSON can represent, copied through JSON: lists in place of tuples, and string keys."""


class Record:
    """Base of the classes that `record` decorates."""

    __slots__ = ()
    error: ClassVar[type[GRPOError]]
    """The error that is raised for values that are not a record."""
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, as values that JSON can represent."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """The inverse of `to_dict`. The class's own error names a field that is missing, unknown or invalid."""
        return cls._checked(pydantic.TypeAdapter(cls).validate_python, values)

    def to_json(self) -> str:
        """The record as one line of JSON. Floats are read back bit for bit. NaN and infinity raise a ValueError."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The inverse of `to_json`. Raises the class's own error if the text is not JSON, or not a record."""
        return cls.from_dict(cls._checked(json.loads, text))

    @classmethod
    def _checked(cls, function: Callable[..., Any], /, *args: Any, **fields: Any) -> Any:
        """Call a function, and raise its errors as the class's own error."""
        try:
            return function(*args, **fields)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = "".join(f".{part}" for part in first["loc"])
            got = "" if first["type"] == "value_error" else f"; got {first['input']!r:.120}."
            raise cls.error(f"{cls.__name__}{place}: {first['msg'].removeprefix('Value error, ')}{got}") from error
        except (ValueError, RecursionError) as error:
            raise cls.error(f"a {cls.__name__} must be JSON: {error}. Write one object per line.") from error


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def record(kind: type[RecordT]) -> type[RecordT]:
    """Make a class a frozen dataclass. pydantic checks its fields and converts them to the types of their annotations: a list
    to a tuple, an integer to a float, an object to a record. A record therefore equals its copy read from JSON."""
    made: Any = pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True, config={"extra": "forbid"})(kind)
    check = made.__init__

    @wraps(check)
    def __init__(self: RecordT, /, *args: Any, **fields: Any) -> None:
        made._checked(check, self, *args, **fields)

    made.__init__ = __init__
    # Checkpoints hold only objects of classes that define these two methods themselves.
    made.to_state, made.from_state = Record.to_dict, vars(Record)["from_dict"]
    return made

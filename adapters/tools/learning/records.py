"""Frozen records that check their fields and convert to JSON and back, and recorded tool choices.

`sample_batches` converts groups of recorded choices to batches.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, field
from functools import wraps
from typing import Annotated, Any, ClassVar, Self, TypeVar, dataclass_transform

import pydantic

from adapters.tools.catalogue.calls import ToolCall
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
            got = "" if first["type"] in ("missing", "value_error") else f"; got {first['input']!r:.120}."
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


class SampleError(GRPOError, ValueError):
    """Data is not a valid sample, group or batch of samples. The message names the field."""


@record
class ToolSample(Record):
    """One tool choice with its reward: a row of an `ExperienceBatch`.

    Raises:
        SampleError: A field has an invalid value.
    """

    error = SampleError

    state: str | Steps
    """The request: a text or a vector."""
    tool: pydantic.StrictStr
    """Name of the chosen tool. The name, not the position, identifies the tool, because catalogues change."""
    arguments: JSONObject = field(default_factory=dict)
    """The call's arguments as JSON values: lists instead of tuples, and string keys."""
    log_prob: Steps
    """Log-prob of each step under the policy that chose it, in nats."""
    ref_log_prob: Steps | None = None
    """Log-prob of each step under the reference policy. None if it was not computed."""
    reward: Number
    """Total reward of the row."""
    value: Steps | None = None
    """The critic's value estimate at each step. None if there is no critic."""
    done: pydantic.StrictBool = True
    """True if the episode terminated after this row. False if it was truncated."""
    final_value: Number | None = None
    """The critic's value after the last step of a truncated row that has a `value`. None otherwise."""

    def __post_init__(self) -> None:
        lengths = [None if steps is None else len(steps) for steps in (self.log_prob, self.ref_log_prob, self.value)]
        if len({*lengths} - {None}) > 1:
            raise ValueError(f"ref_log_prob and value must be as long as log_prob; got the lengths {lengths}.")
        if (self.final_value is None) == (not self.done and self.value is not None):
            raise ValueError(
                "final_value must be a number if done=False and value is given, and None otherwise; got "
                f"final_value={self.final_value!r}, done={self.done}, value={self.value!r:.120}."
            )

    @property
    def action(self) -> ToolCall:
        """The choice as a `ToolCall`."""
        return ToolCall(tool=self.tool, arguments=self.arguments)


@record
class ToolGroup(Record):
    """Samples of one task. Advantages compare the samples of a group with each other.

    Raises:
        SampleError: There is no sample, the id is neither text nor an integer, or JSON cannot represent the context.
    """

    error = SampleError

    id: pydantic.StrictStr | pydantic.StrictInt
    """Identifier of the group. Two groups with the same id are not merged."""
    context: JSONObject = field(default_factory=dict)
    """Data about the task, as JSON values."""
    samples: Annotated[tuple[ToolSample, ...], pydantic.Field(min_length=1)]
    """The samples. A group has at least one."""

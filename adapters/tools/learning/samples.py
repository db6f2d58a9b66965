"""Recorded tool choices, single and in groups, that can be stored as JSON. `sample_batches` converts them to batches."""

from dataclasses import field
from typing import Annotated, ClassVar

import pydantic

from adapters.tools.catalogue.calls import ToolCall
from grpo.errors import GRPOError

from .records import JSONObject, Number, Record, Steps, record


class SampleError(GRPOError, ValueError):
    """Data is not a valid sample, group or batch of samples. The message names the field."""


@record
class ToolSample(Record):
    """One tool choice with its reward: a row of an `ExperienceBatch`.

    Raises:
        SampleError: A field has an invalid value.
    """

    error: ClassVar[type[GRPOError]] = SampleError

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
    """The critic's value after the last step of a truncated row. Give both `value` and `final_value`, or neither."""

    def __post_init__(self) -> None:
        if any(steps is not None and len(steps) != len(self.log_prob) for steps in (self.ref_log_prob, self.value)):
            raise ValueError(
                f"ref_log_prob and value must be as long as log_prob={self.log_prob!r:.120}; got {self.ref_log_prob!r:.120} "
                f"and {self.value!r:.120}."
            )
        if (self.final_value is None) == (not self.done and self.value is not None):
            raise ValueError(
                "final_value must be a number if done=False and value is given, and None otherwise; got "
                f"final_value={self.final_value!r}, done={self.done}, value={self.value!r:.120}."
            )

    @property
    def call(self) -> ToolCall:
        """The action as a `ToolCall`."""
        return ToolCall(tool=self.tool, arguments=self.arguments)


@record
class ToolGroup(Record):
    """Samples of one task. Advantages compare the samples of a group with each other.

    Raises:
        SampleError: There is no sample, the id is neither text nor an integer, or JSON cannot represent the context.
    """

    error: ClassVar[type[GRPOError]] = SampleError

    id: pydantic.StrictStr | pydantic.StrictInt
    """Identifier of the group. Two groups with the same id are not merged."""
    context: JSONObject = field(default_factory=dict)
    """Data about the task, as JSON values."""
    samples: Annotated[tuple[ToolSample, ...], pydantic.Field(min_length=1)]
    """The samples. A group has at least one."""

"""Recorded tool choices, single and in groups, that can be stored as JSON. `sample_batches` converts them to batches."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from adapters.tools.catalogue.calls import ToolCall
from grpo.errors import GRPOError

from .records import Record

Steps = tuple[float, ...]
"""One number per decision: the tool, then each enumerated parameter of the tool."""


class SampleError(GRPOError, ValueError):
    """Data is not a valid sample, group or batch of samples. The message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSample(Record):
    """One tool choice with its reward: a row of an `ExperienceBatch`.

    Numbers are converted to `float` and sequences to tuples, so a sample equals its copy read from JSON.

    Raises:
        SampleError: A field has an invalid value.
    """

    error: ClassVar[type[GRPOError]] = SampleError

    state: str | Steps
    """The request: a text or a vector."""
    tool: str
    """Name of the chosen tool. The name, not the position, identifies the tool, because catalogues change."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The call's arguments as JSON values: lists instead of tuples, and string keys."""
    log_prob: Steps
    """Log-prob of each step under the policy that chose it, in nats."""
    ref_log_prob: Steps | None = None
    """Log-prob of each step under the reference policy. None if it was not computed."""
    reward: float
    """Total reward of the row."""
    value: Steps | None = None
    """The critic's value estimate at each step. None if there is no critic."""
    done: bool = True
    """True if the episode terminated after this row. False if it was truncated."""
    final_value: float | None = None
    """The critic's value after the last step of a truncated row. Give both `value` and `final_value`, or neither."""

    def __post_init__(self) -> None:
        """Check and convert the fields."""
        steps = _steps("log_prob", self.log_prob)
        checked = {
            "state": self.state if isinstance(self.state, str) else _steps("state", self.state),
            "arguments": _json_object("ToolSample.arguments", self.arguments),
            "log_prob": steps,
            "ref_log_prob": None
            if self.ref_log_prob is None
            else _steps("ref_log_prob", self.ref_log_prob, len(steps)),
            "reward": _number("reward", self.reward),
            "value": None if self.value is None else _steps("value", self.value, len(steps)),
            "final_value": None if self.final_value is None else _number("final_value", self.final_value),
        }
        if (type(self.tool), type(self.done)) != (str, bool):
            raise SampleError(
                f"ToolSample: tool must be a string and done must be a bool; got tool={self.tool!r}, done={self.done!r}."
            )
        if self.done and self.final_value is not None:
            raise SampleError(
                f"ToolSample.final_value must be None if done=True; got {self.final_value!r}. Set done=False."
            )
        if not self.done and (self.value is None) != (self.final_value is None):
            raise SampleError(
                f"ToolSample: a truncated sample (done=False) must have both value and final_value, or neither; "
                f"got value={self.value!r:.120}, final_value={self.final_value!r}. Pass both from the critic, or omit both."
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def call(self) -> ToolCall:
        """The action as a `ToolCall`."""
        return ToolCall(tool=self.tool, arguments=self.arguments)

    def to_state(self) -> dict[str, Any]:
        """Fields by name, for checkpoints."""
        return self.to_dict()

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "ToolSample":
        """The inverse of `to_state`."""
        return cls.from_dict(state)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGroup(Record):
    """Samples of one task. Advantages compare the samples of a group with each other.

    Raises:
        SampleError: There is no sample, the id is neither text nor an integer, or JSON cannot represent the context.
    """

    error: ClassVar[type[GRPOError]] = SampleError

    id: str | int
    """Identifier of the group. Two groups with the same id are not merged."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """Data about the task, as JSON values."""
    samples: tuple[ToolSample, ...]
    """The samples. A group has at least one."""

    def __post_init__(self) -> None:
        """Check and convert the fields."""
        if type(self.id) not in (str, int):
            raise SampleError(f"ToolGroup.id must be a text or an integer; got {self.id!r}.")
        if not isinstance(self.samples, list | tuple):
            raise SampleError(f"ToolGroup.samples must be a list; got {self.samples!r:.120}.")
        samples = tuple(ToolSample.from_dict(one) if isinstance(one, Mapping) else one for one in self.samples)
        if not samples or not all(isinstance(sample, ToolSample) for sample in samples):
            raise SampleError(
                f"ToolGroup {self.id}: samples must be ToolSamples, and at least one; got {samples!r:.120}."
            )
        object.__setattr__(self, "samples", samples)
        object.__setattr__(self, "context", _json_object("ToolGroup.context", self.context))

    def to_state(self) -> dict[str, Any]:
        """Fields by name, for checkpoints."""
        return self.to_dict()

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "ToolGroup":
        """The inverse of `to_state`."""
        return cls.from_dict(state)


def _number(name: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    raise SampleError(f"ToolSample.{name} must be a finite number; got {value!r:.120}.")


def _steps(name: str, value: Any, length: int | None = None) -> Steps:
    if not isinstance(value, list | tuple) or length not in (None, len(value)):
        size = "" if length is None else f" of {length}, as many as log_prob"
        raise SampleError(f"ToolSample.{name} must be a list of numbers{size}; got {value!r:.120}.")
    return tuple(_number(name, entry) for entry in value)


def _json_object(name: str, value: Any) -> dict[str, Any]:
    """A deep copy through JSON."""
    try:
        if isinstance(value, Mapping):
            copy: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
            return copy
    except (TypeError, ValueError, RecursionError) as error:
        raise SampleError(
            f"{name} must hold only values that JSON can represent: {error}; got {value!r:.120}."
        ) from error
    raise SampleError(f"{name} must be a mapping; got {value!r:.120}.")

"""Decisions as they were made, one by one and in groups, which JSON can hold. `sample_batches` makes batches of them."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from grpo.errors import GRPOError

from .calls import ToolCall

Steps = tuple[float, ...]
"""One number per decision: the tool, then each parameter that its schema enumerates."""


class SampleError(GRPOError, ValueError):
    """What was given or read is no sample or group, or samples do not make a batch; the field is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSample:
    """One choice of a tool, and what came of it: a row of an `ExperienceBatch`.

    Numbers are taken in as `float`, and sequences as tuples; what JSON gives back is equal to what it was given.

    Raises:
        SampleError: a value that is not what the field says.
    """

    state: str | Steps
    """What was asked for: a text, or a vector."""
    tool: str
    """The tool's name: the action. Its place in a catalogue is no part of it, since catalogues change."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The tool's parameters, as JSON holds them: with lists for tuples, and texts for keys."""
    log_prob: Steps
    """Under what chose it, one per step, in nats."""
    ref_log_prob: Steps | None = None
    """Under the reference policy; None: not asked."""
    reward: float
    """Of the whole row."""
    value: Steps | None = None
    """A critic's estimate of what is still to come at each step; None: there is no critic."""
    done: bool = True
    """It ended here, by its own, and nothing follows; False: it was cut off."""
    final_value: float | None = None
    """Where it was cut off: the critic's value of what would have followed. It goes with `value`: both, or neither."""

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
                f"ToolSample: tool must be a text and done a bool; got tool={self.tool!r}, done={self.done!r}."
            )
        if self.done and self.final_value is not None:
            raise SampleError(
                f"ToolSample.final_value must be None where done; got {self.final_value!r}. Set done=False."
            )
        if not self.done and (self.value is None) != (self.final_value is None):
            raise SampleError(
                f"ToolSample: what was cut off (done=False) must have both value and final_value, or neither; "
                f"got value={self.value!r:.120}, final_value={self.final_value!r}. Give the critic's, or leave both out."
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def call(self) -> ToolCall:
        """The action, as policies score it."""
        return ToolCall(tool=self.tool, arguments=self.arguments)

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, as JSON holds them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Any) -> "ToolSample":
        """The inverse of `to_dict`.

        Raises:
            SampleError: a field that is missing, unknown, or not what it should be.
        """
        return cls(**_named_fields(cls, values, needed=("state", "tool", "log_prob", "reward")))

    def to_json(self) -> str:
        """One line; floats are written so that they come back bit by bit."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "ToolSample":
        """The inverse of `to_json`.

        Raises:
            SampleError: not JSON, or no sample.
        """
        return cls.from_dict(_parsed(cls, text))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGroup:
    """Samples of one task, compared with one another.

    Raises:
        SampleError: no sample, an id that is neither text nor integer, or a context that JSON cannot hold.
    """

    id: str | int
    """What tells it from others; two groups of one id stay two."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """What is known of the task, as JSON holds it."""
    samples: tuple[ToolSample, ...]
    """At least one."""

    def __post_init__(self) -> None:
        """Check and convert the fields."""
        if type(self.id) not in (str, int):
            raise SampleError(f"ToolGroup.id must be a text or an integer; got {self.id!r}.")
        samples = tuple(self.samples)
        if not samples or not all(isinstance(sample, ToolSample) for sample in samples):
            raise SampleError(f"ToolGroup {self.id}: samples must be ToolSamples, at least one; got {samples!r:.120}.")
        object.__setattr__(self, "samples", samples)
        object.__setattr__(self, "context", _json_object("ToolGroup.context", self.context))

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, as JSON holds them."""
        return {"id": self.id, "context": self.context, "samples": [sample.to_dict() for sample in self.samples]}

    @classmethod
    def from_dict(cls, values: Any) -> "ToolGroup":
        """The inverse of `to_dict`.

        Raises:
            SampleError: a field that is missing, unknown, or not what it should be.
        """
        named = _named_fields(cls, values, needed=("id", "samples"))
        if not isinstance(named["samples"], list):
            raise SampleError(f"ToolGroup.samples must be a list; got {named['samples']!r:.120}.")
        return cls(**{**named, "samples": tuple(map(ToolSample.from_dict, named["samples"]))})

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "ToolGroup":
        """The inverse of `to_json`.

        Raises:
            SampleError: not JSON, or no group.
        """
        return cls.from_dict(_parsed(cls, text))


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
    """A copy that shares nothing, as it comes back from JSON."""
    try:
        if isinstance(value, Mapping):
            copy: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
            return copy
    except (TypeError, ValueError, RecursionError) as error:
        raise SampleError(f"{name} must be what JSON can hold: {error}; got {value!r:.120}.") from error
    raise SampleError(f"{name} must be a mapping; got {value!r:.120}.")


def _parsed(cls: type, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SampleError(f"{cls.__name__}.from_json: not JSON: {error}.") from error


def _named_fields(cls: Any, values: Any, *, needed: Sequence[str]) -> Mapping[str, Any]:
    names = [each.name for each in fields(cls)]
    if not isinstance(values, Mapping):
        raise SampleError(f"a {cls.__name__} must be an object with {', '.join(names)}; got {values!r:.120}.")
    for what, wrong in (("lacks", set(needed) - set(values)), ("has unknown", set(values) - set(names))):
        if wrong:
            listed = ", ".join(map(repr, sorted(wrong)))
            raise SampleError(f"a {cls.__name__} {what} {listed}; its fields are {', '.join(names)}.")
    return values

"""Five kinds of error in a call for a task: classify the error of a call, or make a call with a given error."""

from collections.abc import Iterator
from random import Random
from typing import Any, Literal, assert_never

import jsonschema
import referencing

from adapters.tools.catalogue.arguments import json_arguments
from adapters.tools.catalogue.calls import ToolCall, same_json
from adapters.tools.catalogue.tools import ABSENT, Tool, ToolCatalogue
from grpo.errors import ConfigError

from .tasks import ToolTask

ErrorKind = Literal["wrong_tool", "wrong_parameter", "missing", "invalid", "redundant"]
"""Kind of error in a call. `classify_error` defines each kind."""

_UNLIKE_ANY: tuple[Any, ...] = ({"?": []}, [None], "?", -0.5, None, True)
"""Values of every JSON type. Nearly every schema rejects one of them."""


def classify_error(task: ToolTask, call: ToolCall, catalogue: ToolCatalogue) -> ErrorKind | None:
    """Classify the error of a call. Returns the first kind that applies, or None if the call is right.

    1. `invalid`: the catalogue lacks the tool, JSON cannot represent the arguments, or the tool's schema rejects an argument.
       A missing required argument does not count as invalid.
    2. `wrong_tool`: the call names another tool than the task.
    3. `missing`: the call lacks an argument of the task, even if the schema does not require it. An argument whose expected
       value is the schema's default may be omitted.
    4. `redundant`: the call has an argument that the task lacks, with a value other than the schema's default.
    5. `wrong_parameter`: an argument differs from the task's value. Values are compared as JSON: 1 equals 1.0, but not true.

    Raises:
        ConfigError: The catalogue lacks the task's tool.
    """
    tool = _tool_of(task, catalogue)
    called, arguments = catalogue.get(call.tool), json_arguments(call.arguments)
    if called is None or arguments is None or _refuses(called, arguments):
        return "invalid"
    if called.name != tool.name:
        return "wrong_tool"
    defaults = {name: schema["default"] for name, schema in tool.properties.items() if "default" in schema}
    expected, given = defaults | dict(task.arguments), defaults | arguments
    if not expected.keys() <= given.keys():
        return "missing"
    different = [name for name in given if name not in expected or not same_json(given[name], expected[name])]
    if any(name not in task.arguments for name in different):
        return "redundant"
    return "wrong_parameter" if different else None


def make_erroneous_call(task: ToolTask, kind: ErrorKind, catalogue: ToolCatalogue, rng: Random) -> ToolCall | None:
    """Make a call with exactly one error, of the given kind as `classify_error` defines it.

    A call of another tool gets the request's values for its parameters of the same name, and random values for its enumerated
    parameters.

    Args:
        task: The task whose right call is changed.
        kind: Kind of the error.
        catalogue: Catalogue that holds the task's tool.
        rng: Chooses among the possible calls.

    Returns:
        The call, or None if no call has this error: there is no other tool, no argument to omit or add, or no other value.

    Raises:
        ConfigError: The catalogue lacks the task's tool.
    """
    tool = _tool_of(task, catalogue)
    match kind:
        case "wrong_tool":
            candidates = _calls_of_others(task, catalogue, rng)
        case "wrong_parameter":
            candidates = _changed(task, list(task.arguments), tool, rng)
        case "redundant":
            candidates = _changed(task, [name for name in tool.properties if name not in task.arguments], tool, rng)
        case "missing":
            candidates = _shortened(task, rng)
        case "invalid":
            candidates = _invalid(task, tool, catalogue, rng)
        case _:
            assert_never(kind)
    return next((call for call in candidates if classify_error(task, call, catalogue) == kind), None)


def _tool_of(task: ToolTask, catalogue: ToolCatalogue) -> Tool:
    if task.tool not in catalogue:
        raise ConfigError(
            f"the catalogue must have the task's tool {task.tool!r}; it has {', '.join(catalogue)}. Add the tool."
        )
    return catalogue[task.tool]


def _refuses(tool: Tool, arguments: dict[str, Any]) -> bool:
    """Whether the schema rejects an argument. Missing arguments do not count."""
    # Unknown arguments are rejected unless the schema allows them, as in `ArgumentChecker`.
    schema = {"additionalProperties": False} | dict(tool.parameters) | {"required": []}
    validator = jsonschema.Draft202012Validator(
        schema, registry=referencing.Registry()
    )  # nothing is fetched for a `$ref`
    try:
        return not validator.is_valid(arguments)
    except Exception:  # the schema cannot be applied to these arguments; the executor rejects them too
        return True


def _call(task: ToolTask, **changes: Any) -> ToolCall:
    return ToolCall(tool=task.tool, arguments=dict(task.arguments) | changes)


def _shuffled(values: Any, rng: Random) -> list[Any]:
    listed = list(values)
    rng.shuffle(listed)
    return listed


def _calls_of_others(task: ToolTask, catalogue: ToolCatalogue, rng: Random) -> Iterator[ToolCall]:
    for name in _shuffled(catalogue, rng):
        tool = catalogue[name]
        chosen = {choice.name: rng.choice(choice.values) for choice in tool.choices}
        said = {name: value for name, value in task.slots.items() if name in tool.properties}
        arguments = chosen | said | dict(tool.constants)
        yield ToolCall(tool=name, arguments={name: value for name, value in arguments.items() if value is not ABSENT})


def _changed(task: ToolTask, names: list[str], tool: Tool, rng: Random) -> Iterator[ToolCall]:
    """Calls with one changed argument. `classify_error` selects the calls that have the wanted error."""
    choices = {choice.name: choice.values for choice in tool.choices}
    for name in _shuffled(names, rng):
        if name in choices:
            values = [value for value in _shuffled(choices[name], rng) if value is not ABSENT]
        else:
            values = [*_near(task.arguments.get(name)), "?", 7, 0.5, True, ["?"], [7], {}]
        yield from (_call(task, **{name: value}) for value in values)


def _near(value: Any) -> list[Any]:
    """Other values of the same type as this value."""
    if isinstance(value, str):
        return [value + " ?", value[:-1]]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value + 1, value - 1, value * 2]
    if isinstance(value, list):
        return [value[:-1], value[::-1], value + value[:1]]
    return []


def _shortened(task: ToolTask, rng: Random) -> Iterator[ToolCall]:
    for name in _shuffled(task.arguments, rng):
        yield ToolCall(
            tool=task.tool, arguments={other: value for other, value in task.arguments.items() if other != name}
        )


def _invalid(task: ToolTask, tool: Tool, catalogue: ToolCatalogue, rng: Random) -> Iterator[ToolCall]:
    """Calls with an argument of another type, an unknown argument, or an unknown tool, each equally often."""
    wrong_types = (
        _call(task, **{name: value})
        for name in _shuffled(tool.properties, rng)
        for value in _shuffled(_UNLIKE_ANY, rng)
    )
    unknown_arguments = iter([_call(task, **{_unused("extra", tool.properties): 1})])
    unknown_tools = iter([ToolCall(tool=_unused(task.tool, catalogue), arguments=dict(task.arguments))])
    for ways in _shuffled((wrong_types, unknown_arguments, unknown_tools), rng):
        yield from ways


def _unused(name: str, names: Any) -> str:
    while name in names:
        name += "_"
    return name

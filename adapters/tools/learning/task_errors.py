"""Five kinds of error in a call for a task."""

from typing import Any, Literal, get_args

import jsonschema
import referencing

from adapters.tools.catalogue.arguments import json_arguments
from adapters.tools.catalogue.calls import ToolCall, same_json
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from grpo.errors import ConfigError

from .tasks import ToolTask

ErrorKind = Literal["invalid", "wrong_tool", "missing", "redundant", "wrong_parameter"]
"""Kind of error in a call, in the order of `classify_error`, which defines each kind."""


def classify_error(task: ToolTask, call: ToolCall | None, catalogue: ToolCatalogue) -> ErrorKind | None:
    """Classify the error of a call. Returns the first kind that applies, or None if the call is right.

    1. `invalid`: the catalogue lacks the tool, JSON cannot represent the arguments, or the tool's schema rejects an argument.
       A missing required argument does not count as invalid.
    2. `wrong_tool`: the call names another tool than the task, or there is a call where no tool is right, or no call where a
       tool is right.
    3. `missing`: the call lacks an argument of the task, even if the schema does not require it. An argument whose expected
       value is the schema's default may be omitted.
    4. `redundant`: the call has an argument that the task lacks, with a value other than the schema's default.
    5. `wrong_parameter`: an argument differs from the task's value. Values are compared as JSON: 1 equals 1.0, but not true.

    If the task has several right answers, the call is compared with each, and the error that comes last in this list counts.

    Args:
        task: The task with its right answers.
        call: The call to classify. None: no tool was called.
        catalogue: Catalogue that holds the task's tools.

    Raises:
        ConfigError: The catalogue lacks a tool of the task.
    """
    lacking = [right.tool for right in task.right_calls if right is not None and right.tool not in catalogue]
    if lacking:
        raise ConfigError(
            f"the catalogue must have the task's tool {lacking[0]!r}; it has {', '.join(catalogue)}. Add the tool."
        )
    if call is None:
        return None if None in task.right_calls else "wrong_tool"
    called, arguments = catalogue.get(call.tool), json_arguments(call.arguments)
    if called is None or arguments is None or _refuses(called, arguments):
        return "invalid"
    kinds = [_difference(called, arguments, right) for right in task.right_calls]
    return max(kinds, key=(*get_args(ErrorKind), None).index)


def _difference(called: Tool, arguments: dict[str, Any], right: ToolCall | None) -> ErrorKind | None:
    """The error of a valid call, compared with one right answer."""
    if right is None or called.name != right.tool:
        return "wrong_tool"
    defaults = {name: schema["default"] for name, schema in called.properties.items() if "default" in schema}
    expected, given = defaults | dict(right.arguments), defaults | arguments
    if not expected.keys() <= given.keys():
        return "missing"
    different = [name for name in given if name not in expected or not same_json(given[name], expected[name])]
    if any(name not in right.arguments for name in different):
        return "redundant"
    return "wrong_parameter" if different else None


def _refuses(tool: Tool, arguments: dict[str, Any]) -> bool:
    """Whether the schema rejects an argument. Missing arguments do not count."""
    # Unknown arguments are rejected unless the schema allows them, as in `ArgumentChecker`.
    schema = {"additionalProperties": False} | dict(tool.parameters) | {"required": []}
    # An empty registry: nothing is fetched for a `$ref`.
    validator = jsonschema.Draft202012Validator(schema, registry=referencing.Registry())
    try:
        return not validator.is_valid(arguments)
    except Exception:  # the schema cannot be applied to these arguments; the executor rejects them too
        return True

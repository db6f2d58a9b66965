"""Tools and the catalogue that holds them."""

import functools
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import jsonschema

from grpo.arguments import is_finite, require_each, require_instances
from grpo.errors import ConfigError

from .annotations import schema_of
from .calls import ToolCall, plain_name, same_json
from .schemas import plain_schema

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


class _Absent(Enum):
    """Type of `ABSENT`. An enum member keeps its identity when it is copied or pickled."""

    ABSENT = "left out"


ABSENT = _Absent.ABSENT
"""The choice to omit an optional parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterChoices:
    """The enumerated values of one parameter. The policy chooses one of them."""

    name: str
    """Name of the parameter."""
    values: tuple[Any, ...]
    """The values to choose from. No two of them are equal as JSON. `ABSENT` means that the parameter is omitted."""
    texts: tuple[str, ...]
    """Text of each value for an encoder: the value, then the parameter's name. The pair of words distinguishes
    `from_unit="mile"` from `to_unit="mile"`."""

    def index(self, arguments: Mapping[str, Any]) -> int | None:
        """Index of the value that `arguments` gives this parameter. None if that value is not enumerated."""
        given = arguments.get(self.name, ABSENT)
        return next((i for i, value in enumerate(self.values) if value is given or same_json(value, given)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that a policy can call.

    Raises:
        ConfigError: A field is invalid, or it is not certain which of the schema's strings are paths.
    """

    name: str
    """The tool's name: 1 to 64 letters, digits, `_`, `-` and `.`."""
    description: str
    """What the tool does. A policy sees only the tool's name and this description."""
    function: Callable[..., Any]
    """Function that is called with the arguments by name. It runs in a worker process, so it must be importable (defined at
    the top level of a module). It may be `async def`. JSON must be able to represent its return value."""
    category: str = "general"
    """Group of similar tools. `right_tool` gives partial reward for another tool of the same category."""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON Schema (draft 2020-12) of the arguments, with type object. Each `$ref` to a definition is replaced by the
    definition, unless it is recursive. Strings with `"format": "path"` are confined to the executor's root."""
    remote: bool = False
    """Whether `function` is an `async def` that this process awaits, such as a client of another process or machine."""
    timeout: float | None = None
    """Time limit of one call in seconds. None uses the executor's limit. A larger limit waits longer for a call that hangs."""
    cost: float = 0.0
    """Cost of one call, in any unit. `call_cost` reads it."""

    def __post_init__(self) -> None:
        """Check the fields."""
        require_instances("Tool", str, "a text", name=self.name, description=self.description, category=self.category)
        require_instances("Tool", bool, "True or False", remote=self.remote)
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"Tool: name must be 1 to 64 letters, digits, '_', '-' or '.'; got {self.name!r}.")
        is_awaitable = not self.remote or inspect.iscoroutinefunction(self.function)
        in_time = self.timeout is None or (is_finite(self.timeout) and self.timeout > 0)
        for name, is_right, required in (
            ("description", self.description.strip(), "not be empty, because policies choose tools by it"),
            ("function", callable(self.function), "be callable"),
            ("function", is_awaitable, "be `async def` if the tool is remote, because this process awaits it"),
            ("timeout", in_time, "be a positive, finite number of seconds, or None"),
            ("cost", is_finite(self.cost), "be a finite number"),
        ):
            if not is_right:
                raise ConfigError(f"Tool {self.name}: {name} must {required}; got {getattr(self, name)!r:.100}.")
        object.__setattr__(self, "parameters", self._checked_schema())

    def _checked_schema(self) -> dict[str, Any]:
        owner = f"Tool {self.name}: parameters"
        schema: Any = self.parameters
        if not isinstance(schema, Mapping) or schema.get("type") != "object":
            raise ConfigError(f'{owner} must be a JSON Schema with "type": "object"; got {schema!r:.80}.')
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
            return plain_schema(schema)
        except jsonschema.SchemaError as error:
            raise ConfigError(f"{owner} must be a valid JSON Schema; at {error.json_path}: {error.message}.") from error
        except (ValueError, RecursionError) as error:  # an uncertain path, or many levels
            raise ConfigError(f"{owner}: {error}") from error

    @classmethod
    def from_function(cls, function: Callable[..., Any], **fields: Any) -> "Tool":
        """Create a tool from a Python function: its name, its docstring, and a schema built from its annotations.

        An annotation may be any type that pydantic converts to JSON Schema: `Literal`, an Enum class, `date`, a dataclass,
        `Path` (confined to the executor's root), `Annotated[int, pydantic.Field(description=...)]`, and so on. The function
        receives what its annotation says. A parameter with a default is optional. A default of None means that the parameter
        is omitted.

        Args:
            function: Function with an annotation on every parameter. A `functools.partial` has no name and needs `name=`.
            fields: Fields of the tool that replace the values read from the function.

        Raises:
            ConfigError: A parameter has no annotation that can be converted, or the function has no name.
        """
        own = function
        while isinstance(own, functools.partial):
            own = own.func
        name, described = getattr(function, "__name__", None), inspect.getdoc(own) or ""
        fields = {"name": name, "description": described, "function": function} | fields
        if "parameters" not in fields:
            try:
                fields["parameters"] = schema_of(function)
            except ValueError as error:
                raise ConfigError(
                    f"Tool {fields['name']}: {error}. Change it, or pass Tool(parameters=...)."
                ) from error
        return cls(**fields)

    @property
    def properties(self) -> Mapping[str, Any]:
        """Schemas of the parameters by name. A schema of `true` becomes {}. A parameter with schema `false` is left out."""
        schemas = self.parameters.get("properties", {})
        return {name: {} if schema is True else schema for name, schema in schemas.items() if schema is not False}

    @property
    def choices(self) -> tuple[ParameterChoices, ...]:
        """The enumerated parameters, in the schema's order. The policy decides them after it chooses the tool."""
        found = []
        for name, schema in self.properties.items():
            values = _enumerated(schema) or {}
            is_optional = name not in self.parameters.get("required", ())
            # A default that is not among the values cannot be given in a call.
            if values and is_optional and _json_key(schema.get("default", ABSENT)) not in values:
                values[None] = (ABSENT, "left out")
            if len(values) > 1:
                given, texts = zip(*values.values(), strict=True)
                texts = tuple(f"{text} {_words(name)}" for text in texts)
                found.append(ParameterChoices(name=name, values=given, texts=texts))
        return tuple(found)

    @property
    def constants(self) -> Mapping[str, Any]:
        """The only allowed value of each required parameter that has exactly one, by name."""
        allowed = {name: _enumerated(self.properties.get(name, {})) for name in self.parameters.get("required", ())}
        return {name: next(iter(of.values()))[0] for name, of in allowed.items() if of and len(of) == 1}

    @property
    def free_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that the policy does not decide. It decides no values within lists and objects."""
        decided = {choice.name for choice in self.choices} | self.constants.keys()
        names = dict.fromkeys((*self.properties, *self.parameters.get("required", ())))
        return tuple(name for name in names if name not in decided)

    @property
    def required_free(self) -> tuple[str, ...]:
        """Names of the required parameters that the policy does not decide. `fill` must give their values."""
        return tuple(name for name in self.free_parameters if name in self.parameters.get("required", ()))

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as language models read it, in OpenAI's form: its name, description and parameters."""
        described = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": described}

    @property
    def text(self) -> str:
        """Name, description and names of the parameters, for an encoder."""
        return f"{_words(self.name)}: {self.description} {', '.join(map(_words, self.properties))}".rstrip()


class ToolCatalogue(Mapping[str, Tool]):
    """An ordered mapping of tools by name.

    Args:
        tools: At least one tool. Names must be unique.

    Raises:
        ConfigError: There is no tool, or two tools have the same name.

    Example:
        >>> def add(a: float, b: float) -> float:
        ...     "Add two numbers."
        ...     return a + b
        >>> list(ToolCatalogue([Tool.from_function(add)]))
        ['add']
    """

    def __init__(self, tools: Iterable[Tool]) -> None:
        listed = require_each("ToolCatalogue.tools", Tool, tools)
        if not listed:
            raise ConfigError("ToolCatalogue.tools must have at least one tool; got none.")
        self._tools = {tool.name: tool for tool in listed}
        twice = Counter(tool.name for tool in listed) - Counter(list(self._tools))
        if twice:
            raise ConfigError(
                f"ToolCatalogue: tools must have different names; several have {', '.join(sorted(twice))}."
            )

    def __getitem__(self, name: object) -> Tool:
        if (plain := plain_name(name)) is None:  # a policy may ask for anything, even for something unhashable
            raise KeyError(name)
        return self._tools[plain]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def with_tools(self, *tools: Tool) -> "ToolCatalogue":
        """Return a new catalogue with `tools` appended."""
        return ToolCatalogue([*self.values(), *tools])

    def without(self, *names: str) -> "ToolCatalogue":
        """Return a new catalogue without the named tools."""
        return ToolCatalogue(tool for name, tool in self.items() if name not in names)

    @functools.cached_property
    def choices(self) -> Mapping[str, tuple[ParameterChoices, ...]]:
        """`Tool.choices` of each tool by name."""
        return {name: tool.choices for name, tool in self.items()}

    @functools.cached_property
    def value_places(self) -> Mapping[str, int]:
        """The distinct texts of all enumerated values, numbered in order of first appearance."""
        texts = dict.fromkeys(text for of in self.choices.values() for choice in of for text in choice.texts)
        return {text: place for place, text in enumerate(texts)}

    def decisions(self, call: ToolCall | None) -> tuple[tuple[Any, ...], ...]:
        """What a policy decides of a call: the tool, then each enumerated value as (tool, parameter, index of the value).

        Calls that differ in other arguments only have equal decisions. A value that is not enumerated is no decision. No call
        (None) has no decisions.
        """
        if call is None:
            return ()
        tool = plain_name(call.tool)
        chosen = ((choice.name, choice.index(call.arguments)) for choice in self.choices.get(tool or "", ()))
        return ((tool,), *((tool, name, index) for name, index in chosen if index is not None))

    @property
    def categories(self) -> tuple[str, ...]:
        """The tools' categories, in order of first appearance."""
        return tuple(dict.fromkeys(tool.category for tool in self.values()))


def _words(name: str) -> str:
    return re.sub(r"[_.-]+", " ", name)


def _enumerated(schema: Any) -> dict[str | None, tuple[Any, str]] | None:
    """The values that a schema enumerates, each with its text, by `_json_key`. None if it enumerates no values.

    A schema enumerates values by `enum`, `const`, type boolean or null, or `oneOf` or `anyOf` of constants. Each constant may
    have a `title` and a `description`. Values that JSON cannot represent are left out.
    """
    if isinstance(schema, bool):
        return None if schema else {}
    for keyword in ("oneOf", "anyOf"):
        branches = [_enumerated(branch) for branch in schema.get(keyword, ())]
        if branches and None not in branches:
            pairs = [pair for branch in branches if branch for pair in branch.items()]
            times = Counter(key for key, _ in pairs)
            # `oneOf` rejects a value that two branches accept.
            return {key: pair for key, pair in pairs if keyword == "anyOf" or times[key] == 1}
    values = {"boolean": [False, True], "null": [None]}.get(str(schema.get("type")))
    values = schema.get("enum", [schema["const"]] if "const" in schema else values)
    if values is None:
        return None
    about = " ".join(str(schema[key]) for key in ("title", "description") if key in schema)
    found = {key: value for value in values if (key := _json_key(value)) is not None}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in found.items()}
    return {key: (value, f"{texts[key]} {about}".strip()) for key, value in found.items()}


def _json_key(value: Any) -> str | None:
    """JSON text that is the same for equal values, such as 1 and 1.0. None if JSON cannot represent the value."""
    try:
        plain = json.loads(json.dumps(value, allow_nan=False), parse_float=_whole_if_equal)
    except (TypeError, ValueError):
        return None
    return json.dumps(plain, sort_keys=True)


def _whole_if_equal(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number

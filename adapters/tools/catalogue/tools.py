"""Tools and the catalogue that holds them."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from grpo.errors import ConfigError

from .annotations import schema_of
from .calls import plain_name, same_json
from .enumerations import enumerated_values
from .hints import unwrapped
from .inputs import is_finite, require_type
from .schemas import UncertainPathError, check_path_formats, plain_schema, schema_problem

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


class _Absent(Enum):
    """Type of `ABSENT`. An enum member keeps its identity when it is copied or pickled."""

    ABSENT = "left out"


ABSENT = _Absent.ABSENT
"""The choice to omit an optional parameter."""

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


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
        if self.name not in arguments:
            return next((i for i, value in enumerate(self.values) if value is ABSENT), None)
        given = arguments[self.name]
        return next((i for i, value in enumerate(self.values) if same_json(value, given)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that a policy can call.

    Raises:
        ConfigError: The name is invalid, the description is empty, the schema is not the schema of an object, it is not certain
            which of its strings are paths, or a number is out of range.
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
    parameters: Mapping[str, Any] = field(default_factory=lambda: _NO_PARAMETERS)
    """JSON Schema (draft 2020-12) of the arguments, with type object. Each `$ref` is replaced by the part that it points to,
    unless it is recursive. Strings with `"format": "path"` are confined to the executor's root."""
    remote: bool = False
    """Whether `function` is an `async def` that this process awaits, such as a client of another process or machine."""
    timeout: float | None = None
    """Time limit of one call in seconds. None uses the executor's limit. A larger limit waits longer for a call that hangs."""
    cost: float = 0.0
    """Cost of one call, in any unit. `call_cost` reads it."""

    def __post_init__(self) -> None:
        """Check the fields."""
        require_type("Tool", str, "a text", name=self.name, description=self.description, category=self.category)
        require_type("Tool", bool, "True or False", remote=self.remote)
        if not NAME.fullmatch(self.name):
            raise ConfigError(f"Tool.name must be 1 to 64 letters, digits, '_', '-' or '.'; got {self.name!r}.")
        if not self.description.strip():
            raise ConfigError(
                f"Tool {self.name}: description must not be empty, because policies choose tools by their descriptions."
            )
        if not callable(self.function):
            raise ConfigError(f"Tool {self.name}: function must be callable; got {self.function!r}.")
        if self.remote and not inspect.iscoroutinefunction(self.function):
            raise ConfigError(
                f"Tool {self.name}: a remote tool's function must be `async def`, because this process awaits it; got "
                f"{self.function!r}. Make the function async, or leave out remote=True."
            )
        if self.timeout is not None and not (is_finite(self.timeout) and self.timeout > 0):
            raise ConfigError(
                f"Tool {self.name}: timeout must be a positive, finite number of seconds, or None; got {self.timeout!r}."
            )
        if not is_finite(self.cost):
            raise ConfigError(f"Tool {self.name}: cost must be a finite number; got {self.cost!r}.")
        object.__setattr__(self, "parameters", self._checked_schema())

    def _checked_schema(self) -> dict[str, Any]:
        owner = f"Tool {self.name}: parameters"
        schema: Any = self.parameters  # `true` is a schema too
        require_type("Tool", (Mapping, bool), "a JSON Schema", parameters=schema)
        try:
            problem = schema_problem(schema)
            if problem is not None:
                raise ConfigError(f"{owner} must be a valid JSON Schema; {problem}")
            if not isinstance(schema, Mapping) or schema.get("type") != "object":
                raise ConfigError(f'{owner} must be a JSON Schema with "type": "object"; got {str(schema)[:80]}.')
            check_path_formats(schema)
            return plain_schema(schema)
        except RecursionError as error:
            raise ConfigError(f"{owner} are nested too deeply to be checked. Use a flatter schema.") from error
        except UncertainPathError as error:
            raise ConfigError(f"{owner}: {error}") from error

    @classmethod
    def from_function(cls, function: Callable[..., Any], **fields: Any) -> "Tool":
        """Create a tool from a Python function: its name, its docstring, and a schema built from its annotations.

        An annotation may be any type that pydantic converts to JSON Schema: `str`, `int`, `float`, `bool`, `Literal`, Enum
        classes, `date`, `datetime`, `Path` (confined to the executor's root), lists, dicts, TypedDicts, dataclasses, pydantic
        models, unions, and `Annotated[..., pydantic.Field(description=...)]`. The function receives what its annotation says.
        A parameter with a default is optional, and a default of None means that the parameter is omitted.

        Args:
            function: Function with an annotation on every parameter. A `functools.partial` has no name and needs `name=`.
            fields: Fields of the tool that replace the values read from the function.

        Raises:
            ConfigError: A parameter has no annotation that can be converted, or the function has no name.
            ImportError: pydantic is not installed.
        """
        name = fields.get("name", getattr(function, "__name__", None))
        if name is None:
            raise ConfigError(
                f"Tool.from_function: the function must have a name; {function!r} has none. Pass name=..."
            )
        described: dict[str, Any] = {"name": name, "description": inspect.getdoc(unwrapped(function)) or ""}
        if "parameters" not in fields:
            described["parameters"] = schema_of(name, function)
        return cls(function=function, **described | fields)

    @property
    def properties(self) -> Mapping[str, Any]:
        """Schemas of the parameters by name. A schema of `true` becomes {}. A parameter with schema `false` is left out."""
        schemas = self.parameters.get("properties", {})
        return {name: {} if schema is True else schema for name, schema in schemas.items() if schema is not False}

    @property
    def choices(self) -> tuple[ParameterChoices, ...]:
        """The enumerated parameters, in the schema's order. The policy decides them after it chooses the tool."""
        required = self.parameters.get("required", ())
        found = []
        for name, schema in self.properties.items():
            values = enumerated_values(schema)
            if values is None:
                continue
            # A default that is not among the values cannot be given in a call.
            default_is_given = "default" in schema and any(same_json(schema["default"], value) for value, _ in values)
            if name not in required and not default_is_given:
                values.append((ABSENT, "left out"))
            if len(values) > 1:
                found.append(
                    ParameterChoices(
                        name=name,
                        values=tuple(v for v, _ in values),
                        texts=tuple(f"{text} {_words(name)}" for _, text in values),
                    )
                )
        return tuple(found)

    @property
    def constants(self) -> Mapping[str, Any]:
        """The only allowed value of each required parameter that has exactly one, by name."""
        allowed = {
            name: enumerated_values(self.properties.get(name, {})) for name in self.parameters.get("required", ())
        }
        return {name: values[0][0] for name, values in allowed.items() if values is not None and len(values) == 1}

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
        require_type("ToolCatalogue", Iterable, "a list of Tools", tools=tools)
        listed = list(tools)
        for tool in listed:
            require_type("ToolCatalogue", Tool, "a list of Tools", tools=tool)
        self._tools = {tool.name: tool for tool in listed}
        if not listed:
            raise ConfigError("ToolCatalogue.tools must have at least one tool; got none.")
        twice = sorted(name for name, times in Counter(tool.name for tool in listed).items() if times > 1)
        if twice:
            raise ConfigError(f"ToolCatalogue: tools must have different names; several have {', '.join(twice)}.")

    def __getitem__(self, name: object) -> Tool:
        plain = plain_name(name)
        if plain is None:  # a policy may ask for anything, even for something unhashable
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

    @property
    def categories(self) -> tuple[str, ...]:
        """The tools' categories, in order of first appearance."""
        return tuple(dict.fromkeys(tool.category for tool in self.values()))


def _words(name: str) -> str:
    return re.sub(r"[_.-]+", " ", name)

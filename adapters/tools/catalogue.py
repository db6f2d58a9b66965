"""Tools: what they are called, what they are for, what they take, and how they are run."""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import jsonschema

from grpo.errors import ConfigError

from .annotations import schema_of, written
from .calls import plain_name, same_json

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


class _Absent(Enum):
    """One value that stays itself where a policy that holds it is copied or pickled."""

    ABSENT = "left out"


ABSENT = _Absent.ABSENT
"""The choice to leave an optional parameter out."""

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterChoices:
    """The values of one parameter that a schema enumerates: a decision of the policy."""

    name: str
    """Of the parameter."""
    values: tuple[Any, ...]
    """What may be chosen, no two equal as JSON; `ABSENT` stands for leaving the parameter out."""
    texts: tuple[str, ...]
    """Each value in words, for an encoder: the value, then the name of the parameter. Together they make a pair of words, which
    tells `from_unit="mile"` from `to_unit="mile"`."""

    def index(self, arguments: Mapping[str, Any]) -> int | None:
        """Which value stands in `arguments`; None: one that is not enumerated."""
        if self.name not in arguments:
            return next((i for i, value in enumerate(self.values) if value is ABSENT), None)
        given = arguments[self.name]
        return next((i for i, value in enumerate(self.values) if same_json(value, given)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool.

    Raises:
        ConfigError: a name that is none, no description, a schema that is not one of an object, or a number out of range.
    """

    name: str
    """Letters, digits, `_`, `-` and `.`, at most 64."""
    description: str
    """What it is for: a policy knows a tool by its name and these words."""
    function: Callable[..., Any]
    """Called with the arguments by name, in a worker process, so that it must be importable (at the top level of a module); may
    be `async def`. What it returns has to be something JSON can hold."""
    category: str = "general"
    """Tools of one category are alike: choosing another one of the same is half right."""
    parameters: Mapping[str, Any] = field(default_factory=lambda: _NO_PARAMETERS)
    """JSON Schema of the arguments, an object. Strings of `"format": "path"` are confined to the executor's root."""
    remote: bool = False
    """The work is done by another process or machine, as behind a client: an `async def` that is awaited in this process."""
    timeout: float | None = None
    """Seconds for one call; None: the executor's. Larger waits longer for what hangs."""
    cost: float = 0.0
    """Of one call, in any unit; read by `call_cost`."""

    def __post_init__(self) -> None:
        """Check the fields."""
        if not NAME.fullmatch(self.name):
            raise ConfigError(f"Tool.name must be 1 to 64 letters, digits, '_', '-' or '.'; got {self.name!r}.")
        if not self.description.strip():
            raise ConfigError(f"Tool {self.name}: description must say what the tool is for; policies choose by it.")
        if not callable(self.function):
            raise ConfigError(f"Tool {self.name}: function must be callable; got {self.function!r}.")
        if self.remote and not inspect.iscoroutinefunction(self.function):
            raise ConfigError(
                f"Tool {self.name}: a remote tool's function must be `async def`: this process awaits it."
            )
        if self.timeout is not None and not (_is_finite(self.timeout) and self.timeout > 0):
            raise ConfigError(
                f"Tool {self.name}: timeout must be a positive, finite number of seconds, or None; got {self.timeout!r}."
            )
        if not _is_finite(self.cost):
            raise ConfigError(f"Tool {self.name}: cost must be a finite number; got {self.cost!r}.")
        try:
            jsonschema.Draft202012Validator.check_schema(self.parameters)
        except jsonschema.SchemaError as error:
            raise ConfigError(f"Tool {self.name}: parameters at {error.json_path}: {error.message}.") from error
        except RecursionError as error:
            raise ConfigError(f"Tool {self.name}: parameters must not be so many levels deep.") from error
        schema: Any = self.parameters  # `true` is a schema too
        if not isinstance(schema, Mapping) or schema.get("type") != "object":
            raise ConfigError(f'Tool {self.name}: parameters must be a JSON Schema with "type": "object".')

    @classmethod
    def from_function(cls, function: Callable[..., Any], **fields: Any) -> "Tool":
        """A tool from a Python function: its name, its docstring, and a schema from its annotations.

        `str`, `int`, `float`, `bool`, `Path` (confined to the executor's root), `Literal[...]` of texts, numbers and None (an
        enumeration), `list[...]` and `dict[str, ...]` of these, `list` and `dict` of anything, and `... | None`; a parameter
        with a default may be left out.

        Args:
            function: every parameter annotated. One without a name of its own, as `functools.partial` makes, needs `name=`.
            fields: of the tool, instead of what the function says.

        Raises:
            ConfigError: a parameter whose annotation is none of these, or a function without a name.
        """
        name = fields.get("name", getattr(function, "__name__", None))
        if name is None:
            raise ConfigError(f"Tool.from_function: {function!r} has no name of its own; pass name=...")
        described: dict[str, Any] = {"name": name, "description": inspect.getdoc(written(function)) or ""}
        if "parameters" not in fields:
            described["parameters"] = schema_of(name, function)
        return cls(function=function, **described | fields)

    @property
    def properties(self) -> Mapping[str, Any]:
        """Schemas of the parameters by name: {} for `true`; without those that are `false`, which may not be given."""
        schemas = self.parameters.get("properties", {})
        return {name: {} if schema is True else schema for name, schema in schemas.items() if schema is not False}

    @property
    def choices(self) -> tuple[ParameterChoices, ...]:
        """The decisions that come after choosing this tool, in the schema's order."""
        required = self.parameters.get("required", ())
        found = []
        for name, schema in self.properties.items():
            values = _enumerated(schema)
            if values is None:
                continue
            # a default that is none of the values stands for nothing that can be given
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
        """Required parameters for which the schema allows one value only."""
        allowed = {name: _enumerated(self.properties.get(name, {})) for name in self.parameters.get("required", ())}
        return {name: values[0][0] for name, values in allowed.items() if values is not None and len(values) == 1}

    @property
    def text(self) -> str:
        """Name and description, for an encoder."""
        return f"{_words(self.name)}: {self.description}"


class ToolCatalogue(Mapping[str, Tool]):
    """Tools by name, in order.

    Args:
        tools: at least one; names differ.

    Raises:
        ConfigError: no tool, or two of one name.

    Example:
        >>> def add(a: float, b: float) -> float:
        ...     "Add two numbers."
        ...     return a + b
        >>> list(ToolCatalogue([Tool.from_function(add)]))
        ['add']
    """

    def __init__(self, tools: Iterable[Tool]) -> None:
        listed = list(tools)
        self._tools = {tool.name: tool for tool in listed}
        if not listed:
            raise ConfigError("ToolCatalogue needs at least one tool.")
        if len(self._tools) < len(listed):
            twice = sorted({tool.name for tool in listed if sum(other.name == tool.name for other in listed) > 1})
            raise ConfigError(f"ToolCatalogue: names must differ; twice: {', '.join(twice)}.")

    def __getitem__(self, name: object) -> Tool:
        plain = plain_name(name)
        if plain is None:  # a policy may ask for anything, which need not be hashable
            raise KeyError(name)
        return self._tools[plain]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def with_tools(self, *tools: Tool) -> "ToolCatalogue":
        """A new catalogue, with more tools at its end."""
        return ToolCatalogue([*self.values(), *tools])

    def without(self, *names: str) -> "ToolCatalogue":
        """A new catalogue that lacks some tools."""
        return ToolCatalogue(tool for name, tool in self.items() if name not in names)

    @property
    def categories(self) -> tuple[str, ...]:
        """In the order of their first tools."""
        return tuple(dict.fromkeys(tool.category for tool in self.values()))


def _words(name: str) -> str:
    return re.sub(r"[_.-]+", " ", name)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _enumerated(schema: Any) -> list[tuple[Any, str]] | None:
    """Values that a parameter's schema enumerates, no two equal, each with its text; None: it does not.

    `enum`, `const`, booleans, and `oneOf` or `anyOf` of constants, which may have a `title` or `description` each.
    """
    if isinstance(schema, bool):
        return None if schema else []
    for key in ("oneOf", "anyOf"):
        parts = [_enumerated(part) for part in schema.get(key, ())]
        if parts and all(part is not None for part in parts):
            found = [value for part in parts if part for value in part]
            return _different(found, drop_repeated=key == "oneOf")
    if "enum" in schema:
        values = list(schema["enum"])
    elif "const" in schema:
        values = [schema["const"]]
    elif schema.get("type") == "boolean":
        values = [False, True]
    else:
        return None
    about = " ".join(str(schema[key]) for key in ("title", "description") if key in schema)
    values = [value for value in values if same_json(value, value)]  # no call can have what JSON cannot hold
    texts = (f"{value if isinstance(value, str) else json.dumps(value)} {about}".strip() for value in values)
    return _different(list(zip(values, texts, strict=True)))


def _different(found: list[tuple[Any, str]], *, drop_repeated: bool = False) -> list[tuple[Any, str]]:
    """The first of equal values; none of them where `drop_repeated`, since `oneOf` allows only what one branch takes."""
    alike: dict[Any, list[tuple[Any, str]]] = {}  # by what can be hashed, so that long enumerations take no time
    for pair in found:
        alike.setdefault(_hashable(pair[0]), []).append(pair)
    kept = []
    for pair in found:
        same = [other for other in alike[_hashable(pair[0])] if same_json(other[0], pair[0])]
        if same[0] is pair and not (drop_repeated and len(same) > 1):
            kept.append(pair)
    return kept


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else None

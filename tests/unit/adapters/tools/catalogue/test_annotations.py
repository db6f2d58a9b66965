"""Tools from functions: schemas read from annotations, names and descriptions."""

import datetime
import enum
import functools
import inspect
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Optional

import pydantic
import pytest

from adapters.tools.catalogue.arguments import ArgumentChecker, RefusedArgumentsError
from adapters.tools.catalogue.tools import ABSENT, Tool
from grpo.errors import ConfigError
from tests.support.annotated import Colour, Order, Row, typed


def taking(hint: Any) -> Callable[..., None]:
    def read(file: hint) -> None:  # type: ignore[valid-type]
        """Read."""

    return read


class Tone(enum.StrEnum):
    LOUD = "loud"


def everything(
    text: str, count: int, share: float, sure: bool, path: Path, unit: Literal["mile", "foot"], words: list[str],
    units: list[Literal["mile", 2]], rows: list[list[int]], anything: list, table: dict, counts: dict[str, int],
    files: dict[str, list[Path]], notes: dict[str, Any], gaps: list[int | None], tones: dict[str, Literal["loud", 2] | None],
    maybe: int | None,
    perhaps: Optional[float],  # noqa: UP045  # the older spelling has to work too
    limit: int = 3, folder: Path = Path("some/where"), tone: Literal[Tone.LOUD, "soft"] = "soft", found: str | None = None,
) -> None:  # fmt: skip
    """Take everything.

    At once.
    """


def test_each_annotation_becomes_its_schema() -> None:
    text, whole, number, null = ({"type": name} for name in ("string", "integer", "number", "null"))
    path = text | {"format": "path"}
    array, table = {"type": "array"}, {"type": "object"}
    assert Tool.from_function(everything).parameters == {
        "type": "object",
        "properties": {
            "text": text, "count": whole, "share": number, "sure": {"type": "boolean"}, "path": path,
            "unit": text | {"enum": ["mile", "foot"]}, "words": array | {"items": text},
            "units": array | {"items": {"enum": ["mile", 2]}}, "rows": array | {"items": array | {"items": whole}},
            "anything": array | {"items": {}}, "table": table | {"additionalProperties": True},
            "counts": table | {"additionalProperties": whole},
            "files": table | {"additionalProperties": array | {"items": path}}, "notes": table | {"additionalProperties": True},
            "gaps": array | {"items": {"anyOf": [whole, null]}},
            "tones": table | {"additionalProperties": {"anyOf": [{"enum": ["loud", 2]}, null]}},
            "maybe": {"anyOf": [whole, null]}, "perhaps": {"anyOf": [number, null]}, "limit": whole | {"default": 3},
            "folder": path | {"default": "some/where"}, "tone": text | {"enum": ["loud", "soft"], "default": "soft"},
            "found": text,
        },
        "required": [
            "text", "count", "share", "sure", "path", "unit", "words", "units", "rows", "anything", "table", "counts",
            "files", "notes", "gaps", "tones", "maybe", "perhaps",
        ],
        "additionalProperties": False,
    }  # fmt: skip


def test_classes_dates_unions_and_descriptions_become_schemas_without_references() -> None:
    colour = {"type": "string", "enum": ["red", "blue"]}
    path, text, whole = {"type": "string", "format": "path"}, {"type": "string"}, {"type": "integer"}
    sides = {"width": whole, "height": whole | {"default": 3}}
    assert Tool.from_function(typed).parameters["properties"] == {
        "colour": colour, "day": text | {"format": "date"},
        "row": {"type": "object", "properties": {"colour": colour, "file": path}, "required": ["colour"]},
        "size": {"anyOf": [{"type": "object", "properties": sides, "required": ["width"]}, text]},
        "pages": whole | {"minimum": 1, "description": "Number of pages.", "title": "Pages"},
        "tags": {"type": "array", "items": text, "uniqueItems": True},
        "by_number": {"type": "object", "additionalProperties": text}, "folder": text | {"format": "directory-path"},
        "shade": colour | {"description": "A shade."}, "tint": colour | {"default": "blue"},
        "until": {"anyOf": [text | {"format": "date-time"}, text | {"format": "date"}]}, "never": {"type": "null"},
    }  # fmt: skip


def test_a_class_may_contain_itself() -> None:
    def put(order: Order, colour: Colour) -> None:
        """Put an order."""

    parameters = Tool.from_function(put).parameters
    number = {"type": "integer", "description": "Which one."}
    parts = {"type": "array", "items": {"$ref": "#/$defs/Order"}, "default": []}
    assert parameters["properties"] == {
        "order": {"type": "object", "properties": {"number": number, "parts": parts}, "required": ["number"]},
        "colour": {"type": "string", "enum": ["red", "blue"]},
    }
    check = ArgumentChecker(put, parameters, "/")
    given = {"order": {"number": 1.0, "parts": [{"number": 2}]}, "colour": "red"}
    assert check(given) == {"order": Order(number=1, parts=[Order(number=2)]), "colour": Colour.RED}
    with pytest.raises(RefusedArgumentsError, match=r"at \$\.order\.parts\[0\]: 'number' is a required property"):
        check({"order": {"number": 1, "parts": [{}]}, "colour": "red"})


def test_a_function_whose_arguments_cannot_be_read_from_json_is_refused_by_name(subtests: pytest.Subtests) -> None:
    def several(*numbers: int) -> None:
        """Take numbers."""

    def named(**numbers: int) -> None:
        """Take numbers."""

    def by_position(a: int, /) -> None:
        """Take a."""

    def silent() -> None: ...

    uncertain = [
        Path | str, tuple[int, Path], dict[Path, int], pydantic.Json[Path], Path | datetime.date, Row | dict[str, str],
        list[Path | str], Path | Colour,
    ]  # fmt: skip
    for function, message in (
        *((taking(hint), '"format": "path" must be where .* Otherwise, use two parameters or two tools') for hint in uncertain),
        (taking(inspect.Parameter.empty), "read: each parameter must have an annotation.*; got file"),
        (taking(threading.Lock), r"(?s)read: each parameter must have an annotation.*; got file: .*lock.*: Unable to"),
        (taking(list[threading.Lock]), r"(?s)read: each parameter must have an annotation.*; got file: list\[.*\]"),
        (taking(Callable[[int], str]), "(?s)read: each parameter must have an annotation.*; got file: .*Callable"),
        (taking(Literal[Colour.RED]), "read: each .* got .*Literal.*: 1 validation error"),
        (taking(Literal[b"x"]), "read: each .* got .*Literal.*: 1 validation error"),
        (taking("Nowhere"), "read: the function's annotations cannot be read"), (dict.fromkeys, "fromkeys: "),
        (several, r"several: each .* by name; got \*numbers: int\. "), (silent, "silent: description must not be empty"),
        (named, r"named: each .* by name; got \*\*numbers: int\. "), (by_position, "by_position: each .* by name; got a: int"),
    ):  # fmt: skip
        with subtests.test(message), pytest.raises(ConfigError, match=message) as caught:
            Tool.from_function(function)
        assert str(caught.value).startswith(f"Tool {function.__name__}: ")


def test_a_function_gives_its_name_and_its_docstring_unless_they_are_given() -> None:
    made = Tool.from_function(everything)
    assert (made.name, made.description, made.function) == ("everything", "Take everything.\n\nAt once.", everything)
    made.properties["text"]["default"] = "changed"
    assert Tool.from_function(everything).properties["text"] == {"type": "string"}, "two tools share no schema"
    given = {"name": "hello", "description": "Greet.", "category": "talk", "timeout": 2.0, "cost": 0.5}
    made = Tool.from_function(add, **given)
    assert {field: getattr(made, field) for field in given} == given
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}}
    assert Tool.from_function(taking(inspect.Parameter.empty), parameters=schema).parameters == schema


def test_a_default_that_json_cannot_hold_leaves_the_parameter_optional() -> None:
    def wait(sure: Literal["yes", "no"] = Colour.RED) -> None:  # type: ignore[assignment]
        """Wait."""

    made = Tool.from_function(wait)
    assert made.properties == {"sure": {"type": "string", "enum": ["yes", "no"]}}
    assert made.choices[0].values == ("yes", "no", ABSENT)

    def share(part: float = math.nan, lock: Any = threading.Lock()) -> None:  # noqa: B008
        """Share."""

    assert Tool.from_function(share).properties == {"part": {"type": "number"}, "lock": {}}


def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


class Adder:
    """Add to a number."""

    def __call__(self, a: int) -> int:
        return a + 1


def test_a_function_without_a_name_requires_name() -> None:
    partly = functools.partial(functools.partial(add), b=3)
    for function in (partly, Adder()):
        with pytest.raises(ConfigError, match=r"^Tool: name must be a text; got NoneType None"):
            Tool.from_function(function)
    made = Tool.from_function(partly, name="plus_three")
    assert (made.name, made.description) == ("plus_three", "Add two numbers.")
    assert made.properties == {"a": {"type": "integer"}, "b": {"type": "integer", "default": 3}}
    assert made.function(a=1) == 4
    made = Tool.from_function(Adder(), name="plus_one")
    assert (made.description, made.properties) == ("Add to a number.", {"a": {"type": "integer"}})

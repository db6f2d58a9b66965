"""Tools from functions: schemas read from annotations, names and descriptions."""

import datetime
import enum
import functools
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


def ping() -> str:
    """Say that you are there."""
    return "pong"


def everything(
    text: str,
    count: int,
    share: float,
    sure: bool,
    path: Path,
    unit: Literal["mile", "foot"],
    words: list[str],
    units: list[Literal["mile", 2]],
    rows: list[list[int]],
    anything: list,
    table: dict,
    counts: dict[str, int],
    files: dict[str, list[Path]],
    notes: dict[str, Any],
    gaps: list[int | None],
    tones: dict[str, Literal["loud", 2] | None],
    maybe: int | None,
    perhaps: Optional[float],  # noqa: UP045  # the older spelling has to work too
    limit: int = 3,
    folder: Path = Path("some/where"),
    tone: Literal["loud", "soft"] = "soft",
    found: str | None = None,
) -> None:
    """Take everything.

    At once.
    """


# --- from functions


def test_each_annotation_becomes_its_schema() -> None:
    text, path, whole, null = (
        {"type": "string"},
        {"type": "string", "format": "path"},
        {"type": "integer"},
        {"type": "null"},
    )
    assert Tool.from_function(everything).parameters == {
        "type": "object",
        "properties": {
            "text": text,
            "count": whole,
            "share": {"type": "number"},
            "sure": {"type": "boolean"},
            "path": path,
            "unit": text | {"enum": ["mile", "foot"]},
            "words": {"type": "array", "items": text},
            "units": {"type": "array", "items": {"enum": ["mile", 2]}},
            "rows": {"type": "array", "items": {"type": "array", "items": whole}},
            "anything": {"type": "array", "items": {}},
            "table": {"type": "object", "additionalProperties": True},
            "counts": {"type": "object", "additionalProperties": whole},
            "files": {"type": "object", "additionalProperties": {"type": "array", "items": path}},
            "notes": {"type": "object", "additionalProperties": True},
            "gaps": {"type": "array", "items": {"anyOf": [whole, null]}},
            "tones": {"type": "object", "additionalProperties": {"anyOf": [{"enum": ["loud", 2]}, null]}},
            "maybe": {"anyOf": [whole, null]},
            "perhaps": {"anyOf": [{"type": "number"}, null]},
            "limit": whole | {"default": 3},
            "folder": path | {"default": "some/where"},
            "tone": text | {"enum": ["loud", "soft"], "default": "soft"},
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
    assert Tool.from_function(typed).parameters["properties"] == {
        "colour": colour,
        "day": text | {"format": "date"},
        "row": {"type": "object", "properties": {"colour": colour, "file": path}, "required": ["colour"]},
        "size": {"anyOf": [
            {"type": "object", "properties": {"width": whole, "height": whole | {"default": 3}}, "required": ["width"]}, text,
        ]},
        "pages": whole | {"minimum": 1, "description": "Number of pages.", "title": "Pages"},
        "tags": {"type": "array", "items": text, "uniqueItems": True},
        "by_number": {"type": "object", "additionalProperties": text},
        "folder": text | {"format": "directory-path"},
        "shade": colour | {"description": "A shade."},
        "tint": colour | {"default": "blue"},
        "until": {"anyOf": [text | {"format": "date-time"}, text | {"format": "date"}]},
        "never": {"type": "null"},
    }  # fmt: skip


def test_a_class_may_contain_itself() -> None:
    def put(order: Order, colour: Colour) -> None:
        """Put an order."""

    parameters = Tool.from_function(put).parameters
    assert parameters["properties"] == {
        "order": {
            "type": "object",
            "properties": {
                "number": {"type": "integer", "description": "Which one."},
                "parts": {"type": "array", "items": {"$ref": "#/$defs/Order"}, "default": []},
            },
            "required": ["number"],
        },
        "colour": {"type": "string", "enum": ["red", "blue"]},
    }
    check = ArgumentChecker(put, parameters, "/")
    given = {"order": {"number": 1.0, "parts": [{"number": 2}]}, "colour": "red"}
    assert check(given) == {"order": Order(number=1, parts=[Order(number=2)]), "colour": Colour.RED}
    with pytest.raises(RefusedArgumentsError, match=r"at \$\.order\.parts\[0\]: 'number' is a required property"):
        check({"order": {"number": 1, "parts": [{}]}, "colour": "red"})


def test_the_policy_decides_the_members_of_an_enum() -> None:
    made = Tool.from_function(typed)
    assert {choice.name: choice.values for choice in made.choices} == {
        "colour": ("red", "blue"),
        "shade": ("red", "blue", ABSENT),
        "tint": ("red", "blue"),
        "never": (None, ABSENT),
    }
    assert made.choices[0].texts == ("red colour", "blue colour")
    assert made.choices[1].texts[0] == "red A shade. shade"


def test_annotations_that_leave_a_path_uncertain_are_refused(subtests: pytest.Subtests) -> None:
    for hint in (
        Path | str, tuple[int, Path], dict[Path, int], pydantic.Json[Path], Path | datetime.date, Row | dict[str, str],
        list[Path | str], Path | Colour,
    ):  # fmt: skip

        def read(file: hint) -> None:  # type: ignore[valid-type]
            """Read."""

        with (
            subtests.test(str(hint)),
            pytest.raises(ConfigError, match='Tool read: parameters: "format": "path" must be'),
        ):
            Tool.from_function(read)


def test_a_function_gives_its_name_and_its_docstring() -> None:
    made = Tool.from_function(everything)
    assert made.name == "everything"
    assert made.description == "Take everything.\n\nAt once."
    assert made.function is everything


def test_two_tools_from_functions_share_no_schema() -> None:
    Tool.from_function(everything).properties["text"]["default"] = "changed"
    assert Tool.from_function(everything).properties["text"] == {"type": "string"}


def test_given_fields_override_those_read_from_the_function() -> None:
    made = Tool.from_function(ping, name="hello", description="Greet.", category="talk", timeout=2.0, cost=0.5)
    assert (made.name, made.description, made.category, made.timeout, made.cost) == (
        "hello",
        "Greet.",
        "talk",
        2.0,
        0.5,
    )


def test_a_schema_that_is_given_is_not_read_from_annotations() -> None:
    def unannotated(a):
        """Take anything."""

    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}}
    assert Tool.from_function(unannotated, parameters=schema).parameters == schema


def test_annotations_without_a_json_schema_are_refused_by_name() -> None:
    def unannotated(a) -> None:
        """Take a."""

    def locked(a: int, b: threading.Lock) -> None:
        """Take b."""

    def several(b: list[threading.Lock]) -> None:
        """Take b."""

    def calls(c: Callable[[int], str]) -> None:
        """Take c."""

    for function, shown in (
        (unannotated, "a"), (locked, r"b: .*lock.*: Unable to"), (several, r"b: list\[.*\]"), (calls, r"c: .*Callable"),
    ):  # fmt: skip
        with pytest.raises(
            ConfigError, match=rf"(?s)^Tool {function.__name__}: each parameter must have an annotation.*; got {shown}"
        ):
            Tool.from_function(function)


class Tone(enum.StrEnum):
    LOUD = "loud"


def test_literals_that_cannot_be_made_from_json_are_refused() -> None:
    def painted(colour: Literal[Colour.RED]) -> None:
        """Paint."""

    def sent(what: Literal[b"x"]) -> None:
        """Send it."""

    for function in (painted, sent):
        with pytest.raises(
            ConfigError, match=rf"^Tool {function.__name__}: each .* got .*Literal.*: 1 validation error"
        ):
            Tool.from_function(function)

    def said(tone: Literal[Tone.LOUD, "soft"]) -> None:
        """Say it."""

    assert Tool.from_function(said).choices[0].values == ("loud", "soft")


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


def test_annotations_that_cannot_be_resolved_are_refused() -> None:
    def forward(a: "Nowhere") -> None:  # type: ignore[name-defined]
        """Take a."""

    for function in (forward, dict.fromkeys):
        with pytest.raises(ConfigError, match=rf"^Tool {function.__name__}: "):
            Tool.from_function(function)


def test_parameters_that_cannot_be_passed_by_name_are_refused() -> None:
    def several(*numbers: int) -> None:
        """Take numbers."""

    def named(**numbers: int) -> None:
        """Take numbers."""

    def by_position(a: int, /) -> None:
        """Take a."""

    for function, shown in ((several, r"\*numbers: int"), (named, r"\*\*numbers: int"), (by_position, "a: int")):
        with pytest.raises(ConfigError, match=rf"^Tool {function.__name__}: each .* by name; got {shown}\. "):
            Tool.from_function(function)


def test_a_function_without_docstring_is_refused() -> None:
    def silent() -> None: ...

    with pytest.raises(ConfigError, match="Tool silent: description must not be empty"):
        Tool.from_function(silent)

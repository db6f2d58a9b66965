"""Tools from functions: schemas read from annotations, names and descriptions."""

import enum
import functools
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from adapters.tools.catalogue.arguments import ArgumentChecker, RefusedArgumentsError
from adapters.tools.catalogue.tools import ABSENT, Tool
from grpo.errors import ConfigError


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
    assert Tool.from_function(everything).parameters == {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "sure": {"type": "boolean"},
            "path": {"type": "string", "format": "path"},
            "unit": {"enum": ["mile", "foot"]},
            "words": {"type": "array", "items": {"type": "string"}},
            "units": {"type": "array", "items": {"enum": ["mile", 2]}},
            "rows": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            "anything": {"type": "array", "items": {}},
            "table": {"type": "object"},
            "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
            "files": {
                "type": "object",
                "additionalProperties": {"type": "array", "items": {"type": "string", "format": "path"}},
            },
            "notes": {"type": "object"},
            "gaps": {"type": "array", "items": {"type": ["integer", "null"]}},
            "tones": {"type": "object", "additionalProperties": {"enum": ["loud", 2, None]}},
            "maybe": {"type": "integer"},
            "perhaps": {"type": "number"},
            "limit": {"type": "integer", "default": 3},
            "folder": {"type": "string", "format": "path", "default": "some/where"},
            "tone": {"enum": ["loud", "soft"], "default": "soft"},
            "found": {"type": "string"},
        },
        "required": [
            "text", "count", "share", "sure", "path", "unit", "words", "units", "rows", "anything", "table", "counts",
            "files", "notes", "gaps", "tones", "maybe", "perhaps",
        ],
        "additionalProperties": False,
    }  # fmt: skip


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


def test_annotations_without_a_known_schema_are_refused_by_name() -> None:
    def unannotated(a) -> None:
        """Take a."""

    def a_set(a: int, b: set[int]) -> None:
        """Take b."""

    def sets(b: list[set[int]]) -> None:
        """Take b."""

    def either(c: int | str) -> None:
        """Take c."""

    for function, name, got in (
        (unannotated, "a", "None"), (a_set, "b", r"set\[int\]"), (sets, "b", r"list\[set\[int\]\]"),
        (either, "c", r"int \| str"),
    ):  # fmt: skip
        message = rf"^{function.__name__}: parameter {name} must have a supported annotation: str, .*; got {got}\. "
        with pytest.raises(ConfigError, match=message):
            Tool.from_function(function)


class Colour(enum.Enum):
    RED = "red"


class Tone(enum.StrEnum):
    LOUD = "loud"


def test_choices_that_json_cannot_hold_are_refused_by_name() -> None:
    def painted(colour: Literal[Colour.RED]) -> None:
        """Paint."""

    def said(tone: Literal[Tone.LOUD, "soft"]) -> None:
        """Say it."""

    def sent(what: Literal[b"x"]) -> None:
        """Send it."""

    def listed(what: list[Literal[Colour.RED]]) -> None:
        """List it."""

    def by_number(of: dict[int, str]) -> None:
        """Take texts by number."""

    def sets(of: dict[str, set[int]]) -> None:
        """Take sets by name."""

    for function, name in (
        (painted, "colour"), (said, "tone"), (sent, "what"), (listed, "what"), (by_number, "of"), (sets, "of"),
    ):  # fmt: skip
        with pytest.raises(
            ConfigError, match=rf"^{function.__name__}: parameter {name} must have a supported .*; got "
        ):
            Tool.from_function(function)


def test_a_default_that_json_cannot_hold_leaves_the_parameter_optional() -> None:
    def wait(sure: Literal["yes", "no"] = Colour.RED) -> None:  # type: ignore[assignment]
        """Wait."""

    made = Tool.from_function(wait)
    assert made.properties == {"sure": {"enum": ["yes", "no"]}}
    assert made.choices[0].values == ("yes", "no", ABSENT)


def test_paths_in_a_dict_are_confined(tmp_path: Path) -> None:
    def read(files: dict[str, Path]) -> str:
        """Read files."""
        return "".join(path.read_text() for path in files.values())

    check = ArgumentChecker(read, Tool.from_function(read).parameters, str(tmp_path))
    assert check({"files": {"a": "b.txt"}}) == {"files": {"a": tmp_path.resolve() / "b.txt"}}
    with pytest.raises(RefusedArgumentsError, match="must lie in the tools' folder"):
        check({"files": {"a": "b.txt", "c": "../../etc/passwd"}})
    with pytest.raises(RefusedArgumentsError, match="is not of type 'string'"):
        check({"files": {"a": 1}})


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
        with pytest.raises(
            ConfigError, match=r"^Tool\.from_function: the function must have a name; .* has none\. Pass name="
        ):
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
        with pytest.raises(ConfigError, match=rf"^{function.__name__}: "):
            Tool.from_function(function)


def test_parameters_that_cannot_be_passed_by_name_are_refused() -> None:
    def several(*numbers: int) -> None:
        """Take numbers."""

    def named(**numbers: int) -> None:
        """Take numbers."""

    def by_position(a: int, /) -> None:
        """Take a."""

    for function, shown in ((several, r"\*numbers: int"), (named, r"\*\*numbers: int"), (by_position, "a: int")):
        with pytest.raises(ConfigError, match=rf"^{function.__name__}: it must be possible .* by name; got {shown}\. "):
            Tool.from_function(function)


def test_a_function_without_docstring_is_refused() -> None:
    def silent() -> None: ...

    with pytest.raises(ConfigError, match="Tool silent: description must not be empty"):
        Tool.from_function(silent)

"""What a tool's function receives: what its annotations say."""

import datetime
import functools
import threading
from pathlib import Path
from typing import Any

import pydantic
import pytest
from pydantic_core import core_schema

from adapters.tools.catalogue.arguments import ArgumentChecker, RefusedArgumentsError
from adapters.tools.catalogue.tools import Tool
from tests.support.annotated import Colour, Row, Size, typed


def test_a_function_receives_what_its_annotation_says() -> None:
    check = ArgumentChecker(typed, Tool.from_function(typed).parameters, "/")
    arguments = {
        "colour": "red", "day": "2024-02-29", "row": {"colour": "blue", "file": "usr"}, "size": {"width": 2}, "tint": "red",
        "pages": 3, "tags": ["a"], "by_number": {"7": "x"},
        "folder": "usr", "until": "2024-02-29T10:00:00Z",
    }  # fmt: skip
    assert check(arguments) == {
        "colour": Colour.RED,
        "day": datetime.date(2024, 2, 29),
        "row": {"colour": Colour.BLUE, "file": Path("/usr").resolve()},
        "size": Size(2, 3),
        "tint": Colour.RED,
        "pages": 3,
        "tags": {"a"},
        "by_number": {7: "x"},
        "folder": Path("/usr").resolve(),
        "until": datetime.datetime(2024, 2, 29, 10, tzinfo=datetime.UTC),
    }
    assert check(arguments | {"size": "large"})["size"] == "large"
    for wrong, message in (
        ({"colour": "green"}, r"at \$\.colour: 'green' is not one of"),
        ({"day": "2023-02-29"}, r"at \$\.day: Input should be a"),
        ({"by_number": {"x": "y"}}, r"at \$\.by_number\['x'\].*: Input should be a valid integer"),
        ({"folder": "no/such/folder"}, r"at \$\.folder: Path does not point to a directory"),
        ({"folder": "../../x" * 3}, "does not point"), ({"row": {"colour": "red", "file": 3}}, "3 is not of type 'string'"),
    ):  # fmt: skip
        with pytest.raises(RefusedArgumentsError, match=message) as caught:
            check(arguments | wrong)
        assert caught.value.error == "InvalidArgumentsError"


def test_paths_within_classes_are_confined(tmp_path: Path) -> None:
    def keep(row: Row, rows: list[Row], folder: pydantic.DirectoryPath) -> None:
        """Keep rows."""

    check = ArgumentChecker(keep, Tool.from_function(keep).parameters, str(tmp_path))
    inside, outside = {"colour": "red", "file": "a"}, {"colour": "red", "file": "../a"}
    assert check({"row": inside, "rows": [inside], "folder": "."})["rows"][0]["file"] == tmp_path.resolve() / "a"
    for wrong in ({"row": outside}, {"rows": [inside, outside]}, {"folder": ".."}):
        with pytest.raises(RefusedArgumentsError) as caught:
            check({"row": inside, "rows": [inside], "folder": "."} | wrong)
        assert caught.value.error == "PathOutsideRootError"


class Even(int):
    """A class with a validator of its own, which raises whatever it likes."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        def check(value: int) -> int:
            if value % 2:
                raise KeyError(value)
            return cls(value)

        return core_schema.no_info_after_validator_function(check, handler(int))


def test_a_validator_that_raises_refuses_the_arguments() -> None:
    def halve(number: Even) -> int:
        """Halve a number."""
        return number // 2

    check = ArgumentChecker(halve, Tool.from_function(halve).parameters, "/")
    assert type(check({"number": 4})["number"]) is Even
    with pytest.raises(RefusedArgumentsError, match=r"at \$\.number: the value cannot be converted: KeyError\(3\)\.$"):
        check({"number": 3})


class Plan(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    days: set[datetime.date]


def test_values_that_json_can_represent_are_not_changed_or_refused() -> None:
    def keep(text: str, anything: Any, whole: int, share: float, plan: Plan) -> None:
        """Keep values."""

    check = ArgumentChecker(keep, Tool.from_function(keep).parameters, "/")
    given = {"text": "\ud800\0", "anything": ["\ud800", 2.0, 10**400], "whole": 10**400, "share": 2.5}
    plan = {"plan": {"days": ["2024-02-29"]}}
    assert check(given | plan) == given | {"plan": Plan(days={datetime.date(2024, 2, 29)})}
    with pytest.raises(RefusedArgumentsError, match=r"at \$\.share: Input should be a valid number"):
        check(given | plan | {"share": 10**400})


def test_a_number_that_may_be_an_integer_keeps_its_fraction() -> None:
    def scale(by: int | float, each: list[float | int]) -> None:  # pydantic makes a branch of each
        """Scale numbers."""

    check = ArgumentChecker(scale, Tool.from_function(scale).parameters, "/")
    assert check({"by": 2.5, "each": [1.5, -0.5]}) == {"by": 2.5, "each": [1.5, -0.5]}


class Diary:
    """Keep days."""

    def __call__(self, day: datetime.date, note: Path) -> None: ...

    def keep(self, day: datetime.date, note: Path) -> None: ...


def write(text: str, day: datetime.date, note: Path) -> None:
    """Write a note."""


def test_objects_methods_and_partial_functions_receive_what_their_annotations_say() -> None:
    for function in (Diary(), Diary().keep, functools.partial(write, "text"), functools.partial(write, text="text")):
        tool = Tool.from_function(function, name="write", description="Write.")
        assert tool.required_free == ("day", "note")
        found = ArgumentChecker(function, tool.parameters, "/")({"day": "2024-02-29", "note": "a"})
        assert found == {"day": datetime.date(2024, 2, 29), "note": Path("/a")}


def test_a_function_with_a_schema_of_its_own_receives_what_its_annotations_say() -> None:
    def mix(colour: Colour, other: object, path: Path, odd: threading.Lock) -> None:
        """Mix colours."""

    free = {"type": "object", "properties": {name: {} for name in ("colour", "other", "path", "odd")}}
    check = ArgumentChecker(mix, free, "/")
    given = {"colour": "red", "other": "red", "path": "a", "odd": 1}
    assert check(given) == {"colour": Colour.RED, "other": "red", "path": "a", "odd": 1}, (
        "only confined texts become paths"
    )


def test_only_texts_that_the_schema_marks_become_paths() -> None:
    def read(paths: Path | list[Path]) -> None:
        """Read paths."""

    path, text = {"type": "string", "format": "path"}, {"type": "string"}
    for of_one, of_list, expected in (
        (path, path, Path("/a")),
        (path, text, "/a"),
        (text, path, "a"),
        (text, text, "a"),
    ):
        schema = {"anyOf": [of_one, {"type": "array", "items": of_list}]}
        check = ArgumentChecker(read, {"type": "object", "properties": {"paths": schema}}, "/")
        assert check({"paths": "a"}) == {"paths": expected}
        assert ArgumentChecker(read, {"type": "object", "additionalProperties": schema}, "/")({"paths": "a"}) == {
            "paths": expected
        }

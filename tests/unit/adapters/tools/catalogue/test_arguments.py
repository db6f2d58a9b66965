"""Arguments: JSON of bounded size that matches the schema, with every path inside the tools' folder."""

import asyncio
import datetime
import functools
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pytest

from adapters.tools.catalogue.arguments import (
    MAX_BYTES,
    ArgumentChecker,
    RefusedArgumentsError,
    bounded_text,
    confine,
    encode_arguments,
)
from adapters.tools.catalogue.tools import Tool
from tests.support import tool_functions
from tests.support.annotated import Colour, Size, typed

PATH = {"type": "string", "format": "path"}
PATHS = {"type": "array", "items": PATH}


def checker(function: Any = tool_functions.echo, **properties: Any) -> ArgumentChecker:
    return ArgumentChecker(function, {"type": "object", "properties": properties}, "/usr")


def nested(value: Any, depth: int, width: int = 1) -> Any:
    for _ in range(depth):
        value = [value] * width
    return value


CIRCLE: dict[Any, Any] = {}
CIRCLE["a"] = CIRCLE
LAUGHS = nested("ha", 100, 10)  # 10**100 texts


# --- paths
def test_paths_are_resolved_against_the_folder(subtests: pytest.Subtests) -> None:
    check = checker(x=PATH, name={"type": "string"}, maybe={"anyOf": [{"type": "null"}, PATH]}, many=PATHS)
    for given, found in {
        "lib": "/usr/lib", "lib/../share/./x": "/usr/share/x", "/usr/lib": "/usr/lib", "": "/usr", "~": "/usr/~",
    }.items():  # fmt: skip
        with subtests.test(given=given):
            arguments = check({"x": given, "name": given, "many": [given], "maybe": None})
            assert arguments == {"x": found, "name": given, "many": [found], "maybe": None}
            assert {type(arguments["x"]), type(arguments["name"])} == {str}
    check = checker(a={"type": "string"}, b=PATH, c={"enum": ["x"]}, d={"type": "string", "format": "date"})
    changed = {"a": "x", "b": "/usr/x", "c": "x", "d": "x"}
    assert check(dict.fromkeys("abcd", "x")) == changed, "only marked texts change"


def refusal(message: str, function: Callable[..., Any], *arguments: Any) -> str:
    """The name of the error with which a function refuses arguments."""
    with pytest.raises(RefusedArgumentsError, match=message) as caught:
        function(*arguments)
    return caught.value.error


def test_paths_outside_the_root_are_refused(subtests: pytest.Subtests) -> None:
    for value in ("../etc", "/etc/passwd", "lib/../../x", "/", "//etc", "/usr/../etc", "/usrx", "../usrx/a"):
        with subtests.test(value=value):
            assert refusal("must lie in the tools' folder", confine, value, "/usr") == "PathOutsideRootError"


def test_links_are_followed_before_the_root_is_checked(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name, target in {"in": "a", "out": "../b", "chain": "out", "dangling": "/no/such", "loop": "loop"}.items():
        (root / name).symlink_to(target)
    assert confine("in", str(root)) == root / "a"
    for name, message, error in (
        *((name, "must lie in", "PathOutsideRootError") for name in ("out", "chain", "dangling")),
        ("loop", "cannot be resolved", "InvalidArgumentsError"), ("a\0", "resolved: embedded null", "InvalidArgumentsError"),
    ):  # fmt: skip
        assert refusal(message, confine, name, str(root)) == error
    (tmp_path / "link").symlink_to("root")  # a root that is a link is followed first
    schema = {"type": "object", "properties": {"path": PATH}}
    check = ArgumentChecker(tool_functions.read, schema, str(tmp_path / "link"))
    assert check({"path": "x"}) == {"path": root / "x"}
    assert check.at("/usr")({"path": "x"}) == {"path": Path("/usr/x")}
    assert check({"path": "x"}) == {"path": root / "x"}


def test_arguments_the_schema_lacks_are_refused_unless_it_allows_them() -> None:
    refusal("'c' was unexpected", checker(a={"type": "integer"}), {"a": 1, "c": 2})
    refusal("^.{500,1099}$", checker(a={"type": "integer"}), {"a": "x" * 50_000})  # messages are of bounded length
    for allowed in (True, {"type": "integer"}):
        opened = {"type": "object", "properties": {"a": {}}, "additionalProperties": allowed}
        assert ArgumentChecker(tool_functions.add, opened, "/usr")({"a": 1, "c": 2}) == {"a": 1, "c": 2}


class Sneaky(str):
    """Claims to be short."""

    def __len__(self) -> int:
        return 0


def test_arguments_that_are_no_object_of_json_values_are_refused(subtests: pytest.Subtests) -> None:
    for name, arguments, message in (
        ("list", [], "must be an object"), ("nothing", None, "must be an object"), ("text", "{}", "must be an object"),
        ("number as a key", {1: 2}, "keys of objects must be text; got int"),
        ("null as a deeper key", {"a": {None: 1}}, "keys of objects must be text; got NoneType"),
        ("NaN", {"a": math.nan}, "finite"), ("infinity", {"a": [math.inf]}, "finite"), ("bytes", {"a": b"x"}, "got bytes"),
        ("set", {"a": {1}}, "got set"), ("complex", {"a": 1j}, "got complex"), ("range", {"a": range(3)}, "got range"),
        ("long text", {"a": "x" * 10**7}, "at most 100000 bytes"), ("long key", {"x" * 10**7: 1}, "at most 100000 bytes"),
        ("long list", {"a": [0] * 10**6}, "at most 100000 bytes"),
        ("wide characters", {"a": "\u20ac" * 20_000}, "at most 100000 bytes"),
        ("text that lies", {"a": Sneaky("x" * 10**6)}, "at most 100000 bytes"),
        ("digits", {"a": 10**5000}, "raises ValueError"),
        ("circle", CIRCLE, "nested at most 32 lists or objects deep"), ("laughs", {"a": LAUGHS}, "32 lists or objects"),
        ("wide laughs", {"a": nested("ha", 20, 10)}, "at most 100000 bytes"),
    ):  # fmt: skip
        with subtests.test(name):
            assert refusal(message, encode_arguments, arguments) == "InvalidArgumentsError"


def test_arguments_that_raise_while_they_are_read_are_refused_unless_somebody_presses_ctrl_c() -> None:
    class Raises(dict[str, Any]):
        def __init__(self, error: BaseException) -> None:
            super().__init__(a=1)
            self.error = error

        def items(self) -> Any:
            raise self.error

    for error in (KeyError("a"), ValueError(), SystemExit(), asyncio.CancelledError()):
        for arguments in (Raises(error), {"a": Raises(error)}):
            message = f"cannot be read: reading them raises {type(error).__name__}"
            refusal(message, encode_arguments, arguments)
    interrupted = {"a": Raises(KeyboardInterrupt())}
    with pytest.raises(KeyboardInterrupt):
        encode_arguments(interrupted)
    with ThreadPoolExecutor(1) as threads:
        refusal("raises KeyboardInterrupt", threads.submit(encode_arguments, interrupted).result)


def test_arguments_of_exactly_the_largest_size_and_depth_pass() -> None:
    size = MAX_BYTES - len('{"a": ""}')
    assert len(encode_arguments({"a": "x" * size})) == MAX_BYTES
    assert encode_arguments({"a": nested(0, 31)}) == '{"a": ' + "[" * 31 + "0" + "]" * 31 + "}"
    refusal(f"at most {MAX_BYTES} bytes", encode_arguments, {"a": "x" * (size + 1)})
    refusal("nested at most 32", encode_arguments, {"a": nested(0, 32)})


def test_any_value_has_a_text_of_bounded_length(subtests: pytest.Subtests) -> None:
    class Kind(type):
        @property
        def __name__(cls) -> str:  # type: ignore[override]
            raise RuntimeError

    for value, text in (
        ({"a": [1, (2.5, None)]}, '{"a": [1, [2.5, null]]}'), ("é\n", r'"\u00e9\n"'), ({}, "{}"), ({b"b": True}, "<dict>"),
        (10**5000, "<int>"), (object(), "<object>"), (Sneaky("a"), '"a"'), ({1: {2}}, "<dict>"),
        ("x" * 50, '"' + "x" * 39 + "..."), ("x" * 10**8, "<str>"), ([[]] * 10**6, "<list>"), (CIRCLE, "<dict>"),
        (LAUGHS, "<list>"), (Kind("Odd", (), {})(), "<Odd>"),
    ):  # fmt: skip
        with subtests.test(text=text):
            assert bounded_text(value, 40) == text


# --- What a tool's function receives
def test_a_function_receives_what_its_annotation_says() -> None:
    check = ArgumentChecker(typed, Tool.from_function(typed).parameters, "/")
    arguments = {
        "colour": "red", "day": "2024-02-29", "row": {"colour": "blue", "file": "usr"}, "size": {"width": 2}, "tint": "red",
        "pages": 3, "tags": ["a"], "by_number": {"7": "x"}, "folder": "usr", "until": "2024-02-29T10:00:00Z",
    }  # fmt: skip
    assert check(arguments) == {
        "colour": Colour.RED, "day": datetime.date(2024, 2, 29), "row": {"colour": Colour.BLUE, "file": Path("/usr").resolve()},
        "size": Size(2, 3), "tint": Colour.RED, "pages": 3, "tags": {"a"}, "by_number": {7: "x"},
        "folder": Path("/usr").resolve(), "until": datetime.datetime(2024, 2, 29, 10, tzinfo=datetime.UTC),
    }  # fmt: skip
    assert check(arguments | {"size": "large"})["size"] == "large"
    for wrong, message in (
        ({"colour": "green"}, r"at \$\.colour: 'green' is not one of"),
        ({"day": "2023-02-29"}, r"at \$\.day: Input should be a"),
        ({"by_number": {"x": "y"}}, r"at \$\.by_number\['x'\].*: Input should be a valid integer"),
        ({"folder": "no/such/folder"}, r"at \$\.folder: Path does not point to a directory"),
        ({"folder": "../../x" * 3}, "does not point"), ({"row": {"colour": "red", "file": 3}}, "3 is not of type 'string'"),
    ):  # fmt: skip
        assert refusal(message, check, arguments | wrong) == "InvalidArgumentsError"


def refuse_odd(number: int) -> int:
    if number % 2:
        raise KeyError(number)
    return -number


def test_a_validator_that_raises_refuses_the_arguments() -> None:
    def halve(number: Annotated[int, pydantic.AfterValidator(refuse_odd)]) -> int:
        """Halve a number."""
        return number // 2

    check = ArgumentChecker(halve, Tool.from_function(halve).parameters, "/")
    assert check({"number": 4}) == {"number": -4}
    refusal(r"at \$\.number: the value cannot be converted: KeyError\(3\)\.$", check, {"number": 3})


class Plan(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    days: set[datetime.date]


def test_values_that_json_can_represent_are_not_changed_or_refused() -> None:
    def keep(text: str, anything: Any, whole: int, share: float, plan: Plan) -> None:
        """Keep values."""

    def scale(by: int | float, each: list[float | int]) -> None:  # pydantic makes a branch of each
        """Scale numbers."""

    check = ArgumentChecker(keep, Tool.from_function(keep).parameters, "/")
    given = {"text": "\ud800\0", "anything": ["\ud800", 2.0, 10**400], "whole": 10**400, "share": 2.5}
    plan = {"plan": {"days": ["2024-02-29"]}}
    assert check(given | plan) == given | {"plan": Plan(days={datetime.date(2024, 2, 29)})}
    refusal(r"at \$\.share: Input should be a valid number", check, given | plan | {"share": 10**400})
    fractions = {"by": 2.5, "each": [1.5, -0.5]}
    assert ArgumentChecker(scale, Tool.from_function(scale).parameters, "/")(fractions) == fractions


class Diary:
    """Keep days."""

    def __call__(self, day: datetime.date, note: Path) -> None: ...
    def keep(self, day: datetime.date, note: Path) -> None: ...


def write(text: str, day: datetime.date, note: Path) -> None: ...


def test_objects_methods_and_partial_functions_receive_what_their_annotations_say() -> None:
    for function in (Diary(), Diary().keep, functools.partial(write, "text"), functools.partial(write, text="text")):
        tool = Tool.from_function(function, name="write", description="Write.")
        assert tool.required_free == ("day", "note")
        found = ArgumentChecker(function, tool.parameters, "/")({"day": "2024-02-29", "note": "a"})
        assert found == {"day": datetime.date(2024, 2, 29), "note": Path("/a")}


def test_a_function_with_a_schema_of_its_own_receives_what_its_annotations_say() -> None:
    """Only confined texts become paths."""

    def mix(colour: Colour, other: object, path: Path, odd: threading.Lock) -> None:
        """Mix colours."""

    free = {"type": "object", "properties": {name: {} for name in ("colour", "other", "path", "odd")}}
    given = {"colour": "red", "other": "red", "path": "a", "odd": 1}
    assert ArgumentChecker(mix, free, "/")(given) == given | {"colour": Colour.RED}

    def unknown(path: "Nowhere") -> None: ...  # noqa: F821

    assert checker(unknown, path=PATH)({"path": "a"}) == {"path": "/usr/a"}


def test_only_texts_that_the_schema_marks_become_paths() -> None:
    def read(paths: Path | list[Path]) -> None:
        """Read paths."""

    text = {"type": "string"}
    for of_one, of_list, expected in (
        (PATH, PATH, Path("/a")), (PATH, text, "/a"), (text, PATH, "a"), (text, text, "a"),
    ):  # fmt: skip
        schema = {"anyOf": [of_one, {"type": "array", "items": of_list}]}
        for named in ({"properties": {"paths": schema}}, {"additionalProperties": schema}):
            assert ArgumentChecker(read, {"type": "object", **named}, "/")({"paths": "a"}) == {"paths": expected}

"""Arguments: JSON of bounded size that matches the schema, with every path inside the tools' folder."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapters.tools.catalogue.arguments import (
    MAX_BYTES,
    ArgumentChecker,
    RefusedArgumentsError,
    bounded_text,
    confine,
    encode_arguments,
)
from tests.support import tool_functions

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


def test_a_text_of_another_format_is_not_treated_as_a_path() -> None:
    assert checker(x={"type": "string", "format": "date"})({"x": "no date"}) == {"x": "no date"}


def test_a_text_that_equals_a_path_is_not_changed() -> None:
    check = checker(a={"type": "string"}, b=PATH, c={"enum": ["x"]})
    assert check({"a": "x", "b": "x", "c": "x"}) == {"a": "x", "b": "/usr/x", "c": "x"}


def test_a_parameter_annotated_with_path_receives_path_objects() -> None:
    def f(one: Path, many: list[Path], maybe: Path | None, text: str) -> None: ...

    check = checker(f, one=PATH, many=PATHS, maybe=PATH, text=PATH)
    assert check({"one": "a", "many": ["b"], "maybe": "c", "text": "d"}) == {
        "one": Path("/usr/a"), "many": [Path("/usr/b")], "maybe": Path("/usr/c"), "text": "/usr/d",
    }  # fmt: skip


def test_parameters_whose_annotations_cannot_be_resolved_receive_texts() -> None:
    def f(one: "Nowhere") -> None: ...  # type: ignore[name-defined]

    assert checker(f, one=PATH)({"one": "a"}) == {"one": "/usr/a"}


def test_paths_outside_the_root_are_refused(subtests: pytest.Subtests) -> None:
    for value in ("../etc", "/etc/passwd", "lib/../../x", "/", "//etc", "/usr/../etc", "/usrx", "../usrx/a"):
        with (
            subtests.test(value=value),
            pytest.raises(RefusedArgumentsError, match="must lie in the tools' folder") as caught,
        ):
            confine(value, "/usr")
        assert caught.value.error == "PathOutsideRootError"


def test_links_are_followed_before_the_root_is_checked(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    root = str(tmp_path / "root")
    for name, target in {"in": "a", "out": "../b", "chain": "out", "dangling": "/no/such", "loop": "loop"}.items():
        (tmp_path / "root" / name).symlink_to(target)
    assert confine("in", root) == tmp_path / "root" / "a"
    for name in ("out", "chain", "dangling"):
        with pytest.raises(RefusedArgumentsError) as caught:
            confine(name, root)
        assert caught.value.error == "PathOutsideRootError"
    for name, message in (("loop", "cannot be resolved"), ("a\0", "cannot be resolved: embedded null")):
        with pytest.raises(RefusedArgumentsError, match=message) as caught:
            confine(name, root)
        assert caught.value.error == "InvalidArgumentsError"


def test_a_root_that_is_a_link_is_followed_first(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    schema = {"type": "object", "properties": {"path": PATH}}
    check = ArgumentChecker(tool_functions.read, schema, str(tmp_path / "link"))
    assert check({"path": "x"}) == {"path": tmp_path / "real" / "x"}
    assert check.at("/usr")({"path": "x"}) == {"path": Path("/usr/x")}
    assert check({"path": "x"}) == {"path": tmp_path / "real" / "x"}


# --- the schema


def test_arguments_the_schema_lacks_are_refused_unless_it_allows_them() -> None:
    with pytest.raises(RefusedArgumentsError, match="'c' was unexpected"):
        checker(a={"type": "integer"})({"a": 1, "c": 2})
    for allowed in (True, {"type": "integer"}):
        opened = {"type": "object", "properties": {"a": {}}, "additionalProperties": allowed}
        assert ArgumentChecker(tool_functions.add, opened, "/usr")({"a": 1, "c": 2}) == {"a": 1, "c": 2}


def test_messages_are_of_bounded_length() -> None:
    with pytest.raises(RefusedArgumentsError) as caught:
        checker(a={"type": "integer"})({"a": "x" * 50_000})
    assert len(str(caught.value)) < 1100


# --- JSON


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
        with subtests.test(name), pytest.raises(RefusedArgumentsError, match=message):
            encode_arguments(arguments)


def test_arguments_that_raise_while_they_are_read_are_refused(subtests: pytest.Subtests) -> None:
    class Raises(dict[str, Any]):
        def __init__(self, error: BaseException) -> None:
            super().__init__(a=1)
            self.error = error

        def items(self) -> Any:
            raise self.error

    for error in (KeyError("a"), ValueError(), SystemExit(), asyncio.CancelledError()):
        message = f"cannot be read: reading them raises {type(error).__name__}"
        for arguments in (Raises(error), {"a": Raises(error)}):
            with (
                subtests.test(error=type(error).__name__, deeper=type(arguments) is dict),
                pytest.raises(RefusedArgumentsError, match=message),
            ):
                encode_arguments(arguments)


def test_a_keyboard_interrupt_while_arguments_are_read_is_raised() -> None:
    class Interrupted(dict[str, Any]):
        """While it is read, somebody presses ctrl-c."""

        def items(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_arguments({"a": Interrupted()})
    with ThreadPoolExecutor(1) as threads, pytest.raises(RefusedArgumentsError, match="raises KeyboardInterrupt"):
        threads.submit(encode_arguments, {"a": Interrupted()}).result()


def test_arguments_of_exactly_the_largest_size_and_depth_pass() -> None:
    size = MAX_BYTES - len('{"a": ""}')
    assert len(encode_arguments({"a": "x" * size})) == MAX_BYTES
    assert encode_arguments({"a": nested(0, 31)}) == '{"a": ' + "[" * 31 + "0" + "]" * 31 + "}"
    for arguments in ({"a": "x" * (size + 1)}, {"a": nested(0, 32)}):
        with pytest.raises(RefusedArgumentsError):
            encode_arguments(arguments)


# --- any value as text


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

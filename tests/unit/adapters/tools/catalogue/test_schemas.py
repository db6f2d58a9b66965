"""Schemas: which paths they leave unconfined, which integers they mean, what takes long to check."""

import itertools
from typing import Any

import pytest

from adapters.tools.catalogue.arguments import ArgumentChecker, RefusedArgumentsError
from adapters.tools.catalogue.schemas import check_path_formats, plain_schema, slow_keyword
from adapters.tools.catalogue.tools import Tool
from grpo.errors import ConfigError
from tests.support import tool_functions

TEXT: dict[str, Any] = {"type": "string"}
PATH: dict[str, Any] = {"type": "string", "format": "path"}
URI: dict[str, Any] = {"type": "string", "format": "uri"}
NONE: dict[str, Any] = {"type": "null"}
FILE: dict[str, Any] = {"type": "object", "properties": {"file": PATH}}
DEFINED: dict[str, Any] = {
    "path": PATH,
    "text": TEXT,
    "file": FILE,
    "list": {"type": "array", "items": {"$ref": "#/$defs/path"}},
    "whole": {"type": "integer"},
}
OUTSIDE = "../../etc/passwd"


def schema_of(x: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": x, "y": PATH}, "$defs": DEFINED, **more}


UNCERTAIN: list[Any] = [
    {"anyOf": [URI, PATH]}, {"anyOf": [PATH, URI]}, {"oneOf": [URI, PATH]}, {"anyOf": [{}, PATH]}, {"anyOf": [True, PATH]},
    {"anyOf": [{"minLength": 1}, PATH]}, {"anyOf": [TEXT, {"format": "path"}]}, {"oneOf": [{"format": "path"}, TEXT]},
    {"anyOf": [{"type": ["null", "string"]}, PATH]}, {"anyOf": [{"enum": ["a", 1]}, PATH]}, {"anyOf": [{"const": "a"}, PATH]},
    {"anyOf": [{"$ref": "#/$defs/text"}, {"$ref": "#/$defs/path"}]}, {"anyOf": [{"allOf": [TEXT]}, {"allOf": [PATH]}]},
    {"anyOf": [{"type": "object"}, FILE]}, {"anyOf": [{"type": "object"}, {"$ref": "#/$defs/file"}]},
    {"anyOf": [{"type": "array"}, {"$ref": "#/$defs/list"}]}, {"anyOf": [NONE, {"anyOf": [URI, PATH]}]},
    {"type": "array", "items": {"anyOf": [URI, PATH]}}, {"type": "array", "contains": PATH},
    {"type": "array", "contains": {"$ref": "#/$defs/path"}}, {"type": "object", "propertyNames": {"format": "path"}},
    {"type": "object", "propertyNames": {"$ref": "#/$defs/path"}}, {"not": {"format": "path"}}, {"not": {"not": PATH}},
    {"if": PATH, "then": {}}, {"if": {"$ref": "#/$defs/file"}, "else": TEXT}, {"then": PATH},
    {"type": "array", "unevaluatedItems": PATH}, {"type": "object", "unevaluatedProperties": PATH},
    {"type": "object", "patternProperties": {"^a": TEXT}, "additionalProperties": PATH},
    {"type": "object", "dependencies": {"a": {"properties": {"b": PATH}}}}, {"type": "array", "additionalItems": PATH},
    {"type": "string", "contentMediaType": "application/json", "contentSchema": PATH},
    {"type": "object", "dependentSchemas": {"a": {"properties": {"b": {"anyOf": [URI, PATH]}}}}},
    {"then": TEXT, "if": True, "else": {"anyOf": [URI, PATH]}}, {"$dynamicRef": "#path"},
    {"$id": "http://a/b", "$defs": {"text": PATH}, "anyOf": [TEXT, {"$ref": "#/$defs/text"}]},
    {"$id": "http://a/b", "$defs": {"p": {"$anchor": "here", **PATH}}, "anyOf": [TEXT, {"$ref": "#here"}]},
    {"anyOf": [TEXT, {"$ref": "#/$defs/list/items"}]}, {"anyOf": [TEXT, {"$ref": "#/$defs/file/properties/file"}]},
    {"allOf": [{"$ref": "#/$defs/text"}, {"anyOf": [TEXT, PATH]}]},
    {"$schema": "http://json-schema.org/draft-07/schema#", "anyOf": [TEXT, PATH]},
    {"prefixItems": [TEXT, PATH]}, {"prefixItems": [TEXT], "items": PATH}, {"patternProperties": {"^k": PATH}},
    {"dependentSchemas": {"k": FILE}}, {"if": TEXT, "then": PATH}, {"if": NONE, "then": NONE, "else": PATH},
    {"type": "array", "items": {"prefixItems": [PATH]}}, {"anyOf": [FILE, {"not": FILE}]}, {"items": [TEXT, PATH]},
    {"properties": {"default": {"not": PATH}}}, {"properties": {"enum": {"contains": PATH}}}, {"x-anything": [PATH]},
    {"$ref": "#/properties/x/$defs/p", "$defs": {"p": {"anyOf": [TEXT, PATH]}}}, {"$ref": "#/x", **PATH},
    {"properties": {"file": PATH, "next": {"$ref": "#/properties/x"}}}, {"$ref": "#/$defs/lost", "$defs": {"p": PATH}},
    {"items": {"$id": "http://a/b", **PATH}, "additionalProperties": {"$ref": "#/$defs/text"}},
    {"anyOf": [{"type": "array", "format": "path"}, TEXT]}, {"anyOf": [{"enum": [1, None]}, PATH]},
    {"oneOf": [{"format": "path"}, NONE]}, {"anyOf": [{"const": 1}, {"$ref": "#/$defs/path"}]},
]  # fmt: skip


def test_a_schema_that_may_leave_a_path_unconfined_is_refused(subtests: pytest.Subtests) -> None:
    for x in UNCERTAIN:
        with subtests.test(str(x)[:60]):
            with pytest.raises(ValueError, match=r'^"format": "path" must not be '):
                check_path_formats(schema_of(x))
            with pytest.raises(ValueError, match='"format": "path"'):
                ArgumentChecker(tool_functions.echo, schema_of(x), "/usr")


def test_a_tool_with_an_uncertain_path_is_refused_with_its_place_and_what_to_write() -> None:
    schema = schema_of({"anyOf": [URI, PATH]})
    message = (
        r'^Tool fetch: parameters: "format": "path" must not be at \$\.properties\.x\.anyOf\[1\], because it is not certain .* '
        "Give each branch a type that no other branch has, or use two parameters or two tools"
    )
    for remote, function in ((False, tool_functions.echo), (True, tool_functions.async_raise)):
        with pytest.raises(ConfigError, match=message):
            Tool(name="fetch", description="Fetch.", function=function, parameters=schema, remote=remote)


def around(text: str) -> Any:
    """Certain schemas, each with a value in which `text` stands where a path is."""
    nested = {"a": [{"file": text}]}
    return [
        (PATH, text), ({"format": "path"}, text), ({"$ref": "#/$defs/path"}, text), ({"allOf": [PATH]}, text),
        ({"anyOf": [PATH, NONE]}, text), ({"anyOf": [NONE, PATH]}, text), ({"oneOf": [{"type": "integer"}, PATH]}, text),

        ({"anyOf": [PATH, FILE]}, text), ({"anyOf": [PATH, FILE]}, {"file": text}), ({"anyOf": [FILE, PATH]}, {"file": text}),
        ({"anyOf": [PATH, {"$ref": "#/$defs/list"}]}, [text]), ({"anyOf": [URI, NONE], "format": "path"}, text),
        ({"type": "array", "items": PATH}, ["a", text]), ({"additionalProperties": PATH}, {"k": text}),
        ({"properties": {"k": PATH}, "patternProperties": {"^a": TEXT}}, {"k": text}),

        ({"additionalProperties": {"items": FILE}}, nested),
        ({"$schema": "http://json-schema.org/draft-04/schema#", **PATH}, text),
        ({"$ref": "#/$defs/text", "format": "path"}, text),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/$defs/text", "format": "path"}, text),
        ({"not": NONE, **PATH}, text), ({"allOf": [{"anyOf": [URI, NONE]}, {"format": "path"}]}, text),
        ({"anyOf": [{"type": "array", "items": TEXT}, {"type": "object", "additionalProperties": PATH}]}, {"k": text}),
        ({"type": "array", "contains": TEXT, "items": PATH}, [text]), ({"$ref": "#/$defs/list/items"}, text),
        ({"$ref": "#/properties/y"}, text), ({"$ref": "#/$defs/path", "minLength": 1}, text),
        ({"type": "array", "items": {"oneOf": [NONE, {"$ref": "#/$defs/file"}]}}, [None, {"file": text}]),
    ]  # fmt: skip


def test_an_accepted_schema_refuses_paths_outside_the_root(subtests: pytest.Subtests) -> None:
    for x, value in around(OUTSIDE):
        with subtests.test(str(x)[:60]):
            check_path_formats(schema_of(x))
            check = ArgumentChecker(tool_functions.echo, schema_of(x), "/usr")
            with pytest.raises(RefusedArgumentsError) as caught:
                check({"x": value})
            assert caught.value.error == "PathOutsideRootError"


def test_an_accepted_schema_accepts_paths_inside_the_root(subtests: pytest.Subtests) -> None:
    for x, value in around("lib"):
        with subtests.test(str(x)[:60]):
            found = ArgumentChecker(tool_functions.echo, schema_of(x), "/usr")({"x": value})
            assert "/usr/lib" in str(found)


def test_no_schema_of_two_branches_accepts_a_path_outside_the_root() -> None:
    """Every pair of branches, in each kind of choice: refused, or confined."""
    branches: list[Any] = [
        PATH, TEXT, URI, NONE, True, {}, {"type": "integer"}, {"enum": ["a", OUTSIDE]}, {"minLength": 3},
        {"$ref": "#/$defs/path"}, {"$ref": "#/$defs/text"}, {"allOf": [PATH]}, {"not": {"minLength": 3}},
        {"if": {"minLength": 3}, "then": PATH}, {"anyOf": [NONE, PATH]}, {"oneOf": [TEXT, {"type": "integer"}]},
    ]  # fmt: skip
    let_through = 0
    for kind, one, other in itertools.product(("anyOf", "oneOf"), branches, branches):
        schema = schema_of({kind: [one, other]})
        if "'path'" not in str([one, other]) and "$defs/path" not in str([one, other]):
            continue
        try:
            check_path_formats(schema)
        except ValueError:
            continue
        let_through += 1
        with pytest.raises(RefusedArgumentsError) as caught:
            ArgumentChecker(tool_functions.echo, schema, "/usr")({"x": OUTSIDE})
        assert caught.value.error in ("PathOutsideRootError", "InvalidArgumentsError")
    assert let_through >= 16


def test_unused_path_formats_and_choices_without_paths_are_accepted() -> None:
    check_path_formats(schema_of(PATH, anyOf=[{"required": ["x"]}, {"required": ["y"]}]))
    check_path_formats(schema_of({"anyOf": [URI, TEXT]}))
    check_path_formats(schema_of(TEXT, propertyNames=TEXT, default={"format": "path"}))
    check_path_formats({"type": "object", "properties": {"format": {"enum": ["path"]}, "$id": PATH, "default": PATH}})
    check_path_formats({"type": "object", "properties": {"x": {"const": {"format": "path"}}}})


def test_a_recursive_schema_is_accepted_unless_it_has_paths() -> None:
    inner = {"type": "array", "items": {"$ref": "#/$defs/tree"}}
    tree: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}, "inner": inner}}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}}
    check = ArgumentChecker(tool_functions.echo, schema, "/usr")
    assert check({"x": {"n": 1.0, "inner": [{"n": 2}]}}) == {"x": {"n": 1, "inner": [{"n": 2}]}}
    with pytest.raises(RefusedArgumentsError, match="'a' is not of type 'integer'"):
        check({"x": {"inner": [{"inner": [{"n": "a"}]}]}})
    tree["properties"]["file"] = PATH
    with pytest.raises(ValueError, match="must not be in a schema with a recursive or unknown `\\$ref`"):
        check_path_formats(schema)
    for circle in ({"$ref": "#/$defs/tree"}, {"anyOf": [{"$ref": "#/$defs/tree"}, PATH]}):
        with pytest.raises(ValueError, match="format"):
            check_path_formats({**schema_of({"$ref": "#/$defs/tree"}), "$defs": {"tree": circle}})


def test_an_unresolvable_reference_makes_each_call_fail(subtests: pytest.Subtests) -> None:
    for reference in ("#/required", "#/required/x", "#/required/0", "#/no", "http://127.0.0.1:1/x", "#nowhere"):
        with subtests.test(reference):
            schema = {"type": "object", "properties": {"x": {"$ref": reference}}, "required": ["x"]}
            with pytest.raises(RefusedArgumentsError, match="the tool's schema cannot be applied") as caught:
                ArgumentChecker(tool_functions.echo, schema, "/usr")({"x": 1})
            assert caught.value.error == "InvalidArgumentsError"


# --- references


def plain(x: Any, **definitions: Any) -> Any:
    return plain_schema({"type": "object", "properties": {"x": x}, "$defs": definitions})


def test_a_reference_is_replaced_by_its_target(subtests: pytest.Subtests) -> None:
    odd = {"a/b~c d": TEXT}
    for x, expected in (
        ({"$ref": "#/$defs/a"}, TEXT), ({"$ref": "#/$defs/a", "description": "d"}, {**TEXT, "description": "d"}),
        ({"$ref": "#/$defs/a", "enum": [1]}, {"enum": [1], "allOf": [TEXT]}), ({"$ref": "#/$defs/b"}, {"items": TEXT}),
        ({"$ref": "#/$defs/a", "allOf": [True]}, {"allOf": [True, TEXT]}), ({"$ref": "#/$defs/b/items"}, TEXT),
        ({"$ref": "#/$defs/any"}, {"allOf": [True]}), ({"anyOf": [{"$ref": "#/$defs/list/anyOf/1"}]}, {"anyOf": [TEXT]}),
        ({"$ref": "#/$defs/odd/properties/a~1b~0c%20d"}, TEXT), ({"default": {"$ref": "#/$defs/a"}},) * 2,
        ({"properties": {"$ref": {"$ref": "#/$defs/a"}}}, {"properties": {"$ref": TEXT}}),
        ({"const": {"$schema": "kept"}, "$schema": "http://json-schema.org/draft-07/schema#"}, {"const": {"$schema": "kept"}}),
    ):  # fmt: skip
        with subtests.test(str(x)):
            found = plain(
                x,
                a=TEXT,
                b={"items": {"$ref": "#/$defs/a"}},
                any=True,
                list={"anyOf": [NONE, TEXT]},
                odd={"properties": odd},
            )
            assert found == {"type": "object", "properties": {"x": expected}}


def test_a_reference_that_cannot_be_replaced_stays_with_the_definitions(subtests: pytest.Subtests) -> None:
    tree = {"anyOf": [{"$ref": "#/$defs/tree"}, NONE]}
    for x, definitions, expected in (
        ({"$ref": "#/$defs/tree"}, {"tree": tree}, tree), ({"$ref": "#/$defs/no"}, {}, {"$ref": "#/$defs/no"}),
        ({"$ref": "#/$defs/a"}, {"a": {"$id": "http://a/b"}}, {"$ref": "#/$defs/a"}),
        ({"$ref": f"#/$defs/l/anyOf/{'9' * 5000}"}, {"l": {"anyOf": [TEXT]}}, {"$ref": f"#/$defs/l/anyOf/{'9' * 5000}"}),
        ({"properties": {"default": {"$id": "b"}, "a": {"$ref": "#/$defs/a"}}}, {"a": TEXT},
         {"properties": {"default": {"$id": "b"}, "a": {"$ref": "#/$defs/a"}}}),
        ({"$ref": "#/type"}, {}, {"$ref": "#/type"}), ({"$ref": "http://a/b"}, {}, {"$ref": "http://a/b"}),
    ):  # fmt: skip
        with subtests.test(str(x)):
            found = plain(x, **definitions)
            assert found == {"type": "object", "properties": {"x": expected}, "$defs": definitions}


def test_references_that_would_make_a_schema_huge_are_not_replaced() -> None:
    """Each of 40 definitions names the next one twice: 2 ** 40 parts."""
    doubled = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": doubled | {"d40": NONE}}
    assert plain_schema(schema) == schema
    assert slow_keyword(schema) == "$ref"
    with pytest.raises(ValueError, match="recursive or unknown"):
        check_path_formats(schema | {"properties": {"x": {"$ref": "#/$defs/d0"}, "y": PATH}})


# --- types


def test_integral_floats_become_integers_where_the_schema_asks_for_them(subtests: pytest.Subtests) -> None:
    for schema, value, expected in (
        ({"type": "integer"}, 2.0, 2), ({"type": "integer"}, -0.0, 0), ({"type": "integer"}, 1e20, 10**20),
        ({"type": "integer"}, 2, 2), ({"type": "number"}, 2.0, 2.0), ({}, 2.0, 2.0), ({"type": ["integer", "null"]}, 2.0, 2),
        ({"type": ["integer", "number"]}, 2.0, 2.0), ({"anyOf": [{"type": "integer"}, NONE]}, 2.0, 2),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, 2.0, 2),
        ({"enum": [2, 1.5]}, 2.0, 2.0), ({"allOf": [{"type": "number"}, {"type": "integer"}]}, 2.0, 2),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, [2.0], [2]),
        ({"additionalProperties": {"type": "integer"}}, {"n": 2.0}, {"n": 2}), ({"$ref": "#/$defs/whole"}, 2.0, 2),
        ({"type": "array", "items": {"type": "integer"}}, [1.0, 2], [1, 2]),
        ({"type": "array", "items": {"type": "number"}}, [1.0, 2], [1.0, 2]),
        ({"anyOf": [NONE, {"type": "array", "items": {"type": "integer"}}]}, [1.0], [1]),
        ({"type": "object", "properties": {"n": {"type": "integer"}}}, {"n": 3.0, "m": 3.0}, {"n": 3, "m": 3.0}),
    ):  # fmt: skip
        with subtests.test(str(schema), value=value):
            found = ArgumentChecker(tool_functions.echo, schema_of(schema), "/usr")({"x": value})["x"]
            assert repr(found) == repr(expected)


def test_slow_keywords_of_a_schema_are_found(subtests: pytest.Subtests) -> None:
    for schema, keyword in (
        (schema_of({"pattern": "a"}), "pattern"), (schema_of(TEXT, patternProperties={"a": {}}), "patternProperties"),
        (schema_of({"anyOf": [{"items": {"uniqueItems": True}}]}), "uniqueItems"),
        (schema_of({"$ref": "#/$defs/list"}), None), (schema_of({"$ref": "#/nowhere"}), "$ref"),
        (schema_of({"$ref": "#"}), "$ref"),
        ({"properties": {"x": {"$ref": "#/$defs/a"}},
          "$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"anyOf": [TEXT, {"$ref": "#/$defs/a"}]}}}, "$ref"),
        ({"properties": {"a": {"$dynamicRef": "#a"}}}, "$dynamicRef"), ({"properties": {"a": {"uniqueItems": False}}}, None),
        ({"type": "object", "properties": {"pattern": TEXT, "uniqueItems": TEXT, "$ref": TEXT}}, None),
    ):  # fmt: skip
        with subtests.test(keyword, schema=str(schema)[:60]):
            assert slow_keyword(schema) == keyword

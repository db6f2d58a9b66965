"""Schemas: which paths they leave unconfined, which integers they mean, what takes long to check."""

import itertools
from typing import Any

import pytest

from adapters.tools.catalogue.arguments import ArgumentChecker, RefusedArgumentsError
from adapters.tools.catalogue.schemas import plain_schema, slow_keyword
from tests.support import tool_functions

TEXT: dict[str, Any] = {"type": "string"}
PATH: dict[str, Any] = {"type": "string", "format": "path"}
URI: dict[str, Any] = {"type": "string", "format": "uri"}
NONE: dict[str, Any] = {"type": "null"}
FILE: dict[str, Any] = {"type": "object", "properties": {"file": PATH}}
DEFINED: dict[str, Any] = {
    "path": PATH, "text": TEXT, "file": FILE, "list": {"type": "array", "items": {"$ref": "#/$defs/path"}},
    "whole": {"type": "integer"},
}  # fmt: skip
OUTSIDE = "../../etc/passwd"


def schema_of(x: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": x, "y": PATH}, "$defs": DEFINED, **more}


def checked(schema: Any, x: Any) -> Any:
    return ArgumentChecker(tool_functions.echo, schema, "/usr")({"x": x})["x"]


def refusal(schema: Any, x: Any, message: str | None = None) -> str:
    with pytest.raises(RefusedArgumentsError, match=message) as caught:
        checked(schema, x)
    return caught.value.error


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
    {"allOf": [PATH]}, {"allOf": [{"anyOf": [URI, NONE]}, {"format": "path"}]}, {"$ref": "#/$defs/list/items"},
    {"$ref": "#/properties/y"}, {"$ref": "#/$defs/path", "minLength": 1}, {"$ref": "#/$defs/text", "format": "path"},
    {"const": {"format": "path"}}, {"default": {"format": "path"}},
]  # fmt: skip


def test_a_schema_that_may_leave_a_path_unconfined_is_refused(subtests: pytest.Subtests) -> None:
    for x in UNCERTAIN:
        with subtests.test(str(x)[:60]):
            with pytest.raises(ValueError, match=r'^"format": "path" must be '):
                plain_schema(schema_of(x))
            with pytest.raises(ValueError, match='"format": "path"'):
                ArgumentChecker(tool_functions.echo, schema_of(x), "/usr")


def around(text: str) -> Any:
    """Certain schemas, each with a value in which `text` stands where a path is."""
    nested = {"a": [{"file": text}]}
    return [
        (PATH, text), ({"format": "path"}, text), ({"$ref": "#/$defs/path"}, text),
        ({"anyOf": [PATH, NONE]}, text), ({"anyOf": [NONE, PATH]}, text), ({"oneOf": [{"type": "integer"}, PATH]}, text),
        ({"anyOf": [PATH, FILE]}, text), ({"anyOf": [PATH, FILE]}, {"file": text}), ({"anyOf": [FILE, PATH]}, {"file": text}),
        ({"anyOf": [PATH, {"$ref": "#/$defs/list"}]}, [text]), ({"anyOf": [URI, NONE], "format": "path"}, text),
        ({"type": "array", "items": PATH}, ["a", text]), ({"additionalProperties": PATH}, {"k": text}),
        ({"properties": {"k": PATH}, "patternProperties": {"^a": TEXT}}, {"k": text}),
        ({"additionalProperties": {"items": FILE}}, nested),
        ({"$schema": "http://json-schema.org/draft-04/schema#", **PATH}, text),
        ({"not": NONE, **PATH}, text), ({"type": "string", "format": "file-path"}, text),
        ({"type": "string", "format": "directory-path"}, text),
        ({"anyOf": [{"type": "array", "items": TEXT}, {"type": "object", "additionalProperties": PATH}]}, {"k": text}),
        ({"type": "array", "contains": TEXT, "items": PATH}, [text]), ({"$ref": "#/$defs/path", "description": "d"}, text),
        ({"type": "array", "items": {"oneOf": [NONE, {"$ref": "#/$defs/file"}]}}, [None, {"file": text}]),
    ]  # fmt: skip


def test_an_accepted_schema_refuses_paths_outside_the_root_and_accepts_others(subtests: pytest.Subtests) -> None:
    for (x, outside), (_, inside) in zip(around(OUTSIDE), around("lib"), strict=True):
        with subtests.test(str(x)[:60]):
            plain_schema(schema_of(x))
            assert refusal(schema_of(x), outside) == "PathOutsideRootError"
            assert "/usr/lib" in str(checked(schema_of(x), inside))
    # unused path formats, and choices without paths
    plain_schema(schema_of(PATH, anyOf=[{"required": ["x"]}, {"required": ["y"]}]))
    plain_schema(schema_of({"anyOf": [URI, TEXT]}))
    plain_schema(schema_of(TEXT, propertyNames=TEXT))
    plain_schema({"type": "object", "properties": {"format": {"enum": ["path"]}, "$id": PATH, "default": PATH}})


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
            plain_schema(schema)
        except ValueError:
            continue
        let_through += 1
        assert refusal(schema, OUTSIDE) in ("PathOutsideRootError", "InvalidArgumentsError")
    assert let_through >= 16


def test_a_recursive_schema_is_accepted_unless_it_has_paths() -> None:
    inner = {"type": "array", "items": {"$ref": "#/$defs/tree"}}
    tree: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}, "inner": inner}}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}}
    assert checked(schema, {"n": 1.0, "inner": [{"n": 2}]}) == {"n": 1, "inner": [{"n": 2}]}
    refusal(schema, {"inner": [{"inner": [{"n": "a"}]}]}, "'a' is not of type 'integer'")
    tree["properties"]["file"] = PATH
    with pytest.raises(ValueError, match="must have no recursive or unknown `\\$ref`"):
        plain_schema(schema)
    for circle in ({"$ref": "#/$defs/tree"}, {"anyOf": [{"$ref": "#/$defs/tree"}, PATH]}):
        with pytest.raises(ValueError, match="format"):
            plain_schema({**schema_of({"$ref": "#/$defs/tree"}), "$defs": {"tree": circle}})


def test_an_unresolvable_reference_makes_each_call_fail(subtests: pytest.Subtests) -> None:
    for reference in ("#/required", "#/required/x", "#/required/0", "#/no", "http://127.0.0.1:1/x", "#nowhere"):
        with subtests.test(reference):
            schema = {"type": "object", "properties": {"x": {"$ref": reference}}, "required": ["x"]}
            assert refusal(schema, 1, "the tool's schema cannot be applied") == "InvalidArgumentsError"


def plain(x: Any, **definitions: Any) -> Any:
    return plain_schema({"type": "object", "properties": {"x": x}, "$defs": definitions})


def test_a_reference_to_a_definition_is_replaced(subtests: pytest.Subtests) -> None:
    definitions = {"a": TEXT, "b": {"items": {"$ref": "#/$defs/a"}}, "null": NONE}
    for x, expected in (
        ({"$ref": "#/$defs/a"}, TEXT), ({"$ref": "#/$defs/a", "description": "d"}, {**TEXT, "description": "d"}),
        ({"$ref": "#/$defs/b"}, {"items": TEXT}), ({"anyOf": [{"$ref": "#/$defs/null"}]}, {"anyOf": [NONE]}),
        ({"properties": {"$ref": {"$ref": "#/$defs/a"}}}, {"properties": {"$ref": TEXT}}),
        ({"properties": {"$schema": TEXT}, "$schema": "http://a/b"}, {"properties": {"$schema": TEXT}}),
    ):  # fmt: skip
        with subtests.test(str(x)):
            assert plain(x, **definitions) == {"type": "object", "properties": {"x": expected}}


def test_definitions_of_an_older_draft_are_replaced_too() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"x": {"$ref": "#/definitions/a"}}}
    assert plain_schema(schema | {"definitions": {"a": PATH}}) == {"properties": {"x": PATH}}


def test_any_other_reference_stays_with_the_definitions(subtests: pytest.Subtests) -> None:
    tree = {"anyOf": [{"$ref": "#/$defs/tree"}, NONE]}
    for x, definitions, expected in (
        ({"$ref": "#/$defs/tree"}, {"tree": tree}, tree), ({"$ref": "#/$defs/a"}, {"a": {"$id": "http://a/b"}}, None),
        ({"properties": {"default": {"$id": "b"}, "a": {"$ref": "#/$defs/a"}}}, {"a": TEXT}, None),
        ({"$ref": "#/$defs/no"}, {}, None), ({"$ref": "#/type"}, {}, None), ({"$ref": "http://a/b"}, {}, None),
        ({"$ref": "#/$defs/a/items"}, {"a": {"items": TEXT}}, None), ({"$ref": "#/$defs/a"}, {"a": True}, None),
        ({"$ref": "#/$defs/a", "enum": [1]}, {"a": TEXT}, None), ({"$ref": "#/$defs/a", "allOf": [True]}, {"a": TEXT}, None),
    ):  # fmt: skip
        with subtests.test(str(x)):
            found = plain(x, **definitions)
            assert found == {"type": "object", "properties": {"x": expected or x}, "$defs": definitions}


def test_references_that_would_make_a_schema_huge_are_not_replaced() -> None:
    """Each of 40 definitions names the next one twice: 2 ** 40 parts."""
    doubled = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": doubled | {"d40": NONE}}
    found = plain_schema(schema)
    assert found["$defs"] == schema["$defs"]
    assert len(str(found)) < 100_000
    assert slow_keyword(found) == "$ref"
    with pytest.raises(ValueError, match="recursive or unknown"):
        plain_schema(schema | {"properties": {"x": {"$ref": "#/$defs/d0"}, "y": PATH}})


def test_integral_floats_become_integers_where_the_schema_asks_for_them(subtests: pytest.Subtests) -> None:
    whole, number = {"type": "integer"}, {"type": "number"}
    for schema, value, expected in (
        (whole, 2.0, 2), (whole, -0.0, 0), (whole, 1e20, 10**20), (whole, 2, 2), (number, 2.0, 2.0), ({}, 2.0, 2.0),
        ({"type": ["integer", "null"]}, 2.0, 2), ({"type": ["integer", "number"]}, 2.0, 2.0), ({"enum": [2, 1.5]}, 2.0, 2.0),
        ({"anyOf": [whole, NONE]}, 2.0, 2), ({"anyOf": [whole, number]}, 2.0, 2), ({"anyOf": [whole, number]}, 2.5, 2.5),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": whole}]}, [2.0], [2]),
        ({"additionalProperties": whole}, {"n": 2.0}, {"n": 2}), ({"$ref": "#/$defs/whole"}, 2.0, 2),
        ({"type": "array", "items": whole}, [1.0, 2], [1, 2]), ({"type": "array", "items": number}, [1.0, 2], [1.0, 2]),
        ({"anyOf": [NONE, {"type": "array", "items": whole}]}, [1.0], [1]),
        ({"type": "object", "properties": {"n": whole}}, {"n": 3.0, "m": 3.0}, {"n": 3, "m": 3.0}),
    ):  # fmt: skip
        with subtests.test(str(schema), value=value):
            assert repr(checked(schema_of(schema), value)) == repr(expected)


def test_slow_keywords_of_a_schema_are_found(subtests: pytest.Subtests) -> None:
    recursive = {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"anyOf": [TEXT, {"$ref": "#/$defs/a"}]}}
    for x, definitions, keyword in (
        ({"pattern": "a"}, {}, "pattern"), ({"patternProperties": {"a": {}}}, {}, "patternProperties"),
        ({"anyOf": [{"items": {"uniqueItems": True}}]}, {}, "uniqueItems"), ({"$ref": "#/$defs/a"}, {"a": TEXT}, None),
        ({"$ref": "#/nowhere"}, {}, "$ref"), ({"$ref": "#"}, {}, "$ref"), ({"$ref": "#/$defs/a"}, recursive, "$ref"),
        ({"$dynamicRef": "#a"}, {}, "$dynamicRef"), ({"uniqueItems": False}, {}, None),
        ({"unevaluatedItems": False}, {}, "unevaluatedItems"), ({"unevaluatedProperties": TEXT}, {}, "unevaluatedProperties"),
        ({"properties": {"pattern": TEXT, "uniqueItems": TEXT, "$ref": TEXT}}, {}, None),
    ):  # fmt: skip
        with subtests.test(keyword, schema=str(x)):
            assert slow_keyword(plain(x, **definitions)) == keyword
            check = ArgumentChecker(tool_functions.echo, plain(x, **definitions), "/usr")
            assert check.is_slow is (keyword is not None)

"""Schemas of MCP servers in the form that `Tool` reads."""

from adapters.tools.mcp_support import plain_schema


def test_schemas_that_refer_to_themselves_or_narrow_what_they_refer_to_stay_as_they_are() -> None:
    tree = {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}
    schema = {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/tree"}, "few": {"$ref": "#/$defs/all", "enum": [1]}, "any": True},
        "$defs": {"tree": tree, "all": {"enum": [1, 2]}},
    }
    assert plain_schema(schema)["properties"] == {
        "tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"const": None}]},
        "few": {"$ref": "#/$defs/all", "enum": [1]},
        "any": True,
    }
    odd = {"type": "object", "properties": 3, "$defs": []}
    assert plain_schema(odd) == odd

"""Schemas of MCP servers in the form that `Tool` reads."""

from adapters.tools.execution.mcp_support import plain_schema


def test_self_referring_and_narrowing_schemas_are_not_inlined() -> None:
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

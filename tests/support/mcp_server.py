"""A real MCP server for tests, made with the official SDK: `python mcp_server.py [--name NAME] [--port PORT]`.

Over stdio, or with a port over HTTP. Everything it does on the side is told to who asks by its own tools.
"""

import argparse
import enum
import os
from pathlib import Path
from typing import Annotated, Literal

import anyio
from mcp.server.mcpserver import Image, MCPServer
from mcp.types import CallToolResult, TextContent
from pydantic import BaseModel, Field

arguments = argparse.ArgumentParser()
arguments.add_argument("--name", default="testing")
arguments.add_argument("--port", type=int)
chosen = arguments.parse_args()
server = MCPServer(chosen.name, log_level="ERROR")
counts = {"begun": 0, "cancelled": 0}


class Weather(BaseModel):
    """What the structured tool returns."""

    city: str
    degrees: float


class Shade(enum.Enum):
    """An enumeration that stands in the schema's definitions, behind a reference."""

    LIGHT = "light"
    DARK = "dark"


@server.tool(description="Add two numbers.", structured_output=False)
def add(a: float, b: float) -> str:
    return f"{a + b:g}"


@server.tool(description="The weather in a city.")
def weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> Weather:
    return Weather(city=city, degrees=20.0 if unit == "celsius" else 68.0)


@server.tool(description="Paint something.", structured_output=False)
def paint(
    colour: Annotated[Literal["red", "blue"], Field(description="Of the paint.")],
    shade: Shade,
    finish: Literal["matt", "gloss"] | None = None,
) -> str:
    return f"{shade.value} {colour}, {finish or 'plain'}"


@server.tool(description="Wait, and say so.", structured_output=False)
async def slow(seconds: float) -> str:
    counts["begun"] += 1
    try:
        await anyio.sleep(seconds)
    except anyio.get_cancelled_exc_class():
        counts["cancelled"] += 1
        raise
    return f"waited {seconds:g} s"


@server.tool(description="How many waits have begun, and how many were cancelled.")
def waits() -> dict[str, int]:
    return counts


@server.tool(description="Fail.", structured_output=False)
def fail(reason: str) -> str:
    raise RuntimeError(reason)


@server.tool(description="Fail, by returning an error.")
def refuse() -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text="not today")], is_error=True)


@server.tool(description="A picture.", structured_output=False)
def picture() -> list[str | Image]:
    return ["look:", Image(data=b"12345", format="png")]


@server.tool(description="Where the server was started, and as which process.")
def place() -> dict[str, str | int]:
    return {"folder": str(Path.cwd()), "process": os.getpid()}


if __name__ == "__main__":
    if chosen.port is None:
        server.run()
    else:
        server.run("streamable-http", host="127.0.0.1", port=chosen.port)

"""What the tests of MCP servers share: how the servers are started, and calls of their tools."""

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from adapters.tools.catalogue.tools import Tool
from adapters.tools.execution.mcp_tools import MCPServer

FOLDER = Path(__file__).resolve().parent
REAL = [sys.executable, str(FOLDER / "mcp_server.py")]
"""A server of the official SDK. It takes more than a second to start."""

ODD = ("slow", "waits", "place", "variable", "die")
"""Tools of the server by hand that do more than return their names."""


def listing(name: str, **fields: Any) -> dict[str, Any]:
    """A tool as a server lists it."""
    return {"name": name, "inputSchema": {"type": "object", "additionalProperties": True}, **fields}


def by_hand(*tools: dict[str, Any], env: dict[str, str] | None = None, **options: Any) -> MCPServer:
    """A server without the SDK."""
    shown = json.dumps(tools or [listing(name) for name in ODD])
    return MCPServer(
        [sys.executable, "-S", str(FOLDER / "mcp_server_by_hand.py")], env={"TOOLS": shown, **(env or {})}, **options
    )


def by_name(server: MCPServer) -> dict[str, Tool]:
    return {tool.name: tool for tool in server.tools()}


def ask(tool: Tool, **arguments: Any) -> Any:
    return asyncio.run(tool.function(**arguments))


def process_of(tools: dict[str, Tool]) -> int:
    """The process of a server by hand."""
    return int(json.loads(ask(tools["place"]))["process"])


def is_gone(process: int) -> bool:
    """Whether a process has ended and was collected by its parent, which is this process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        return False
    return True

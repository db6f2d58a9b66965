"""An MCP server without the SDK, which speaks no newer handshake than `initialize`. It starts within a few milliseconds.

The environment variable TOOLS holds its tools as JSON. They are listed one per page. A call of a tool that `answer` does not
know returns the tool's name.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

TOOLS = json.loads(os.environ["TOOLS"])
num_slow = 0


def listed(page: int) -> dict[str, Any]:
    found: dict[str, Any] = {"tools": TOOLS[page : page + 1]}
    return found | ({"nextCursor": str(page + 1)} if page + 1 < len(TOOLS) else {})


def answer(name: str, arguments: dict[str, Any]) -> Any:
    global num_slow
    match name:
        case "slow":
            num_slow += 1
            return None
        case "waits":
            return num_slow
        case "place":
            return {"folder": str(Path.cwd()), "process": os.getpid()}
        case "variable":
            return os.environ.get(arguments["name"], "not set")
        case "complain":
            print("x" * 20_000, file=sys.stderr)
            print("that is all", file=sys.stderr, flush=True)
        case "noise":  # a line that is neither UTF-8 nor JSON
            sys.stdout.buffer.write(b"\xff\xfe\xfd\n")
            sys.stdout.buffer.flush()
        case "die":
            print("the server gives up", file=sys.stderr, flush=True)
            os._exit(3)
    return name


for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    parameters, reply = asked.get("params", {}), {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["method"] == "initialize":
        info = {"name": "by hand", "version": "1"}
        version = parameters["protocolVersion"]
        reply["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif asked["method"] == "tools/list":
        reply["result"] = listed(int(parameters.get("cursor", 0)))
    elif asked["method"] == "tools/call":
        value = answer(parameters["name"], parameters.get("arguments", {}))
        if value is None:  # it is never answered
            continue
        reply["result"] = {"content": [{"type": "text", "text": json.dumps(value)}]}
    else:
        reply["error"] = {"code": -32601, "message": "what?"}
    print(json.dumps(reply), flush=True)

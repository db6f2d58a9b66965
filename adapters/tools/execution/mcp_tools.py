"""Tools of MCP servers, called through the official SDK. The SDK is imported when the first server is created."""

import asyncio
import contextlib
import functools
import json
import math
import os
import re
import shlex
import tempfile
import textwrap
import warnings
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from adapters.tools.catalogue.tools import Tool
from adapters.tools.errors import InvalidArgumentsError, ServerLostError, ToolRaisedError
from grpo.arguments import install_command, is_finite
from grpo.errors import ConfigError, GRPOWarning

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp import types
    from mcp.client.client import Client

_RESTART = "The server is not restarted: leave its `with` block, and enter it again."
_STDERR_BYTES = 2_000
"""How much of the end of a server's stderr is read."""
_STDERR_FILE_BYTES = 10_000_000
"""Size of the file with a server's stderr from which on the next call empties it."""


class MCPServer:
    """An MCP server and one session with it, open within the `with` block.

    The session runs on its own thread and event loop, so the tools can be awaited concurrently from any loop. Leaving the
    block ends the server: its stdin is closed, then it gets SIGTERM, then its process group is killed.

    Args:
        command: Program and arguments that start a server over stdio. It is not a shell command line.
        url: URL of a running server (streamable HTTP), instead of `command`.
        env: Environment variables for the server, added to the few variables that the SDK passes on (PATH, HOME, ...).
        cwd: The server's working directory. None uses the current directory.
        start_timeout: Time limit in seconds for the start, the handshake and the list of tools.

    Raises:
        ImportError: The SDK is not installed.
        ConfigError: The arguments contradict each other, or, on entering the block, the server did not start.

    Example:
        >>> with MCPServer(["uvx", "mcp-server-time"]) as server:  # doctest: +SKIP
        ...     catalogue = ToolCatalogue(server.tools())

    Source:
        Model Context Protocol, https://modelcontextprotocol.io/specification.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        *,
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        start_timeout: float = 30.0,
    ) -> None:
        is_list = isinstance(command, Sequence) and not isinstance(command, str) and len(command) > 0
        for name, value, is_right, what in (
            ("command", command, command is None or (is_list and all(isinstance(word, str) for word in command or ())),
             "a list of strings that begins with a program, such as ['uvx', 'a-server']"),
            ("url", url, url is None or isinstance(url, str), "a text, or None"),
            ("env", env, env is None or isinstance(env, Mapping), "a dict of texts, or None"),
            ("cwd", cwd, cwd is None or isinstance(cwd, str | Path), "a path, or None"),
            ("start_timeout", start_timeout, is_finite(start_timeout) and start_timeout > 0, "> 0 seconds"),
        ):  # fmt: skip
            if not is_right:
                raise ConfigError(f"MCPServer.{name} must be {what}; got {value!r}.")
        if (command is None) == (url is None) or (url is not None and (env is not None or cwd is not None)):
            raise ConfigError(
                "MCPServer needs either the command that starts a server, or the url of a running server, and not both; "
                f"env and cwd apply only to a server that `command` starts; got {command=}, {url=}."
            )
        try:
            import mcp.client.client  # noqa: F401
        except ImportError as error:
            raise ImportError(f"MCPServer needs mcp: {install_command('tools')}") from error
        self._command, self._url, self._start_timeout = command, url, start_timeout
        self._env, self._cwd = None if env is None else dict(env), cwd
        self._where = textwrap.shorten(url or shlex.join(command or ()), 120)
        self._open: contextlib.ExitStack | None = None

    def __enter__(self) -> "MCPServer":
        from anyio.from_thread import start_blocking_portal

        if self._open is not None:
            raise ConfigError(
                f"MCPServer {self._where} is already running. Create another MCPServer for another session."
            )
        with contextlib.ExitStack() as stack:  # an interrupt at the start ends the server
            self._stderr: TextIO = stack.enter_context(tempfile.TemporaryFile("w+"))
            self._portal: BlockingPortal = stack.enter_context(start_blocking_portal(name="MCP session"))
            self._client: Client = stack.enter_context(self._portal.wrap_async_context_manager(self._session()))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        stack, self._open = self._open, None
        if stack is not None:
            with contextlib.suppress(CancelledError, RuntimeError):  # the session ended by itself
                stack.close()

    @property
    def name(self) -> str:
        """The server's own name, or the command or URL if the server has none."""
        if self._open is None:
            raise ConfigError(
                f"MCPServer {self._where} is not running. Use it in a block `with MCPServer(...) as server:`."
            )
        info = self._client.server_info
        return info.name if info is not None and info.name else self._where

    def tools(self, category: str | Callable[[str], str] | None = None, *, skip: Collection[str] = ()) -> list[Tool]:
        """The server's tools for a catalogue, as the server listed them at its start.

        A character that `Tool` does not allow in a name becomes `_`, and names are cut to 64 characters. If two servers have
        tools of the same name, rename one: `dataclasses.replace(tool, name=...)`. A tool without a description uses its title,
        or its name. Schemas are read as JSON Schema 2020-12 with Python's regular expressions; a `$schema` keyword is ignored.
        A tool whose definition is invalid is left out with a `GRPOWarning`.

        Args:
            category: Category of all tools, or a function from the server's tool name to a category. None uses the server's
                name.
            skip: The server's names of tools to leave out without a warning.

        Returns:
            Remote tools. A tool returns the server's structured content if there is any (the SDK wraps a plain value as
            {"result": value}), otherwise the content as text, with one line per image, audio clip or resource. A tool raises
            ToolRaisedError with the server's text if the call failed, and ServerLostError if the server is gone.

        Raises:
            ConfigError: Two tools get the same name, or the server lacks a name in `skip`.
        """
        server = f"MCP server {self.name}"
        names = [listed.name for listed in self._listed]
        if unknown := sorted(set(skip).difference(names)):
            raise ConfigError(
                f"{server}: skip must name tools of the server; the server has no {', '.join(unknown)}. "
                f"Its tools are {', '.join(names)}."
            )
        tools: dict[str, tuple[str, Tool]] = {}
        for listed in [each for each in self._listed if each.name not in skip]:
            try:
                tool = self._tool(listed, category)
            except ConfigError as error:
                advice = "Change the tool at the server, or pass its name in skip=."
                warnings.warn(f"{server}: its tool {listed.name!r} is left out: {error} {advice}", GRPOWarning, 2)
                continue
            if tool.name in tools:
                raise ConfigError(
                    f"{server}: {tools[tool.name][0]!r} and {listed.name!r} would both be called {tool.name!r} here. "
                    "Rename one of these tools at the server, or pass its name in skip=."
                )
            tools[tool.name] = listed.name, tool
        return [tool for _, tool in tools.values()]

    def _tool(self, listed: "types.Tool", category: str | Callable[[str], str] | None) -> Tool:
        said = [text for text in (listed.description, listed.title, listed.name) if text and text.strip()]
        own = self.name if category is None else category
        return Tool(
            name=re.sub(r"[^A-Za-z0-9_.-]", "_", listed.name)[:64],
            description=said[0] if said else "",
            function=functools.partial(self._ask, listed.name),
            category=own(listed.name) if callable(own) else own,
            parameters=listed.input_schema,
            remote=True,
        )

    async def _ask(self, name: str, /, **arguments: Any) -> Any:
        """The function of the tool `name`. Runs on the caller's loop."""
        if self._open is None:
            raise ServerLostError(f"MCP server {self._where} is closed. Call its tools inside its `with` block.")
        try:
            json.dumps(arguments, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentsError(f"texts for an MCP server must be valid Unicode: {error}.") from error
        try:
            answer = self._portal.start_task_soon(self._call, name, arguments)
        except RuntimeError as error:  # the session's loop has ended
            raise ServerLostError(f"MCP server {self._where} is lost. {_RESTART}") from error
        return await asyncio.wrap_future(answer)  # a cancellation is forwarded, and the SDK notifies the server

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool. Runs on the session's loop."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        stderr = self._stderr.fileno()
        if os.fstat(stderr).st_size > _STDERR_FILE_BYTES:
            os.ftruncate(stderr, 0)
            os.lseek(stderr, 0, os.SEEK_SET)  # the server shares this position
        try:
            result = await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED and error.message == "Connection closed":  # servers use this code too
                said = self._last_words()
                raise ServerLostError(f"the connection to MCP server {self._where} ended{said}. {_RESTART}") from error
            raise ToolRaisedError(error.message) from error
        except (RuntimeError, ValueError) as error:  # the output does not match the tool's output schema
            raise ToolRaisedError(str(error)) from error
        text = "\n".join(map(_text_of, result.content))
        if result.is_error:
            raise ToolRaisedError(text)
        return text if result.structured_content is None else result.structured_content

    @contextlib.asynccontextmanager
    async def _session(self) -> "AsyncIterator[Client]":
        """The session, from the server's start to its end. Runs in one task, as the SDK requires."""
        import anyio
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.client import Client

        target: Any = self._url
        reason = f"was not ready within {self._start_timeout:g} s; if it is only slow, raise start_timeout"
        is_ready = False
        try:
            if self._command is not None:
                program, *arguments = self._command
                server = StdioServerParameters(
                    command=program, args=arguments, env=self._env, cwd=self._cwd, encoding_error_handler="replace"
                )
                target = stdio_client(server, errlog=self._stderr)
            with anyio.CancelScope(deadline=anyio.current_time() + self._start_timeout) as scope:
                async with Client(target) as client:
                    page = await client.list_tools()
                    self._listed = page.tools
                    while page.next_cursor is not None:
                        page = await client.list_tools(cursor=page.next_cursor)
                        self._listed += page.tools
                    is_ready, scope.deadline = True, math.inf
                    yield client
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            reason = f"could not be started: {type(error).__name__}: {error}"
            if is_ready:
                await self._portal.stop()  # the calls raise ServerLostError
        if not is_ready:
            advice = "Run the command in a terminal: it must wait for JSON on stdin, and write only JSON to stdout."
            if self._command is None:
                advice = (
                    "Check that the server runs, and that the url has the path that the server expects, often /mcp."
                )
            raise ConfigError(f"MCP server {self._where} {reason}{self._last_words()}. {advice}")

    def _last_words(self) -> str:
        """The last three lines of the server's stderr, as the end of a sentence."""
        if self._stderr.closed:
            return ""
        file = self._stderr.fileno()
        end = os.pread(file, _STDERR_BYTES, max(0, os.fstat(file).st_size - _STDERR_BYTES)).decode(errors="replace")
        said = " / ".join(line.strip() for line in end.strip().splitlines()[-3:])
        return f"; on stderr it said last: {said}" if said else ""


def _text_of(block: "types.ContentBlock") -> str:
    """A content block as text. An image, an audio clip or a resource without text becomes a line that describes it."""
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return f"[{block.type} {block.mime_type}, {len(block.data) * 3 // 4 - block.data.count('=')} bytes]"
        case "resource_link":
            return f"[resource {block.uri}]"
        case "resource":
            return getattr(block.resource, "text", None) or f"[resource {block.resource.uri}]"

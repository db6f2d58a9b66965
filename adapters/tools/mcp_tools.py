"""The tools of MCP servers, spoken to by the official SDK, which is imported where the first server is made and not before."""

import asyncio
import contextlib
import re
import shlex
import textwrap
import threading
import warnings
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.errors import ConfigError, GRPOWarning

from .catalogue import Tool
from .errors import ToolRaisedError, WorkerDiedError
from .mcp_support import StderrTail, plain_schema, text_of

if TYPE_CHECKING:
    from anyio import CancelScope
    from mcp import types
    from mcp.client.client import Client


class MCPServer:
    """One MCP server and one session with it, for as long as the `with` block lasts.

    The session lives on a thread with an event loop of its own, so the tools can be awaited from any loop, many at a time.
    Leaving the block ends the server: its stdin is closed, then it gets SIGTERM, then its process group is killed.

    Args:
        command: program and arguments that start a server over stdio; never a line for a shell.
        url: of a running server (streamable HTTP) instead of a command.
        env: added to the few variables that the SDK passes on (PATH, HOME, ...); no other variable of this process is.
        cwd: where the server is started; None: here.
        start_timeout: seconds for the start, the handshake and the list of tools. Larger waits longer for a slow start.

    Raises:
        ImportError: the SDK is not installed.
        ConfigError: arguments that contradict one another; on entering: the server did not start.

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
        if (command is None) == (url is None):
            raise ConfigError(
                "MCPServer needs a command to start a server with, or the url of a running one, not both."
            )
        if isinstance(command, str) or (command is not None and not all(isinstance(word, str) for word in command)):
            raise ConfigError(f"MCPServer.command must be a list of words, as ['uvx', 'a-server']; got {command!r}.")
        if command is not None and not command:
            raise ConfigError("MCPServer.command must name a program; got an empty list.")
        if url is not None and (env is not None or cwd is not None):
            raise ConfigError("MCPServer: env and cwd are for a server that is started by command; drop them, or url.")
        if not start_timeout > 0:
            raise ConfigError(f"MCPServer.start_timeout must be > 0 seconds; got {start_timeout!r}.")
        _require_sdk()
        self._command, self._url, self._env, self._cwd = command, url, env, cwd
        self._start_timeout = start_timeout
        self._where = textwrap.shorten(url or shlex.join(command or ()), 120)
        self._stderr: StderrTail | None = None
        self._loss = ""
        self._session: _Session | None = None

    def __enter__(self) -> "MCPServer":
        if self._session is not None:
            raise ConfigError(f"MCPServer {self._where} is running already; make a second one for a second session.")
        session = _Session(self._run)
        try:
            session.started.result()
        except BaseException:  # an interrupt too must not leave the server behind
            session.end()
            raise
        self._session = session
        return self

    def __exit__(self, *_: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.end()

    @property
    def name(self) -> str:
        """What the server calls itself; else what started it."""
        info = self._running().client.server_info
        return info.name if info is not None and info.name else self._where

    def tools(self, category: str | Callable[[str], str] | None = None, *, skip: Collection[str] = ()) -> list[Tool]:
        """The server's tools, as they were listed when it started, for a catalogue.

        In a name, what `Tool` does not allow becomes `_`, and the 65th character and all after it are dropped; the server is
        called by the name it gave. Where two servers have a tool of one name: `dataclasses.replace(tool, name=...)`.
        A tool without a description is described by its title, or its name. A tool that cannot be one here is left out with a
        `GRPOWarning`: schemas are read as JSON Schema 2020-12, whatever their `$schema` says, with Python's regular
        expressions.

        Args:
            category: one for all of them, or a function of the name that the server gave; None: the server's name.
            skip: tools to leave out, without a warning, by the names that the server gave.

        Returns:
            Remote tools. They return structured content where there is some (as the server sent it: the SDK wraps a plain
            value as {"result": value}), else the text; of pictures, sounds and resources, a line that says what they are.
            They raise ToolRaisedError with the server's text where the tool failed, WorkerDiedError where the server is gone.

        Raises:
            ConfigError: two tools whose names become the same, or a name in `skip` that the server does not have.
        """
        session = self._running()
        unknown = sorted(set(skip) - {listed.name for listed in session.listed})
        if unknown:
            raise ConfigError(
                f"MCP server {self.name}: skip must name tools that it has; it has no {', '.join(unknown)}, "
                f"but {', '.join(listed.name for listed in session.listed)}."
            )
        found: dict[str, str] = {}
        tools = []
        for listed in session.listed:
            if listed.name in skip:
                continue
            try:
                tool = self._tool(listed, category)
            except ConfigError as error:
                warnings.warn(
                    f"MCP server {self.name}: its tool {listed.name!r} is left out: {error} Change it at the server, or pass "
                    "its name in skip=.",
                    GRPOWarning,
                    stacklevel=2,
                )
                continue
            if tool.name in found:
                raise ConfigError(
                    f"MCP server {self.name}: {found[tool.name]!r} and {listed.name!r} would both be called {tool.name!r} "
                    "here. Rename one of these tools at the server, or pass its name in skip=."
                )
            found[tool.name] = listed.name
            tools.append(tool)
        return tools

    def _tool(self, listed: "types.Tool", category: str | Callable[[str], str] | None) -> Tool:
        said = [text for text in (listed.description, listed.title, listed.name) if text and text.strip()]
        own = self.name if category is None else category
        return Tool(
            name=re.sub(r"[^A-Za-z0-9_.-]", "_", listed.name)[:64],
            description=said[0] if said else "",
            function=self._caller(listed.name),
            category=own(listed.name) if callable(own) else own,
            parameters=plain_schema(listed.input_schema),
            remote=True,
        )

    def _caller(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(**arguments: Any) -> Any:
            session = self._session
            if session is None or session.loop.is_closed():
                why = "was left" if session is None else f"is lost: {self._loss}"
                raise WorkerDiedError(f"MCP server {self._where} {why}. Call its tools inside its `with` block.")
            forwarded = asyncio.run_coroutine_threadsafe(self._call(session.client, name, arguments), session.loop)
            return await asyncio.wrap_future(forwarded)  # a cancellation passes on, and the SDK tells the server

        call.__name__ = call.__qualname__ = name
        return call

    async def _call(self, client: "Client", name: str, arguments: dict[str, Any]) -> Any:
        """On the session's loop."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                said = await asyncio.to_thread(self._last_words)
                raise WorkerDiedError(
                    f"the connection to MCP server {self._where} ended{said}. Nothing replaces the server: leave its `with` "
                    "block, and enter a new one."
                ) from error
            raise ToolRaisedError(error.message) from error
        except (RuntimeError, ValueError) as error:  # what it returned is not what its own output schema says
            raise ToolRaisedError(str(error)) from error
        if result.is_error:
            raise ToolRaisedError(text_of(result.content))
        return text_of(result.content) if result.structured_content is None else result.structured_content

    def _running(self) -> "_Session":
        if self._session is None:
            raise ConfigError(f"MCPServer {self._where} is not running: write `with MCPServer(...) as server:` around.")
        return self._session

    async def _run(self, session: "_Session") -> None:
        """The session, from its beginning to its end, in one task, as the SDK's contexts demand."""
        import anyio
        from mcp.client.client import Client

        session.starting = scope = anyio.CancelScope(deadline=anyio.current_time() + self._start_timeout)
        try:
            with scope:
                async with Client(self._target()) as client:
                    if self._stderr is not None:
                        self._stderr.stream.close()  # the server has it now
                    session.client, session.listed = client, await _listed(client)
                    scope.deadline = float("inf")
                    session.started.set_result(None)
                    await session.ending.wait()
        except Exception as error:
            self._loss = _innermost(error)
        finally:
            if self._stderr is not None:
                self._stderr.stream.close()
        if session.started.done():
            in_flight = asyncio.all_tasks() - {asyncio.current_task()}
            if in_flight:  # each has an error of its own to raise; the end of the loop would cancel it, and its caller
                await asyncio.wait(in_flight, timeout=5.0)
            return
        late = f"was not ready within {self._start_timeout:g} s; if it is only slow, raise start_timeout"
        reason = late if scope.cancelled_caught else f"could not be started: {self._loss}"
        session.started.set_exception(
            ConfigError(f"MCP server {self._where} {reason}{self._last_words()}. {self._advice()}")
        )

    def _target(self) -> Any:
        """What the SDK connects to."""
        from mcp import StdioServerParameters, stdio_client

        if self._command is None:
            return self._url
        parameters = StdioServerParameters(
            command=self._command[0],
            args=list(self._command[1:]),
            env=None if self._env is None else dict(self._env),
            cwd=None if self._cwd is None else str(self._cwd),
        )
        self._stderr = StderrTail()
        return stdio_client(parameters, errlog=self._stderr.stream)

    def _last_words(self) -> str:
        said = "" if self._stderr is None else self._stderr.last_lines()
        return f"; on stderr it said last: {said}" if said else ""

    def _advice(self) -> str:
        if self._command is None:
            return "See whether it runs, and whether the url ends as the server wants it, often in /mcp."
        return (
            "Run the command in a terminal: it must wait for JSON on stdin, and write nothing else than JSON to stdout."
        )


class _Session:
    """A thread with an event loop that runs one coroutine, and what that makes known."""

    client: "Client"
    listed: "list[types.Tool]"
    starting: "CancelScope | None" = None

    def __init__(self, run: Callable[["_Session"], Coroutine[Any, Any, None]]) -> None:
        self.started: Future[None] = Future()
        self.ending = asyncio.Event()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, args=(run,), daemon=True, name="MCP session")
        self._thread.start()

    def _work(self, run: Callable[["_Session"], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:  # cancels what is left, and closes the loop
            runner.run(run(self))

    def end(self) -> None:
        """Returns when the server is gone; the SDK bounds each of its waits."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the session has ended by itself
            self.loop.call_soon_threadsafe(self._leave)
        self._thread.join()

    def _leave(self) -> None:
        self.ending.set()
        if self.starting is not None and not self.started.done():  # an interrupt does not wait for a slow start
            self.starting.cancel()


async def _listed(client: "Client") -> "list[types.Tool]":
    """All pages."""
    found: list[types.Tool] = []
    cursor, number = None, 0
    while number == 0 or cursor is not None:
        try:
            page = await client.list_tools(cursor=cursor)
        except ValueError as error:  # pydantic's, which names the tool by its place
            last = f" (after {found[-1].name!r})" if found else ""
            raise ConfigError(f"page {number} of its list of tools{last} is not what MCP asks for: {error}") from error
        found += page.tools
        cursor, number = page.next_cursor, number + 1
    return found


def _require_sdk() -> None:
    try:
        import mcp.client.client  # noqa: F401
    except ImportError as error:
        raise ImportError('MCPServer needs mcp: pip install "model-agnostic-grpo[tools]"') from error


def _innermost(error: BaseException) -> str:
    """The first error of a group, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"

"""Execution of tool calls. Every call returns a result, whatever the policy asks for and whatever the tool does."""

import asyncio
import json
import os
import re
import tempfile
import threading
import warnings
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import CancelledError, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from adapters.tools.catalogue.arguments import ArgumentChecker, RefusedArgumentsError, bounded_text, encode_arguments
from adapters.tools.catalogue.calls import ToolCall, ToolResult, plain_name
from adapters.tools.catalogue.schemas import paths_in, slow_keyword
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.errors import ToolError, ToolNotAllowedError, UnknownToolError
from grpo.arguments import require_each, require_instances, require_integers
from grpo.errors import ConfigError, GRPOWarning

from .batches import Batch, Turn
from .call_log import CallLog
from .confinement import Kind, choose
from .confinement.process import why_no_own_users
from .folder_limits import FolderLimits
from .fork_server import INSIDE
from .options import ExecutorOptions
from .remote_tools import RemoteTools
from .worker import remove_folder
from .workers import ERRORS, WorkerPool, setup_of

_FOLDER = re.compile(r"[A-Za-z0-9_-]{1,100}")
_LOOK_SECONDS = 0.5
_END_SECONDS = 10.0
"""Time for calls that are given up to end."""


class ToolExecutor:
    """Executes tool calls in worker processes, and awaits remote tools in this process. Made for Linux; workers need Unix.

    Arguments are treated as hostile, and tools are trusted. A call is rejected before anything runs if its tool is not in the
    catalogue or not allowed, if its arguments do not match the schema, or if a path leaves its folder. A worker shares no
    memory, open files, environment or terminal with this program. A worker that times out, dies or sends an invalid answer is
    killed with its processes, and replaced. Between two calls, a worker's process state is restored, but not the state of
    modules. Calls share files in `root`, unless they have folders.

    Functions are imported by name, once, in a process that receives only a few environment variables. Import modules at the
    top of the tool's module, because workers may not be able to read them later. In a script that defines a tool, put
    everything but definitions under `if __name__ == "__main__":`.

    Remote tools run in one thread. The timeout cancels a remote tool; a tool that ignores its cancellation is abandoned. If its
    schema can be slow to check (`pattern`, `patternProperties`, `uniqueItems` or a recursive `$ref`), a worker checks the
    arguments, and the schema must not contain `"format": "path"`.

    An executor is thread-safe. It cannot be pickled, and cannot be used in a child process after `os.fork`.

    Args:
        catalogue: The tools.
        allow: Names of the tools that may be called. None allows the whole catalogue.
        num_workers: Maximum number of worker processes, started on demand. More workers use more memory.
        options: All other settings. None uses the defaults of `ExecutorOptions`.

    Raises:
        ConfigError: An argument is invalid, workers cannot import a function or read `root`, a schema does not determine which
            strings are paths, the log cannot be written, or the confinement does not work here.

    Example:
        >>> async def shout(text: str) -> str:
        ...     "Ask another machine for capital letters."
        ...     return text.upper()
        >>> with ToolExecutor(ToolCatalogue([Tool.from_function(shout, remote=True)])) as executor:
        ...     executor.run([ToolCall(tool="shout", arguments={"text": "a"})])[0].output
        'A'
    """

    def __init__(
        self,
        catalogue: ToolCatalogue,
        *,
        allow: Collection[str] | None = None,
        num_workers: int = 4,
        options: ExecutorOptions | None = None,
    ) -> None:
        if INSIDE in os.environ:
            raise ConfigError(
                "ToolExecutor was created while a worker imported the tools. Create it under `if __name__ == '__main__':`, or "
                "in a function, so that importing the tools' module does not create it."
            )
        _check(catalogue, allow, num_workers, options)
        options = options or ExecutorOptions()
        root, limits = options.root, options.limits
        if root is not None and not Path(root).is_dir():
            raise ConfigError(f"ToolExecutor: root must be an existing folder; got {str(root)!r:.100}.")
        allowed = [tool for name, tool in catalogue.items() if allow is None or name in allow]
        in_workers = [tool for tool in allowed if _needs_worker(tool)]
        kind, reasons = choose(options.confinement) if in_workers else ("user", [])
        if kind is None:
            raise ConfigError(
                f"ToolExecutor: confinement={options.confinement!r} must work on this machine; {reasons[0]}."
            )
        self.confinement: Kind = kind
        """The kind of confinement of the workers."""
        self._catalogue = catalogue
        self._allowed = frozenset(tool.name for tool in allowed)
        self._at_once = num_workers, options.max_concurrency
        self._options = options
        self._process = os.getpid()
        owned = ExitStack()  # with no reference to `self`, so that an executor that was never closed is closed too
        self._finish = weakref.finalize(self, _finish, self._process, owned)
        self.root = Path(tempfile.mkdtemp(prefix="grpo-tools-") if root is None else root).resolve()
        """The tools' folder."""
        if root is None:
            owned.callback(remove_folder, str(self.root))
        self._log = CallLog(options.log_path, options.redact) if options.log_path is not None else None
        if self._log is not None:
            owned.callback(self._log.close)
        root_path = str(self.root)
        self._checkers = {t.name: ArgumentChecker(t.function, t.parameters, root_path) for t in allowed if t.remote}
        self._remote = RemoteTools(options.max_output_bytes, options.max_concurrency)
        owned.callback(self._remote.close)
        setup = setup_of(
            in_workers,
            root=root_path,
            own_root=root is None,
            kind=kind,
            readable=options.readable,
            max_output_bytes=options.max_output_bytes,
            no_own_users=why_no_own_users(limits.first_uid),
            limits=limits.to_dict(),
        )
        self._limits = FolderLimits(self.root, options.max_folder_bytes, options.max_root_bytes)
        self._pool = WorkerPool(setup, num_workers)
        owned.callback(self._pool.close)
        self._batches: set[Batch] = set()
        owned.callback(_give_up, self._batches)
        if in_workers:
            try:
                problems = self._pool.start()
            except BaseException:
                self.close()
                raise
            if kind == "user" and reasons:
                problems = [f"are confined by their user only: {'; '.join(reasons)}", *problems]
            for problem in problems:
                warnings.warn(f"ToolExecutor's workers {problem}.", GRPOWarning, 2)

    @property
    def tools(self) -> dict[str, Tool]:
        """The tools that may be called, by name."""
        return {name: tool for name, tool in self._catalogue.items() if name in self._allowed}

    def run(self, calls: Sequence[ToolCall], folders: Sequence[str | None] | None = None) -> list[ToolResult]:
        """Execute calls concurrently and return their results in the order of the calls.

        A failing call does not raise: its error is in its result. An interrupt cancels the unfinished calls.

        Args:
            calls: The calls.
            folders: For each call, the name of its folder within `root`, or None. A folder is created when its first call runs,
                shared by all calls with its name, for example those of a group, and kept. It is the working directory, and the
                folder that paths must not leave. Remote tools have no folders: their paths are in `root`.

        Raises:
            ConfigError: The executor is closed, or belongs to another process, or a folder is not the name of a folder.
        """
        if self._remote.is_current:
            raise ConfigError(
                "ToolExecutor.run must not be called in a remote tool, where it would wait for itself; await run_async."
            )
        batch = self._batch(calls, folders)
        try:
            batch.start(*self._at_once)
            while not wait([batch.ended], _LOOK_SECONDS).done:
                pass  # an interrupt that comes just before such a wait is raised after it
            return batch.results()
        except BaseException:  # an interrupt, or the executor was closed
            batch.give_up()
            wait([batch.ended], _END_SECONDS)
            raise

    async def run_async(
        self, calls: Sequence[ToolCall], folders: Sequence[str | None] | None = None
    ) -> list[ToolResult]:
        """Asynchronous version of `run`."""
        batch = self._batch(calls, folders)
        try:
            batch.start(*self._at_once)
            await asyncio.wrap_future(batch.ended)
            return batch.results()
        except BaseException:
            batch.give_up()
            raise

    def remove_folder(self, name: str) -> None:
        """Remove the folder of calls with this name within `root`, once its calls have ended. It need not exist.

        Raises:
            ConfigError: It is not the name of a folder.
        """
        if not _FOLDER.fullmatch(name):
            raise ConfigError(
                f"ToolExecutor.remove_folder: name must have letters, digits, '_' and '-'; got {name!r:.100}."
            )
        running = [batch.ended for batch in self._batches if any(turn.folder == name for turn in batch.turns)]
        wait(running, _END_SECONDS)
        self._remove(name)

    def close(self) -> None:
        """End all workers and calls, and remove the folder if the executor created it. May be called more than once."""
        self._finish()

    def __enter__(self) -> "ToolExecutor":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A ToolExecutor owns processes, so it cannot be pickled or copied. Create an executor where it is used."
        )

    def _batch(self, calls: Sequence[ToolCall], folders: Sequence[str | None] | None) -> Batch:
        """A new batch. Until its calls have ended, `close` gives it up."""
        if os.getpid() != self._process:
            raise ConfigError(
                "ToolExecutor belongs to the process that created it. Create another executor after a fork."
            )
        calls = require_each("ToolExecutor.run: calls (without None, which means no call)", ToolCall, calls)
        named: list[Any] = [None] * len(calls) if folders is None else list(folders)
        if len(named) != len(calls) or not all(
            name is None or (isinstance(name, str) and _FOLDER.fullmatch(name)) for name in named
        ):
            raise ConfigError(
                f"ToolExecutor.run: folders must give each of the {len(calls)} calls None, or a name of letters, digits, "
                f"'_' and '-'; got {named!r}."
            )
        given_up = threading.Event()
        turns = [Turn(call, self._find(call), name, given_up) for call, name in zip(calls, named, strict=True)]
        batch = Batch(turns, self._execute, self._batches)
        if not self._finish.alive:
            self._batches.discard(batch)
            raise ConfigError("ToolExecutor is closed. Create another executor.")
        return batch

    def _find(self, call: ToolCall) -> Tool | ToolError:
        """The tool of a call, or the error if the call has no allowed tool."""
        name = plain_name(call.tool)
        if name is None or name not in self._catalogue:
            shown = bounded_text(call.tool if name is None else name, 100)
            advice = "Tools that a policy adds later need another executor"
            return UnknownToolError(f"{shown} must be a tool of the executor's catalogue. {advice}.")
        if name not in self._allowed:
            return ToolNotAllowedError(f"{name} must be one of the allowed tools.")
        return self._catalogue[name]

    def _execute(self, turn: Turn) -> ToolResult:
        output, size = None, 0
        error: ToolError | CancelledError | None = None
        try:
            turn.check()
            output, size = self._output(turn)
        except (ToolError, CancelledError) as raised:
            error = raised.with_traceback(None)  # whoever keeps the result must not keep the executor
            error.__context__ = None
        seconds = turn.seconds()
        if self._log is not None:
            self._log.write(turn.call, error, seconds, size)
        return ToolResult(output=output, error=error if isinstance(error, ToolError) else None, seconds=seconds)

    def _output(self, turn: Turn) -> tuple[Any, int]:
        """The output of a call, and its size in bytes."""
        tool = turn.tool
        if isinstance(tool, ToolError):
            raise tool
        timeout = tool.timeout if tool.timeout is not None else self._options.timeout
        try:
            text = encode_arguments(turn.call.arguments)
            if not tool.remote:
                return self._ask(turn, tool, text, timeout)
            check, arguments = self._checkers[tool.name], json.loads(text)
            if check.is_slow:  # only a worker can be stopped while it checks
                self._ask(turn, tool, text, timeout)
                arguments = check.convert(arguments)
            else:
                arguments = check(arguments)
            return self._remote.call(tool, arguments, timeout, turn)
        except RefusedArgumentsError as error:
            raise ERRORS[error.error](f"{tool.name}: {error}") from None

    def _ask(self, turn: Turn, tool: Tool, text: str, timeout: float) -> tuple[Any, int]:
        is_fresh = self._options.fresh_folder and turn.folder is None
        folder = f"call-{os.urandom(8).hex()}" if is_fresh else turn.folder
        try:
            request = f'["{tool.name}",{text},{json.dumps(folder)}]'.encode()
            return self._pool.call(request, timeout, turn, lambda: self._limits.of(folder))
        except ToolError as error:
            raise type(error)(f"{tool.name}: {error}") from None
        finally:
            if is_fresh:
                self._remove(folder)

    def _remove(self, folder: str | None) -> None:
        try:
            remove_folder(f"{self.root}/{folder}")
        except OSError as error:  # the calls have their results in any case
            warnings.warn(f"ToolExecutor could not remove the folder of a call: {error}.", GRPOWarning, 3)


def _needs_worker(tool: Tool) -> bool:
    """Whether a worker executes the tool, or checks its arguments because that may be slow. Checks the tool's schema."""
    slow = slow_keyword(tool.parameters)
    if not hasattr(os, "fork") and (not tool.remote or slow is not None):
        raise ConfigError(
            f"ToolExecutor needs Unix for its worker processes, and tool {tool.name} needs a worker. It must be `remote`, and "
            "its schema must not have `pattern`, `patternProperties`, `uniqueItems` or a recursive `$ref`."
        )
    if tool.remote and slow is not None and paths_in(tool.parameters):
        raise ConfigError(
            f'Tool {tool.name}: parameters of a remote tool must not have both "format": "path" and `{slow}`: this process '
            f"checks paths, and a check of `{slow}` could block all other calls. Remove one of the two from the schema, or "
            "leave the tool out of `allow`."
        )
    return not tool.remote or slow is not None


def _check(catalogue: ToolCatalogue, allow: object, num_workers: object, options: object) -> None:
    require_instances("ToolExecutor", ToolCatalogue, "a ToolCatalogue", catalogue=catalogue)
    require_instances("ToolExecutor", ExecutorOptions | None, "ExecutorOptions or None", options=options)
    require_integers("ToolExecutor", 1, num_workers=num_workers)
    if allow is not None and (isinstance(allow, str) or not isinstance(allow, Collection)):
        raise ConfigError(f"ToolExecutor: allow must be a list of tool names, or None; got {allow!r:.100}.")
    unknown = sorted(str(name) for name in allow or () if name not in catalogue)
    if unknown:
        raise ConfigError(
            f"ToolExecutor: allow must name tools of the catalogue; the catalogue has no {', '.join(unknown)}."
        )


def _finish(process: int, owned: ExitStack) -> None:
    if os.getpid() == process:  # a forked child owns nothing here
        owned.close()


def _give_up(batches: set[Batch]) -> None:
    running = list(batches)
    for turn in (turn for batch in running for turn in batch.turns):
        turn.given_up.set()  # first for all, so that no call takes the turn of another one
    for batch in running:
        batch.give_up()
    wait([batch.ended for batch in running], _END_SECONDS)

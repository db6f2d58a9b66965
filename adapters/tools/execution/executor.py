"""Execution of tool calls. Every call returns a result, whatever the policy asks for and whatever the tool does."""

import asyncio
import contextlib
import functools
import os
import pickle
import shutil
import tempfile
import threading
import warnings
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import NoReturn

from adapters.tools.catalogue.arguments import ArgumentChecker, bounded_text
from adapters.tools.catalogue.calls import ToolCall, ToolResult, plain_name
from adapters.tools.catalogue.inputs import require_real, require_type, require_whole
from adapters.tools.catalogue.schemas import check_path_formats, names_path_format, slow_keyword
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.errors import ToolError, ToolNotAllowedError, UnknownToolError
from grpo.errors import ConfigError, GRPOWarning

from .call_log import CallLog
from .commands import Command
from .execution import CLEAN_UP_SECONDS, Engine
from .worker_main import INSIDE
from .workers import WorkerLimits, WorkerSource


class ToolExecutor:
    """Executes tool calls in worker processes, and awaits remote tools in this process. Made for Linux; workers need Unix.

    Trust: arguments are treated as hostile, and tools are trusted. A call is rejected before anything runs if its tool is not
    in the catalogue or not allowed, if its arguments do not match the schema, or if a path leaves `root` (see
    `ArgumentChecker`). A call runs in a worker process that shares no memory, open files, environment or terminal with this
    program (see `WorkerLimits` for its user and limits). A worker that times out, dies or sends an invalid answer is killed
    with every process that it started, and then replaced.

    Between two calls of one worker, processes started by the first call are killed. The worker's folder, umask, environment,
    timer, recursion limit and handlers of the common signals are reset. A worker with a leftover thread, or with half of its
    allowed files open, is replaced. Module-level state of a tool persists.

    Imports: functions are imported by name, once, in a process that receives only a few environment variables, such as PATH.
    Import modules at the top of the tool's module, because the workers' user may not be able to read them later. In a script
    that defines a tool, put everything but definitions under `if __name__ == "__main__":`.

    Remote tools: all remote tools run in one thread, so a tool that blocks delays every other call. The timeout cancels a
    remote tool; a tool that ignores its cancellation is abandoned. Some schemas can be very slow to check: with `pattern`,
    `patternProperties`, `uniqueItems` or a recursive `$ref`. A worker checks the arguments of such a remote tool within the
    tool's timeout, and its schema must not contain `"format": "path"`.

    An executor is thread-safe. It cannot be pickled, and cannot be used in a child process after `os.fork`.

    Args:
        catalogue: The tools.
        allow: Names of the tools that may be called. None allows the whole catalogue.
        num_workers: Maximum number of worker processes, started on demand. More workers run more calls at once and use more
            memory.
        timeout: Time limit of one call in seconds, for tools without their own limit. A larger limit waits longer for a
            call that hangs.
        max_output_bytes: Size limit of one output as JSON. A larger limit lets more data into this process.
        max_concurrency: Maximum number of concurrent remote calls. A larger limit puts more load on the servers.
        root: The tools' folder: their working directory, and the folder that paths must not leave. Files that tools change
            must be writable for the workers' user. None creates a new folder, which `close` removes.
        log_path: File to which one JSON line per call is appended, cancelled calls included. None writes no log.
        limits: Resource limits of each worker.

    Raises:
        ConfigError: `allow` has a name that the catalogue lacks, workers cannot import a function, a `Command` does not match
            its tool, a schema does not determine which strings are paths, workers cannot read `root`, the log cannot be
            written, or a number is out of range.

    Example:
        >>> def upper(text: str) -> str:
        ...     "Change text to capital letters."
        ...     return text.upper()
        >>> async def shout(text: str) -> str:
        ...     "Ask another machine for capital letters."
        ...     return upper(text)
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
        timeout: float = 10.0,
        max_output_bytes: int = 100_000,
        max_concurrency: int = 32,
        root: Path | str | None = None,
        log_path: Path | str | None = None,
        limits: WorkerLimits | None = None,
    ) -> None:
        require_type("ToolExecutor", ToolCatalogue, "a ToolCatalogue", catalogue=catalogue)
        require_whole(
            "ToolExecutor", num_workers=num_workers, max_output_bytes=max_output_bytes, max_concurrency=max_concurrency
        )
        require_real("ToolExecutor", timeout=timeout)
        require_type("ToolExecutor", (WorkerLimits, NoneType), "WorkerLimits, or None", limits=limits)
        require_type("ToolExecutor", (str, Path, NoneType), "a path, or None", root=root, log_path=log_path)
        if isinstance(allow, str) or not (allow is None or isinstance(allow, Collection)):
            raise ConfigError(f"ToolExecutor.allow must be a list of tool names, or None; got {allow!r}.")
        if not hasattr(os, "fork") and any(_needs_worker(tool) for tool in catalogue.values()):
            raise ConfigError(
                "ToolExecutor needs Unix for its worker processes. On this system, tools must be `remote`. Schemas "
                "must not have `pattern`, `patternProperties`, `uniqueItems` or a recursive `$ref`: workers check these."
            )
        if INSIDE in os.environ:
            raise ConfigError(
                "ToolExecutor was created while a worker imported the tools. Create it under `if __name__ == '__main__':`, or "
                "in a function, so that importing the tools' module does not create it."
            )
        unknown = [str(name) for name in allow or () if name not in catalogue]
        if unknown:
            raise ConfigError(
                f"ToolExecutor.allow must name tools of the catalogue; the catalogue has no {', '.join(sorted(unknown))}."
            )
        numbers = {"num_workers": num_workers, "max_output_bytes": max_output_bytes, "max_concurrency": max_concurrency}
        if timeout <= 0:
            raise ConfigError(f"ToolExecutor.timeout must be > 0 seconds; got {timeout}.")
        allowed = [tool for name, tool in catalogue.items() if allow is None or name in allow]
        for tool in allowed:
            _check_schema(tool)
        in_workers = [(tool, _pickled(tool)) for tool in allowed if _needs_worker(tool)]
        self._catalogue = catalogue
        self._allowed = frozenset(tool.name for tool in allowed)
        self._process = os.getpid()
        if root is not None and not Path(root).is_dir():
            raise ConfigError(f"ToolExecutor.root must be a folder that exists; got {root}.")
        log = CallLog(log_path) if log_path is not None else None
        own_root = root is None
        self._root = Path(tempfile.mkdtemp(prefix="grpo-tools-") if root is None else root).resolve()
        remote = [tool for tool in allowed if tool.remote]
        checkers = {t.name: ArgumentChecker(t.function, t.parameters, str(self._root)) for t in remote}
        setup = {
            "root": str(self._root),
            "own_root": own_root,
            "max_output_bytes": max_output_bytes,
            "limits": asdict(limits or WorkerLimits()),
        }
        self._engine = Engine(
            functools.partial(WorkerSource, in_workers, setup), checkers, timeout=timeout, log=log, **numbers
        )
        # The finalizer holds no reference to `self`, so it also cleans up after an executor that was never closed.
        self._finish = weakref.finalize(
            self, _finish, self._process, self._engine, self._root if own_root else None, log
        )
        if in_workers:
            try:
                for problem in self._engine.submit(self._engine.start()).result():
                    warnings.warn(f"ToolExecutor's workers {problem}.", GRPOWarning, 2)
            except BaseException:
                self.close()
                raise

    @property
    def root(self) -> Path:
        """The tools' folder."""
        return self._root

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Execute calls concurrently and return their results in the order of the calls.

        A failing call does not raise: its error is in its result. An interrupt cancels the unfinished calls.

        Raises:
            ConfigError: The executor is closed, or belongs to another process.
        """
        ended = threading.Event()
        future = self._start(calls, ended)
        try:
            return future.result()
        except CancelledError:
            raise ConfigError("ToolExecutor was closed while calls ran; their results are lost.") from None
        except BaseException:
            future.cancel()
            ended.wait(CLEAN_UP_SECONDS)
            raise

    async def run_async(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Asynchronous version of `run`."""
        try:
            return await asyncio.wrap_future(self._start(calls, threading.Event()))
        except asyncio.CancelledError:
            if self._finish.alive:  # the caller was cancelled
                raise
            raise ConfigError("ToolExecutor was closed while calls ran; their results are lost.") from None

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

    def _start(self, calls: Sequence[ToolCall], ended: threading.Event) -> "Future[list[ToolResult]]":
        if os.getpid() != self._process:
            raise ConfigError(
                "ToolExecutor belongs to the process that created it. Create another executor after a fork."
            )
        if self._engine.is_current:
            raise ConfigError(
                "ToolExecutor.run must not be called in a remote tool, where it would wait for itself; await run_async."
            )
        return self._engine.submit(self._engine.run([(call, self._find(call)) for call in calls], ended))

    def _find(self, call: ToolCall) -> Tool | ToolError:
        """The tool of a call, or the error if the call has no allowed tool."""
        name = plain_name(call.tool)
        if name is None or name not in self._catalogue:
            shown = bounded_text(call.tool if name is None else name, 100)
            return UnknownToolError(f"{shown} must be a tool of the catalogue.")
        if name not in self._allowed:
            return ToolNotAllowedError(f"{name} must be one of the allowed tools.")
        return self._catalogue[name]


def _needs_worker(tool: Tool) -> bool:
    """Whether a worker is needed to execute the tool, or to check its arguments where the check may be slow."""
    return not tool.remote or slow_keyword(tool.parameters) is not None


def _check_schema(tool: Tool) -> None:
    slow = slow_keyword(tool.parameters)
    if tool.remote and slow is not None and names_path_format(tool.parameters):
        raise ConfigError(
            f'Tool {tool.name}: parameters of a remote tool must not have both "format": "path" and `{slow}`: this '
            f"process checks paths, and a check of `{slow}` could block all other calls. Remove one of the two from the "
            "schema, or leave the tool out of `allow`."
        )
    try:
        check_path_formats(tool.parameters)
    except ValueError as error:
        raise ConfigError(f"Tool {tool.name}: parameters: {error} Or leave the tool out of `allow`.") from error


def _pickled(tool: Tool) -> bytes:
    if tool.remote:
        return pickle.dumps("".format)  # accepts any arguments and returns a text; the worker only checks the arguments
    if isinstance(tool.function, Command):
        tool.function.check(tool)
    try:
        return pickle.dumps(tool.function)
    except Exception as error:  # pickle's errors, or anything that an object's own methods raise
        raise ConfigError(
            f"Tool {tool.name}: workers must be able to import its function by name; the import fails: {error}. Define the "
            "function at the top level of a module, or make the tool `remote` with an `async def`."
        ) from error


def _finish(process: int, engine: Engine, folder: Path | None, log: CallLog | None) -> None:
    if os.getpid() != process:  # a forked child ends; it owns nothing here
        return
    try:
        engine.close()
    finally:
        if log is not None:
            log.close()
        if folder is not None:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder, with permissions restored first: a tool may have made a folder inaccessible."""
    if os.geteuid() != 0:
        for parent, names, _ in os.walk(folder):
            for inner in (Path(parent) / name for name in names):
                if not inner.is_symlink():
                    inner.chmod(0o700)
    with contextlib.suppress(FileNotFoundError):  # a tool has removed it
        shutil.rmtree(folder)

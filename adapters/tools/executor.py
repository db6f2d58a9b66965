"""Tool calls, executed: whatever a policy asks for, and whatever a tool does, a result comes back."""

import asyncio
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
from typing import NoReturn

from grpo.errors import ConfigError, GRPOWarning

from .arguments import ArgumentChecker, bounded_text
from .call_log import CallLog
from .calls import ToolCall, ToolResult, plain_name
from .catalogue import Tool, ToolCatalogue
from .commands import Command
from .errors import ToolError, ToolNotAllowedError, UnknownToolError
from .execution import CLEAN_UP_SECONDS, Engine
from .schemas import check_path_formats, names_path_format, slow_keyword
from .worker_main import INSIDE
from .workers import WorkerLimits, WorkerSource


class ToolExecutor:
    """Executes calls, in worker processes or, for remote tools, by awaiting them here. Made for Linux; workers need Unix.

    Arguments are hostile, tools are not: what a call can reach is what its tool, with these arguments, does. A call is refused
    before anything runs where its tool is not in the catalogue or not allowed; its arguments are held against the schema, and
    its paths against `root` (see `ArgumentChecker`). It runs in a process that was forked for such calls and has no part in
    this program's memory, files, environment or terminal (see `WorkerLimits` for its user and limits), which is killed with all
    that it started when it is late, ends, or answers nonsense, and then replaced.

    Between two calls of one worker, processes that the first one started are killed, and its folder, umask, environment, timer,
    recursion limit and the handlers of the common signals are as before; a worker with a thread left over, or with half of the
    files open that it may have, is replaced. What a tool keeps in its modules stays.
    Functions are imported by name, once, in a process without this program's environment variables but PATH; a module that they
    import while they run has to be readable by the workers' user, so import at the top. In a script, everything but definitions
    belongs under `if __name__ == "__main__":` if a tool is defined there.

    A remote tool runs in one thread with all others: one that blocks holds up everything. Its timeout cancels it; one that does
    not end is left behind. Where its schema has a `pattern`, `patternProperties`, `uniqueItems` or a `$ref` that leads back,
    the check of some arguments may take for ever, so a worker does it first, within the tool's timeout; such a tool may have no
    `"format": "path"`.

    Thread-safe. Cannot be pickled, nor used after `os.fork` in the child.

    Args:
        catalogue: the tools.
        allow: names that may be called. None: all of the catalogue.
        num_workers: processes, started when there are calls for them. More run more calls at once, and take more memory.
        timeout: seconds for one call, unless its tool has its own. Larger waits longer for what hangs.
        max_output_bytes: of one output as JSON. Larger lets more through to this process.
        max_concurrency: remote calls awaited at once. Larger loads their servers more.
        root: the folder of the tools: where they start, and which paths must not leave. What they shall change has to be
            writable for the workers' user. None: a new one, which is removed by `close`.
        log_path: a line of JSON for each call is appended here, also for one that is given up (`close`, an interrupt). None:
            no log.
        limits: of each worker.

    Raises:
        ConfigError: a name in `allow` that the catalogue lacks, a function that workers cannot import, a `Command` that
            does not fit its tool, a schema of which it is not certain which strings are paths, a `root` that workers cannot
            read, a log that cannot be written, or a number out of range.

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
        if not hasattr(os, "fork") and any(_needs_worker(tool) for tool in catalogue.values()):
            raise ConfigError(
                "ToolExecutor needs Unix for its worker processes; on this system tools must be `remote`, without `pattern`, "
                "`patternProperties`, `uniqueItems` or recursive `$ref` in their schemas, which workers check."
            )
        if INSIDE in os.environ:
            raise ConfigError(
                "ToolExecutor is made while a worker imports the tools. Make it under `if __name__ == '__main__':`, or in a "
                "function, so that importing the tools' module does not."
            )
        unknown = sorted(set(allow or ()) - set(catalogue))
        if unknown:
            raise ConfigError(f"ToolExecutor.allow must name tools of the catalogue; it has no {', '.join(unknown)}.")
        numbers = {"num_workers": num_workers, "max_output_bytes": max_output_bytes, "max_concurrency": max_concurrency}
        for name, value in numbers.items():
            if value < 1:
                raise ConfigError(f"ToolExecutor.{name} must be >= 1; got {value}.")
        if not 0 < timeout < float("inf"):
            raise ConfigError(f"ToolExecutor.timeout must be positive and finite; got {timeout}.")
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
        # Holds no reference to this object, so that it also ends what an executor that was forgotten has started.
        self._finish = weakref.finalize(
            self, _finish, self._process, self._engine, self._root if own_root else None, log
        )
        if in_workers:
            try:
                for problem in self._engine.submit(self._engine.start()).result():
                    warnings.warn(f"ToolExecutor's workers are less confined than meant: {problem}.", GRPOWarning, 2)
            except BaseException:
                self.close()
                raise

    @property
    def root(self) -> Path:
        """The folder of the tools."""
        return self._root

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Execute calls, as many at once as there are workers; results in their order.

        No call makes this raise: what went wrong with one is in its result. An interrupt ends what has not finished.

        Raises:
            ConfigError: the executor is closed, or belongs to another process.
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
        """`run`, for those who await."""
        try:
            return await asyncio.wrap_future(self._start(calls, threading.Event()))
        except asyncio.CancelledError:
            if self._finish.alive:  # it is the caller who gives up
                raise
            raise ConfigError("ToolExecutor was closed while calls ran; their results are lost.") from None

    def close(self) -> None:
        """End everything that was started, and remove the folder if it was made here. May be called again."""
        self._finish()

    def __enter__(self) -> "ToolExecutor":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("A ToolExecutor owns processes, and cannot be pickled or copied; make one where it is needed.")

    def _start(self, calls: Sequence[ToolCall], ended: threading.Event) -> "Future[list[ToolResult]]":
        if os.getpid() != self._process:
            raise ConfigError("ToolExecutor belongs to the process that made it; make another one after a fork.")
        if self._engine.is_current:
            raise ConfigError("ToolExecutor.run would wait for itself in a remote tool; await run_async there.")
        return self._engine.submit(self._engine.run([(call, self._find(call)) for call in calls], ended))

    def _find(self, call: ToolCall) -> Tool | ToolError:
        """The tool of a call, or why it has none."""
        name = plain_name(call.tool)
        if name is None or name not in self._catalogue:
            shown = bounded_text(call.tool if name is None else name, 100)
            return UnknownToolError(f"{shown} must be a tool of the catalogue.")
        if name not in self._allowed:
            return ToolNotAllowedError(f"{name} must be one of the tools that are allowed.")
        return self._catalogue[name]


def _needs_worker(tool: Tool) -> bool:
    """To be executed, or to have its arguments checked where that may take long."""
    return not tool.remote or slow_keyword(tool.parameters) is not None


def _check_schema(tool: Tool) -> None:
    slow = slow_keyword(tool.parameters)
    if tool.remote and slow is not None and names_path_format(tool.parameters):
        raise ConfigError(
            f'Tool {tool.name}: parameters of a remote tool must not have both "format": "path" and `{slow}`: paths are '
            f"confined in this process, where `{slow}` could hold up everything. Leave one of them out, "
            "or the tool out of `allow`."
        )
    try:
        check_path_formats(tool.parameters)
    except ValueError as error:
        raise ConfigError(f"Tool {tool.name}: parameters: {error} Or leave the tool out of `allow`.") from error


def _pickled(tool: Tool) -> bytes:
    if tool.remote:
        return pickle.dumps("".format)  # takes any arguments, and returns a text: only their check is asked for
    if isinstance(tool.function, Command):
        tool.function.check(tool)
    try:
        return pickle.dumps(tool.function)
    except Exception as error:  # pickle's, or whatever an object raises that is not made for it
        raise ConfigError(
            f"Tool {tool.name}: workers must be able to import its function by name, which fails: {error}. Define it at the "
            "top level of a module, or make the tool `remote` with an `async def`."
        ) from error


def _finish(process: int, engine: Engine, folder: Path | None, log: CallLog | None) -> None:
    if os.getpid() != process:  # a fork that ends: nothing here is its own
        return
    try:
        engine.close()
    finally:
        if log is not None:
            log.close()
        if folder is not None:
            _remove(folder)


def _remove(folder: Path) -> None:
    """A folder with all that tools have put there, which may be closed to their own user."""
    if os.geteuid() != 0:
        for parent, names, _ in os.walk(folder):
            for inner in (Path(parent) / name for name in names):
                if not inner.is_symlink():
                    inner.chmod(0o700)
    shutil.rmtree(folder)

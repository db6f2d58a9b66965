"""Execution of tool calls. Every call returns a result, whatever the policy asks for and whatever the tool does."""

import asyncio
import functools
import os
import re
import tempfile
import warnings
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import CancelledError
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args

from adapters.tools.catalogue.arguments import ArgumentChecker, bounded_text
from adapters.tools.catalogue.calls import ToolCall, ToolResult, plain_name
from adapters.tools.catalogue.inputs import require_real, require_type, require_whole
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.errors import ToolError, ToolNotAllowedError, UnknownToolError
from grpo.errors import ConfigError, GRPOWarning

from .call_log import SECRET_NAMES, CallLog, Redact
from .confinement import Kind, choose
from .confinement.process import why_no_own_users
from .engine import Engine, Given, Waiting
from .fork_server import INSIDE
from .links import ForkServerLink
from .worker import remove_folder
from .workers import WorkerLimits, allowed_tools, needs_worker, pickled

_FOLDER = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""Names of the folders of calls."""


class ToolExecutor:
    """Executes tool calls in worker processes, and awaits remote tools in this process. Made for Linux; workers need Unix.

    Trust: arguments are treated as hostile, and tools are trusted. A call is rejected before anything runs if its tool is not
    in the catalogue or not allowed, if its arguments do not match the schema, or if a path leaves its folder. A worker shares
    no memory, open files, environment or terminal with this program. A worker that times out, dies or sends an invalid answer
    is killed with its processes, and replaced. Between two calls, a worker's process state is restored, but not the state of
    modules. Calls share files in `root`, unless they have folders.

    Imports: functions are imported by name, once, in a process that receives only a few environment variables, such as PATH.
    Import modules at the top of the tool's module, because workers may not be able to read them later. In a script that
    defines a tool, put everything but definitions under `if __name__ == "__main__":`.

    Remote tools run in one thread. The timeout cancels a remote tool; a tool that ignores its cancellation is abandoned. If its
    schema can be slow to check (`pattern`, `patternProperties`, `uniqueItems` or a recursive `$ref`), a worker checks the
    arguments within the tool's timeout, and the schema must not contain `"format": "path"`.

    An executor is thread-safe. It cannot be pickled, and cannot be used in a child process after `os.fork`.

    Args:
        catalogue: The tools.
        allow: Names of the tools that may be called. None allows the whole catalogue.
        num_workers: Maximum number of worker processes, started on demand. More workers use more memory.
        timeout: Time limit of one call in seconds, for tools without their own limit. A larger limit waits longer for hangs.
        max_output_bytes: Size limit of one output as JSON. A larger limit lets more data into this process.
        max_concurrency: Maximum number of concurrent remote calls. A larger limit puts more load on the servers.
        root: The tools' folder: their working directory, and the folder that paths must not leave. It must stay in place. Files
            that tools change must be writable for the workers' user. None creates a new folder, which `close` removes.
        fresh_folder: Whether each call in a worker runs in an empty folder within `root`, which is removed after the call.
        confinement: How workers are kept from other files and processes: "bubblewrap" (mount and process namespaces),
            "landlock" (file rules of Linux 6.2), or "user" (their user id alone). "auto" takes the first of these that works.
        readable: Files and folders that tools may read, in addition to `root`, the system's programs and libraries, Python,
            `sys.path` and imported packages. With "user", tools read what their user may read.
        log_path: File, readable by its owner only, to which one JSON line per call is appended, cancelled calls included. None
            writes no log.
        redact: Which arguments the log leaves out. See `CallLog`.
        limits: Resource limits of each worker.

    Raises:
        ConfigError: `allow` has a name that the catalogue lacks, workers cannot import a function, a `Command` does not match
            its tool, a schema does not determine which strings are paths, workers cannot read `root`, the log cannot be
            written, the confinement does not work here, or a number is out of range.

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
        fresh_folder: bool = False,
        confinement: Literal["auto"] | Kind = "auto",
        readable: Collection[Path | str] = (),
        log_path: Path | str | None = None,
        redact: Redact = SECRET_NAMES,
        limits: WorkerLimits | None = None,
    ) -> None:
        if INSIDE in os.environ:
            raise ConfigError(
                "ToolExecutor was created while a worker imported the tools. Create it under `if __name__ == '__main__':`, or "
                "in a function, so that importing the tools' module does not create it."
            )
        numbers = {"num_workers": num_workers, "max_output_bytes": max_output_bytes, "max_concurrency": max_concurrency}
        require_whole("ToolExecutor", **numbers)
        _check(
            catalogue, allow, timeout, confinement, limits,
            root=root, log_path=log_path, fresh_folder=fresh_folder, readable=readable, redact=redact,
        )  # fmt: skip
        allowed = allowed_tools(catalogue, allow)
        in_workers = [(tool, pickled(tool)) for tool in allowed if needs_worker(tool)]
        kind, reasons = choose(confinement) if in_workers else ("user", [])
        if kind is None:
            raise ConfigError(f"ToolExecutor.confinement={confinement!r} must work on this machine; {reasons[0]}.")
        self._confinement: Kind = kind
        self._catalogue = catalogue
        self._allowed = frozenset(tool.name for tool in allowed)
        self._process = os.getpid()
        log = CallLog(log_path, redact) if log_path is not None else None
        own_root = root is None
        self._root = Path(tempfile.mkdtemp(prefix="grpo-tools-") if root is None else root).resolve()
        limits = limits or WorkerLimits()
        setup = {
            "root": str(self._root),
            "own_root": own_root,
            "kind": kind,
            "readable": [os.fspath(path) for path in readable],
            "no_own_users": why_no_own_users(limits.first_uid),
            "max_output_bytes": max_output_bytes,
            "limits": asdict(limits),
        }
        self._engine = Engine(
            functools.partial(ForkServerLink, in_workers, setup),
            {t.name: ArgumentChecker(t.function, t.parameters, str(self._root)) for t in allowed if t.remote},
            timeout=timeout,
            fresh_in=self._root if fresh_folder else None,
            log=log,
            **numbers,
        )
        # The finalizer holds no reference to `self`, so it also cleans up after an executor that was never closed.
        self._finish = weakref.finalize(
            self, _finish, self._process, self._engine, self._root if own_root else None, log
        )
        if in_workers:
            try:
                problems = self._engine.submit(self._engine.start(), Waiting()).result()
            except BaseException:
                self.close()
                raise
            if kind == "user" and reasons:
                problems = [f"are confined by their user only: {'; '.join(reasons)}", *problems]
            for problem in problems:
                warnings.warn(f"ToolExecutor's workers {problem}.", GRPOWarning, 2)

    @property
    def confinement(self) -> Kind:
        """The kind of confinement of the workers."""
        return self._confinement

    @property
    def root(self) -> Path:
        """The tools' folder."""
        return self._root

    def run(self, calls: Sequence[ToolCall], folders: Sequence[str | None] | None = None) -> list[ToolResult]:
        """Execute calls concurrently and return their results in the order of the calls.

        A failing call does not raise: its error is in its result. An interrupt cancels the unfinished calls.

        Args:
            calls: The calls.
            folders: For each call, the name of its folder within `root`, for example one name per group; None is `root` itself,
                or an empty folder with `fresh_folder`. A folder is created when its first call runs, shared by all calls with
                its name, and kept. It is the working directory, and the folder that paths must not leave. Remote tools have
                no folders: their paths are in `root`.

        Raises:
            ConfigError: The executor is closed, or belongs to another process, or a folder is not the name of a folder.
        """
        given = self._given(calls, folders)
        waiting = Waiting()
        try:
            self._engine.submit(self._engine.run(given), waiting)
            return waiting.future.result()
        except CancelledError:
            raise ConfigError("ToolExecutor was closed while calls ran; their results are lost.") from None
        except BaseException:  # an interrupt, maybe within `submit`
            waiting.give_up()
            raise

    async def run_async(
        self, calls: Sequence[ToolCall], folders: Sequence[str | None] | None = None
    ) -> list[ToolResult]:
        """Asynchronous version of `run`."""
        waiting = Waiting()
        self._engine.submit(self._engine.run(self._given(calls, folders)), waiting)
        try:
            return await asyncio.wrap_future(waiting.future)
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

    def _given(self, calls: Sequence[ToolCall], folders: Sequence[str | None] | None) -> list[Given]:
        if os.getpid() != self._process:
            raise ConfigError(
                "ToolExecutor belongs to the process that created it. Create another executor after a fork."
            )
        if self._engine.is_current:
            raise ConfigError(
                "ToolExecutor.run must not be called in a remote tool, where it would wait for itself; await run_async."
            )
        named = [None] * len(calls) if folders is None else list(folders)
        if len(named) != len(calls) or not all(name is None or _FOLDER.fullmatch(name) for name in named):
            raise ConfigError(
                f"ToolExecutor.run: folders must give each of the {len(calls)} calls None, or a name of letters, digits, "
                f"'_' and '-'; got {named!r}."
            )
        return [(call, self._find(call), name) for call, name in zip(calls, named, strict=True)]

    def _find(self, call: ToolCall) -> Tool | ToolError:
        """The tool of a call, or the error if the call has no allowed tool."""
        name = plain_name(call.tool)
        if name is None or name not in self._catalogue:
            shown = bounded_text(call.tool if name is None else name, 100)
            return UnknownToolError(f"{shown} must be a tool of the catalogue.")
        if name not in self._allowed:
            return ToolNotAllowedError(f"{name} must be one of the allowed tools.")
        return self._catalogue[name]


def _check(catalogue: Any, allow: Any, timeout: Any, confinement: Any, limits: Any, **settings: Any) -> None:
    """Check the arguments of `ToolExecutor`."""
    owner, paths = "ToolExecutor", (str, Path, NoneType)
    require_type(owner, ToolCatalogue, "a ToolCatalogue", catalogue=catalogue)
    require_real(owner, timeout=timeout)
    if timeout <= 0:
        raise ConfigError(f"ToolExecutor.timeout must be > 0 seconds; got {timeout}.")
    require_type(owner, (WorkerLimits, NoneType), "WorkerLimits, or None", limits=limits)
    root, redact = settings["root"], settings["redact"]
    require_type(owner, paths, "a path, or None", root=root, log_path=settings["log_path"])
    require_type(owner, bool, "True or False", fresh_folder=settings["fresh_folder"])
    if root is not None and not Path(root).is_dir():
        raise ConfigError(f"ToolExecutor.root must be a folder that exists; got {root}.")
    for name, given, kind, required in (
        ("allow", () if allow is None else allow, object, "a list of tool names, or None"),
        ("readable", settings["readable"], (str, Path), "a list of paths"),
        ("redact", () if callable(redact) else redact, str, "a list of argument names, or a function"),
    ):
        is_list = isinstance(given, Collection) and not isinstance(given, str)
        if not is_list or not all(isinstance(each, kind) for each in given):
            raise ConfigError(f"ToolExecutor.{name} must be {required}; got {given!r}.")
    if confinement not in ("auto", *get_args(Kind)):
        raise ConfigError(f"ToolExecutor.confinement must be 'auto' or one of {get_args(Kind)}; got {confinement!r}.")


def _finish(process: int, engine: Engine, folder: Path | None, log: CallLog | None) -> None:
    if os.getpid() != process:  # a forked child ends; it owns nothing here
        return
    try:
        engine.close()
    finally:
        if log is not None:
            log.close()
        if folder is not None:
            remove_folder(str(folder))

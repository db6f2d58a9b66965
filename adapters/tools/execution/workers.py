"""The pool of workers, their limits, and which tools need them."""

import asyncio
import os
import pickle
import signal
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

from adapters.tools.catalogue.schemas import names_path_format, slow_keyword
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.errors import ToolError, ToolTimeoutError, WorkerDiedError, WorkerLostError
from grpo.errors import ConfigError

from .commands import Command
from .links import ERRORS, ForkServerLink, LinkLostError, Worker
from .worker import OK, RETIRE


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Resource limits of one worker process and of each process that it starts. None sets no limit.

    Raises:
        ConfigError: A limit is not a positive integer.
    """

    memory_bytes: int | None = 2**30
    """Memory of one process in bytes, beyond the memory of the imported modules (`RLIMIT_DATA`, without shared memory and file
    mappings). A larger limit lets tools, and hostile calls, use more memory."""
    cpu_seconds: int | None = None
    """Processor time of one call in seconds. A worker that uses more is killed. The executor's timeout applies in any case."""
    file_bytes: int | None = 100 * 2**20
    """Size of one written file in bytes. A larger limit lets a call fill more of the disk."""
    open_files: int | None = 256
    """Number of open file descriptors. A larger limit lets tools open more files and connections."""
    processes: int | None = 64
    """Number of processes and threads of one worker with everything that it started. It applies only to workers with their own
    user id. A larger limit lets a fork bomb use more of the machine until it is killed."""
    first_uid: int | None = 61_000
    """First user id for workers, if this program runs as root on Linux. Each worker takes the first free of the 1,000 user
    ids from this id on. No other account may have these ids. With None, workers keep the program's user."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for name, value in asdict(self).items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"WorkerLimits.{name} must be a positive integer, or None; got {value!r}.")


class WorkerPool:
    """Workers that are started on demand. Each call takes the next free worker.

    Args:
        make_server: Creates a fork server: the first one, and a replacement if a fork server died.
        num_workers: Maximum number of concurrent workers.
    """

    def __init__(self, make_server: Callable[[], ForkServerLink], num_workers: int) -> None:
        self._make_server = make_server
        self._server: ForkServerLink | None = None
        self._starting = asyncio.Lock()
        self._turns = asyncio.Semaphore(num_workers)
        self._idle: list[Worker] = []
        self.problems: list[str] = []

    async def start(self) -> None:
        """Start the fork server and one worker.

        Raises:
            ConfigError: The worker processes cannot import the tools' modules, or cannot read the folder.
        """
        self._idle.append(await self._spawn())

    def close(self) -> None:
        """End the workers and the fork server."""
        for worker in self._idle:
            worker.link.socket.close()
        if self._server is not None:
            self._server.close()

    async def call(self, request: bytes, timeout: float, begin: Callable[[], None]) -> tuple[Any, int]:
        """Run a call on the next free worker. Returns the output and its size in bytes.

        A worker may send data that does not answer the call. If earlier calls ran on that worker, the data may be theirs, so
        the call runs again on a new worker. `begin` is called when a worker is available. The timeout in seconds starts then.

        Raises:
            ToolError: The call failed.
        """
        async with self._turns:
            while self._idle and not self._idle[-1].link.is_quiet:
                await self._idle.pop().kill()
            worker = self._idle.pop() if self._idle else await self._new_worker()
            begin()
            answer = await self._ask(worker, request, timeout)
            if answer is None:
                worker = await self._new_worker()
                begin()
                answer = await self._ask(worker, request, timeout)
            assert answer is not None
        flags, content, value = answer
        if flags & OK:
            return value, len(content)
        raise ERRORS[value[0]](str(value[1]))

    async def _ask(self, worker: Worker, request: bytes, timeout: float) -> tuple[int, bytes, Any] | None:
        """Run a call on this worker. Returns None if it sent invalid data, which an earlier call may have caused."""
        is_new, worker.is_new = worker.is_new, False
        try:
            async with asyncio.timeout(timeout):
                answer = await worker.ask(request)
        except TimeoutError:
            is_garbled = worker.link.has_unread_data
            await worker.kill()
            if is_garbled and not is_new:
                return None
            raise ToolTimeoutError(f"no answer within {timeout:g} s; the worker was killed.") from None
        except LinkLostError as error:
            status = await worker.kill(has_ended=error.has_ended)
            if not error.has_ended and not is_new:
                return None
            raise _died(worker, error, status) from None
        except BaseException:  # the call was cancelled
            await worker.kill()
            raise
        if answer[0] & RETIRE:
            await worker.kill()
        else:
            self._idle.append(worker)
        return answer

    async def _new_worker(self) -> Worker:
        try:
            return await self._spawn()
        except (LinkLostError, ConfigError) as error:
            raise WorkerLostError(f"no worker could be started: {error}") from error

    async def _spawn(self) -> Worker:
        async with self._starting:
            if self._server is None or self._server.is_lost:
                if self._server is not None:
                    self._server.close()
                self._server = self._make_server()
                await self._server.start()
        worker, self.problems = await self._server.spawn()
        return worker


def _died(worker: Worker, error: LinkLostError, status: int | None) -> ToolError:
    """The error of a call whose worker ended. The call is lost if something else ended the worker."""
    how = "it did not end by itself"
    kind: type[ToolError] = WorkerDiedError
    if worker.server.is_lost:
        how, kind = "the fork server ended too", WorkerLostError
    elif status is not None:
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGXCPU:
            return ToolTimeoutError(
                "the call used more processor time than WorkerLimits.cpu_seconds; the worker was killed."
            )
        how = f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        if error.has_ended and code in (-signal.SIGKILL, -signal.SIGTERM):
            how, kind = "killed", WorkerLostError
    return kind(f"the worker ended during the call: {error} ({how}).")


def needs_worker(tool: Tool) -> bool:
    """Whether a worker is needed to execute the tool, or to check its arguments where the check may be slow."""
    return not tool.remote or slow_keyword(tool.parameters) is not None


def allowed_tools(catalogue: ToolCatalogue, allow: Collection[str] | None) -> list[Tool]:
    """The allowed tools. Their schemas are checked."""
    unknown = [str(name) for name in allow or () if name not in catalogue]
    if unknown:
        raise ConfigError(
            f"ToolExecutor.allow must name tools of the catalogue; the catalogue has no {', '.join(sorted(unknown))}."
        )
    if not hasattr(os, "fork") and any(needs_worker(tool) for tool in catalogue.values()):
        raise ConfigError(
            "ToolExecutor needs Unix for its worker processes. On this system, tools must be `remote`. Schemas "
            "must not have `pattern`, `patternProperties`, `uniqueItems` or a recursive `$ref`: workers check these."
        )
    allowed = [tool for name, tool in catalogue.items() if allow is None or name in allow]
    for tool in allowed:
        slow = slow_keyword(tool.parameters)
        if tool.remote and slow is not None and names_path_format(tool.parameters):
            raise ConfigError(
                f'Tool {tool.name}: parameters of a remote tool must not have both "format": "path" and `{slow}`: this '
                f"process checks paths, and a check of `{slow}` could block all other calls. Remove one of the two from the "
                "schema, or leave the tool out of `allow`."
            )
    return allowed


def pickled(tool: Tool) -> bytes:
    """The tool's function, for the fork server."""
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

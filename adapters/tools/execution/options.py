"""Options of `ToolExecutor`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from grpo.arguments import Settings, setting

from .call_log import SECRET_NAMES
from .confinement import Kind
from .workers import WorkerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions(Settings):
    """Options of a `ToolExecutor`: limits of calls, where the tools work, and what is logged.

    Raises:
        ConfigError: A value is not allowed.
    """

    timeout: float = setting(10.0, above=0.0)
    """Time limit of one call in seconds, for tools without their own limit. A larger limit waits longer for hangs."""
    max_output_bytes: int = setting(100_000, at_least=1)
    """Size limit of one output as JSON. A larger limit lets more data into this process."""
    max_folder_bytes: int | None = setting(200 * 2**20, at_least=1)
    """Maximum size of the files in the folder of a call, or in `root` for calls without a folder. The size is measured while
    calls run, about ten times a second, so a call that writes fast may exceed it before it is ended. A larger limit lets a call
    fill more of the disk. Files that were in `root` before do not count. None sets no limit."""
    max_root_bytes: int | None = setting(2 * 2**30, at_least=1)
    """Maximum size of the files in `root`, with all folders of calls. Above it, calls are lost. None sets no limit."""
    max_concurrency: int = setting(32, at_least=1)
    """Maximum number of concurrent remote calls. A larger limit puts more load on the servers. A remote tool that awaits other
    remote calls counts too while it waits."""
    root: Path | str | None = None
    """The tools' folder: their working directory, and the folder that paths must not leave. Files that tools change must be
    writable for the workers' user. None creates a new folder, which `close` removes."""
    fresh_folder: bool = False
    """Whether each call in a worker runs in an empty folder within `root`, which is removed after the call."""
    confinement: Literal["auto", Kind] = "auto"
    """How workers are kept from other files and processes: "bubblewrap" (mount and process namespaces), "landlock" (file rules
    of Linux 6.2), or "user" (their user id alone). "auto" takes the first of these that works."""
    readable: tuple[Path | str, ...] = ()
    """Files and folders that tools may read, in addition to `root`, the system's programs and libraries, Python, `sys.path` and
    imported packages. With "user", tools read what their user may read."""
    log_path: Path | str | None = None
    """File, readable by its owner only, to which one JSON line per call is appended, cancelled calls included."""
    redact: tuple[str, ...] | Callable = SECRET_NAMES
    """Names of the arguments, at any depth, whose values the log leaves out. Longer names that contain one are meant too; case,
    "_" and "-" do not matter. Or a function of a tool's name and arguments that returns what to log."""
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    """Resource limits of each worker."""

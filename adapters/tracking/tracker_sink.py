"""What the sinks have in common: when a tracker's run is opened, continued and closed, and which iterations it has already."""

import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from grpo import Samples
from grpo.arguments import install_command, require_count
from grpo.errors import ConfigError
from grpo.sinks import replace_text


class TrackerSink(ABC):
    """A `MetricSink` that writes to one tracker.

    The tracker's run is opened by the first `start` or `log`. Iteration 1 opens a new run. A later iteration continues the run
    whose id is in the folder, so a resumed run has one id. The trainer calls sinks on rank 0 only, so the other ranks open
    nothing.

    Args:
        folder: The run's folder. It is made if it is missing. A file `PACKAGE.json` in it keeps the id of the tracker's run.
        name: The run's name in the tracker. None: the folder's name.
        log_every: Iterations between the logged iterations. Iterations with an evaluation, and the last, are logged too.
            Larger: tracking costs less, and curves have fewer points.

    Raises:
        ConfigError: The tracker's package is not installed, or `log_every` is below 1.
    """

    package: ClassVar[str]
    """The import name of the tracker's package."""
    replaces: ClassVar[bool] = False
    """Whether the tracker replaces an iteration that is logged again. Otherwise it is not logged again."""

    def __init__(self, folder: str | Path, *, name: str | None = None, log_every: int = 1) -> None:
        require_installed(self.package, by=type(self).__name__)
        self.folder = Path(folder)
        self.name = name or self.folder.resolve().name
        self.log_every = require_count("log_every", log_every)
        self._is_open = self._is_broken = False
        # iterations up to these numbers were in the tracker at `start`, and are now
        self._num_repeated = self._last = 0

    def start(self, settings: Mapping[str, Any], iteration: int) -> None:
        """Open or continue the tracker's run, and write the settings.

        Args:
            settings: Plain JSON values: the config, the policy's class, versions.
            iteration: The first iteration that is logged next. 1: a new run.
        """
        self._begin(iteration)
        self._write(lambda: self._log_settings(settings, iteration))

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Write the metrics of one iteration, if the tracker does not have the iteration yet."""
        if not self._is_open:
            self._begin(iteration)
        if iteration > self._num_repeated:
            self._write(lambda: self._log_metrics(metrics, iteration))
            self._last = iteration

    def log_samples(self, samples: Samples, iteration: int) -> None:
        """Write a table of a few samples and, where the tracker has them, histograms of all rewards and advantages."""
        if not self._is_open:
            self._begin(iteration)
        if iteration > self._num_repeated:
            self._write(lambda: self._log_samples(samples, iteration))

    def close(self) -> None:
        """Finish the tracker's run. A sink that raised an error before writes nothing more."""
        self._finish(failed=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish(failed=kind is not None)

    def _begin(self, iteration: int) -> None:
        """Open a new run at iteration 1, else the run that the folder names. After an error, open the run again."""
        if self._is_open and (iteration == 1 or self._is_broken):
            self.close()
        if not self._is_open:
            self.folder.mkdir(parents=True, exist_ok=True)
            run = json.loads(self._run_file.read_text("utf-8")) if iteration > 1 and self._run_file.exists() else {}
            self._last = run.get("iteration", 0)
            self._is_broken = False
            self._write(lambda: self._open(run, iteration))
            self._is_open = True
        self._num_repeated = 0 if self.replaces else self._last

    def _write(self, action: Any) -> None:
        """Call `action`. After an error, which reaches the caller, `close` only releases what is open."""
        self._is_broken, was_broken = True, self._is_broken
        action()
        self._is_broken = was_broken

    def _finish(self, *, failed: bool) -> None:
        if self._is_open:
            self._is_open = False
            self._close(failed=failed, broken=self._is_broken)

    @property
    def _run_file(self) -> Path:
        return self.folder / f"{self.package}.json"

    def _save_run(self, **values: Any) -> None:
        """Write the id of the tracker's run, and what else a resume needs, to the folder: completely or not at all."""
        replace_text(self._run_file, json.dumps(values))

    @abstractmethod
    def _open(self, run: Mapping[str, Any], iteration: int) -> None:
        """Continue the run that `_save_run` described, or open a new one if `run` is empty."""

    @abstractmethod
    def _log_settings(self, settings: Mapping[str, Any], iteration: int) -> None: ...

    @abstractmethod
    def _log_metrics(self, metrics: Mapping[str, float], iteration: int) -> None: ...

    @abstractmethod
    def _log_samples(self, samples: Samples, iteration: int) -> None: ...

    @abstractmethod
    def _close(self, *, failed: bool, broken: bool) -> None:
        """Finish the run. `failed`: an error ended it. `broken`: the sink raised an error, so write nothing more."""


def require_installed(package: str, *, by: str, install: str | None = None) -> None:
    """Check that a package can be imported, without importing it.

    Raises:
        ConfigError: It is not installed. A folder of the same name, such as `./wandb`, is no package.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        command = install_command("tracking") if install is None else f"pip install {install}"
        raise ConfigError(f"{by} needs the package {package}, which is not installed. Install it: {command}.")

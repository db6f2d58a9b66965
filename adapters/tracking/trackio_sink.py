"""A sink for trackio."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from grpo import Samples

from .tracker_sink import TrackerSink
from .values import histograms, image_of, pictures_of, table


class TrackioSink(TrackerSink):
    """Writes a run to trackio: metrics, settings as the run's config, tables of samples with small copies of their
    pictures, and histograms.

    trackio writes to a database on this machine (in the folder TRACKIO_DIR, if this environment variable is set), twice per
    second, in a thread of its own. Look at the runs with `trackio show`. trackio reports its own errors as warnings, and
    training goes on.

    A resumed run continues under its id. trackio cannot replace what was logged, so an iteration that is in its database
    is not logged again: its first values stay. A name that the project has already gets a number, because trackio
    resumes runs by their names.

    Args:
        folder: The run's folder. `trackio.json` in it keeps the run's name and id.
        project: The project in trackio.
        name: The run's name. None: the folder's name.
        log_every: Iterations between the logged iterations. Iterations with an evaluation, and the last, are logged too.
        options: Passed on to `trackio.init`: `group`, `space_id`, `auto_log_gpu`.

    Raises:
        ConfigError: `trackio` is not installed, or `log_every` is below 1.
    """

    package: ClassVar[str] = "trackio"

    def __init__(
        self,
        folder: str | Path,
        *,
        project: str = "grpo",
        name: str | None = None,
        log_every: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(folder, name=name, log_every=log_every)
        self._project, self._options = project, options
        self._settings: dict[str, Any] = {}

    def start(self, settings: Mapping[str, Any], iteration: int) -> None:
        """Open or continue the run. trackio takes the settings only when it opens a run."""
        self._settings = dict(settings)
        super().start(settings, iteration)

    def _open(self, run: Mapping[str, Any], iteration: int) -> None:
        self._trackio = import_module("trackio")
        name = run.get("name") or self._new_name()
        options = {"config": self._settings, "resume": "allow", "embed": False} | self._options
        self._run = self._trackio.init(self._project, name=name, **options)
        self._last = self._run._next_step - 1  # trackio asked its database, or its server
        self._save_run(id=self._run.id, name=name)

    def _new_name(self) -> str:
        """The run's name, with a number if the project has a run of this name on this machine."""
        try:
            taken = {run.name for run in self._trackio.Api().runs(self._project)}
        except ValueError:  # there is no such project yet
            return self.name
        numbered = (f"{self.name}-{number}" for number in range(2, len(taken) + 3))
        return next(name for name in (self.name, *numbered) if name not in taken)

    def _log_settings(self, settings: Mapping[str, Any], iteration: int) -> None:
        pass  # `_open` passes them on

    def _log_metrics(self, metrics: Mapping[str, float], iteration: int) -> None:
        self._run.log(dict(metrics), step=iteration)

    def _log_samples(self, samples: Samples, iteration: int) -> None:
        rows = self._trackio.Table(data=[dict(row) for row in table(samples)])
        charts = {
            name: self._trackio.Histogram(np_histogram=(one.counts, one.edges)) for name, one in histograms(samples)
        }
        shown = {name: self._trackio.Image(image_of(file)) for name, file in pictures_of(samples)}
        self._run.log({f"{samples.kind}/samples": rows, **shown, **charts}, step=iteration)

    def _close(self, *, failed: bool, broken: bool) -> None:
        self._trackio.finish()

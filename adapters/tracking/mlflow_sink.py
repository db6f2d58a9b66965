"""A sink for MLflow."""

import json
import math
import posixpath
import re
import tempfile
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from grpo import Samples

from .tracker_sink import TrackerSink
from .values import Row, flat, image_of, pictures_of, table

MAX_METRICS, MAX_PARAMS, MAX_NAME, MAX_VALUE = 1_000, 100, 250, 6_000
"""MLflow's limits: metrics and params of one call, and characters of a name and of a param's value."""
MAX_ROWS = 2_000
"""Rows that a table of samples keeps: the newest."""


class MLflowSink(TrackerSink):
    """Writes a run to MLflow: metrics, settings as params, and tables of samples.

    MLflow has no histograms. The tables are the artifacts `train_samples.json` and `eval_samples.json`, with the newest
    2,000 rows each and the iteration as the first column. Small copies of the pictures of the newest rows are images of the
    run. Metrics and tables wait in memory and are written together, because one call of MLflow takes about as long as an
    iteration of a bandit. A killed process loses what waits.

    A resumed run continues under its id. MLflow cannot replace what was logged, so an iteration that it has already
    is not logged again: its first values stay. MLflow's params cannot change either: a resumed run keeps those of its start,
    and the artifact `settings-00000051.json` has the settings of the call of `train` that began with iteration 51.

    Args:
        folder: The run's folder. `mlflow.json` in it keeps the run's id.
        experiment: The experiment in MLflow. It is made if it is missing.
        name: The run's name. None: the folder's name.
        tracking_uri: Where MLflow writes: `sqlite:///mlflow.db`, or a server. None: as MLFLOW_TRACKING_URI or
            `mlflow.set_tracking_uri` says, else MLflow's default, the file `mlflow.db` in the current folder.
        log_every: Iterations between the logged iterations. Iterations with an evaluation, and the last, are logged too.
        write_every: Seconds between writes. Larger: tracking costs less, and a killed process loses more.

    Raises:
        ConfigError: `mlflow` is not installed, or `log_every` is below 1.
    """

    package: ClassVar[str] = "mlflow"

    def __init__(
        self,
        folder: str | Path,
        *,
        experiment: str = "grpo",
        name: str | None = None,
        tracking_uri: str | None = None,
        log_every: int = 1,
        write_every: float = 10.0,
    ) -> None:
        super().__init__(folder, name=name, log_every=log_every)
        self._experiment, self._tracking_uri, self._write_every = experiment, tracking_uri, write_every

    def _open(self, run: Mapping[str, Any], iteration: int) -> None:
        self._client = import_module("mlflow").MlflowClient(self._tracking_uri)
        self._entities = import_module("mlflow.entities")
        self._waiting: list[Any] = []
        self._tables: dict[str, list[Row]] = {}
        self._changed: set[str] = set()
        self._pictures: dict[str, tuple[list[tuple[str, bytes]], int]] = {}
        self._written_at = -math.inf
        if run:
            self._id = run["id"]
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(self._experiment_id(), run_name=self.name).info.run_id
            self._save_run(id=self._id, iteration=0)

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        return self._client.create_experiment(self._experiment) if found is None else found.experiment_id

    def _log_settings(self, settings: Mapping[str, Any], iteration: int) -> None:
        self._client.log_dict(self._id, dict(settings), f"settings-{iteration:08d}.json")
        known = self._client.get_run(self._id).data.params
        named = {accepted_name(name): str(value)[:MAX_VALUE] for name, value in flat(settings).items()}
        params = [self._entities.Param(name, value) for name, value in named.items() if name not in known]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MAX_PARAMS], synchronous=True)

    def _log_metrics(self, metrics: Mapping[str, float], iteration: int) -> None:
        now = int(1e3 * time.time())
        named = {accepted_name(name): float(value) for name, value in metrics.items()}
        self._waiting += [self._entities.Metric(name, value, now, iteration) for name, value in named.items()]
        if time.monotonic() - self._written_at >= self._write_every or len(self._waiting) >= MAX_METRICS:
            self._write_waiting(iteration)

    def _log_samples(self, samples: Samples, iteration: int) -> None:
        file = f"{samples.kind}_samples.json"
        if file not in self._tables:
            self._tables[file] = self._saved_rows(file)
        rows = [{"iteration": iteration, **row} for row in table(samples)]
        self._tables[file] = [*self._tables[file], *rows][-MAX_ROWS:]
        self._changed.add(file)
        self._pictures[samples.kind] = (pictures_of(samples), iteration)

    def _saved_rows(self, file: str) -> list[Row]:
        """The rows of a table that this run wrote before it was resumed."""
        if file not in {artifact.path for artifact in self._client.list_artifacts(self._id)}:
            self._show_table(file)
            return []
        with tempfile.TemporaryDirectory() as folder:
            saved = json.loads(Path(self._client.download_artifacts(self._id, file, folder)).read_text("utf-8"))
        rows = [dict(zip(saved["columns"], row, strict=True)) for row in saved["data"]]
        # the others are sampled again
        return [row for row in rows if row["iteration"] <= self._num_repeated]

    def _show_table(self, file: str) -> None:
        """Tell MLflow that an artifact is a table, so that it shows the artifact as one."""
        tag = "mlflow.loggedArtifacts"
        known = json.loads(self._client.get_run(self._id).data.tags.get(tag, "[]"))
        self._client.set_tag(self._id, tag, json.dumps([*known, {"path": file, "type": "table"}]))

    def _write_waiting(self, iteration: int) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), MAX_METRICS):
            self._client.log_batch(self._id, metrics=waiting[start : start + MAX_METRICS], synchronous=True)
        changed, self._changed = self._changed, set()
        for file in changed:
            columns = list(dict.fromkeys(name for row in self._tables[file] for name in row))
            data = [[row.get(name) for name in columns] for row in self._tables[file]]
            self._client.log_text(self._id, json.dumps({"columns": columns, "data": data}), file)
        shown, self._pictures = self._pictures, {}
        for pictures, step in shown.values():
            for name, png in pictures:
                self._client.log_image(self._id, image_of(png), key=name, step=step, synchronous=True)
        # after the rest: a process that is killed in between writes iterations twice, and loses none
        self._save_run(id=self._id, iteration=iteration)
        self._written_at = time.monotonic()

    def _close(self, *, failed: bool, broken: bool) -> None:
        if not broken:
            self._write_waiting(self._last)
            self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def accepted_name(name: str) -> str:
    """A name that MLflow accepts: other characters than letters, digits, `_-. /` become `_`, and the path is a plain one."""
    plain = posixpath.normpath(re.sub(r"[^\w\-. /]", "_", name)).lstrip("/.")
    return plain[:MAX_NAME] or "_"

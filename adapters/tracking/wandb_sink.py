"""A sink for Weights & Biases."""

import math
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from grpo import Samples

from .tracker_sink import TrackerSink
from .values import histograms, image_of, pictures_of, table

FLUSH_INTERVAL = "x_transaction_log_flush_interval"
"""W&B's setting: seconds between writes of the file that it keeps on this machine."""


class WandbSink(TrackerSink):
    """Writes a run to Weights & Biases: metrics, settings as the run's config, histograms, and tables of samples.

    W&B keeps each table as a version of an artifact, so tables are logged less often than metrics: see `tables_every`. Small
    copies of the pictures of a table's rows are logged with it.

    Without `mode`, W&B does what it always does: it sends the run to its server, and asks for a login if there is none. With
    `mode="offline"` (or the environment variable WANDB_MODE), the run stays in the folder until `wandb sync` sends it.

    A resumed run continues under its id (`wandb.init(id=..., resume="allow")`). W&B cannot replace what was logged, so an
    iteration that it has already is not logged again: its first values stay. Offline, each resume writes one more folder
    `wandb/offline-run-...-ID` with the same id. W&B writes its file once per second, so a killed process loses up to a second.

    Args:
        folder: The run's folder. W&B writes to `wandb/` in it, and `wandb.json` keeps the run's id.
        project: The project in W&B.
        name: The run's name. None: the folder's name.
        mode: "online", "offline" or "disabled". None: as WANDB_MODE says, else "online".
        log_every: Iterations between the logged iterations. Iterations with an evaluation, and the last, are logged too.
        tables_every: Seconds between two tables of the same kind, training or evaluation. 0: a table with each log.
        options: Passed on to `wandb.init`: `entity`, `group`, `tags`, `settings`.

    Raises:
        ConfigError: `wandb` is not installed, or `log_every` is below 1.
    """

    package: ClassVar[str] = "wandb"

    def __init__(
        self,
        folder: str | Path,
        *,
        project: str = "grpo",
        name: str | None = None,
        mode: str | None = None,
        log_every: int = 1,
        tables_every: float = 30.0,
        **options: Any,
    ) -> None:
        super().__init__(folder, name=name, log_every=log_every)
        self._tables_every = tables_every
        self._table_at: dict[str, float] = {}
        # "create_new": another run of this process may be open, such as one per seed
        self._options = {"project": project, "mode": mode, "reinit": "create_new"} | options

    def _open(self, run: Mapping[str, Any], iteration: int) -> None:
        self._wandb = import_module("wandb")
        self._id = run.get("id") or uuid4().hex[:8]
        options = {"id": self._id, "name": self.name, "dir": self.folder, "resume": "allow"} | self._options
        if FLUSH_INTERVAL in self._wandb.Settings.model_fields:  # 15 seconds by default; old versions do not have it
            options = {"settings": self._wandb.Settings(**{FLUSH_INTERVAL: 1.0})} | options
        self._run = self._wandb.init(**options)
        self._save_run(id=self._id, iteration=self._last)

    def _log_settings(self, settings: Mapping[str, Any], iteration: int) -> None:
        self._run.config.update(dict(settings), allow_val_change=True)

    def _log_metrics(self, metrics: Mapping[str, float], iteration: int) -> None:
        self._run.log(dict(metrics), step=iteration)
        self._save_run(id=self._id, iteration=self._last)  # W&B keeps an iteration open until the next one comes

    def _log_samples(self, samples: Samples, iteration: int) -> None:
        shown: dict[str, Any] = {
            name: self._wandb.Histogram(np_histogram=(one.counts, one.edges)) for name, one in histograms(samples)
        }
        now = time.monotonic()
        if now - self._table_at.get(samples.kind, -math.inf) >= self._tables_every:
            self._table_at[samples.kind] = now
            rows = table(samples)
            columns = list(rows[0]) if rows else []
            shown[f"{samples.kind}/samples"] = self._wandb.Table(columns, [list(row.values()) for row in rows])
            shown |= {name: self._wandb.Image(image_of(file)) for name, file in pictures_of(samples)}
        self._run.log(shown, step=iteration)

    def _close(self, *, failed: bool, broken: bool) -> None:
        self._run.finish(exit_code=int(failed))
        if not broken:
            self._save_run(id=self._id, iteration=self._last)

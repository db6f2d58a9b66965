"""A sink for TensorBoard."""

import json
import os
import socket
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from grpo import Samples

from .tracker_sink import TrackerSink
from .values import Histogram, flat, histograms, image_of, markdown_table, pictures_of, table


class TensorBoardSink(TrackerSink):
    """Writes a run for TensorBoard: scalars, texts and histograms, in an event file in the run's folder.

    Look at the runs with `tensorboard --logdir runs`. Settings are a text, and values in the tab HPARAMS. Samples are a table
    in the tab TEXT, and small copies of their pictures in the tab IMAGES. Each iteration is written at once, by the thread that
    trains. TensorFlow is not needed.

    A folder is one run in TensorBoard. A resumed run writes a new event file into the same folder. The file begins with a mark
    at the first new iteration, so that TensorBoard shows each repeated iteration once, with its new values. A new run in
    the folder of an old one replaces it in TensorBoard.

    Args:
        folder: The run's folder, `runs/first`.
        name: A folder in `folder`, for several runs. None: the event files are in `folder` itself.
        log_every: Iterations between the logged iterations. Iterations with an evaluation, and the last, are logged too.

    Raises:
        ConfigError: `tensorboard` is not installed, or `log_every` is below 1.
    """

    package: ClassVar[str] = "tensorboard"
    replaces: ClassVar[bool] = True

    def __init__(self, folder: str | Path, *, name: str | None = None, log_every: int = 1) -> None:
        super().__init__(folder if name is None else Path(folder) / name, name=name, log_every=log_every)

    def _open(self, run: Mapping[str, Any], iteration: int) -> None:
        self._events = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = import_module("tensorboard.compat.proto.summary_pb2")
        self._tensors = import_module("tensorboard.compat.proto.tensor_pb2")
        self._types = import_module("tensorboard.compat.proto.types_pb2")
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)  # files are read in the order of their names
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = EventFile(self.folder / name)
        self._records = import_module("tensorboard.summary.writer.record_writer").RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        self._forget_from(iteration)

    def _log_settings(self, settings: Mapping[str, Any], iteration: int) -> None:
        if iteration <= self._last:
            self._forget_from(iteration)
        text = f"```json\n{json.dumps(settings, indent=2)}\n```"
        self._add_values(iteration, [self._text("settings", text), self._hyperparameters(settings)])

    def _log_metrics(self, metrics: Mapping[str, float], iteration: int) -> None:
        value = self._summaries.Summary.Value
        self._add_values(iteration, [value(tag=name, simple_value=number) for name, number in metrics.items()])

    def _log_samples(self, samples: Samples, iteration: int) -> None:
        text = self._text(f"{samples.kind}/samples", markdown_table(table(samples)))
        pictures = [self._image(name, file) for name, file in pictures_of(samples)]
        charts = [self._histogram(name, one) for name, one in histograms(samples)]
        self._add_values(iteration, [text, *pictures, *charts])

    def _close(self, *, failed: bool, broken: bool) -> None:
        self._file.close()

    def _forget_from(self, iteration: int) -> None:
        """Write the mark of a restart, after which TensorBoard forgets this iteration and those after it."""
        self._add(step=iteration, session_log=self._events.SessionLog(status=self._events.SessionLog.START))

    def _add(self, **fields: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())

    def _add_values(self, iteration: int, values: list[Any]) -> None:
        """Write all values of an iteration in one event."""
        # torch's SummaryWriter writes an event for each value, which takes ten times as long
        self._add(step=iteration, summary=self._summaries.Summary(value=values))

    def _text(self, tag: str, text: str) -> Any:
        tensor = self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()])
        return self._summaries.Summary.Value(tag=tag, tensor=tensor, metadata=self._metadata("text"))

    def _histogram(self, tag: str, histogram: Histogram) -> Any:
        values = histogram.values
        histo = self._summaries.HistogramProto(
            min=values.min(),
            max=values.max(),
            num=len(values),
            sum=values.sum(),
            sum_squares=values @ values,
            bucket_limit=histogram.edges[1:],
            bucket=histogram.counts,
        )
        return self._summaries.Summary.Value(tag=tag, histo=histo)

    def _image(self, tag: str, file: bytes) -> Any:
        width, height = image_of(file).size
        image = self._summaries.Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=file)
        return self._summaries.Summary.Value(tag=tag, image=image)

    def _hyperparameters(self, settings: Mapping[str, Any]) -> Any:
        plugin = import_module("tensorboard.plugins.hparams.plugin_data_pb2")
        info = plugin.SessionStartInfo(start_time_secs=time.time())
        for name, value in flat(settings).items():
            kind = "bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"
            setattr(info.hparams[name], f"{kind}_value", value)
        content = plugin.HParamsPluginData(session_start_info=info).SerializeToString()
        tensor = self._tensors.TensorProto(dtype=self._types.DT_FLOAT, float_val=[0.0])
        metadata = self._metadata("hparams", content)
        return self._summaries.Summary.Value(tag="_hparams_/session_start_info", tensor=tensor, metadata=metadata)

    def _metadata(self, plugin: str, content: bytes = b"") -> Any:
        data = self._summaries.SummaryMetadata.PluginData(plugin_name=plugin, content=content)
        return self._summaries.SummaryMetadata(plugin_data=data)


class EventFile:
    """A file without a buffer, so that an error is raised by the write that caused it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)

    def write(self, data: bytes) -> None:
        """Write all of `data`."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

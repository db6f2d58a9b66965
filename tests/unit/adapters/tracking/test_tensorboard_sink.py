"""TensorBoard's own reader finds in the event files what was logged, each iteration once."""

import html
import json
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from adapters.tracking import TensorBoardSink
from adapters.tracking.values import markdown_table
from grpo import GRPOWarning, Samples
from tests.support.tracked_runs import STATES, crash_after, samples, train


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0}).Reload()


def scalars(events: EventAccumulator, name: str) -> dict[int, float]:
    found = events.Scalars(name)
    assert len({one.step for one in found}) == len(found), f"{name} has a step twice"
    return {one.step: one.value for one in found}


def text(events: EventAccumulator, name: str) -> dict[int, str]:
    return {one.step: one.tensor_proto.string_val[0].decode() for one in events.Tensors(name)}


@contextmanager
def files_at_most(num_bytes: int) -> Iterator[None]:
    """Writing beyond this size raises an OSError, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_every_metric_of_a_run_is_a_scalar_and_the_settings_are_a_text_and_hyperparameters(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path / "run") as sink:
        trained = train([sink], 4, eval_states=STATES, eval_every=2)
    events = read(tmp_path / "run")
    for name in {name for metrics in trained.history for name in metrics}:
        expected = {
            number: value for number, row in enumerate(trained.history, 1) if (value := row.get(name)) is not None
        }
        assert scalars(events, name) == pytest.approx(expected, rel=1e-6), name
    settings = json.loads(text(events, "settings")[1].removeprefix("```json\n").removesuffix("\n```"))
    assert settings["config"] == trained.config.to_dict()
    assert settings["policy"] == "SoftmaxPolicy"
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["config.learning_rate"].number_value == 0.1
    assert values["config.objective.surrogate.kind"].string_value == "clip"
    assert values["config.compile_objective"].WhichOneof("kind") == "bool_value"


def test_samples_are_a_table_with_escaped_texts_and_histograms_of_the_finite_values(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path) as sink:
        sink.log_samples(samples("train"), 1)
        sink.log_samples(samples("eval", offset=1.0), 1)
    events = read(tmp_path)
    assert text(events, "train/samples")[1].splitlines() == [
        "| state | action | reward | reward/style | advantage | steps |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 1 + 1 = ? | 2 | 1 | 0.5 | 0.5 | 1 |",
        "| 1 + 1 = ? | three | 0 | 0.25 | -0.5 | 5 |",
        r"| a \| b<br>c | \_x\_? |  | 0.125 | 0 | 3 |",
        r"| a \| b<br>c | &lt;y\> | 0.5 | 0 | 0.25 | 3 |",
    ]
    assert set(events.Tags()["histograms"]) == {"train/rewards", "train/advantages", "eval/rewards"}
    histogram = events.Histograms("eval/rewards")[0].histogram_value
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (1.0, 2.0, 3, 4.5)
    assert histogram.sum_squares == 1.0 + 4.0 + 2.25
    assert sum(histogram.bucket) == 3
    assert histogram.bucket_limit[-1] == 2.0


def test_samples_without_a_finite_value_or_without_rows_are_no_error(tmp_path: Path) -> None:
    none = torch.empty(0)
    with TensorBoardSink(tmp_path) as sink:
        sink.log_samples(Samples(kind="eval", states=[], actions=[], group_ids=none.long(), rewards=none), 1)
    events = read(tmp_path)
    assert text(events, "eval/samples") == {1: ""}
    assert events.Tags()["histograms"] == []


def test_a_resumed_run_shows_repeated_iterations_once_with_their_new_values(tmp_path: Path) -> None:
    folder, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    with TensorBoardSink(folder) as sink:
        train([sink], 5, checkpoints)
        sink.log({"mark": 1.0, "rewards/mean": -1.0}, 6)  # logged before the crash, never repeated with these values
    crash_after(5, checkpoints)
    with TensorBoardSink(folder) as sink:
        resumed = train([sink], 8, checkpoints)
    assert len(resumed.history) == 5, "the run must repeat iterations 4 and 5"
    events = read(folder)
    found = scalars(events, "rewards/mean")
    assert list(found) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [found[number] for number in range(4, 9)] == [row["rewards/mean"] for row in resumed.history]
    assert events.Scalars("mark") == []
    assert list(text(events, "settings")) == [1, 4]


def test_an_iteration_that_a_callback_stopped_is_recorded_again_and_shown_once(tmp_path: Path) -> None:
    class Failing:
        def on_iteration(self, trainer: Any, metrics: Any) -> None:
            if trainer.iteration == 2:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), TensorBoardSink(tmp_path / "run") as sink:
        train([sink], 4, tmp_path / "checkpoints", callbacks=[Failing()])
    with TensorBoardSink(tmp_path / "run") as sink:
        resumed = train([sink], 4, tmp_path / "checkpoints")
    assert len(resumed.history) == 3
    assert list(scalars(read(tmp_path / "run"), "rewards/mean")) == [1, 2, 3, 4]


def test_a_trainer_that_goes_back_within_one_process_replaces_iterations(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path) as sink:
        sink.start({}, 1)
        for number in (1, 2, 3):
            sink.log({"x": number}, number)
        sink.start({}, 2)
        sink.log({"x": 20.0}, 2)
    assert scalars(read(tmp_path), "x") == {1: 1.0, 2: 20.0}


def test_a_new_run_in_the_same_folder_replaces_the_old_one(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        with TensorBoardSink(tmp_path, name="run") as sink:
            sink.start({}, 1)
            sink.log({"x": value}, 1)
    assert scalars(read(tmp_path / "run"), "x") == {1: 2.0}


def test_values_that_are_not_finite_or_do_not_fit_float32_are_no_error(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path) as sink:
        sink.log({"nan": float("nan"), "infinity": float("inf"), "large": 1e300}, 1)
    events = read(tmp_path)
    assert scalars(events, "nan")[1] != scalars(events, "nan")[1]
    assert scalars(events, "infinity") == scalars(events, "large") == {1: float("inf")}


def test_a_disk_that_is_full_is_reported_once_and_the_run_goes_on(tmp_path: Path) -> None:
    with (
        pytest.warns(
            GRPOWarning, match=r"TensorBoardSink\.log\w* raised OSError in iteration \d+: .* switched off"
        ) as warned,
        TensorBoardSink(tmp_path / "run") as sink,
        files_at_most(20_000),
    ):
        trained = train([sink], 30)
    assert len(trained.history) == 30
    assert len(warned) == 1
    assert 1 <= len(scalars(read(tmp_path / "run"), "rewards/mean")) < 30, "what fitted can be read"


def test_a_folder_that_cannot_be_made_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.warns(GRPOWarning, match="TensorBoardSink.start raised"),
        TensorBoardSink(tmp_path / "file/run") as sink,
    ):
        trained: Any = train([sink], 2)
    assert len(trained.history) == 2


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated")  # in TensorBoard
def test_tensorboard_shows_a_text_of_a_table_as_it_is() -> None:
    from tensorboard.plugin_util import markdown_to_safe_html

    text = r"\ ` * _ { } [ ] ( ) > # + - . ! | ~ & < <b>x</b> &lt; **bold** [a](b)"
    page = markdown_to_safe_html(markdown_table([{"state": text}]))
    (cell,) = re.findall(r"<td>(.*?)</td>", page)
    assert html.unescape(cell) == text

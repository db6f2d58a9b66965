"""Reading a run's folder: what is kept, what is skipped, and what a damaged folder says."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from adapters.tracking.report.run_data import read_run
from grpo import ConfigError
from tests.support.comparisons import AFTER, BEFORE, compared
from tests.support.run_folders import sample, settings, write_run


def table(iteration: int, kind: str = "train", **row: Any) -> dict[str, Any]:
    return {"iteration": iteration, "kind": kind, "rows": 8, "samples": [sample(**row)]}


def test_metrics_become_one_array_each_with_nan_where_they_are_absent(tmp_path: Path) -> None:
    lines = [
        {"iteration": 1, "a": 1.0, "b": None},
        {"iteration": 2, "b": 2, "name": "text", "flag": True},
        {"iteration": 4},
    ]
    run = read_run(write_run(tmp_path / "run", lines))
    assert run.name == "run"
    assert run.iterations.tolist() == [1.0, 2.0, 4.0]
    assert set(run.metrics) == {"a", "b"}
    assert run.of("a")[0] == 1.0
    assert [math.isnan(value) for value in run.of("a")] == [False, True, True]
    assert [math.isnan(value) for value in run.of("b")] == [True, False, True]
    assert (run.has("a"), run.has("b"), run.has("c")) == (True, True, False)
    assert len(run.of("c")) == 3
    assert (run.num_bad_lines, run.starts, run.tables, run.comparison, dict(run.settings)) == (0, (), (), None, {})


def test_numbers_that_are_not_finite_or_absurdly_large_count_as_not_measured(tmp_path: Path) -> None:
    values = [1e100, -1e100, 1.1e100, -1e300, math.inf, math.nan, 10**400, 7]
    run = read_run(write_run(tmp_path, [{"iteration": k, "a": value} for k, value in enumerate(values, start=1)]))
    assert [value for value in run.of("a").tolist() if not math.isnan(value)] == [1e100, -1e100, 7.0]


def test_an_iteration_that_was_written_twice_counts_as_its_last_line_says(tmp_path: Path) -> None:
    lines = [{"iteration": k, "a": float(value)} for k, value in [(1, 10), (2, 20), (3, 30), (2, 21), (3, 31)]]
    run = read_run(write_run(tmp_path, lines))
    assert (run.iterations.tolist(), run.of("a").tolist()) == ([1.0, 2.0, 3.0], [10.0, 21.0, 31.0])


def test_lines_that_cannot_be_read_are_counted_and_skipped(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [{"iteration": 1, "a": 1.0}], [table(1)])
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(b'[1]\n\xff\xfe\n{"iteration": "2"}\n{"iteration": 0}\n{"iteration": 3, "a')
    run = read_run(folder)
    assert (run.iterations.tolist(), run.num_bad_lines, len(run.tables)) == ([1.0], 10, 1)


def test_tables_come_from_the_beginning_the_middle_and_the_end_of_each_kind(tmp_path: Path) -> None:
    samples = [table(k, kind) for k in range(1, 10) for kind in ("train", "eval") if kind == "train" or k % 4 == 0]
    run = read_run(write_run(tmp_path, [{"iteration": 1}], samples))
    assert [(one.kind, one.iteration) for one in run.tables] == [
        ("eval", 4),
        ("eval", 8),
        ("train", 1),
        ("train", 5),
        ("train", 9),
    ]
    assert run.tables[0].rows == [sample()]
    assert run.eval_rows == {4: 8, 8: 8}


def test_settings_and_a_comparison_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [{"iteration": 1}], settings=settings(50))
    report = compared(BEFORE, AFTER)
    report.to_json(folder / "comparison.json")
    run = read_run(folder)
    assert run.settings["num_iterations"] == 50
    assert run.comparison == report
    other = compared(AFTER, BEFORE)
    assert read_run(folder, other).comparison == other  # the given one counts


def test_a_folder_without_a_run_says_what_to_do(tmp_path: Path, subtests: pytest.Subtests) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    write_run(tmp_path / "nothing", []).joinpath("metrics.jsonl").write_text("")
    write_run(tmp_path / "damaged", []).joinpath("metrics.jsonl").write_text("{\n[]\n")
    advice = r".* Pass sinks=\[RunFolder\(folder\)\] to trainer.train"
    cases = [
        ("missing", "needs the folder of a run; .*missing is missing" + advice),
        ("file", "needs the folder of a run; .*file is a file" + advice),
        ("empty", "needs metrics.jsonl in the folder of a run; .*empty is empty" + advice),
        ("other", "needs metrics.jsonl .*other has notes.txt" + advice),
        ("nothing", "needs at least one iteration; .* has 0 lines, .* start it again"),
        ("damaged", "needs at least one iteration; .* has 2 lines, and none of them can be read"),
    ]
    for name, message in cases:
        with subtests.test(name=name), pytest.raises(ConfigError, match=message):
            read_run(tmp_path / name)


def test_nested_lines_and_absurd_iterations_are_skipped(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [{"iteration": 1}])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n" + '{"iteration": 1' + "0" * 400 + "}\n")
    run = read_run(folder)
    assert (run.iterations.tolist(), run.num_bad_lines) == ([1], 2)


def test_a_damaged_file_beside_the_metrics_is_named(tmp_path: Path, subtests: pytest.Subtests) -> None:
    cases = [
        ("settings.json", "{", "settings.json cannot be read .* Delete this file to get the report without settings"),
        ("settings.json", json.dumps({"starts": [{"iteration": 1}]}), "cannot be read .KeyError"),
        ("settings.json", '{"starts": [{"iteration": Infinity, "settings": {}}]}', "cannot be read .OverflowError"),
        ("settings.json", "[" * 100_000, "cannot be read .RecursionError"),
        ("comparison.json", "[" * 100_000, "comparison.json cannot be read"),
        ("comparison.json", "[]", "comparison.json cannot be read. .* or delete it"),
    ]
    for number, (name, text, message) in enumerate(cases):
        folder = write_run(tmp_path / str(number), [{"iteration": 1}])
        (folder / name).write_text(text, encoding="utf-8")
        with subtests.test(name=name, text=text), pytest.raises(ConfigError, match=message):
            read_run(folder)

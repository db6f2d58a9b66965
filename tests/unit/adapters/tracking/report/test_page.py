"""The whole page: its head line and sections, what it must not contain, and its size."""

import math
import os
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.tracking import write_comparison, write_report
from adapters.tracking.report.comparison import MAX_OPEN, MAX_STATES, comparison_section, comparison_words
from adapters.tracking.report.page import head_line, title_of
from adapters.tracking.report.run_data import SampleTable, Start, read_run
from adapters.tracking.report.tables import sample_tables, settings_section
from grpo import ConfigError, WeightedRewards
from grpo.evaluation import Answer
from tests.support.comparisons import AFTER, BEFORE, action_itself, compared, of_many, paying
from tests.support.run_folders import constant, healthy, lines_of, ramp, run_of, sample, settings, start_of, write_run


def report_of(tmp_path: Path, *args: Any, **options: Any) -> str:
    folder = write_run(tmp_path / "run", *args, **options)
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def headings(page: str) -> list[str]:
    return re.findall("<h[12]>(.*?)</h[12]>", page)


SAMPLES = [{"iteration": k, "kind": "eval", "rows": 8, "samples": [sample()]} for k in (1, 100)]


def test_a_full_run_has_all_sections(tmp_path: Path) -> None:
    folder = write_run(tmp_path, lines_of(healthy()), SAMPLES, settings=settings(learning_rate=0.1))
    compared(BEFORE, AFTER).to_json(folder / "comparison.json")
    page = write_report(folder).read_text(encoding="utf-8")
    parts = ["What the numbers say", "Reward", "Before and after training", "Training", "Samples", "Settings"]
    assert headings(page) == ["TablePolicy: the mean reward rose from 0.227 to 0.773", *parts]
    assert "The reward rose" in page
    assert "Time per iteration" in page
    assert "<title>TablePolicy: the mean reward rose from 0.227 to 0.773</title>" in page


def test_rewards_stand_alone_and_their_parts_with_the_signs_of_training(tmp_path: Path) -> None:
    parts = {"eval/avg_reward": 0.5, "rewards/right/mean": 0.5, "rewards/short/mean": 0.1}
    page = report_of(tmp_path, [{**line, **parts} for line in lines_of(healthy())])
    rewards, training = page.split("<h2>Training</h2>")
    assert re.findall("<h3>(.*?)</h3>", rewards) == ["Reward in training", "Reward in evaluations"]
    assert re.findall("<h3>(.*?)</h3>", training)[:2] == ["Parts of the reward", "KL divergence"]


def test_a_run_of_one_metric_has_a_page(tmp_path: Path) -> None:
    page = report_of(tmp_path, [{"iteration": 1, "rewards/mean": 0.5}])
    assert headings(page) == ["run: 1 iteration", "Reward", "Settings"]
    assert "Trained for 1 iteration." in page
    nothing = report_of(tmp_path, [{"iteration": 1}])
    assert headings(nothing) == ["run: 1 iteration", "Settings"]


def test_the_first_lines_say_what_was_trained_how_long_and_from_what_to_what(subtests: pytest.Subtests) -> None:
    cases = [
        (ramp(0.2, 0.8), "TablePolicy: the mean reward rose from 0.227 to 0.773"),
        (ramp(0.8, 0.2), "TablePolicy: the mean reward fell from 0.773 to 0.227"),
        (ramp(0.5, 0.5), "TablePolicy: the mean reward went from 0.5 to 0.5"),
    ]
    for rewards, title in cases:
        with subtests.test(title=title):
            run = run_of({"rewards/mean": rewards, "time/iteration": 0.5}, starts=(start_of(100),))
            assert title_of(run) == title
            assert head_line(run) == (
                "Trained on the reward right for 100 iterations, in about 50 s. The numbers above are means of the first and "
                "the last 10 iterations."
            )
    short = run_of({"rewards/mean": [0.0, 1.0]})
    assert (title_of(short), head_line(short)) == ("run: the mean reward went from 0 to 1", "Trained for 2 iterations.")


def test_without_a_reward_that_teaches_the_first_lines_name_what_else_did(subtests: pytest.Subtests) -> None:
    """No row has an advantage, or nothing was sampled at all."""
    without = {"rewards/mean": 0.0, "train/advantages_mean": 0.0, "train/advantages_std": 0.0}
    pulled = {"train/kl_coef": 1.0, "train/kl_mean": ramp(1.0, 0.1)}
    imitated = {"train/demonstration_loss": ramp(1.0, 0.1)}
    foreseen = {"train/observation_loss": ramp(1.0, 0.1)}
    taught = {**without, "train/advantages_std": 0.1, **imitated}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({**without, **pulled}, "the KL to the teacher fell from 0.959 to 0.141", "its teacher"),
        ({**without, **imitated}, "the loss of demonstrations fell from 0.959 to 0.141", "demonstrations"),
        (imitated, "the loss of demonstrations fell from 0.959 to 0.141", "demonstrations"),
        ({**without, **foreseen}, "the loss of observations fell from 0.959 to 0.141", "what the environment answered"),
        (taught, "the mean reward went from 0 to 0", "the reward right and demonstrations"),
        (without, "the mean reward went from 0 to 0", "the reward right"),
    ]
    for metrics, title, source in cases:
        with subtests.test(title=title, source=source):
            run = run_of({**metrics, "anything": ramp(0.0, 1.0)}, starts=(start_of(100),))
            assert title_of(run) == f"TablePolicy: {title}"
            assert head_line(run).startswith(f"Trained on {source} for 100 iterations.")


def test_tiles_show_the_ends_of_both_rewards_the_best_evaluation_and_the_size_of_an_iteration(tmp_path: Path) -> None:
    evaluation = constant(np.nan)
    evaluation[[9, 49, 99]] = 0.25, 0.9, 0.75
    rows = {"group_stats__num_groups": 4.0, "group_stats__avg_group_size": 8.0}
    run = healthy(eval__avg_reward=evaluation, **rows)
    page = report_of(tmp_path, [{k: v for k, v in line.items() if v == v} for line in lines_of(run)])
    assert re.findall('<div class="tile"><b>(.*?)</b><span>(.*?)</span></div>', page) == [
        ("0.227 → 0.773", "mean reward in training"), ("0.25 → 0.75", "reward in the evaluation"),
        ("0.9", "best evaluation"), ("1.0 s", "per iteration"), ("32", "rows per iteration"),
    ]  # fmt: skip


class Elements(HTMLParser):
    """Collects the elements of a page, and the addresses that it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.handlers: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    attack = '"><script>alert(1)</script><img src="http://x.y/z" onerror=alert(1)>'
    changed = {**settings(), "policy": attack, attack: attack}
    rows = [sample(state=attack, action=attack, **{f"reward/{attack}": 1.0})]
    samples = [{"iteration": 1, "kind": "eval", "rows": 8, "samples": rows}]
    lines = [
        {**line, f"rewards/{attack}/mean": 1.0, "rewards/b/mean": 0.5, f"rewards/{attack}/applies": 0.5}
        for line in lines_of(healthy())
    ]
    page = report_of(tmp_path, lines, samples, settings=changed)
    found = Elements(page)
    assert found.open == []
    assert not found.names & {"script", "img", "iframe", "object", "embed", "form", "base"}
    assert found.handlers == []
    assert [address for address in found.addresses if not address.startswith("#")] == ["data:,"]
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src &#x27;none&#x27;" in page  # and if anything were in it, the browser would refuse it


@pytest.mark.parametrize("num", [2_000, pytest.param(100_000, marks=pytest.mark.faults)])
def test_a_page_of_a_long_run_is_below_2_megabytes(tmp_path: Path, num: int) -> None:
    """Every chart that there is, six parts of the reward, long samples and a comparison of many states with long answers."""
    names = ["rewards/mean", "rewards/q25", "rewards/q75", "train/kl_mean", "train/entropy", "train/clip_fraction"]
    names += ["train/clip_fraction_low", "train/grad_norm", "group_stats/zero_variance_fraction", "steps/mean"]
    names += [
        "train/sampler_divergence",
        "eval/avg_reward",
        "eval/avg_reward_std",
        *(f"rewards/part{k}/mean" for k in range(6)),
    ]
    names += ["time/sample", "time/iteration"]
    noise = np.random.default_rng(0).random((num, len(names))).round(4).tolist()
    lines = [{"iteration": k, **dict(zip(names, values, strict=True))} for k, values in enumerate(noise, start=1)]
    rows = [sample(state="s" * 5000, action="<" * 5000) for _ in range(4)]
    samples = [
        {"iteration": k, "kind": kind, "rows": 9, "samples": rows} for k in range(1, 9) for kind in ("train", "eval")
    ]
    write_run(tmp_path, lines, samples, settings=settings(num))
    script = [["<" * 5000]]
    long = compared(script, script, lambda states, actions: [1.0 for _ in actions])
    replace(long, states=long.states * 1000).to_json(tmp_path / "comparison.json")
    path = write_report(tmp_path)
    assert path.stat().st_size < 2_000_000
    page = path.read_text(encoding="utf-8")
    assert f"for {num:,} iterations" in page
    assert f"Each point is the mean of {-(-num // 160)} iterations." in page


def test_iterations_that_were_left_out_and_lines_that_were_damaged_are_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [{"iteration": k, "rewards/mean": 0.5} for k in (10, 20, 30)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 40, "rew')
    page = write_report(folder).read_text(encoding="utf-8")
    assert "3 iterations were logged. 1 line of its files could not be read." in page


def test_the_page_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [{"iteration": 1}])
    target = tmp_path / "new" / "page.html"
    assert write_report(folder, target) == target
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>\n<html lang=")
    assert not (folder / "report.html").exists()
    with pytest.raises(ConfigError, match=r"A report is a file; .*run is a folder"):
        write_report(folder, folder)


def test_a_comparison_is_passed_or_has_a_page_of_its_own(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines_of(run_of({"rewards/mean": constant(0.5)})))
    report = compared(BEFORE, AFTER)
    page = write_report(folder, comparison=report).read_text(encoding="utf-8")
    assert "Before and after training" in page
    alone = write_comparison(report, tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert headings(alone) == ["Before and after training"]
    assert "Answers side by side" in alone


def test_a_comparison_that_is_older_than_the_run_is_said_to_be(tmp_path: Path) -> None:
    folder = write_run(tmp_path, lines_of(healthy()))
    path = folder / "comparison.json"
    compared(BEFORE, AFTER).to_json(path)
    words = "The run went on after this comparison was made"
    assert words not in write_report(folder).read_text(encoding="utf-8")
    earlier = (folder / "metrics.jsonl").stat().st_mtime - 60
    os.utime(path, (earlier, earlier))
    assert words in write_report(folder).read_text(encoding="utf-8")
    given = write_report(folder, comparison=compared([[0]], [[1]], paying(0.25, 1.0))).read_text(encoding="utf-8")
    assert words not in given
    assert "The mean reward went from 0.25 to 1" in given


def test_without_matplotlib_a_page_has_its_tables_and_says_how_to_get_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path, lines_of(healthy()), SAMPLES, settings=settings())
    compared(BEFORE, AFTER).to_json(folder / "comparison.json")
    words = "pip install &quot;.[tracking]&quot; in the checkout"
    assert words not in write_report(folder).read_text(encoding="utf-8")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = write_report(folder).read_text(encoding="utf-8")
    assert page.count(words) == 1
    assert "<svg" not in page
    for name in ("Time per iteration", "Answers side by side", "Samples", "Settings"):
        assert name in page


# --- samples and settings as tables


def cells(page: str, tag: str = "td") -> list[str]:
    """The texts of the cells, in order."""
    found = re.findall(f"<{tag}[ >].*?</{tag}>", page.replace("<td>", "<td >"), re.S)
    return [re.sub("<[^>]*>", "", cell) for cell in found]


def tables(*found: SampleTable) -> str:
    return sample_tables(run_of({"a": 1.0}, tables=found))


def test_a_sample_table_has_the_columns_that_were_measured() -> None:
    rows = [
        sample(**{"reward/right": 1.0, "reward/short": None, "advantage": None}),
        sample(**{"reward/right": None, "reward/short": None, "advantage": None, "action": ""}),
    ]
    page = tables(SampleTable(iteration=1200, kind="eval", rows=rows))
    assert re.findall("<th [^>]*>(.*?)</th>", page) == ["state", "action", "reward", "steps", "reward/right"]
    assert cells(page) == ["2 + 2?", "4", "1", "1", "1", "2 + 2?", "(empty)", "1", "1", "-"]
    assert "<summary>Evaluation after iteration 1,200</summary>" in page


def test_both_ends_of_the_run_are_open_and_other_tables_are_folded() -> None:
    found = [SampleTable(iteration=k, kind=kind, rows=[sample()]) for kind in ("eval", "train") for k in (1, 5, 9)]
    page = tables(*found)
    assert re.findall("<details( open)?><summary>(.*?)</summary>", page) == [
        (" open", "Evaluation after iteration 1"), ("", "Evaluation after iteration 5"),
        (" open", "Evaluation after iteration 9"),
        ("", "Training, iteration 1"), ("", "Training, iteration 5"), ("", "Training, iteration 9"),
    ]  # fmt: skip
    assert sample_tables(run_of({"a": 1.0})) is None


def test_settings_that_differ_from_the_defaults_come_first() -> None:
    given = settings(learning_rate=0.5, group_size=4)
    page = settings_section([Start(iteration=1, settings=given)])
    first, rest = page.split("<details>", 1)
    assert cells(first) == ["group_size", "4", "8", "learning_rate", "0.5", "0.001"]
    assert "group_size" not in rest
    assert "objective.kl_estimator" in cells(rest)
    assert {"policy", "TablePolicy", "versions.torch", "2.13.0", "num_iterations"} <= set(cells(rest))
    assert "All settings have their defaults." in settings_section([Start(iteration=1, settings=settings())])


def test_what_a_resume_changed_or_that_settings_are_missing_is_said() -> None:
    assert "no settings.json" in settings_section([])
    starts = [
        Start(iteration=1, settings=settings(100, learning_rate=0.5)),
        Start(iteration=51, settings=settings(200, learning_rate=0.1)),
        Start(iteration=81, settings=settings(200, learning_rate=0.1)),
    ]
    lines = re.findall("<li>(.*?)</li>", settings_section(starts))
    assert lines == [
        "Continued at iteration 51: config.learning_rate: 0.5 → 0.1; num_iterations: 100 → 200",
        "Continued at iteration 81: with the same settings",
    ]


# --- before and after training


def test_the_words_have_means_difference_percentage_interval_and_counts() -> None:
    report = compared([[1, 1], [1, 0]], [[2, 2], [1, 0]], paying(0.5, 1.0, 2.0))
    means, counts = comparison_words(replace(report, confidence_interval=(0.0, 1.0)))
    assert means == (
        "The mean reward went from 0.875 to 1.38: +0.5 (+57.1 %). With 95 % confidence, the difference is between 0 and +1, "
        "if other states are like these. From fewer than 20 states, the interval is too narrow. "
    )
    assert counts == "Of 2 states: 1 improved, 0 worse, 1 unchanged. 2 actions of each policy in each state."


def test_few_states_are_said_to_give_a_narrow_interval_and_a_mean_that_is_not_positive_no_percentage() -> None:
    narrow = {count: "too narrow" in comparison_words(of_many(count))[0] for count in (1, 2, 19, 20)}
    assert narrow == {1: False, 2: True, 19: True, 20: False}
    for before in (0.0, -2.0):
        words = f"The mean reward went from {before:g} to 1: +{1 - before:g}. One state gives no interval."
        assert comparison_words(compared([[0]], [[1]], paying(before, 1.0)))[0].startswith(words)


def test_both_answers_of_a_state_stand_side_by_side_with_their_rewards() -> None:
    report = compared([[0]], [[1]], paying(0.25, 1.0))
    attack = Answer(text="<script>alert(1)</script>", reward=1.0)
    attacked = replace(report.states[0], answer_after=attack, label="<b>up</b>")
    page = comparison_section(replace(report, states=(attacked,)))
    row = re.findall("<tbody>(.*?)</tbody>", page, re.S)[-1]
    assert re.findall('<td class="[^"]*">(.*?)</td>', row, re.S) == [
        '<div class="answer">&lt;b&gt;up&lt;/b&gt;</div>',
        '<div class="answer">0</div><div class="small">mean reward 0.25, this answer 0.25</div>',
        '<div class="answer">&lt;script&gt;alert(1)&lt;/script&gt;</div><div class="small">mean reward 1, this answer 1</div>',
        "+0.75",
    ]
    assert "<script" not in page


def test_parts_of_the_reward_have_a_table_of_their_own() -> None:
    page = comparison_section(compared(BEFORE, AFTER, WeightedRewards({"right": action_itself})))
    second = re.findall("<tbody>(.*?)</tbody>", page, re.S)[1]
    assert re.findall("<td[^>]*>(.*?)</td>", second) == ["right", "0.583", "0.583", "0"]
    assert "part of the reward" not in comparison_section(compared(BEFORE, AFTER))


def test_attempts_have_a_table_with_intervals_and_a_curve_over_k() -> None:
    """pass@2 of one success in four is 1 - C(3, 2) / C(4, 2) = 1/2, of two 5/6, and of three or four 1."""
    page = comparison_section(compared(BEFORE, AFTER))
    cells = re.findall("<td[^>]*>(.*?)</td>", re.findall("<tbody>(.*?)</tbody>", page, re.S)[0])
    assert cells[::4] == ["avg@4", "pass@1", "pass@2", "pass@4"]
    assert cells[8:12] == ["pass@2", "0.778 (0.5 to 1)", "0.889 (0.833 to 1)", "+0.111 (-0.167 to +0.5)"]
    assert cells[12:] == ["pass@4", "1 (1 to 1)", "1 (1 to 1)", "0 (0 to 0)"]
    titles = re.findall("<title>(k: .*?|k .*?)</title>", page)
    assert [title.replace(",", "").split(" 95")[0] for title in titles] == [
        *("k 1: before 0.583", "k 2: before 0.778", "k 4: before 1"),
        *("k 1: after 0.583", "k 2: after 0.889", "k 4: after 1"),
    ]
    assert "95 % interval 0.25 to 1" in titles[0]
    without = comparison_section(compared([[0]], [[1]], paying(0.25, 1.0)))
    assert "<h3>pass@k</h3>" in page
    assert "pass@" not in without
    assert "avg@1" in without


def test_of_many_states_the_largest_gains_and_losses_are_shown_and_the_others_described() -> None:
    """The states' differences are 0 to 31, minus `lost`."""
    report = of_many(32)
    page = comparison_section(report)
    shown, folded = page.split("<details>")
    gains = [int(gain) for gain in re.findall('<div class="answer">gains (.*?)</div>', shown)]
    assert gains == [31, 30, 29, 28, 27, 4, 3, 2, 1, 0]
    assert len(re.findall('<div class="answer">gains', folded)) == MAX_STATES - MAX_OPEN
    assert "The answers in 20 further states" in folded
    assert "not shown" not in comparison_section(of_many(30))
    assert "<details>" not in comparison_section(of_many(10))
    for lost, words in (
        (0, "gained most and the 15 that gained least"),
        (16, "gained most and the 15 that lost most"),
        (40, "lost least and the 15 that lost most"),
    ):
        states = tuple(replace(state, difference=state.difference - lost) for state in report.states)
        page = comparison_section(replace(report, states=states))
        assert f"The 15 states that {words}; 2 states are not shown." in page


# --- reading the folder of a run


def table(iteration: int, kind: str = "train", **row: Any) -> dict[str, Any]:
    return {"iteration": iteration, "kind": kind, "rows": 8, "samples": [sample(**row)]}


def test_metrics_become_one_array_each_with_nan_where_they_are_absent_or_no_finite_number(tmp_path: Path) -> None:
    """An iteration that was written twice counts as its last line says."""
    odd = [-1e100, 1.1e100, -1e300, math.inf, math.nan, 10**400, None, "text", True]
    lines = [
        {"iteration": 1, "a": 1e100, "b": None},
        {"iteration": 2, "a": 20.0},
        {"iteration": 2, "b": 2, "name": "text", "flag": True},
    ]
    lines += [{"iteration": number, "a": value} for number, value in enumerate(odd, start=4)]
    run = read_run(write_run(tmp_path / "run", lines))
    assert run.name == "run"
    assert run.iterations.tolist() == [1.0, 2.0, *range(4, 13)]
    assert set(run.metrics) == {"a", "b"}
    nan = math.nan
    assert run.of("a").tolist() == pytest.approx([1e100, nan, -1e100, *[nan] * 8], nan_ok=True)
    assert run.of("b").tolist() == pytest.approx([nan, 2.0, *[nan] * 9], nan_ok=True)
    assert (run.has("a"), run.has("b"), run.has("c")) == (True, True, False)
    assert len(run.of("c")) == 11
    assert (run.num_bad_lines, run.starts, run.tables, run.comparison, dict(run.settings)) == (0, (), (), None, {})


def test_lines_that_cannot_be_read_are_counted_and_skipped(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [{"iteration": 1, "a": 1.0}], [table(1)])
    absurd = "[" * 100_000 + '\n{"iteration": 1' + "0" * 400 + "}\n"
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(absurd.encode() + b'[1]\n\xff\xfe\n{"iteration": "2"}\n{"iteration": 0}\n{"iteration": 3, "a')
    run = read_run(folder)
    assert (run.iterations.tolist(), run.num_bad_lines, len(run.tables)) == ([1.0], 14, 1)


def test_tables_come_from_the_beginning_the_middle_and_the_end_of_each_kind(tmp_path: Path) -> None:
    samples = [table(k, kind) for k in range(1, 10) for kind in ("train", "eval") if kind == "train" or k % 4 == 0]
    run = read_run(write_run(tmp_path, [{"iteration": 1}], samples))
    kept = [("eval", 4), ("eval", 8), ("train", 1), ("train", 5), ("train", 9)]
    assert [(one.kind, one.iteration) for one in run.tables] == kept
    assert run.tables[0].rows == [sample()]
    assert run.eval_rows == {4: 8, 8: 8}


ADVICE = r".* Pass sinks=\[RunFolder\(folder\)\] to trainer.train"
LINE = '{"iteration": 1}\n'


@pytest.mark.parametrize(("files", "message"), [
    (None, "needs the folder of a run; .*run is missing" + ADVICE), ("", "needs the folder of a run; .*run is a file" + ADVICE),
    ({}, "needs metrics.jsonl in the folder of a run; .*run is empty" + ADVICE),
    ({"notes.txt": ""}, "needs metrics.jsonl .*run has notes.txt" + ADVICE),
    ({"metrics.jsonl": ""}, "needs at least one iteration; .* has 0 lines, .* start it again"),
    ({"metrics.jsonl": "{\n[]\n"}, "needs at least one iteration; .* has 2 lines, and none of them can be read"),
    ({"settings.json": "{"}, "settings.json cannot be read .* Delete this file to get the report without settings"),
    ({"settings.json": '{"starts": [{"iteration": 1}]}'}, "cannot be read .KeyError"),
    ({"settings.json": '{"starts": [{"iteration": Infinity, "settings": {}}]}'}, "cannot be read .OverflowError"),
    ({"settings.json": "[" * 100_000}, "cannot be read .RecursionError"),
    ({"comparison.json": "[" * 100_000}, "comparison.json cannot be read"),
    ({"comparison.json": "[]"}, "comparison.json cannot be read. .* or delete it"),
], ids=lambda given: str(given)[:40])  # fmt: skip
def test_a_folder_without_a_run_or_with_a_damaged_file_says_what_to_do(
    files: Any, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    if files == "":
        folder.write_text("")
    elif files is not None:
        folder.mkdir()
        beside = {} if not files or "notes.txt" in files else {"metrics.jsonl": LINE}
        for name, text in {**beside, **files}.items():
            (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        write_report(folder)

"""The whole page: its head line and sections, what it must not contain, and its size."""

import json
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
from adapters.tracking.report.page import head_line, title_of
from grpo import ConfigError
from tests.support.comparisons import AFTER, BEFORE, compared
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
    assert headings(page) == [
        "TablePolicy: the mean reward rose from 0.227 to 0.773",
        "What the numbers say",
        "Reward",
        "Before and after training",
        "Training",
        "Samples",
        "Settings",
    ]
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
                "Trained on the reward right for 100 iterations, in about 50 s. The rewards above are means of the first and "
                "the last 10 iterations."
            )
    short = run_of({"rewards/mean": [0.0, 1.0]})
    assert (title_of(short), head_line(short)) == ("run: the mean reward went from 0 to 1", "Trained for 2 iterations.")


def test_tiles_show_the_ends_of_both_rewards_the_best_evaluation_and_the_size_of_an_iteration(tmp_path: Path) -> None:
    evaluation = constant(np.nan)
    evaluation[[9, 49, 99]] = 0.25, 0.9, 0.75
    rows = {"group_stats__num_groups": 4.0, "group_stats__avg_group_size": 8.0}
    run = healthy(eval__avg_reward=evaluation, **rows)
    page = report_of(tmp_path, [{k: v for k, v in line.items() if v == v} for line in lines_of(run)])
    assert re.findall('<div class="tile"><b>(.*?)</b><span>(.*?)</span></div>', page) == [
        ("0.227 → 0.773", "reward in training"),
        ("0.25 → 0.75", "reward in the evaluation"),
        ("0.9", "best evaluation"),
        ("1.0 s", "per iteration"),
        ("32", "rows per iteration"),
    ]


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
    generator = np.random.default_rng(0)
    noise = generator.random((num, 4)).round(4).tolist()
    constant_part = {f"rewards/part{k}/mean": 0.1 * k for k in range(6)} | {"time/sample": 0.1, "time/iteration": 0.2}
    rest = json.dumps(constant_part)[1:]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for k, (a, b, c, d) in enumerate(noise, start=1):
            file.write(
                f'{{"iteration": {k}, "rewards/mean": {a}, "rewards/q25": {b}, "rewards/q75": {c}, "train/kl_mean": {d}, '
                f'"train/entropy": {a}, "train/clip_fraction": {b}, "train/clip_fraction_low": {c}, "train/grad_norm": {d}, '
                f'"group_stats/zero_variance_fraction": {a}, "steps/mean": {b}, "train/sampler_divergence": {c}, '
                f'"eval/avg_reward": {d}, "eval/avg_reward_std": {a}, {rest}\n'
            )
    rows = [sample(state="s" * 5000, action="<" * 5000) for _ in range(4)]
    samples = [
        {"iteration": k, "kind": kind, "rows": 9, "samples": rows} for k in range(1, 9) for kind in ("train", "eval")
    ]
    write_run(tmp_path, [], samples, settings=settings(num))
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
    assert words not in write_report(folder, comparison=compared(BEFORE, AFTER)).read_text(encoding="utf-8")


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
    assert [
        name for name in ("Time per iteration", "Answers side by side", "Samples", "Settings") if name not in page
    ] == []

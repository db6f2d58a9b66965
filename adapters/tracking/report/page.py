"""The page: its head line, its sections, and the file that they are written to."""

from pathlib import Path
from typing import Any

import numpy as np

from adapters.plots import is_installed
from adapters.tracking.run_folder import REPORT
from grpo.arguments import install_command
from grpo.errors import ConfigError
from grpo.evaluation import ComparisonReport
from grpo.sinks import replace_text

from .comparison import comparison_section
from .diagnosis import diagnose
from .markup import Html, element, joined
from .panels import always_zero, grid, reward_charts, time_table, training_charts
from .run_data import RunData, read_run
from .series import Change, change_of, share_of
from .signals import signals_of
from .style import STYLE
from .tables import sample_tables, settings_section
from .words import counted, duration, number

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Content security policy of the page: nothing is loaded, and no script runs, even if a text were not escaped."""


def write_report(
    folder: str | Path, path: str | Path | None = None, *, comparison: ComparisonReport | None = None
) -> Path:
    """Write one HTML page about a run. It opens without a network, and contains no script.

    The page has the course of the rewards and evaluations, the signs of training, a diagnosis in words, samples, settings, and
    a comparison of the policies before and after training if the folder has a `comparison.json`. A metric that was not
    measured has no chart. Long runs are thinned: a point is then the mean of several iterations.

    Args:
        folder: The folder that a `RunFolder` wrote to. Only its `metrics.jsonl` must exist, which `JSONLSink` writes too.
        path: The file to write. None: `report.html` in the folder.
        comparison: Replaces the folder's `comparison.json`, which `ComparisonReport.to_json` writes.

    Returns:
        The path of the page.

    Raises:
        ConfigError: The folder is missing, empty or damaged. The message says what to do.

    Example:
        >>> trainer.train(states, num_iterations=100, sinks=[RunFolder("run")])  # doctest: +SKIP
        >>> write_report("run")  # doctest: +SKIP
        PosixPath('run/report.html')
    """
    run = read_run(folder, comparison)
    return _written(Path(folder) / REPORT if path is None else Path(path), *_run_page(run))


def write_comparison(report: ComparisonReport, path: str | Path) -> Path:
    """Write one HTML page about a comparison alone: means, interval, each state, and the answers side by side.

    Args:
        report: The result of `compare_policies`.
        path: The file to write.

    Returns:
        The path of the page.
    """
    title = "Before and after training"
    return _written(Path(path), title, joined(element("h1", title), comparison_section(report)))


def _comparison_of(run: RunData) -> list[Html]:
    if run.comparison is None:
        return []
    words = "The run went on after this comparison was made: 'after' is an earlier policy than the last one."
    note = [element("p", words, class_="small")] if run.comparison_is_older else []
    return [*note, comparison_section(run.comparison)]


def _written(path: Path, title: str, body: Html) -> Path:
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        Html(f"<style>{STYLE}</style>"),
    )
    if not is_installed():
        body = joined(
            body,
            element(
                "p",
                f"This page has no pictures, because they need matplotlib: {install_command('tracking')}",
                class_="small",
            ),
        )
    page = "<!doctype html>\n" + element("html", head, element("body", element("main", body)), lang="en") + "\n"
    if path.is_dir():
        raise ConfigError(f"A report is a file; {path} is a folder. Pass the path of an HTML file, or no path.")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, page)  # a reader never sees half a page
    return path


def _run_page(run: RunData) -> tuple[str, Html]:
    title = title_of(run)
    findings = [
        element("div", element("b", finding.title), element("p", finding.text), class_=f"finding {finding.kind}")
        for finding in diagnose(run)
    ]
    rewards, samples, times = reward_charts(run), sample_tables(run), time_table(run)
    training = [*rewards[2:], *training_charts(run), *([] if times is None else [times])]
    zeros = always_zero(run)
    zero_words = [element("p", f"0 in every iteration, and not drawn: {', '.join(zeros)}.", class_="small")]
    parts = [
        element("header", element("h1", title), element("p", head_line(run), class_="lead"), _tiles(run)),
        _section("What the numbers say", findings),
        _section("Reward", [grid(rewards[:2])] if rewards else []),
        _section("Before and after training", _comparison_of(run)),
        _section("Training", [grid(training)] * bool(training) + zero_words * bool(zeros)),
        _section("Samples", [] if samples is None else [samples]),
        _section("Settings", [settings_section(run.starts)]),
        _footer(run),
    ]
    return title, joined(*parts)


def _section(title: str, content: list[Html]) -> Html:
    return element("section", element("h2", title), *content) if content else joined()


def title_of(run: RunData) -> str:
    """Who was trained, and from what to what the mean reward went, or the metric of what else it learned from."""
    who, (name, change) = str(run.settings.get("policy") or run.name), _main_change(run)
    if change is None:
        return f"{who}: {counted(int(run.iterations[-1]), 'iteration')}"
    verb = ("rose" if change.difference > 0 else "fell") if change.is_clear else "went"
    return f"{who}: the {name} {verb} from {number(change.first)} to {number(change.last)}"


def head_line(run: RunData) -> str:
    """On what the policy was trained, how long, and what the title's numbers are."""
    on = " and ".join(signal.source for signal in signals_of(run) if signal.source)
    seconds = share_of(run.of("time/iteration")) * float(run.iterations[-1])
    time = f", in about {duration(seconds)}" if np.isfinite(seconds) else ""
    _, change = _main_change(run)
    means = f" The numbers above are means of the first and the last {change.window} iterations." if change else ""
    means = means if change and change.window > 1 else ""
    return f"Trained{on and f' on {on}'} for {counted(int(run.iterations[-1]), 'iteration')}{time}.{means}"


def _main_change(run: RunData) -> tuple[str, Change | None]:
    """The name and the change of the metric of the first signal."""
    signal = next(iter(signals_of(run)), None)
    return ("", None) if signal is None else (signal.name, change_of(run.of(signal.metric)))


def _tiles(run: RunData) -> Html:
    """A few large numbers."""
    tiles: list[tuple[str, str]] = []
    name, change = _main_change(run)
    if change is not None:
        tiles.append((f"{number(change.first)} → {number(change.last)}", f"{name} in training"))
    evaluation = run.of(run.evaluation or "")
    evaluation = evaluation[np.isfinite(evaluation)]
    if len(evaluation):
        ends = evaluation[[0, -1]] if len(evaluation) > 1 else evaluation
        tiles.append((" → ".join(map(number, ends.tolist())), "reward in the evaluation"))
        tiles.append((number(float(evaluation.max())), "best evaluation"))
    if run.has("time/iteration"):
        tiles.append((duration(share_of(run.of("time/iteration"))), "per iteration"))
    rows = share_of(run.of("group_stats/num_groups")) * share_of(run.of("group_stats/avg_group_size"))
    if np.isfinite(rows):
        tiles.append((number(round(rows)), "rows per iteration"))
    return element(
        "div", *(element("div", element("b", a), element("span", b), class_="tile") for a, b in tiles), class_="tiles"
    )


def _footer(run: RunData) -> Html:
    every: Any = np.diff(run.iterations)
    thin = f" {len(run.iterations):,} iterations were logged." if len(every) and every.max() > 1 else ""
    bad = f" {counted(run.num_bad_lines, 'line')} of its files could not be read." if run.num_bad_lines else ""
    return element("footer", f"Made from the folder {run.name}.{thin}{bad}")

"""Which charts and tables a run has. A metric that was never measured has none, and a metric that was always 0 a sentence."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from adapters.plots import is_installed

from .charts import Chart, Line, line_chart, one_line
from .markup import Html, element, joined
from .run_data import RunData, phase_times
from .tables import row_of, table_of
from .words import duration, percent

MAX_PARTS = 6
"""Number of parts of the reward in a chart."""

PASS = "eval/pass_at_"
"""How the names of pass@k begin, in the metrics of an evaluation."""

NEAR_ZERO = 0.05
"""Part of the largest value below which the smallest one counts as 0."""

FEW_VALUES = 0.9
"""Fraction of the iterations whose quartiles are extremes, above which quartiles are not drawn."""

INTERVAL = 1.96
"""Standard errors on each side of a mean: 95 % of a normal distribution."""

INTERVAL_NOTE = (
    "The band is mean ± 1.96 std / √rows: an interval with at least 95 % confidence for these states. It does not say how much "
    "other states would differ."
)
"""What the interval of an evaluation means. The rows of one state are alike, so that for fixed states it is rather too wide."""

PHASES = {"sample": "sampling", "reward": "reward", "score": "scoring", "update": "update", "other": "other"}
"""Maps the name of a phase to its name in the page."""

SINGLE: dict[str, tuple[str, str, str, str]] = {
    "train/kl_mean": (
        "KL divergence",
        "KL",
        "nats per step",
        "How far the policy is from its reference, as a mean over the steps of the rows.",
    ),
    "train/entropy": (
        "Entropy",
        "entropy",
        "nats per step",
        "How random the policy is. Near 0 it always takes the same action.",
    ),
    "train/demonstration_loss": (
        "Loss of demonstrations",
        "loss",
        "loss",
        "Cross-entropy of the actions to imitate, times its coefficient. Near 0 the policy is sure to take them.",
    ),
    "train/observation_loss": (
        "Loss of observations",
        "loss",
        "loss",
        "Cross-entropy of what the environment answered, times its coefficient. Near 0 the policy foresees every answer.",
    ),
    "group_stats/zero_variance_fraction": (
        "Dead groups",
        "dead groups",
        "fraction of groups",
        "Groups in which all rewards are equal, so that their rewards teach nothing.",
    ),
    "train/grad_norm": ("Gradient norm", "norm", "norm", "Before clipping. 0: the iteration changed nothing."),
    "train/sampler_divergence": (
        "Sampler and policy",
        "divergence",
        "nats per step",
        "KL between the distribution that sampled the actions and the policy. Rounding alone gives nearly 0.",
    ),
    "steps/mean": (
        "Length",
        "length",
        "steps per row",
        "Decisions in a row: tokens of a response, or steps of an episode.",
    ),
}
"""Maps a metric to its title, the label of its line, its unit and its meaning."""


def reward_charts(run: RunData) -> list[Html]:
    """Rewards, evaluations, the parts of the reward, and pass@k. None without matplotlib."""
    if not is_installed():
        return []
    found = [chart for chart in (_rewards(run), _evaluation(run), _parts(run), _passes(run)) if chart is not None]
    values = [line.y[np.isfinite(line.y)] for chart in found for line in chart.lines]
    if values and 0 <= min(one.min() for one in values) <= NEAR_ZERO * max(one.max() for one in values):
        found = [replace(chart, from_zero=True) for chart in found]  # neighbours can be compared
    return [line_chart(chart, is_wide=len(found) == 1) for chart in found]


def training_charts(run: RunData) -> list[Html]:
    """KL, entropy, clip fraction, losses, dead groups and other signs of how training goes. None without matplotlib."""
    if not is_installed():
        return []
    charts = {name: _single(run, name) for name in SINGLE}
    ordered = [
        charts["train/kl_mean"],
        charts["train/entropy"],
        _clip_fraction(run),
        *list(charts.values())[2:],
    ]
    return [line_chart(chart) for chart in ordered if chart is not None]


def always_zero(run: RunData) -> list[str]:
    """Metrics that the page would draw, but that were 0 in every iteration."""
    return [name for name in [*SINGLE, "train/clip_fraction"] if run.has(name) and not _is_ever_nonzero(run, name)]


def time_table(run: RunData) -> Html | None:
    """The mean time of each phase of an iteration. None: no time was measured."""
    measured = {PHASES[name]: value for name, value in phase_times(run).items()}
    if not measured:
        return None
    largest = max(measured, key=lambda name: measured[name])
    note = f"Mean time of each phase of an iteration. The largest part is {largest}. Evaluations are not included."
    total, classes = sum(measured.values()), ["", "number", "number"]
    rows = [
        row_of([name, duration(value), percent(value / total)], classes=classes) for name, value in measured.items()
    ]
    table = table_of(["phase", "time", "share"], rows, classes)
    return element("figure", element("h3", "Time per iteration"), table, element("figcaption", note))


def _rewards(run: RunData) -> Chart | None:
    if not run.has("rewards/mean"):
        return None
    has_band = run.has("rewards/q25") and run.has("rewards/q75")
    has_values = has_band and not _are_extremes(run, "rewards/q25", "rewards/q75")
    line = Line(
        label="mean",
        y=run.of("rewards/mean"),
        colour="reward",
        band=(run.of("rewards/q25"), run.of("rewards/q75")) if has_values else None,
        band_label="quartiles" if has_values else "",
    )
    note = "Mean reward of the sampled rows of each iteration."
    if has_band:
        few = "There is no band of quartiles, because the rewards of an iteration take few values."
        note = f"{note} {'The band contains the middle half of the rows.' if has_values else few}"
    return Chart(title="Reward in training", note=note, y_label="reward", x=run.iterations, lines=[line])


def _are_extremes(run: RunData, *names: str) -> bool:
    """Whether quartiles are nearly always the smallest or the largest reward, as for rewards of 0 and 1."""
    low, high = run.of("rewards/min"), run.of("rewards/max")
    is_extreme = np.logical_and.reduce([(run.of(name) == low) | (run.of(name) == high) for name in names])
    return float(is_extreme.mean()) >= FEW_VALUES


def evaluation_interval(run: RunData) -> tuple[np.ndarray, np.ndarray] | None:
    """The 95 % interval of each evaluation's mean: mean -+ 1.96 std / sqrt(rows). None: std or rows are not known."""
    rows = np.array([run.eval_rows.get(round(number), math.nan) for number in run.iterations])
    half = INTERVAL * run.of("eval/avg_reward_std") / np.sqrt(rows)
    if not np.isfinite(half).any():
        return None
    return run.of("eval/avg_reward") - half, run.of("eval/avg_reward") + half


def _evaluation(run: RunData) -> Chart | None:
    if run.evaluation is None:
        return None
    band = evaluation_interval(run) if run.evaluation == "eval/avg_reward" else None
    line = Line(
        label="evaluation",
        y=run.of(run.evaluation),
        colour="evaluation",
        band=band,
        band_label="" if band is None else "interval",
        has_dots=True,
    )
    if run.evaluation == "eval/return":
        note = "Mean return of new episodes, without training and without exploration."
    else:
        note = "No interval: the number of rows was not recorded." if band is None else INTERVAL_NOTE
        note = f"Mean reward of newly sampled actions, without training. {note}"
    title = "Reward in evaluations"
    return Chart(title=title, note=note, y_label="reward", x=run.iterations, lines=[line])


def _parts(run: RunData) -> Chart | None:
    names = [
        name
        for name in run.metrics
        if name.startswith("rewards/") and name.endswith("/mean") and name.count("/") >= 2 and run.has(name)
    ]
    if len(names) < 2:
        return None
    lines = [
        Line(label=one_line(name.removeprefix("rewards/").removesuffix("/mean")), y=run.of(name), colour=f"part{place}")
        for place, name in enumerate(names[:MAX_PARTS])
    ]
    left_out = f" {len(names) - MAX_PARTS} further parts are not drawn." if len(names) > MAX_PARTS else ""
    note = f"Mean of each named part of the reward, before weighting, over the rows that it applies to.{left_out}"
    return Chart(title="Parts of the reward", note=note, y_label="reward", x=run.iterations, lines=lines)


def _passes(run: RunData) -> Chart | None:
    """The metrics `eval/pass_at_K` of an evaluation of the user's."""
    counts = sorted(
        int(name.removeprefix(PASS))
        for name in run.metrics
        if re.fullmatch(rf"{PASS}[0-9]{{1,9}}", name) and run.has(name)
    )
    if not counts:
        return None
    lines = [
        Line(label=f"k = {count}", y=run.of(f"{PASS}{count}"), colour=f"part{place}", has_dots=True)
        for place, count in enumerate(counts[:MAX_PARTS])
    ]
    note = (
        "Probability that at least one of k attempts at a state passes. Where it stays while the mean reward rises, the policy "
        "does more often what it could do before."
    )
    return Chart(title="pass@k in evaluations", note=note, y_label="pass@k", x=run.iterations, lines=lines)


def _clip_fraction(run: RunData) -> Chart | None:
    sides = {"low": "train/clip_fraction_low", "high": "train/clip_fraction_high"}
    measured = {"clipped": "train/clip_fraction", **sides}
    lines = [
        Line(label=label, y=run.of(name), colour=colour)
        for (label, name), colour in zip(measured.items(), ("plain", "part1", "part2"), strict=True)
        if run.has(name)
    ]
    if not lines or not _is_ever_nonzero(run, *measured.values()):
        return None
    note = (
        "Fraction of the steps whose gradient is stopped: the ratio has left its bounds, below (low) or above (high)."
    )
    return Chart(
        title="Clip fraction", note=note, y_label="fraction of steps", x=run.iterations, lines=lines, from_zero=True
    )


def _single(run: RunData, name: str) -> Chart | None:
    title, label, y_label, note = SINGLE[name]
    is_constant_length = name == "steps/mean" and len(set(run.of(name)[np.isfinite(run.of(name))].tolist())) == 1
    if not _is_ever_nonzero(run, name) or is_constant_length:
        return None
    line = Line(label=label, y=run.of(name))
    return Chart(title=title, note=note, y_label=y_label, x=run.iterations, lines=[line], from_zero=True)


def _is_ever_nonzero(run: RunData, *names: str) -> bool:
    return any(bool((np.nan_to_num(run.of(name), posinf=0.0, neginf=0.0) != 0).any()) for name in names)


def grid(figures: Sequence[Html]) -> Html:
    """Figures side by side, two in a row. A single figure has the whole row."""
    return element("div", joined(*figures), class_="grid" if len(figures) > 1 else None)

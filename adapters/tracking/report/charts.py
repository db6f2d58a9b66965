"""The pictures of a page, drawn by matplotlib: lines over the iterations of a run, and how each state changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from adapters.plots import for_pages, label_ends, svg_of
from grpo.evaluation import StateComparison

from .markup import Html, element, plain
from .series import MAX_POINTS, thinned
from .style import LIGHT
from .words import number

WIDTH, WIDE, HEIGHT = 540, 1096, 250
"""Width of a chart in half the page, its width in the whole page, and its height, in points. The page scales charts."""
LARGEST = 1e100
"""Size above which a reward is drawn at the edge, so that differences of rewards stay finite."""
COLOURS = {colour: f"var(--{name})" for name, colour in LIGHT.items()}
"""Maps each colour to its name in the page, which has another colour for it on dark screens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart, with an optional band around it."""

    label: str
    """The words at the line's end."""
    y: Float64[np.ndarray, " I"]
    """Values. NaN: not measured."""
    colour: str = "plain"
    """The colour's name in `style.py`, one for each meaning."""
    band: tuple[Float64[np.ndarray, " I"], Float64[np.ndarray, " I"]] | None = None
    """Lower and upper edge of the band. None: there is no band."""
    band_label: str = ""
    """What the band is, for the values at the pointer."""
    has_dots: bool = False
    """Whether each value gets a dot: for values that are measured now and then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over the iterations of a run."""

    title: str
    """What is shown."""
    note: str
    """One or two sentences: what the number means."""
    y_label: str
    """The name of the vertical axis."""
    x: Float64[np.ndarray, " I"]
    """Iterations, or other whole numbers."""
    lines: Sequence[Line]
    """Lines with at least one finite value each."""
    from_zero: bool = False
    """Whether the vertical axis contains 0."""
    x_name: str = "iteration"
    """What the numbers in `x` are."""


@for_pages
def line_chart(chart: Chart, *, is_wide: bool = False) -> Html:
    """Draw a chart as a `<figure>`, for half the page or for all of it. Each point has its values in a `<title>`."""
    figure, axis = _figure(WIDE if is_wide else WIDTH, HEIGHT)
    axis.set(xlabel=chart.x_name, ylabel=chart.y_label)
    axis.xaxis.set_major_formatter(lambda x, _: number(x) if x >= 1 and x == round(x) else "")  # iterations, from 1
    axis.grid(axis="y", color=LIGHT["faint"])
    titles: dict[str, list[str]] = {}
    ends: dict[str, tuple[float, str]] = {}
    words, per_point = [], 1
    for place, line in enumerate(chart.lines):
        band = [line.y, line.y] if line.band is None else list(line.band)
        # the lines of a chart share its points, because each point is an element of the page
        x, (y, low, high), size = thinned(chart.x, [line.y, *band], max(MAX_POINTS // len(chart.lines), 40))
        low, high = np.where(np.isfinite(low), low, y), np.where(np.isfinite(high), high, y)
        colour, label = LIGHT[line.colour], plain(line.label)
        if line.band is not None:
            axis.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
        axis.plot(x, y, color=colour, linewidth=2)
        is_dotted = (line.has_dots and len(x) <= 60) or len(x) == 1
        name = f"{'dots' if is_dotted else 'points'}-{place}"
        axis.plot(x, y, color=colour, linestyle="none", marker="o", markersize=6, markeredgewidth=0, gid=name)
        around = [f", {line.band_label} {number(a)} to {number(b)}" for a, b in zip(low, high, strict=True)]
        titles[name] = [
            f"{chart.x_name} {number(round(a))}: {label + ' ' if len(chart.lines) > 1 else ''}{number(b)}"
            f"{around[i] if line.band_label else ''}"
            for i, (a, b) in enumerate(zip(x, y, strict=True))
        ]
        ends[label] = (float(y[-1]), colour)
        words.append(f"{label} from {number(y[0])} to {number(y[-1])}")
        per_point = max(per_point, size)
    if chart.from_zero:
        low, high = axis.dataLim.intervaly
        axis.set_ylim(bottom=0.0 if low >= 0 < high else None, top=0.0 if low < 0 >= high else None)
    first, last = float(chart.x.min()), float(chart.x.max())
    axis.set_xlim(first - 0.5 * (first == last), last + 0.5 * (first == last))  # a single iteration is in the middle
    label_ends(axis, ends, axis.get_xlim()[1])
    means = f" Each point is the mean of {per_point} iterations." if per_point > 1 else ""
    picture = Html(svg_of(figure, titles, f"{chart.title}: {', '.join(words)}", COLOURS))
    return element("figure", element("h3", chart.title), picture, element("figcaption", chart.note + means))


@for_pages
def before_after(states: Sequence[StateComparison]) -> Html:
    """One row per state: a dot for the mean reward before, a dot for the mean after, and a line between them."""
    figure, axis = _figure(1080, 60 + 22 * len(states))
    places = np.arange(len(states))
    before, after = ([state.before for state in states], [state.after for state in states])
    means = {name: np.clip(values, -LARGEST, LARGEST) for name, values in (("before", before), ("after", after))}
    span = {"improved": LIGHT["good"], "worse": LIGHT["problem"]}
    colours = [span.get(state.outcome, LIGHT["middle"]) for state in states]
    axis.hlines(places, means["before"], means["after"], colors=colours, linewidth=2)
    dot = {"linestyle": "none", "marker": "o", "markersize": 9, "markeredgewidth": 0}
    for (name, values), colour in zip(means.items(), ("middle", "reward"), strict=True):
        axis.plot(values, places, color=LIGHT[colour], gid=f"dots-{name}", **dot)
    labels = [one_line(state.label) for state in states]
    axis.set_yticks(places, labels, color=LIGHT["ink"])
    axis.set(ylim=(len(states) - 0.5, -0.5))
    axis.grid(axis="x", color=LIGHT["faint"])
    axis.xaxis.tick_top()
    for place, state in zip(places, states, strict=True):
        beside = {"xycoords": axis.get_yaxis_transform(), "xytext": (5, 0), "textcoords": "offset points"}
        axis.annotate(number(state.difference, signed=True), (1.0, place), va="center", annotation_clip=False, **beside)
    titles = {
        f"dots-{name}": [
            f"{label}: {number(value)} {name} training" for label, value in zip(labels, values, strict=True)
        ]
        for name, values in means.items()
    }
    return Html(svg_of(figure, titles, f"Mean reward of {len(states)} states before and after training", COLOURS))


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """An empty figure of a size in points, and its axis: no box, round ticks, and numbers as the page writes them."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    matplotlib.rcParams.update({"text.color": LIGHT["soft"], "axes.labelcolor": LIGHT["soft"], "font.size": 11})
    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
    axis = figure.subplots()
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0, labelcolor=LIGHT["soft"])
    axis.set_axisbelow(True)
    axis.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axis.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter(lambda value, _: number(value))
    return figure, axis


def one_line(text: str) -> str:
    """A text on one line, cut where it is too long for a label."""
    line = plain(" ".join(text.split()))
    return line if len(line) <= 34 else line[:31] + "..."

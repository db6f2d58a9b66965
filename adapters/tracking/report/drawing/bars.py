"""Horizontal charts as inline SVG: where the time goes, and how each state changed."""

from collections.abc import Sequence

from adapters.tracking.report.words import duration, number, percent
from grpo.evaluation import StateComparison

from .axes import Scale, value_scale
from .markup import Html, element, joined

WIDTH = 540
"""Width of a chart in its own units."""
LARGEST = 1e100
"""Size above which a reward is drawn at the edge, so that differences of rewards stay finite."""
ROW = 30
"""Height of a bar with its room."""
NAMES = 150
"""Room for the names on the left."""


def time_bars(seconds: dict[str, float]) -> Html:
    """Bars of the mean time of each phase of an iteration, with seconds and shares at their ends.

    Args:
        seconds: maps the name of a phase to its mean time in seconds. At least one is above 0.
    """
    total, largest = sum(seconds.values()), max(seconds.values())
    room = WIDTH - NAMES - 110
    rows = []
    for place, (name, value) in enumerate(seconds.items()):
        y, width = place * ROW, max(room * value / largest, 1.0)
        rows += [
            element("text", name, x=NAMES - 10, y=y + 19, class_="name end"),
            element("rect", x=NAMES, y=y + 6, width=width, height=ROW - 12, rx=3, class_="bar"),
            element(
                "text", f"{duration(value)}, {percent(value / total)}", x=NAMES + width + 8, y=y + 19, class_="tick"
            ),
        ]
    words = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    return element(
        "svg",
        *rows,
        viewBox=f"0 0 {WIDTH} {ROW * len(seconds) + 6}",
        role="img",
        aria_label=f"Time per iteration: {words}",
    )


def before_after(states: Sequence[StateComparison]) -> Html:
    """One row per state: a dot for the mean reward before, a dot for the mean after, and a line between them."""
    row, width, top = 22, 1080, 26
    labels = [_one_line(state.label) for state in states]
    names = 24 + 7.5 * max(map(len, labels))
    values = [max(-LARGEST, min(value, LARGEST)) for state in states for value in (state.before, state.after)]
    ends = value_scale(min(values), max(values), from_zero=False)
    x = Scale(low=ends.low, high=ends.high, start=names, end=width - 90)
    bottom = top + row * len(states)
    grid = [
        joined(
            element("line", x1=x(tick), x2=x(tick), y1=top - 6, y2=bottom, class_="zero" if tick == 0 else "grid"),
            element("text", number(tick), x=x(tick), y=top - 12, class_="tick middle"),
        )
        for tick in x.ticks
    ]
    rows = []
    for place, (state, label) in enumerate(zip(states, labels, strict=True)):
        y = top + row * place + row / 2
        rows += [
            element("text", label, x=names - 12, y=y + 4, class_="name end"),
            element("line", x1=x(state.before), x2=x(state.after), y1=y, y2=y, class_=f"span {state.outcome}"),
            element("circle", cx=x(state.before), cy=y, r=4.5, class_="before"),
            element("circle", cx=x(state.after), cy=y, r=4.5, class_="after"),
            element("text", number(state.difference, signed=True), x=width - 8, y=y + 4, class_="tick end"),
        ]
    return element(
        "svg",
        *grid,
        *rows,
        viewBox=f"0 0 {width} {bottom + 6}",
        role="img",
        aria_label=f"Mean reward of {len(states)} states before and after training",
    )


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 34 else line[:31] + "..."

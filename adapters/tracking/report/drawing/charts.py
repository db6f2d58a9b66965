"""Line charts as inline SVG: a title, labelled axes, each line's label at its end, and values where the pointer is."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float64

from adapters.tracking.report.series import MAX_POINTS, thinned
from adapters.tracking.report.words import number

from .axes import BOTTOM, HEIGHT, LEFT, TOP, WIDE, WIDTH, Scale, frame, iteration_scale, value_scale
from .markup import Html, element, joined

LABEL_HEIGHT = 15
"""Smallest distance between the labels of two lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart, with an optional band around it."""

    label: str
    """The words at the line's end."""
    y: Float64[np.ndarray, " I"]
    """Values. NaN: not measured."""
    colour: str = "plain"
    """CSS class of the colour, one for each meaning: see `style.py`."""
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
    """Iterations."""
    lines: Sequence[Line]
    """Lines with at least one finite value each."""
    from_zero: bool = False
    """Whether the vertical axis contains 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """A line as it is drawn: thinned, and without the places that were not measured."""

    line: Line
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    per_point: int


def line_chart(chart: Chart, *, is_wide: bool = False) -> Html:
    """Draw a chart as a `<figure>`, for half the page or for all of it."""
    width = WIDE if is_wide else WIDTH
    drawn = [_drawn(chart.x, line, max(MAX_POINTS // len(chart.lines), 40)) for line in chart.lines]
    x = iteration_scale(float(chart.x.min()), float(chart.x.max()), width)
    low = min(float(min(one.low.min(), one.y.min())) for one in drawn)
    high = max(float(max(one.high.max(), one.y.max())) for one in drawn)
    y = value_scale(low, high, from_zero=chart.from_zero)
    per_point = max(one.per_point for one in drawn)
    means = f" Each point is the mean of {per_point} iterations." if per_point > 1 else ""
    ends = ", ".join(f"{one.line.label} from {number(one.y[0])} to {number(one.y[-1])}" for one in drawn)
    return element(
        "figure",
        element("h3", chart.title),
        element(
            "svg",
            frame(x, y, "iteration", chart.y_label),
            *(_shape(one, x, y) for one in drawn),
            _end_labels(drawn, x, y),
            *(_pointer_values(one, x, y) for one in drawn if len(drawn) == 1),
            viewBox=f"0 0 {width} {HEIGHT}",
            role="img",
            aria_label=f"{chart.title}: {ends}",
        ),
        element("figcaption", chart.note + means),
    )


def _drawn(x: np.ndarray, line: Line, max_points: int) -> _Drawn:
    band = [line.y, line.y] if line.band is None else list(line.band)
    places, (y, low, high), per_point = thinned(x, [line.y, *band], max_points)
    low, high = np.where(np.isfinite(low), low, y), np.where(np.isfinite(high), high, y)
    return _Drawn(line=line, x=places, y=y, low=low, high=high, per_point=per_point)


def _shape(one: _Drawn, x: Scale, y: Scale) -> Html:
    """The band, the line and its dots. A single value is a dot."""
    places = [x(value) for value in one.x]
    points = _points(places, [y(value) for value in one.y])
    parts = []
    if one.line.band is not None:
        upper, lower = [y(value) for value in one.high], [y(value) for value in one.low]
        edge = _points([*places, *places[::-1]], [*upper, *lower[::-1]])
        parts.append(element("polygon", points=edge, class_="band"))
    parts.append(element("polyline", points=points, class_="line"))
    if (one.line.has_dots and len(places) <= 60) or len(places) == 1:
        dots = [element("circle", cx=place, cy=y(value), r=3) for place, value in zip(places, one.y, strict=True)]
        parts += dots
    return element("g", *parts, class_=one.line.colour)


def _points(x: Sequence[float], y: Sequence[float]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def _end_labels(drawn: Sequence[_Drawn], x: Scale, y: Scale) -> Html:
    """The label of each line beside its last value. Labels that would overlap are moved apart."""
    wanted = sorted(((y(float(one.y[-1])), one) for one in drawn), key=lambda pair: pair[0])
    places: list[float] = []
    for place, _ in wanted:
        places.append(max(place, places[-1] + LABEL_HEIGHT) if places else place)
    overflow = max(places[-1] - (HEIGHT - BOTTOM), 0.0)
    labels = [
        element(
            "text", one.line.label, x=x(float(one.x[-1])) + 7, y=place - overflow + 4, class_=f"label {one.line.colour}"
        )
        for place, (_, one) in zip(places, wanted, strict=True)
    ]
    return joined(*labels)


def _pointer_values(one: _Drawn, x: Scale, y: Scale) -> Html:
    """For each point an invisible column, which shows the values at this iteration while the pointer is over it."""
    places = [x(value) for value in one.x]
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(places)), x.end]
    columns = [
        element(
            "g",
            element("rect", x=edges[i], width=max(edges[i + 1] - edges[i], 0.5), y=TOP, height=HEIGHT - TOP - BOTTOM),
            element("line", x1=places[i], x2=places[i], y1=TOP, y2=HEIGHT - BOTTOM),
            element("circle", cx=places[i], cy=y(float(one.y[i])), r=3.5, class_=one.line.colour),
            element("text", _values(one, i), x=x.end, y=TOP - 3, class_="tick end"),
            class_="at",
        )
        for i in range(len(places))
    ]
    return joined(*columns)


def _values(one: _Drawn, i: int) -> str:
    band = f", {one.line.band_label} {number(one.low[i])} to {number(one.high[i])}" if one.line.band_label else ""
    return f"iteration {number(round(one.x[i]))}: {number(one.y[i])}{band}"

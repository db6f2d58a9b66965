"""The frame of a chart: a scale for each axis, round ticks, and the lines and words around the plot."""

import math
from dataclasses import dataclass

from adapters.tracking.report.words import number

from .markup import Html, element, joined

WIDTH, WIDE, HEIGHT = 540, 1096, 250
"""Width of a chart in half the page, its width in the whole page, and its height. The page scales charts to their column."""
LEFT, RIGHT, TOP, BOTTOM = 58, 96, 14, 40
"""Room around the plot for the axes' words, and for the lines' labels on the right."""
SMALLEST = 1e-100
"""Length of an axis below which it is drawn as a constant."""
NUM_TICKS = 5
"""Number of ticks of an axis, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps numbers between `low` and `high` to a place on the chart, linearly."""

    low: float
    high: float
    start: float
    """Place of `low`."""
    end: float
    """Place of `high`."""

    def __call__(self, value: float) -> float:
        """The place of a number."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Round numbers between `low` and `high`."""
        step = tick_step(self.high - self.low)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]


def tick_step(span: float) -> float:
    """The distance between ticks: 1, 2 or 5 times a power of ten, so that a span has about five.

    Example:
        >>> tick_step(1.0), tick_step(37.0)
        (0.2, 10.0)
    """
    rough = span / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    factor = next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return factor * power if power >= 1 else factor / (1 / power)


def iteration_scale(first: float, last: float, width: float) -> Scale:
    """The horizontal axis of a chart. A single iteration is in the middle."""
    margin = 0.5 if first == last else 0.0
    return Scale(low=first - margin, high=last + margin, start=LEFT, end=width - RIGHT)


def value_scale(low: float, high: float, *, from_zero: bool) -> Scale:
    """The vertical axis, which ends near the numbers and leaves a little room. A constant is in the middle."""
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), SMALLEST):
        margin = abs(high) / 2 if abs(high) > SMALLEST else 1.0
        low, high = (0.0 if from_zero else low - margin), high + margin
    step = tick_step(high - low)
    low, high = math.floor(2 * low / step + 1e-9) * step / 2, math.ceil(2 * high / step - 1e-9) * step / 2
    return Scale(low=low, high=high, start=HEIGHT - BOTTOM, end=TOP)


def frame(x: Scale, y: Scale, x_label: str, y_label: str) -> Html:
    """Grid lines, tick labels and the names of both axes."""
    middle = (TOP + HEIGHT - BOTTOM) / 2
    rows = [
        joined(
            element("line", x1=LEFT, x2=x.end, y1=y(tick), y2=y(tick), class_="zero" if tick == 0 else "grid"),
            element("text", number(tick), x=LEFT - 8, y=y(tick) + 4, class_="tick end"),
        )
        for tick in y.ticks
    ]
    columns = [
        element("text", number(tick), x=x(tick), y=HEIGHT - BOTTOM + 17, class_="tick middle")
        for tick in x.ticks
        if tick >= 1 and tick == round(tick)  # iterations are whole numbers from 1
    ]
    return joined(
        *rows,
        *columns,
        element("text", x_label, x=(LEFT + x.end) / 2, y=HEIGHT - 6, class_="axis middle"),
        element("text", y_label, transform=f"translate(12 {middle}) rotate(-90)", class_="axis middle"),
    )

"""Markup is escaped, and charts have the numbers that they show in the right places."""

import math
import xml.etree.ElementTree as ElementTree
from xml.etree.ElementTree import Element

import numpy as np
import pytest

from adapters.tracking.report.drawing.axes import Scale, tick_step, value_scale
from adapters.tracking.report.drawing.bars import before_after, time_bars
from adapters.tracking.report.drawing.charts import Chart, Line, line_chart
from adapters.tracking.report.drawing.markup import Html, element, escaped, joined
from grpo.evaluation import Answer, StateComparison


def test_text_is_escaped_and_markup_is_not() -> None:
    assert element("td", "<b> & 'x'", element("i", "y")) == "<td>&lt;b&gt; &amp; &#x27;x&#x27;<i>y</i></td>"
    assert joined("<", Html("<br>")) == "&lt;<br>"


def test_attributes_are_escaped_and_named_after_python_names() -> None:
    found = element("a", class_='"><script>', aria_label="x", open=True, hidden=False, title=None, x=1.234, y=2.0, z=3)
    assert found == '<a class="&quot;&gt;&lt;script&gt;" aria-label="x" open x="1.23" y="2" z="3"></a>'
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n\tb", "a\n\tb"),
        ("\x00\x1b[31m", "\\x00\\x1b[31m"),
        ("\ud800", "\\ud800"),
        ("\u202eabc", "\\u202eabc"),  # turns the direction of the text around
        ("\r\x0b", "\\r\\x0b"),
        ("né 漢字 √ \xa0", "né 漢字 √ \xa0"),
    ],
)
def test_characters_that_a_page_must_not_have_become_codes(text: str, shown: str) -> None:
    assert escaped(text) == shown
    escaped(text).encode("utf-8")


@pytest.mark.parametrize(("span", "step"), [(1.0, 0.2), (37.0, 10.0), (0.004, 0.001), (5.0, 1.0), (5.1, 2.0)])
def test_ticks_are_round(span: float, step: float) -> None:
    assert tick_step(span) == pytest.approx(step)


def test_a_scale_maps_its_ends_to_its_places() -> None:
    scale = Scale(low=-1.0, high=1.0, start=100.0, end=0.0)
    assert [scale(value) for value in (-1.0, 0.0, 1.0)] == [100.0, 50.0, 0.0]
    assert scale.ticks == pytest.approx([-1.0, -0.5, 0.0, 0.5, 1.0])


@pytest.mark.parametrize(
    ("low", "high", "from_zero", "ends"),
    [
        (0.21, 0.93, False, (0.2, 1.0)),
        (0.21, 0.93, True, (0.0, 1.0)),
        (0.5, 0.5, False, (0.25, 0.75)),
        (0.0, 0.0, False, (-1.0, 1.0)),
        (0.0, 0.0, True, (0.0, 1.0)),
        (-3.0, -1.0, True, (-3.0, 0.0)),
        (0.0, 1e-310, False, (-1.0, 1.0)),
        (1.00, 1.05, False, (1.00, 1.05)),
    ],
)
def test_the_vertical_axis_contains_the_numbers(low: float, high: float, from_zero: bool, ends: object) -> None:
    scale = value_scale(low, high, from_zero=from_zero)
    assert (scale.low, scale.high) == pytest.approx(ends)


def chart(*lines: Line, num_points: int = 5) -> Element:
    x = np.arange(1.0, num_points + 1)
    return ElementTree.fromstring(
        line_chart(Chart(title="T <1>", note="What it is.", y_label="unit", x=x, lines=lines))
    )


def texts(figure: Element) -> list[str]:
    return [text.text or "" for text in figure.iter("text")]


def coordinates(points: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in points.split(" "))]


def test_a_chart_has_a_title_both_axes_names_and_the_label_at_the_lines_end() -> None:
    figure = chart(Line(label="mean", y=np.array([0.0, 1.0, 2.0, 3.0, 4.0])))
    assert [title.text for title in figure.iter("h3")] == ["T <1>"]
    assert {"iteration", "unit", "mean"} <= set(texts(figure))
    assert [caption.text for caption in figure.iter("figcaption")] == ["What it is."]
    (line,) = figure.iter("polyline")
    points = coordinates(line.attrib["points"])
    assert points[0] == (58.0, 210.0)  # the corner of the axes: LEFT, HEIGHT - BOTTOM
    assert points[-1] == (444.0, 14.0)  # WIDTH - RIGHT, TOP
    label = next(text for text in figure.iter("text") if text.text == "mean")
    assert (label.attrib["x"], label.attrib["y"]) == ("451", "18")
    assert figure.find("svg").attrib["aria-label"] == "T <1>: mean from 0 to 4"  # type: ignore[union-attr]


def test_a_band_runs_along_its_upper_edge_and_back_along_the_lower() -> None:
    band = (np.zeros(5), np.full(5, 4.0))
    figure = chart(Line(label="mean", y=np.full(5, 2.0), band=band, band_label="quartiles"))
    (polygon,) = figure.iter("polygon")
    assert [y for _, y in coordinates(polygon.attrib["points"])] == [14.0] * 5 + [210.0] * 5
    assert "iteration 3: 2, quartiles 0 to 4" in texts(figure)


def test_ticks_of_iterations_are_whole_numbers_from_1(subtests: pytest.Subtests) -> None:
    for num_points, ticks in [(1, ["1"]), (3, ["1", "2", "3"]), (12, ["5", "10"])]:
        with subtests.test(num_points=num_points):
            figure = chart(Line(label="mean", y=np.full(num_points, 0.5)), num_points=num_points)
            found = [text.text for text in figure.iter("text") if text.attrib.get("class") == "tick middle"]
            assert found == ticks


def test_a_mean_outside_its_quartiles_is_inside_the_chart() -> None:
    figure = chart(Line(label="mean", y=np.array([9.0, 0.0, 9.0, 0.0, 9.0]), band=(np.full(5, 4.0), np.full(5, 5.0))))
    (line,) = figure.iter("polyline")
    assert {y for _, y in coordinates(line.attrib["points"])} == {210.0, 14.0}  # the axis goes from 0 to 9


def test_places_that_were_not_measured_are_left_out() -> None:
    figure = chart(Line(label="eval", y=np.array([math.nan, 1.0, math.nan, 3.0, math.nan]), has_dots=True))
    (line,) = figure.iter("polyline")
    assert len(coordinates(line.attrib["points"])) == 2
    assert [text for text in texts(figure) if text.startswith("iteration ")] == ["iteration 2: 1", "iteration 4: 3"]


def test_one_value_is_a_dot() -> None:
    figure = chart(Line(label="mean", y=np.array([0.5])), num_points=1)
    dots = [circle for circle in figure.iter("circle") if circle.attrib["r"] == "3"]
    assert len(dots) == 1


def test_a_long_line_is_thinned_and_the_caption_says_so() -> None:
    figure = chart(Line(label="mean", y=np.arange(100_000.0)), num_points=100_000)
    (line,) = figure.iter("polyline")
    assert len(coordinates(line.attrib["points"])) == 160
    assert [caption.text for caption in figure.iter("figcaption")] == [
        "What it is. Each point is the mean of 625 iterations."
    ]


def test_labels_of_lines_that_end_together_do_not_overlap() -> None:
    lines = [Line(label=f"line {k}", y=np.array([0.0, 1.0, 2.0, 3.0, 0.01 * k])) for k in range(5)]
    places = [float(text.attrib["y"]) for text in chart(*lines).iter("text") if (text.text or "").startswith("line ")]
    assert len(places) == 5
    assert np.diff(sorted(places)).min() >= 15
    assert max(places) <= 214  # none below the axis


def test_time_bars_are_as_long_as_their_times() -> None:
    figure = ElementTree.fromstring(time_bars({"sampling": 0.3, "update": 0.1}))
    widths = [float(bar.attrib["width"]) for bar in figure.iter("rect")]
    assert widths[0] == pytest.approx(3 * widths[1], rel=1e-3)
    assert "300 ms, 75 %" in texts(figure)
    assert "100 ms, 25 %" in texts(figure)


def state(label: str, before: float, after: float) -> StateComparison:
    outcome = "improved" if after > before else "worse"
    answer = Answer(text="a", reward=0.0)
    return StateComparison(
        label=label,
        before=before,
        after=after,
        difference=after - before,
        outcome=outcome,  # type: ignore[arg-type]
        answer_before=answer,
        answer_after=answer,
    )


def test_each_state_has_a_dot_before_and_a_dot_after() -> None:
    figure = ElementTree.fromstring(before_after([state("up " * 20, 0.0, 1.0), state("down", 1.0, 0.5)]))
    places = {
        kind: [float(dot.attrib["cx"]) for dot in figure.iter("circle") if dot.attrib["class"] == kind]
        for kind in ("before", "after")
    }
    assert places["before"][0] < places["after"][1] < places["after"][0] == places["before"][1]
    assert [line.attrib["class"] for line in figure.iter("line") if "span" in line.attrib["class"]] == [
        "span improved",
        "span worse",
    ]
    assert "+1" in texts(figure)
    assert max(len(text) for text in texts(figure)) == 34


def test_states_that_did_not_change_at_all_can_be_drawn() -> None:
    for value in (0.0, 3.0, 1e-310):
        figure = ElementTree.fromstring(before_after([state("same", value, value)]))
        assert {dot.attrib["cx"] for dot in figure.iter("circle")} == {"522"}  # in the middle of 54 and 990


def test_absurd_rewards_can_be_drawn() -> None:
    figure = ElementTree.fromstring(before_after([state("far", -1e308, 1e308)]))
    assert len(list(figure.iter("circle"))) == 2

"""Charts are SVG that matplotlib draws: every point tells its value, and equal runs have equal pictures."""

import math
import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
import pytest

from adapters.tracking.report.charts import Chart, Line, before_after, line_chart
from grpo.evaluation import Answer, StateComparison


def chart(*lines: Line, num_points: int = 5, title: str = "T <1>") -> str:
    x = np.arange(1.0, num_points + 1)
    return line_chart(Chart(title=title, note="What it is.", y_label="unit", x=x, lines=lines))


def points(figure: str, kind: str = "point hidden") -> list[tuple[float, float, str]]:
    """The place of each point from the left and from the top, and its title."""
    found = [use for use in ElementTree.fromstring(figure).iter("use") if use.get("class") == kind]
    return [(float(use.attrib["x"]), float(use.attrib["y"]), use.findtext("title") or "") for use in found]


def texts(figure: str) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(figure).iter("text")]


def svg(figure: str) -> Element:
    found = ElementTree.fromstring(figure)
    return found if found.tag == "svg" else next(found.iter("svg"))


def test_a_chart_has_a_title_both_axes_names_and_the_label_at_the_lines_end() -> None:
    figure = chart(Line(label="mean", y=np.array([0.0, 1.0, 2.0, 3.0, 4.0])))
    assert "<h3>T &lt;1&gt;</h3>" in figure
    assert {"iteration", "unit", "mean"} <= set(texts(figure))
    assert "<figcaption>What it is.</figcaption>" in figure
    assert svg(figure).attrib["aria-label"] == "T <1>: mean from 0 to 4"
    assert svg(figure).attrib["viewBox"] == "0 0 540 250"


def test_each_point_has_a_title_with_its_value_at_the_place_of_its_value() -> None:
    figure = chart(Line(label="mean", y=np.array([0.0, 1.0, 2.0, 3.0, 4.0])))
    x, y, titles = zip(*points(figure), strict=True)
    assert titles == tuple(f"iteration {k}: {k - 1}" for k in range(1, 6))
    assert np.diff(x) == pytest.approx([x[1] - x[0]] * 4, abs=1e-3)
    assert np.diff(y) == pytest.approx([y[1] - y[0]] * 4, abs=1e-3)
    assert x[0] < x[1]
    assert y[0] > y[1]  # SVG counts from the top


def test_titles_name_the_band_and_the_line_if_there_are_several() -> None:
    band = (np.zeros(5), np.full(5, 4.0))
    figure = chart(Line(label="mean", y=np.full(5, 2.0), band=band, band_label="quartiles"))
    assert points(figure)[2][2] == "iteration 3: 2, quartiles 0 to 4"
    both = chart(*(Line(label=name, y=np.full(5, 1.0)) for name in ("a", "b")))
    assert [title for _, _, title in points(both)][::5] == ["iteration 1: a 1", "iteration 1: b 1"]


def test_ticks_of_iterations_are_whole_numbers_from_1(subtests: pytest.Subtests) -> None:
    for num_points in (1, 3, 12):
        with subtests.test(num_points=num_points):
            figure = chart(Line(label="mean", y=np.full(num_points, 0.5)), num_points=num_points)
            below = max(float(text.attrib["y"]) for text in svg(figure).iter("text") if (text.text or "").isdigit())
            ticks = [text.text for text in svg(figure).iter("text") if float(text.attrib["y"]) == below and text.text]
            assert ticks
            assert all((tick or "").isdigit() and int(tick or 0) >= 1 for tick in ticks)


def test_places_that_were_not_measured_are_left_out_and_dots_are_drawn() -> None:
    figure = chart(Line(label="eval", y=np.array([math.nan, 1.0, math.nan, 3.0, math.nan]), has_dots=True))
    assert [title for _, _, title in points(figure, "point")] == ["iteration 2: 1", "iteration 4: 3"]


def test_one_value_is_a_dot() -> None:
    assert len(points(chart(Line(label="mean", y=np.array([0.5])), num_points=1), "point")) == 1


def test_a_long_line_is_thinned_and_the_caption_says_so() -> None:
    figure = chart(Line(label="mean", y=np.arange(100_000.0)), num_points=100_000)
    assert len(points(figure)) == 160
    assert "What it is. Each point is the mean of 625 iterations." in figure


def test_labels_of_lines_that_end_together_do_not_overlap() -> None:
    lines = [Line(label=f"line {k}", y=np.array([0.0, 1.0, 2.0, 3.0, 0.01 * k])) for k in range(5)]
    places = [float(text.attrib["y"]) for text in svg(chart(*lines)).iter("text") if "line " in (text.text or "")]
    assert len(places) == 5
    assert np.diff(sorted(places)).min() >= 10
    assert max(places) <= 240


def test_equal_charts_are_equal_text_and_charts_of_a_page_share_no_id() -> None:
    line = Line(label="mean", y=np.arange(5.0))
    assert chart(line) == chart(line)
    first, second = (set(re.findall(' id="(.*?)"', chart(line, title=title))) for title in ("a", "b"))
    assert first
    assert not first & second


def test_a_chart_loads_nothing_and_has_the_colours_of_the_page() -> None:
    figure = chart(Line(label="mean", y=np.arange(5.0), colour="reward"))
    assert "var(--reward)" in figure
    assert set(re.findall(r"#[0-9a-f]{6}\b", figure)) == set()
    assert "url(" not in figure
    assert all(address.startswith("#") for address in re.findall('href="(.*?)"', figure))


def test_labels_are_texts_whatever_they_contain(subtests: pytest.Subtests) -> None:
    for label in ("</svg><script>", "$x$ and $", "\x00\ud800", "漢字", "_a", 'a"&b'):
        with subtests.test(label=label):
            figure = chart(Line(label=label, y=np.arange(5.0)))
            assert "<script" not in figure
            assert label.replace("\x00\ud800", r"\x00\ud800") in texts(figure)


def test_numbers_of_any_size_can_be_drawn(subtests: pytest.Subtests) -> None:
    for values in ([0.0] * 5, [3.0] * 5, [1e-310] * 5, [-1e100, 1e100, 0.0, 0.0, 0.0]):
        for from_zero in (False, True):
            with subtests.test(values=values, from_zero=from_zero):
                lines = [Line(label="mean", y=np.array(values))]
                given = Chart(title="T", note="", y_label="", x=np.arange(1.0, 6), lines=lines, from_zero=from_zero)
                assert len(points(line_chart(given))) == 5


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


def test_each_state_has_a_dot_before_and_a_dot_after_with_its_value() -> None:
    figure = before_after([state("up " * 20, 0.0, 1.0), state("down", 1.0, 0.5)])
    (before, _, up), (also_before, _, down), (after, _, _), (also_after, _, _) = points(figure, "point")
    assert before < also_after < after == also_before
    assert (up, down) == ("up up up up up up up up up up u...: 0 before training", "down: 1 before training")
    assert {"var(--good)", "var(--problem)"} <= set(re.findall(r"stroke: (var\(--\w+\))", figure))
    assert "+1" in texts(figure)
    assert max(len(text) for text in texts(figure)) == 34


def test_states_that_did_not_change_or_have_absurd_rewards_can_be_drawn() -> None:
    for before, after in ((0.0, 0.0), (3.0, 3.0), (1e-310, 1e-310), (-1e308, 1e308)):
        assert len(points(before_after([state("same", before, after)]), "point")) == 2

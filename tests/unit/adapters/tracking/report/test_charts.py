"""Charts are SVG that matplotlib draws: every point tells its value, and equal runs have equal pictures."""

import math
import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
import pytest

from adapters.tracking.report.charts import Chart, Line, before_after, line_chart
from adapters.tracking.report.diagnosis import diagnose
from adapters.tracking.report.markup import Html, element, escaped, joined
from adapters.tracking.report.panels import always_zero, evaluation_interval, reward_charts, time_table, training_charts
from adapters.tracking.report.series import change_of, longest_streak, share_of, thinned
from adapters.tracking.report.words import counted, duration, number, percent
from grpo.evaluation import Answer, StateComparison
from tests.support.run_folders import constant, healthy, ramp, run_of


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


def test_a_chart_has_its_names_and_each_point_its_value_at_the_place_of_its_value() -> None:
    figure = chart(Line(label="mean", y=np.array([0.0, 1.0, 2.0, 3.0, 4.0]), colour="reward"))
    assert "<h3>T &lt;1&gt;</h3>" in figure
    assert {"iteration", "unit", "mean"} <= set(texts(figure))
    assert "<figcaption>What it is.</figcaption>" in figure
    assert svg(figure).attrib["aria-label"] == "T <1>: mean from 0 to 4"
    assert svg(figure).attrib["viewBox"] == "0 0 540 250"
    assert "var(--reward)" in figure
    assert set(re.findall(r"#[0-9a-f]{6}\b", figure)) == set(), "only colours of the page"
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
    answers = dict.fromkeys(("answer_before", "answer_after"), Answer(text="a", reward=0.0))
    rewards = {"before": before, "after": after, "difference": after - before}
    return StateComparison(label=label, outcome=outcome, **rewards, **answers)  # type: ignore[arg-type]


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


# --- markup


def test_texts_and_attributes_are_escaped_and_markup_is_not() -> None:
    assert element("td", "<b> & 'x'", element("i", "y")) == "<td>&lt;b&gt; &amp; &#x27;x&#x27;<i>y</i></td>"
    assert joined("<", Html("<br>")) == "&lt;<br>"
    found = element("a", class_='"><script>', aria_label="x", open=True, hidden=False, title=None, x=1.234, y=2.0, z=3)
    assert found == '<a class="&quot;&gt;&lt;script&gt;" aria-label="x" open x="1.23" y="2" z="3"></a>'
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'


@pytest.mark.parametrize(("text", "shown"), [
    ("a\n\tb", "a\n\tb"), ("\x00\x1b[31m", "\\x00\\x1b[31m"), ("\ud800", "\\ud800"), ("\r\x0b", "\\r\\x0b"),
    ("\u202eabc", "\\u202eabc"),  # turns the direction of the text around
    ("né 漢字 √ \xa0", "né 漢字 √ \xa0"),
])  # fmt: skip
def test_characters_that_a_page_must_not_have_become_codes(text: str, shown: str) -> None:
    assert escaped(text) == shown
    escaped(text).encode("utf-8")


# --- numbers, times and counts


NUMBERS = {
    0.0: "0", 0.12345: "0.123", -0.5: "-0.5", 0.999_9: "1", 0.00123: "0.00123", 1.2345: "1.23", 12.345: "12.3",
    123.45: "123.5", 1234.5: "1,234", 123_456: "123,456", 1.2e8: "1.2e+08", 5.6e-5: "5.6e-05", math.nan: "-", math.inf: "-",
    None: "-",
}  # fmt: skip
PERCENTAGES = {0.0: "0 %", 0.123: "12 %", 0.014: "1 %", 0.004: "0.4 %", 0.996: "99.6 %", 1.0: "100 %", 0.95: "95 %"}
TIMES = {
    0.0032: "3.2 ms", 0.32: "320 ms", 0.9994: "999 ms", 4.14: "4.1 s", 59.4: "59 s", 59.7: "1 min", 125: "2 min 5 s",
    3599.8: "1 h", 12_000: "3 h 20 min", 86_390: "1 d", 187_200: "2 d 4 h",
}  # fmt: skip


def test_numbers_have_about_three_digits_and_times_two_units_and_percentages_hide_nothing_that_is_left() -> None:
    assert {value: number(value) for value in NUMBERS} == NUMBERS
    assert [number(value, signed=True) for value in (0.5, -0.5, 1500.0, 0.0)] == ["+0.5", "-0.5", "+1,500", "0"]
    assert {fraction: percent(fraction) for fraction in PERCENTAGES} == PERCENTAGES
    assert {seconds: duration(seconds) for seconds in TIMES} == TIMES
    assert [counted(count, "row") for count in (0, 1, 1200)] == ["0 rows", "1 row", "1,200 rows"]


# --- series


def test_the_change_is_the_difference_of_the_means_of_both_tenths() -> None:
    """1 ... 100: the first ten have the mean 5.5, the last ten 95.5. Iterations without the metric do not count."""
    gaps = np.full(200, math.nan)
    gaps[::2] = np.arange(1.0, 101.0)
    for values in (np.arange(1.0, 101.0), gaps):
        change = change_of(values)
        assert (change.first, change.last, change.window, change.difference) == (5.5, 95.5, 10, 90.0)
        assert change.is_clear


def test_noise_or_a_constant_is_no_change_and_a_trend_is(subtests: pytest.Subtests) -> None:
    assert not change_of(np.full(50, 0.1)).is_clear
    generator = np.random.default_rng(0)
    assert sum(change_of(generator.normal(size=100)).is_clear for _ in range(200)) <= 10  # three standard errors
    for slope, is_clear in [(0.05, True), (-0.05, True), (0.001, False)]:
        with subtests.test(slope=slope):
            assert change_of(generator.normal(size=100) * 0.5 + slope * np.arange(100)).is_clear == is_clear


def test_few_iterations_are_compared_by_halves_of_at_most_five(subtests: pytest.Subtests) -> None:
    for num_iterations, window in [(2, 1), (3, 1), (8, 4), (12, 5), (60, 6)]:
        with subtests.test(num_iterations=num_iterations):
            change = change_of(np.arange(float(num_iterations)))
            assert change.window == window
            assert change.is_clear == (window > 1)  # one number has no noise to compare with
    assert change_of(np.array([1.0, math.nan])) is None


def test_a_long_series_becomes_means_of_neighbours_and_a_short_one_stays() -> None:
    x, (y,), per_point = thinned(np.array([1.0, 2.0, 3.0]), [np.array([5.0, math.nan, 7.0])], 3)
    assert (x.tolist(), y.tolist(), per_point) == ([1.0, 3.0], [5.0, 7.0], 1)
    x, (y, z), per_point = thinned(np.arange(1.0, 8.0), [np.arange(0.0, 70.0, 10.0), np.ones(7)], 3)
    assert x.tolist() == [1.5, 3.5, 6.0]  # 1 2 | 3 4 | 5 6 7
    assert y.tolist() == [5.0, 25.0, 50.0]
    assert z.tolist() == [1.0, 1.0, 1.0]
    assert per_point == 3
    assert len(thinned(np.arange(100_000.0), [np.arange(100_000.0)])[0]) == 160


def test_the_late_mean_is_over_the_last_measured_iterations() -> None:
    values = np.array([0.0] * 18 + [1.0, math.nan, 3.0])
    assert share_of(values, 0.1) == 2.0  # of 20 measured numbers the last two
    assert share_of(values) == 0.2
    assert math.isnan(share_of(np.full(3, math.nan)))


def test_the_longest_streak_is_counted_between_interruptions() -> None:
    assert longest_streak(np.array([True, False, True, True, False, True])) == 2
    assert longest_streak(np.array([False])) == 0


# --- which charts a page has, and what the interval of an evaluation means


def titles(figures: list[str]) -> list[str]:
    return [title for figure in figures for title in re.findall("<h3>(.*?)</h3>", figure)]


def test_a_metric_that_was_not_measured_has_no_chart(subtests: pytest.Subtests) -> None:
    bounds = {"": 0.1, "_low": 0.1, "_high": 0.0}
    cases: list[tuple[dict[str, object], list[str]]] = [
        ({"rewards/mean": 0.5}, ["Reward in training"]), ({"eval/avg_reward": 0.5}, ["Reward in evaluations"]),
        ({"rewards/right/mean": 0.5, "rewards/short/mean": 0.1}, ["Parts of the reward"]),
        ({"rewards/right/mean": 0.5}, []),  # the only part is the reward itself
        ({"train/kl_mean": 0.1}, ["KL divergence"]), ({"train/entropy": 0.1}, ["Entropy"]),
        ({"train/clip_fraction": 0.1}, ["Clip fraction"]),
        ({f"train/clip_fraction{end}": value for end, value in bounds.items()}, ["Clip fraction"]),
        ({"train/demonstration_loss": 0.1}, ["Loss of demonstrations"]),
        ({"train/observation_loss": 0.1}, ["Loss of observations"]), ({"train/grad_norm": 0.1}, ["Gradient norm"]),
        ({"group_stats/zero_variance_fraction": 0.1}, ["Dead groups"]),
        ({"train/sampler_divergence": 0.1}, ["Sampler and policy"]), ({"steps/mean": ramp(1, 9)}, ["Length"]),
        ({"steps/mean": 1.0}, []),  # always the same
        ({"anything": 1.0, "train/entropy": math.nan}, []),
    ]  # fmt: skip
    for metrics, expected in cases:
        with subtests.test(metrics=list(metrics)):
            run = run_of(metrics)
            assert titles([*reward_charts(run), *training_charts(run)]) == expected


def test_a_metric_that_was_always_0_has_a_sentence_instead_of_a_chart() -> None:
    run = run_of({"train/kl_mean": 0.0, "train/clip_fraction": 0.0, "train/entropy": 1.0})
    assert titles(training_charts(run)) == ["Entropy"]
    assert always_zero(run) == ["train/kl_mean", "train/clip_fraction"]


def test_pass_at_k_has_a_line_for_each_k_in_their_order() -> None:
    measured = constant(math.nan)
    measured[[9, 19]] = 0.5
    values = {f"eval/pass_at_{k}": measured * k / 10 for k in (16, 2, 8)}
    (figure,) = reward_charts(run_of({**values, "eval/pass_at_best": 0.5}))
    assert titles([figure]) == ["pass@k in evaluations"]
    assert list(dict.fromkeys(re.findall("k = [0-9]+", figure))) == ["k = 2", "k = 8", "k = 16"]


def test_at_most_six_parts_of_the_reward_are_drawn_with_labels_of_up_to_34_letters() -> None:
    name = "part0_has_a_name_of_34_letters____"
    run = run_of({f"rewards/{label}/mean": 0.1 for label in (name, f"{name}_more", *(f"part{k}" for k in range(2, 8)))})
    (figure,) = reward_charts(run)
    assert re.findall("(part[0-9]).*? from", figure) == [f"part{k}" for k in (0, 0, 2, 3, 4, 5)]
    assert "2 further parts are not drawn." in figure
    assert f">{name}<" in figure
    assert f">{name[:31]}...<" in figure


def test_the_reward_has_a_band_only_if_its_quartiles_were_measured_and_do_not_only_jump_between_the_extremes() -> None:
    jumps, extremes = np.tile([0.0, 1.0], 50), {"rewards/min": 0.0, "rewards/max": 1.0, "rewards/q25": 0.0}
    some = np.where(np.arange(100) < 11, 0.5, jumps)  # 11 of 100 quartiles are in between
    for quartiles, has_band in (
        ({}, False),
        ({"rewards/q25": ramp(-1, 0), "rewards/q75": ramp(1, 2)}, True),
        ({**extremes, "rewards/q75": jumps}, False),
        ({**extremes, "rewards/q75": some}, True),
    ):
        (figure,) = reward_charts(run_of({"rewards/mean": ramp(0, 1), **quartiles}))
        assert ("fill-opacity: 0.16" in figure, "middle half" in figure) == (has_band, has_band)
        said = "There is no band of quartiles, because the rewards of an iteration take few values." in figure
        assert said == (bool(quartiles) and not has_band)


def test_the_interval_is_196_standard_errors_on_each_side_where_the_number_of_rows_is_known() -> None:
    """At iteration 10, 64 rows: 0.5 -+ 1.96 x 0.4 / 8 = 0.402 ... 0.598. At iteration 20 the rows were not recorded."""
    values, spread = constant(math.nan), constant(math.nan)
    values[[9, 19]], spread[[9, 19]] = 0.5, 0.4
    metrics = {"eval/avg_reward": values, "eval/avg_reward_std": spread}
    known, unknown = (run_of(metrics, eval_rows=rows) for rows in ({10: 64}, {}))
    interval = evaluation_interval(known)
    assert [values[9] for values in interval] == pytest.approx([0.402, 0.598])
    assert all(math.isnan(values[19]) for values in interval)
    (figure,) = reward_charts(known)
    assert "mean ± 1.96 std / √rows" in figure
    assert "interval 0.402 to 0.598" in figure
    assert evaluation_interval(unknown) is None
    (figure,) = reward_charts(unknown)
    assert "No interval: the number of rows was not recorded." in figure
    assert "fill-opacity: 0.16" not in figure


def test_a_chart_that_is_alone_has_the_width_of_the_page() -> None:
    alone = reward_charts(run_of({"eval/return": ramp(10, 200)}))  # returns of control are evaluations, too
    both = reward_charts(run_of({"rewards/mean": ramp(0, 1), "eval/avg_reward": 0.5}))
    assert titles(alone) == ["Reward in evaluations"]
    assert "Mean return of new episodes" in alone[0]
    assert [re.findall('viewBox="0 0 (.*?) 250"', figure) for figure in [*alone, *both]] == [["1096"], ["540"], ["540"]]


def test_the_time_table_shows_each_phase_and_what_is_left() -> None:
    figure = time_table(healthy(time__iteration=1.25))
    for words in ("400 ms", "32 %", "100 ms", "8 %", "other", "250 ms", "20 %"):
        assert f">{words}<" in figure
    assert "The largest part is sampling" in figure
    assert ">other<" not in (time_table(healthy()) or "")
    assert time_table(run_of({"rewards/mean": 1.0})) is None


def test_the_diagnosis_and_the_table_give_a_phase_the_same_share() -> None:
    """11.8 of 20 seconds are 59 %, and 60 % of the 19.65 seconds that the phases have together."""
    times = {"iteration": 20.0, "sample": 11.8, "reward": 5.0, "score": 1.0, "update": 1.85}
    run = run_of({f"time/{name}": seconds for name, seconds in times.items()})
    (finding,) = [found for found in diagnose(run) if "sampling" in found.title]
    assert "It takes 60 %" in finding.text
    assert ">60 %<" in time_table(run).partition("sampling")[2].partition("</tr>")[0]


def test_neighbours_start_at_0_together() -> None:
    """A reward of 0.4 to 0.9 beside an evaluation that begins near 0; with an evaluation from 0.3 each has its own axis."""
    for first, starts_at_0 in ((0.02, True), (0.3, False)):
        charts = reward_charts(run_of({"rewards/mean": ramp(0.4, 0.9), "eval/avg_reward": ramp(first, 0.9)}))
        assert [">0</text>" in chart or ">0<" in chart for chart in charts] == [starts_at_0] * 2

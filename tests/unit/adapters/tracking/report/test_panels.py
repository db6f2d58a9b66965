"""Which charts a page has, and what the interval of an evaluation means."""

import math
import re
import sys

import numpy as np
import pytest

from adapters.tracking.report.diagnosis import diagnose
from adapters.tracking.report.panels import (
    always_zero,
    evaluation_interval,
    reward_charts,
    time_table,
    training_charts,
)
from adapters.tracking.report.run_data import RunData
from tests.support.run_folders import constant, healthy, ramp, run_of


def titles(figures: list[str]) -> list[str]:
    return [title for figure in figures for title in re.findall("<h3>(.*?)</h3>", figure)]


def test_a_metric_that_was_not_measured_has_no_chart(subtests: pytest.Subtests) -> None:
    cases: list[tuple[dict[str, object], list[str]]] = [
        ({"rewards/mean": 0.5}, ["Reward in training"]),
        ({"eval/avg_reward": 0.5}, ["Reward in evaluations"]),
        ({"rewards/right/mean": 0.5, "rewards/short/mean": 0.1}, ["Parts of the reward"]),
        ({"rewards/right/mean": 0.5}, []),  # the only part is the reward itself
        ({"train/kl_mean": 0.1}, ["KL divergence"]),
        ({"train/entropy": 0.1}, ["Entropy"]),
        ({"train/clip_fraction": 0.1}, ["Clip fraction"]),
        (
            {"train/clip_fraction": 0.1, "train/clip_fraction_low": 0.1, "train/clip_fraction_high": 0.0},
            ["Clip fraction"],
        ),
        ({"group_stats/zero_variance_fraction": 0.1}, ["Dead groups"]),
        ({"train/grad_norm": 0.1}, ["Gradient norm"]),
        ({"train/sampler_divergence": 0.1}, ["Sampler and policy"]),
        ({"steps/mean": ramp(1, 9)}, ["Length"]),
        ({"steps/mean": 1.0}, []),  # always the same
        ({"anything": 1.0, "train/entropy": math.nan}, []),
    ]
    for metrics, expected in cases:
        with subtests.test(metrics=list(metrics)):
            run = run_of(metrics)
            assert titles([*reward_charts(run), *training_charts(run)]) == expected


def test_a_metric_that_was_always_0_has_a_sentence_instead_of_a_chart() -> None:
    run = run_of({"train/kl_mean": 0.0, "train/clip_fraction": 0.0, "train/entropy": 1.0})
    assert titles(training_charts(run)) == ["Entropy"]
    assert always_zero(run) == ["train/kl_mean", "train/clip_fraction"]


def test_at_most_six_parts_of_the_reward_are_drawn() -> None:
    run = run_of({f"rewards/part{k}/mean": 0.1 * k for k in range(8)})
    (figure,) = reward_charts(run)
    assert len(set(re.findall("(part[0-9]) from", figure))) == 6
    assert "2 further parts are not drawn." in figure


def test_the_reward_has_a_band_only_if_its_quartiles_were_measured() -> None:
    (plain,) = reward_charts(run_of({"rewards/mean": ramp(0, 1)}))
    (banded,) = reward_charts(
        run_of({"rewards/mean": ramp(0, 1), "rewards/q25": ramp(-1, 0), "rewards/q75": ramp(1, 2)})
    )
    assert ("fill-opacity: 0.16" in plain, "middle half" in plain) == (False, False)
    assert ("fill-opacity: 0.16" in banded, "middle half" in banded) == (True, True)


def test_quartiles_that_only_jump_between_the_extremes_are_not_drawn() -> None:
    jumps, extremes = np.tile([0.0, 1.0], 50), {"rewards/min": 0.0, "rewards/max": 1.0, "rewards/mean": ramp(0, 1)}
    (figure,) = reward_charts(run_of({**extremes, "rewards/q25": 0.0, "rewards/q75": jumps}))
    assert "fill-opacity: 0.16" not in figure
    assert "There is no band of quartiles, because the rewards of an iteration take few values." in figure
    some = np.where(np.arange(100) < 11, 0.5, jumps)  # 11 of 100 quartiles are in between
    (figure,) = reward_charts(run_of({**extremes, "rewards/q25": 0.0, "rewards/q75": some}))
    assert "fill-opacity: 0.16" in figure


def evaluated(rows: dict[int, int]) -> RunData:
    values, spread = constant(math.nan), constant(math.nan)
    values[[9, 19]], spread[[9, 19]] = 0.5, 0.4
    return run_of({"eval/avg_reward": values, "eval/avg_reward_std": spread}, eval_rows=rows)


def test_the_interval_is_196_standard_errors_on_each_side() -> None:
    """At iteration 10, 64 rows: 0.5 -+ 1.96 x 0.4 / 8 = 0.402 ... 0.598. At iteration 20 the rows were not recorded."""
    interval = evaluation_interval(evaluated({10: 64}))
    assert interval is not None
    assert [values[9] for values in interval] == pytest.approx([0.402, 0.598])
    assert all(math.isnan(values[19]) for values in interval)
    (figure,) = reward_charts(evaluated({10: 64}))
    assert "mean ± 1.96 std / √rows" in figure
    assert "interval 0.402 to 0.598" in figure


def test_without_the_number_of_rows_there_is_no_interval_and_the_page_says_so() -> None:
    assert evaluation_interval(evaluated({})) is None
    (figure,) = reward_charts(evaluated({}))
    assert "No interval: the number of rows was not recorded." in figure
    assert "fill-opacity: 0.16" not in figure


def test_returns_of_control_are_evaluations_too() -> None:
    (figure,) = reward_charts(run_of({"eval/return": ramp(10, 200)}))
    assert titles([figure]) == ["Reward in evaluations"]
    assert "Mean return of new episodes" in figure


def test_a_chart_that_is_alone_has_the_width_of_the_page() -> None:
    alone = reward_charts(run_of({"rewards/mean": ramp(0, 1)}))
    both = reward_charts(run_of({"rewards/mean": ramp(0, 1), "eval/avg_reward": 0.5}))
    assert [re.findall('viewBox="0 0 (.*?) 250"', figure) for figure in [*alone, *both]] == [["1096"], ["540"], ["540"]]


def test_the_parts_of_the_reward_come_third() -> None:
    parts = {"rewards/right/mean": 0.5, "rewards/short/mean": 0.1}
    run = run_of({"rewards/mean": 0.5, "eval/avg_reward": 0.5, **parts})
    assert titles(reward_charts(run)) == ["Reward in training", "Reward in evaluations", "Parts of the reward"]


def test_the_interval_contains_the_mean_of_these_states_at_least_95_times_out_of_100() -> None:
    """Eight states whose success rates differ, 16 actions in each: the page says "at least 95 %"."""
    generator = np.random.default_rng(0)
    rates = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 0.9])
    rewards = (generator.random((4000, 8, 16)) < rates[:, None]).reshape(4000, 128).astype(float)
    half = 1.96 * rewards.std(1) / math.sqrt(128)
    assert (np.abs(rewards.mean(1) - rates.mean()) <= half).mean() >= 0.95


def test_the_time_table_shows_each_phase_and_what_is_left() -> None:
    figure = time_table(healthy(time__iteration=1.25))
    assert figure is not None
    for words in (
        ">400 ms<",
        ">32 %<",
        ">100 ms<",
        ">8 %<",
        "other",
        ">250 ms<",
        ">20 %<",
        "The largest part is sampling",
    ):
        assert words in figure
    assert "other" not in (time_table(healthy()) or "")


def test_the_diagnosis_and_the_table_give_a_phase_the_same_share() -> None:
    """11.8 of 20 seconds are 59 %, and 60 % of the 19.65 seconds that the phases have together."""
    times = {"iteration": 20.0, "sample": 11.8, "reward": 5.0, "score": 1.0, "update": 1.85}
    run = run_of({f"time/{name}": seconds for name, seconds in times.items()})
    (finding,) = [found for found in diagnose(run) if "sampling" in found.title]
    (share,) = re.findall(r"It takes (\d+ %)", finding.text)
    table = time_table(run)
    assert table is not None
    assert f">{share}<" in table.partition("sampling")[2].partition("</tr>")[0]


def test_neighbours_start_at_0_together() -> None:
    """A reward of 0.4 to 0.9 beside an evaluation that begins near 0; with an evaluation from 0.3 each has its own axis."""
    for first, starts_at_0 in ((0.02, True), (0.3, False)):
        charts = reward_charts(run_of({"rewards/mean": ramp(0.4, 0.9), "eval/avg_reward": ramp(first, 0.9)}))
        assert [">0</text>" in chart or ">0<" in chart for chart in charts] == [starts_at_0] * 2


def test_labels_are_whole_up_to_34_letters() -> None:
    name = "has_a_name_of_thirty_four_letters_"
    parts = {f"rewards/{name}/mean": 0.5, f"rewards/{name}_more/mean": 0.2}
    (chart,) = reward_charts(run_of(parts))
    assert f">{name}<" in chart
    assert f">{name[:31]}...<" in chart


def test_nothing_is_timed_without_times() -> None:
    assert time_table(run_of({"rewards/mean": 1.0})) is None


def test_without_matplotlib_there_are_tables_and_no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert reward_charts(healthy()) == training_charts(healthy()) == []
    assert time_table(healthy()) is not None

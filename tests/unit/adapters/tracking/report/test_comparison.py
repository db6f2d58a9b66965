"""Before and after training on a page: words, parts of the reward, and the answers side by side."""

import dataclasses
import re

from adapters.tracking.report.comparison import MAX_OPEN, MAX_STATES, comparison_section, comparison_words
from grpo import WeightedRewards
from grpo.evaluation import Answer
from tests.support.comparisons import AFTER, BEFORE, action_itself, compared, of_many, paying


def test_the_words_have_means_difference_percentage_interval_and_counts() -> None:
    report = dataclasses.replace(
        compared([[1, 1], [1, 0]], [[2, 2], [1, 0]], paying(0.5, 1.0, 2.0)), confidence_interval=(0.0, 1.0)
    )
    means, counts = comparison_words(report)
    assert means == (
        "The mean reward went from 0.875 to 1.38: +0.5 (+57.1 %). With 95 % confidence, the difference is between 0 and +1, "
        "if other states are like these. From fewer than 20 states, the interval is too narrow. "
    )
    assert counts == "Of 2 states: 1 improved, 0 worse, 1 unchanged. 2 actions of each policy in each state."


def test_few_states_are_said_to_give_a_narrow_interval() -> None:
    assert ["too narrow" in comparison_words(of_many(count))[0] for count in (1, 2, 19, 20)] == [
        False,
        True,
        True,
        False,
    ]


def test_there_is_no_percentage_if_the_mean_before_is_not_positive() -> None:
    for before in (0.0, -2.0):
        words = comparison_words(compared([[0]], [[1]], paying(before, 1.0)))[0]
        assert words.startswith(
            f"The mean reward went from {before:g} to 1: +{1 - before:g}. One state gives no interval."
        )


def test_both_answers_of_a_state_stand_side_by_side_with_their_rewards() -> None:
    report = compared([[0]], [[1]], paying(0.25, 1.0))
    attacked = dataclasses.replace(
        report.states[0], answer_after=Answer(text="<script>alert(1)</script>", reward=1.0), label="<b>up</b>"
    )
    page = comparison_section(dataclasses.replace(report, states=(attacked,)))
    row = re.findall("<tbody>(.*?)</tbody>", page, re.S)[-1]
    assert re.findall('<td class="[^"]*">(.*?)</td>', row, re.S) == [
        '<div class="answer">&lt;b&gt;up&lt;/b&gt;</div>',
        '<div class="answer">0</div><div class="small">mean reward 0.25, this answer 0.25</div>',
        '<div class="answer">&lt;script&gt;alert(1)&lt;/script&gt;</div><div class="small">mean reward 1, this answer 1</div>',
        "+0.75",
    ]
    assert "<script" not in page


def test_parts_of_the_reward_have_a_table_of_their_own() -> None:
    page = comparison_section(compared(BEFORE, AFTER, WeightedRewards({"right": action_itself})))
    second = re.findall("<tbody>(.*?)</tbody>", page, re.S)[1]
    assert re.findall("<td[^>]*>(.*?)</td>", second) == ["right", "0.583", "0.583", "0"]
    assert "part of the reward" not in comparison_section(compared(BEFORE, AFTER))


def test_attempts_have_a_table_with_intervals_and_a_curve_over_k() -> None:
    """pass@2 of one success in four is 1 - C(3, 2) / C(4, 2) = 1/2, of two 5/6, and of three or four 1."""
    page = comparison_section(compared(BEFORE, AFTER))
    cells = re.findall("<td[^>]*>(.*?)</td>", re.findall("<tbody>(.*?)</tbody>", page, re.S)[0])
    assert cells[::4] == ["avg@4", "pass@1", "pass@2", "pass@4"]
    assert cells[8:12] == ["pass@2", "0.778 (0.5 to 1)", "0.889 (0.833 to 1)", "+0.111 (-0.167 to +0.5)"]
    assert cells[12:] == ["pass@4", "1 (1 to 1)", "1 (1 to 1)", "0 (0 to 0)"]
    titles = re.findall("<title>(k: .*?|k .*?)</title>", page)
    assert [title.replace(",", "").split(" 95")[0] for title in titles] == [
        *("k 1: before 0.583", "k 2: before 0.778", "k 4: before 1"),
        *("k 1: after 0.583", "k 2: after 0.889", "k 4: after 1"),
    ]
    assert "95 % interval 0.25 to 1" in titles[0]
    without = comparison_section(compared([[0]], [[1]], paying(0.25, 1.0)))
    assert "<h3>pass@k</h3>" in page
    assert "pass@" not in without
    assert "avg@1" in without


def test_of_many_states_the_largest_gains_and_losses_are_shown() -> None:
    page = comparison_section(of_many(32))
    shown, folded = page.split("<details>")
    assert [int(gain) for gain in re.findall('<div class="answer">gains (.*?)</div>', shown)] == [
        31,
        30,
        29,
        28,
        27,
        4,
        3,
        2,
        1,
        0,
    ]
    assert len(re.findall('<div class="answer">gains', folded)) == MAX_STATES - MAX_OPEN
    assert "The answers in 20 further states" in folded
    assert "The 15 states that gained most and the 15 that gained least; 2 states are not shown." in page
    assert "not shown" not in comparison_section(of_many(30))
    assert "<details>" not in comparison_section(of_many(10))


def test_states_that_are_left_out_are_described_by_what_happened() -> None:
    """The states' differences are 0 to 31, minus `lost`."""
    for lost, words in ((16, "gained most and the 15 that lost most"), (40, "lost least and the 15 that lost most")):
        report = of_many(32)
        states = tuple(dataclasses.replace(state, difference=state.difference - lost) for state in report.states)
        assert f"The 15 states that {words}; 2 states" in comparison_section(dataclasses.replace(report, states=states))

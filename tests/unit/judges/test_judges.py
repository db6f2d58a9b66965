"""Judges: rankings and rubrics by hand, and calls that fail or answer with rubbish, through the trainer's door."""

import asyncio
import logging
from typing import Any

import pytest
import torch

from grpo import PairwiseRewards, RewardConfig
from grpo._retrying.calls import RetriedCalls
from grpo._rewarding.calls import KeptRewards
from grpo.errors import ConfigError, ContractError, RewardError
from grpo.judges import JudgeReport, KnownPair, ListwiseJudge, RubricJudge, measure_judge
from grpo.rewards import ask_for_rewards
from tests.support.clocks import skipping_clock

pytestmark = pytest.mark.usefixtures("without_type_checks")


def ask(judge: Any, actions: list[Any], group_ids: list[int], **settings: Any) -> KeptRewards:
    states = [f"state {group}" for group in group_ids]
    return RetriedCalls(judge, RewardConfig(**settings))(states, actions, group_ids=torch.tensor(group_ids))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([2, 0, 1, 3], [2 / 3, 1 / 3, 1.0, 0.0]),
        ((3, 1, 2, 0), [0.0, 2 / 3, 1 / 3, 1.0]),
        (torch.tensor([0, 1, 2, 3]), [1.0, 2 / 3, 1 / 3, 0.0]),
        ([2, [0, 3], 1], [1 / 2, 0.0, 1.0, 1 / 2]),  # (1 behind + 1 beside / 2) / 3
        ([[0, 1, 2], [3]], [2 / 3, 2 / 3, 2 / 3, 0.0]),  # (1 + 2 / 2) / 3
        ([[3, 2, 1, 0]], [0.5, 0.5, 0.5, 0.5]),
    ],
)
def test_an_action_earns_the_share_of_the_others_that_it_beats(answer, expected) -> None:
    """With four actions: 3, 2, 1 and 0 of 3. Actions beside one another share what their places earn."""
    found = ask(ListwiseJudge(lambda state, actions: answer), ["?"] * 4, [0] * 4).values.tolist()
    assert (found, sum(found) / 4) == (pytest.approx(expected), pytest.approx(0.5))


def test_a_ranking_pays_what_all_comparisons_would_pay() -> None:
    """Lengths of 1 to 4, two of them equal."""

    def rank(state: str, actions: list[str]) -> list[list[int]]:
        lengths = [len(action) for action in actions]
        return [[i for i, each in enumerate(lengths) if each == length] for length in sorted({*lengths}, reverse=True)]

    def compare(states: Any, first: Any, second: Any) -> list[float]:
        return [0.5 + 0.5 * ((len(a) > len(b)) - (len(a) < len(b))) for a, b in zip(first, second, strict=True)]

    actions, group_ids = ["a", "bb", "cc", "dddd", "e", "ff"], [0, 0, 0, 0, 1, 1]
    by_rank, by_pairs = (ask(judge, actions, group_ids) for judge in (ListwiseJudge(rank), PairwiseRewards(compare)))
    assert by_rank.values.tolist() == pytest.approx(by_pairs.values.tolist())


def test_each_group_of_several_actions_is_one_call() -> None:
    """Rows of a group need not be adjacent, and a group of one row needs no judge."""
    seen: list[tuple[str, list[str]]] = []

    def rank(state: str, actions: list[str]) -> list[int]:
        seen.append((state, actions))
        return list(range(len(actions)))[::-1]

    found = ask(ListwiseJudge(rank), ["a", "b", "c", "d", "e"], [1, 0, 1, 2, 0])
    assert sorted(seen) == [("state 0", ["b", "e"]), ("state 1", ["a", "c"])]
    assert found.values.tolist() == [0.0, 0.0, 1.0, 0.5, 1.0]


MALFORMED: list[Any] = [
    None, "0, 1", 1, [0], [0, 1, 2], [0, 0], [0, 2], [1, 2], [-1, 0], [0.0, 1.0], [True, False], [[0, 1], []], {0: 1},
    [0, None],
]  # fmt: skip
"""Answers for a group of two that are no ranking."""


@pytest.mark.parametrize("answer", MALFORMED)
def test_rubbish_for_one_group_loses_the_rows_of_this_group(caplog, answer):
    judge = ListwiseJudge(lambda state, actions: answer if state == "state 1" else [1, 0])
    found = ask(judge, list("abcdef"), [0, 0, 1, 1, 2, 2])
    assert found.values.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert found.kept.tolist() == [True, True, False, False, True, True]
    assert [found.metrics[name] for name in ("judge/malformed", "judge/failed", "rows/dropped")] == [2, 0, 2]
    (message,) = caplog.messages
    assert "1 of 3 answers are lost, and so are their rows, which judge/malformed counts" in message
    assert "a ranking must have each place from 0 to 1 once, the best first; got" in message


def busy(state: str, actions: list[str]) -> list[int]:
    if state == "state 1":
        raise ConnectionError("the server is busy")
    return [0, 1]


async def awaited(state: str, actions: list[str]) -> list[int]:
    await asyncio.sleep(0)
    return busy(state, actions)


@pytest.mark.parametrize("function", [busy, awaited])
def test_a_judge_that_fails_for_one_group_loses_its_rows_and_says_so_once(function, caplog) -> None:
    judge = ListwiseJudge(function)
    for _ in range(2):
        found = ask(judge, list("abcd"), [0, 0, 1, 1])
        assert found.values.tolist() == [1.0, 0.0]
        assert (found.metrics["judge/failed"], found.metrics["judge/malformed"]) == (2, 0)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "ConnectionError: the server is busy (Logged once.)" in record.message


def test_a_judge_that_fails_everywhere_is_a_failed_call() -> None:
    """The settings for failing rewards apply: an error, or rows that are dropped group by group."""

    def broken(state: str, actions: list[str]) -> list[int]:
        raise ConnectionError("the server is gone")

    with pytest.raises(RewardError, match=r"broken raised ConnectionError: the server is gone for rows 0 to 3"):
        ask(ListwiseJudge(broken), list("abcd"), [0, 0, 1, 1], num_retries=0)
    with pytest.raises(RewardError, match=r"ListwiseJudge\(<lambda>\): a ranking must have .* It returns the places"):
        ask(ListwiseJudge(lambda state, actions: "?"), list("ab"), [0, 0], num_retries=0)


def test_deadlines_end_calls_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    skip = skipping_clock(monkeypatch)

    async def slow(state: str, actions: list[str]) -> list[int]:
        if state == "state 1":
            skip(90.0)
            await asyncio.sleep(3600)
        return [0, 1]

    found = ask(ListwiseJudge(slow), list("abcd"), [0, 0, 1, 1], timeout=60.0, num_retries=0, on_failure="drop")
    assert (found.values.tolist(), found.metrics["rows/dropped"]) == ([1.0, 0.0], 2)
    plain = ask(ListwiseJudge(lambda state, actions: [1, 0]), list("ab"), [0, 0], timeout=60.0)
    assert plain.values.tolist() == [0.0, 1.0]


WEIGHTS = {"right": 3.0, "clear": 1.0, "invented": -2.0}


def scored(*answers: Any, weights: Any = None) -> KeptRewards:
    """The rewards of actions for which a judge fills in the rubric like this."""
    judge = RubricJudge(lambda state, action: answers[action], weights or WEIGHTS)
    return ask(judge, list(range(len(answers))), [0] * len(answers), non_finite="drop")


def test_a_rubric_is_a_weighted_mean_of_what_applies() -> None:
    """3 + .5 of 4, and 3 + 1 - 2 x .5 of 4; without `clear`, 3 of 3; and 0 - 2 of 4."""
    found = scored(
        {"right": 1, "clear": 0.5, "invented": False},
        {"right": True, "clear": 1.0, "invented": 0.5},
        {"right": 1, "clear": None, "invented": 0},
        {"right": torch.tensor(False), "clear": torch.tensor(0.0), "invented": torch.tensor(1)},  # of a comparison
    )
    assert found.values.tolist() == [3.5 / 4, 3.0 / 4, 1.0, -0.5]
    assert found.components["right"].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert found.components["clear"].isnan().tolist() == [False, False, True, False]
    assert found.weights == WEIGHTS


def test_a_rubric_that_does_not_apply_gives_no_reward() -> None:
    found = scored({"right": 1, "clear": 1, "invented": 0}, {"right": None, "clear": None, "invented": 1})
    assert (found.values.tolist(), found.metrics["rows/dropped"]) == ([1.0], 1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, r"must have a score for each of \['clear', 'invented', 'right'\]; got None"),
        ({"right": 1, "clear": 1}, r"got the names \['clear', 'right'\]"),
        ({"right": 1, "clear": 1, "invented": 0, "more": 1}, "got the names"),
        ({"right": 1.5, "clear": 1, "invented": 0}, r"the score of 'right' must be from 0 to 1, or None; got"),
        ({"right": 1, "clear": "yes", "invented": 0}, "the score of 'clear' must be"),
    ],
)
def test_rubbish_loses_its_row(answer: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    found = scored({"right": 1, "clear": 1, "invented": 0}, answer)
    assert (found.values.tolist(), found.metrics["judge/malformed"]) == ([1.0], 1)
    with pytest.raises(RewardError, match=words):
        ask(RubricJudge(lambda state, action: answer, WEIGHTS), [0], [0], num_retries=0)


def fill(state: str, action: str) -> dict[str, float]:
    return {"right": float("right" in action), "short": 1.0}


@pytest.mark.parametrize(
    ("words", "make"),
    [
        (
            r"ListwiseJudge: judge must be a function of \(state, actions\); got",
            lambda: ListwiseJudge(lambda state: [0]),
        ),
        ("ListwiseJudge: judge must be a function", lambda: ListwiseJudge(RubricJudge)),
        (r"RubricJudge: judge must be a function of \(state, action\)", lambda: RubricJudge("gpt", {"a": 1.0})),
        ("weights must be a dict by name", lambda: RubricJudge(fill, ["a"])),
        ("the weight of 'a' must be a finite number", lambda: RubricJudge(fill, {"a": float("inf")})),
        ("a weight must be above 0", lambda: RubricJudge(fill, {"a": -1.0})),
        (
            r"ListwiseJudge\(<lambda>\) must know which rows are a group",
            lambda: ListwiseJudge(lambda state, actions: [0, 1]).compute_rewards(["s"] * 2, ["a", "b"]),
        ),
    ],
)
def test_wrong_judges_are_refused(words, make) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def by_right(state: str, actions: list[str]) -> list[int]:
    return [int("right" not in actions[0]), int("right" in actions[0])]


PAIRS = [KnownPair(state="add", better=f"{number} right", worse=f"{number}") for number in range(10)]


def measured(judge: Any, **settings: Any) -> JudgeReport:
    return measure_judge(judge, PAIRS, **settings)


def test_a_right_judge_is_right_in_both_orders() -> None:
    """Wilson's interval of 10 of 10: 10 / (10 + 1.96^2) = .7225."""
    report = measured(ListwiseJudge(by_right))
    assert (report.accuracy, report.ties, report.flipped, report.first_preferred) == (1.0, 0.0, 0.0, 0.5)
    assert report.interval == (pytest.approx(0.7225, abs=1e-4), 1.0)
    assert report.is_informative


def test_a_judge_that_always_prefers_the_first_is_chance_and_shows_it() -> None:
    """Wilson's interval of 5 of 10 at 95 %: .2366 to .7634."""
    report = measured(ListwiseJudge(lambda state, actions: [0, 1]))
    assert (report.accuracy, report.flipped, report.first_preferred) == (0.5, 1.0, 1.0)
    assert report.interval == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))
    assert "do not show that the judge is better than chance" in str(report)


def test_ties_count_half_and_lost_pairs_not_at_all() -> None:
    """Two pairs without a verdict, two ties, and six right: (6 + 2 / 2) / 8."""

    def rank(state: str, actions: list[str]) -> Any:
        number = int(actions[0].split()[0])
        if number < 2:
            raise ConnectionError
        return [[0, 1]] if number < 4 else by_right(state, actions)

    report = measured(ListwiseJudge(rank), confidence=0.9)
    assert (report.num_pairs, report.num_lost, report.accuracy, report.ties) == (10, 2, 7 / 8, 2 / 8)
    assert "90% interval" in str(report)
    assert "2 pairs had no verdict" in str(report)


def test_a_pair_with_one_verdict_counts_by_it() -> None:
    """The judge fails if the right answer comes first."""

    def rank(state: str, actions: list[str]) -> list[int]:
        if "right" in actions[0] and actions[0] != "9 right":
            raise ConnectionError
        return [1, 0] if "right" in actions[1] else [0, 1]

    report = measured(ListwiseJudge(rank))
    assert (report.num_lost, report.accuracy, report.flipped) == (0, 1.0, 0.0)
    assert report.first_preferred == 1 / 11


def longer(states: Any, first: Any, second: Any) -> list[float]:
    return [float(len(a) > len(b)) for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize(
    "judge",
    [
        lambda states, actions: [float("right" in action) for action in actions],
        RubricJudge(fill, {"right": 1.0, "short": 0.1}),
        PairwiseRewards(longer),
    ],
)
def test_any_reward_can_be_measured(judge) -> None:
    assert measured(judge).accuracy == 1.0


def test_wrong_pairs_are_refused() -> None:
    for pairs in ([], [("state", "better", "worse")], None):
        with pytest.raises(ContractError, match=r"pairs must be a list of KnownPair, at least one"):
            measure_judge(ListwiseJudge(by_right), pairs)
    with pytest.raises(ConfigError, match=r"confidence must be > 0 and < 1; got 1"):
        measured(ListwiseJudge(by_right), confidence=1)

    def never(state: Any, actions: Any) -> Any:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        measured(ListwiseJudge(never))


def test_a_judge_can_be_asked_without_a_trainer() -> None:
    judge, group_ids = ListwiseJudge(lambda state, actions: [1, 0]), torch.tensor([0, 0])
    answer = ask_for_rewards(judge, ["s"] * 2, ["a", "b"], group_ids=group_ids)
    assert (answer.values.tolist(), set(answer.lost)) == ([0.0, 1.0], {"judge/failed", "judge/malformed"})

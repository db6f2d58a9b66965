"""Answers that are mathematics, by the real math-verify: equal forms, absent answers, threads, and texts that take for ever."""

import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from adapters.llm import Completion, CompletionRewards, MathMatch
from adapters.llm.rewards.answer_text import answer_part, expected_part
from adapters.llm.rewards.equality import equal
from adapters.llm.rewards.formulas import read
from adapters.llm.rewards.math_answers import verdicts
from grpo import ConfigError, RewardError
from grpo.rewards import Call, ask_for_rewards
from tests.support.clocks import CallsClock


def said(text: str) -> Completion:
    return Completion(token_ids=(1,), text=text, finish_reason="end")


def verdict(answer: Any, text: str, **settings: Any) -> float | None:
    return MathMatch(**settings)(actions=[said(text)], states=[{"prompt": "?", "answer": answer}])[0]


def test_answers_are_compared_as_mathematics(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Any, list[tuple[str, float]]]] = [
        (r"\frac{1}{2}", [("it is 0.5", 1.0), (r"\boxed{1/2}", 1.0), ("$0.51$", 0.0), ("no idea", 0.0), ("", 0.0)]),
        (1000, [("1,000", 1.0), ("first 7, then 1000.", 1.0), ("first 1000, then 7", 0.0)]),
        ("x^2 + 2x + 1", [("$(x+1)^2$", 1.0), ("$(x-1)^2$", 0.0)]),
        (r"We get 3, so \boxed{4}.", [("4", 1.0), ("3", 0.0)]), ("#### $72$", [("72", 1.0)]), (None, [("1", None)]),
        ("", [("1", None)]),
    ]  # fmt: skip
    rows = [(answer, text, expected) for answer, several in cases for text, expected in several]
    found = MathMatch()(actions=[said(text) for _, text, _ in rows], states=[{"answer": row[0]} for row in rows])
    for row, result in zip(rows, found, strict=True):
        with subtests.test(row=row):
            assert result == row[2]


def test_a_part_of_the_text_can_be_chosen() -> None:
    def after_answer(text: str) -> str | None:
        return text.partition("Answer:")[2] or None

    assert verdict(4, "Answer: 4. Check: 5", extract=lambda text: after_answer(text.partition("Check")[0])) == 1.0
    assert verdict(4, "4", extract=after_answer) == 0.0


def test_it_is_a_reward_of_completions_with_any_column_and_weight() -> None:
    rewards = CompletionRewards({"right": MathMatch(column="gold")}, weights={"right": 2.0})
    rows: list[Any] = [{"prompt": [{"role": "user", "content": "?"}], "gold": gold} for gold in ("0.5", "1", None)]
    found = ask_for_rewards(rewards, rows, [said("1/2")] * 3).components["right"]
    assert found.tolist()[:2] == [1.0, 0.0]
    assert found.isnan().tolist() == [False, False, True]
    assert rewards.compute_rewards(rows[:2], [said("1/2")] * 2).tolist() == [2.0, 0.0]


def test_it_works_outside_the_main_thread_where_signals_do_not() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(verdict("1/2", "0.5")))
    thread.start()
    thread.join()
    assert found == [1.0]


@pytest.mark.slow
def test_an_answer_that_takes_for_ever_gets_0_and_the_others_their_reward() -> None:
    texts = ["2", "$9^{9^{9^{9}}}$", "2"]
    found = MathMatch(timeout=1)(actions=list(map(said, texts)), states=[{"answer": "2"}] * 3)
    assert found == [1.0, 0.0, 1.0]


def test_a_call_that_hangs_beyond_the_limit_or_ends_its_process_gets_0_and_the_others_their_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = [
        Call(name="good", function=float, arguments=(1,)),
        Call(name="hangs", function=CallsClock(monkeypatch).hang),
        Call(name="ends", function=os._exit, arguments=(1,)),
    ]
    assert verdicts(calls, seconds=60.0) == [1.0, 0.0, 0.0]


def test_wrong_settings_and_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"MathMatch.timeout must be >= 1; got 0"):
        MathMatch(timeout=0)
    with pytest.raises(RewardError, match=r"MathMatch needs the column 'answer'; the row has 'prompt'"):
        MathMatch()(actions=[said("1")], states=[{"prompt": "?"}])
    assert MathMatch()(actions=[], states=[]) == []


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r'^MathMatch needs math-verify: pip install "\.\[math\]" in the checkout$'):
        MathMatch()


# --- what counts as the same mathematics, and where the answer stands


PAGE = Path(__file__).parents[5] / "docs" / "llm.md"
HEAD = "| kind | right answer | equal | not equal |"


def is_paid(answer: str, text: str) -> bool:
    found = answer_part(text)
    return bool(found.strip()) and equal(read(expected_part(answer)), read(found))


def rows_of_the_page() -> list[tuple[str, str, list[str], list[str]]]:
    lines = PAGE.read_text(encoding="utf-8").partition(HEAD)[2].strip().splitlines()[1:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        kind, answer, same, other = (cell.strip() for cell in line.strip("|").split(" | "))
        rows.append((kind, answer.strip("`"), re.findall(r"`([^`]+)`", same), re.findall(r"`([^`]+)`", other)))
    return rows


def test_the_table_of_the_page_holds_both_ways(subtests: pytest.Subtests) -> None:
    rows = rows_of_the_page()
    assert len(rows) >= 15
    for kind, answer, same, other in rows:
        assert same, kind
        assert other, kind
        for text, expected in [*((text, True) for text in same), *((text, False) for text in other)]:
            with subtests.test(kind=kind, answer=answer, text=text):
                assert is_paid(answer, rf"So \boxed{{{text}}}.") is expected
                assert is_paid(text, rf"So \boxed{{{answer}}}.") is expected


EQUAL = [
    (r"\sqrt{5+2\sqrt{6}}", r"$\sqrt{2}+\sqrt{3}$"), (r"\frac{\sqrt{3}}{3}", r"\boxed{\frac{1}{\sqrt3}}"),
    ("2/7", r"it is \frac27"), ("1/7", "0.142857"), (r"\pi/4", "pi/4"),
    ("40", r"We have \(3 \cdot 4 = 12\), so the answer is 28 + 12 = 40."),
    ("8", r"$3$ first. The answer is: $8$, as $3 + 5 = 8$."), ("x^2 - 9", "The answer is (x-3)(x+3)."),
    ("12", r"\boxed{\boxed{12}}"), ("7, 11", r"\boxed{7} and \boxed{11}"), ("13", r"\boxed{12}, no: \boxed{13}"),
    ("13", "\\boxed{12}\n\n\\boxed{13}"), ("4.5", r"\boxed{9/2\text{ cups}}"), ("3e8", r"3 \times 10^8"),
    ("0.00025", r"\boxed{2.5 \cdot 10^{-4}}"), (r"6!", "720"), (r"\binom{6}{2}", "15"), ("2 + 3i", r"\boxed{3i + 2}"),
    (r"\sin 30^\circ", r"\frac{1}{2}"), (r"x = -1, x = 4", r"\boxed{4, -1}"), ("(x, y) = (2, 3)", "(2, 3)"),
    (r"\begin{pmatrix} 1 & 0 \\ 0 & 2 \end{pmatrix}", r"\begin{bmatrix} 1 & 0 \\ 0 & \frac{4}{2} \end{bmatrix}"),
    (r"\text{Thursday}", r"\boxed{\text{thursday}}"), (r"\text{(C)}", r"\boxed{C}"), ("It follows that #### 19", "19"),
    ("$12.50", r"\boxed{\$12.5}"), ("2024-03-05", r"It is \boxed{2024-03-05}."), ("2016", r"\boxed{2024 - 3 - 5}"),
]  # fmt: skip
DIFFERENT = [
    ("5", r"\boxed{5}^2"), ("5", r"\boxed{5}/4"), ("9", r"\boxed{9}. Let me check. \boxed{"),
    ("9", r"\boxed{9}. Let me check. \boxed{9"), ("9", r"\boxed{9}, so \boxed{ }"), ("9", r"\boxed{9} or \boxed{10}"),
    ("9", "9x"), ("9", "9 or 10"), ("9", "-9"), ("13", r"\boxed{13}, no: \boxed{12}"), ("x^2", "x^3"), ("R", "r"),
    ("x_1", "x_2"), (r"\frac{1}{1000!}", r"\frac{1}{1001!}"), (r"3^{-200}", r"3^{-201}"),
    (r"\sqrt{2}", r"\sqrt{2} + 10^{-90}"), (r"\sqrt{2}", "1.41"), ("5000000", "5000000.5"),
    ("8.85e-12", r"8.99 \times 10^{-12}"), ("0", "1e-9"), (r"2, 4, 6, \dots", "2, 4, 6"),
    (r"2, 4, 6, \dots, 2n", r"2, 4, 8, \dots, 2^n"), (r"5 \pmod{7}", r"5 \pmod{9}"), ("1/0", "5/0"),
    (r"\infty", r"-\infty"), ("(8, 3)", "(9, 4)"), (r"e^{-1}", r"e^{1}"), (r"1 - e^{-2}", r"1 + e^{-2}"),
    (r"f(x) = x + 1", r"g(x) = x + 1"), (r"\text{even}", r"\boxed{\text{odd}}"), ("B", r"\boxed{\text{(D)}}"),
    (r"x \neq 3", r"x \neq 4"), ("7", "no answer"), ("2024-03-05", r"\boxed{2024-05-03}"),
    ("1/2/2024", r"\boxed{2/4/2024}"), ("2024-03-05", r"\boxed{2016}"),
]  # fmt: skip


def test_answers_are_equal_by_their_mathematics_and_never_by_rounding(subtests: pytest.Subtests) -> None:
    for expected, pairs in ((True, EQUAL), (False, DIFFERENT)):
        for answer, text in pairs:
            with subtests.test(answer=answer, text=text):
                assert is_paid(answer, text) is expected


def test_any_text_is_read(subtests: pytest.Subtests) -> None:
    texts = [
        "(" * 999, "{" * 999, r"\frac" * 99, "$" * 999, "=" * 99, r"\boxed{" * 400, ",", r"\{", "x" * 5000, "1:" * 50,
        "<", ")](",
    ]  # fmt: skip
    for text in texts:
        with subtests.test(text=text[:20]):
            assert not is_paid("17", text)

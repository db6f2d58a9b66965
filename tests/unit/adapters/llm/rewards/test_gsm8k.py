"""Answers to GSM8K: what number a text gives, what a row has to have, and what answers are worth. Mathematics as answers."""

import json
import os
import re
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.llm import Completion, CompletionRewards, MathMatch
from adapters.llm.rewards.answer_text import answer_part, expected_part
from adapters.llm.rewards.equality import equal
from adapters.llm.rewards.formulas import read
from adapters.llm.rewards.gsm8k import extract_answer, gsm8k_prompt, load_gsm8k
from adapters.llm.rewards.gsm8k_rewards import correctness_first, hybrid_reward
from adapters.llm.rewards.math_answers import verdicts
from grpo.errors import ConfigError, RewardError
from grpo.rewards import Call, ask_for_rewards
from tests.support.clocks import CallsClock

ANSWERS = [
    # marked
    ("48 / 2 = <<48/2=24>>24\n#### 72", "72"), ("####72", "72"), ("#### 72.", "72"), ("#### 1,234", "1234"),
    ("#### 1,234,567.50", "1234567.5"), ("#### -5", "-5"), ("#### \u22125", "-5"), ("#### $18", "18"),
    ("#### $ 18.00", "18"), ("#### -$1,000", "-1000"), ("#### $-7", "-7"), ("#### \u20ac3.5", "3.5"),
    ("#### 25%", "25"), ("#### .5", "0.5"), ("#### 18 dollars", "18"), ("#### 18dollars", "18"), ("#### **18**", "18"),
    ("#### [18]", "18"), ("#### = 18", "18"), ("#### $18$", "18"), ("#### $$18$$", "18"), (r"#### $\$18$", "18"),
    (r"#### \boxed{18}", "18"), ("#### 5\nno, wait\n#### 6\nThat was 7.", "6"), ("#### 5\n#### none", "5"),
    ("#### Answer: 6, in 7 steps", "6"),  # no number follows the mark, so "answer:" counts
    ("####\n6, then 7", "7"),  # the number is not in the line of the mark
    ("#### 72\n#### 12. In short", "72"),  # a heading
    ("#### 1,234. In short: $7", "7"),
    # boxed
    (r"so \boxed{72} in 3 steps", "72"), (r"\boxed{5} or \boxed{ 6 }, then 7", "6"),
    (r"\boxed{\$1{,}234.50}, 7", "1234.5"), (r"\boxed{1\,234} 7", "1234"), (r"\boxed{\text{72 eggs}} 7", "72"),
    (r"The answer is 5. \boxed{6}", "6"), (r"so \boxed{-$1,000} (1)", "-1000"), ("so \\boxed{\u22127} (1)", "-7"),
    # stated
    ("The answer is 72. There were 3 of them.", "72"), ("The answer is: $72 for 3", "72"),
    ("**Final Answer:** 72 (of 3)", "72"), ("**Final Answer**: **72** (of 3)", "72"),
    ("The answer is -$1,000 for 3", "-1000"), ("The answer is \u22127 for 3", "-7"), ("The answer is 72/5.", "14.4"),
    ("the answer would be 72 in 3 days", "72"), ("answer = 72, not 3", "72"), ("The answer is\n\n72\nby 3", "72"),
    ("The answer is 5. No, the answer is 6, by 7.", "6"), (r"The answer is \(72\) by 3", "72"),
    ("Answer 2 questions to get 30 points", "30"), ("the answer isn't 5 but 6", "6"),
    # formulas
    ("#### 5/8", "0.625"), ("#### -5/8", "-0.625"), (r"#### \frac{5}{8} of it", "0.625"), ("#### 3 1/2 cups", "3.5"),
    ("#### 2.5e-2", "0.025"), (r"\boxed{\dfrac{-9}{4}}", "-2.25"), (r"\boxed{3\tfrac14}", "3.25"),
    (r"\boxed{5 \cdot 10^{4}}", "50000"), (r"\boxed{\sqrt[3]{27}}", "3"), (r"\boxed{(7 - 2)^2}", "25"),
    (r"\boxed{\boxed{9}}", "9"), (r"\boxed{n = 9}", "9"), (r"\boxed{1,100 + 11}", "1111"), ("#### 3\u00bd", "3.5"),
    ("#### 110_2", "6"), ("#### 3 million", "3000000"), ("The answer is 5 boxes \u00d7 6 eggs = 30 eggs.", "30"),
    ("The answer is $y = 14$.", "14"), ("Answer: 90 - 15 = 75, so 75 of 90.", "75"), ("#### 9*8=72", "72"),
    ("#### 9 x 8 = 72", "72"), ("The answer is 9 X 8", "72"), ("The answer is 72 to 2 decimal places.", "72"),
    ("#### $4.50 + $1.50 = $6", "6"), ("The answer is 8 since 3 + 5 = 8 and 2 + 2 = 4", "8"), ("The answer is 8!", "8"),
    ("It is 5/8.", "0.625"), (r"It is $\frac{5}{8}$, I think.", "0.625"), ("It is 3^4", "81"),
    # formulas without a value that can be read
    ("#### 5/x", None), ("#### y/8", None), (r"3, so \boxed{\sqrt{3}}", None), (r"3, so \boxed{2\pi}", None),
    (r"3, so \boxed{}", None), (r"\boxed{3}. Wait: \boxed{", None), (r"\boxed{3}. Wait: \boxed{3", None),
    (r"\boxed{3}/8", None), (r"\boxed{3 \text{ or } 8}", None), ("#### 3, 8", None), ("#### 3 to 8", None),
    ("The answer is 3 to 8.", None), ("The answer is 3 or 8", None), ("Answer: $3 or $8", None), ("#### 9:15", None),
    ("#### 3x", None), ("#### 5/0", None), (r"\boxed{\frac{5}{0}}", None), (r"\boxed{9^{9^{9^{9}}}}", None),
    # the last number
    ("3 * 4 = 12", "12"), ("He has 1,234 eggs.", "1234"), ("It costs $3.", "3"), ("so -$1,000", "-1000"),
    ("so \u22127", "-7"), ("10-5", "5"),
    ("10 - 5 = 5 - 10 = -5", "-5"), ("(10)-5", "5"), ("10%-20%", "20"), ("$10-$20", "20"), ("well...5", "5"),
    ("7 times x2", "7"), ("7 in area51", "7"), ("1 and 1,234,5", "5"), ("12,34", "34"), ("_72_", "72"), ("-0", "0"),
    ("007", "7"),
    ("\u0667", None),  # an Arabic-Indic seven
    ("", None), ("no idea", None), ("####", None), ("#### [number]", None), ("- . , $ % -$", None),
]  # fmt: skip


def test_the_answer_is_the_last_marked_boxed_or_stated_number_or_the_last_of_all(subtests: pytest.Subtests) -> None:
    for text, expected in ANSWERS:
        with subtests.test(text=text):
            assert extract_answer(text) == (None if expected is None else Decimal(expected))


NUMBERS = st.decimals(min_value=-(10**12), max_value=10**12, places=2)
SPELLINGS = st.sampled_from(["{:f}", "{:,f}", "${:,f}", "{:f}%", "{:,f}.", "**{:,f}**", "{:f} apples", "$ {:f}"])
FORMS = st.sampled_from(["#### {}", "7 + 8\n#### {}\n", "so \\boxed{{{}}} (1)", "The answer is {} for 3", "so {}"])


@given(number=NUMBERS, spelling=SPELLINGS, form=FORMS)
def test_a_number_is_read_as_it_was_written(number: Decimal, spelling: str, form: str) -> None:
    assert extract_answer(form.format(spelling.format(number))) == number


@given(text=st.text(max_size=200), number=st.integers(0, 10**6))
def test_the_number_after_the_mark_counts_whatever_the_text_before(text: str, number: int) -> None:
    assert extract_answer(f"{text}\n#### {number}") == number


@given(st.text(alphabet="#$\\{}[]boxed answer is:=-.,0123456789\u2212\n%*_", max_size=60))
def test_any_text_gives_a_finite_number_or_none(text: str) -> None:
    answer = extract_answer(text)
    assert answer is None or answer.is_finite()


LONG_TEXTS = {
    "marks": lambda n: "#" * n, "spaces after 'answer'": lambda n: "answer" + " " * n,
    "'answer' again and again": lambda n: "answer " * (n // 7),
    "ornaments after 'answer:'": lambda n: "answer: " + "*_ " * (n // 3), "one long number": lambda n: "1" * n,
    "numbers and commas": lambda n: "1," * (n // 2), "groups of three digits": lambda n: "111," * (n // 4) + "1111",
    "boxes": lambda n: r"\boxed{" * (n // 7), "minus signs": lambda n: "-" * n, "currency signs": lambda n: "$" * n,
    "sums": lambda n: "1+" * (n // 2), "boxes after a mark": lambda n: "####" + "\\boxed" * (n // 6),
    "backslashes": lambda n: "\\" * n, "steps": lambda n: "step" * (n // 4),
    "numbers and spaces": lambda n: "1 " * (n // 2), "marks and spaces": lambda n: "####  " * (n // 6),
}  # fmt: skip


def test_a_long_text_of_any_kind_is_rewarded(subtests: pytest.Subtests) -> None:
    """In quadratic time, 400,000 characters take longer than a test may take."""
    for kind, text in LONG_TEXTS.items():
        with subtests.test(kind=kind):
            action = Completion(token_ids=(), text=text(400_000), finish_reason="length")
            for rewards in (correctness_first(), hybrid_reward()):
                rewards.compute_rewards([{"prompt": "", "answer": "1"}], [action])


# --- rows


def test_the_prompt_holds_the_question_and_the_form_of_the_answer() -> None:
    prompt = gsm8k_prompt(" How many?\n")
    assert prompt.startswith("Question: How many?\n")
    assert "#### [number]" in prompt
    assert prompt.endswith("Answer:")


PROBLEMS = [{"question": f"{n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(5)]


def written(folder: Path, *lines: str) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_problems_are_read_from_a_file_or_from_rows(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(PROBLEMS[0]), "", *map(json.dumps, PROBLEMS[1:]), "")
    rows = load_gsm8k(path)
    assert rows == load_gsm8k(str(path)) == load_gsm8k(PROBLEMS)
    assert len(rows) == 5
    assert rows[2] == {"prompt": gsm8k_prompt("2 + 1?"), **PROBLEMS[2]}
    assert load_gsm8k(path, num_samples=2) == rows[:2]
    assert load_gsm8k(path, num_samples=1000) == rows


def test_problems_are_read_from_a_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    assert load_gsm8k(datasets.Dataset.from_list(PROBLEMS), num_samples=3) == load_gsm8k(PROBLEMS[:3])


MALFORMED_LINES = [
    ("{", r"problems.jsonl, line 3 is not JSON"), ("[" * 100_000, r"problems.jsonl, line 3 is not JSON"),
    ('{"question": "1 + 1?"}', r"problems.jsonl, line 3 must have the texts 'question' and 'answer'; got \['question'\]"),
    ('{"question": "1 + 1?", "answer": 2}', "line 3 must have the texts"),
    ("[1]", "line 3 must have the texts 'question' and 'answer'; got a list of 1"),
    ('{"question": "1 + 1?", "answer": "two"}', "the answer of .*line 3 must hold a number, as in '#### 72'; got 'two'"),
]  # fmt: skip


def test_an_error_names_the_malformed_line(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for line, message in MALFORMED_LINES:
        with subtests.test(line=line[:40]):
            path = written(tmp_path, json.dumps(PROBLEMS[0]), "", line, json.dumps(PROBLEMS[1]))
            with pytest.raises(ConfigError, match=message):
                load_gsm8k(path)
            assert len(load_gsm8k(path, num_samples=1)) == 1  # later lines are not read


def test_an_error_names_what_is_wrong_with_the_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="row 1 must have the texts"):
        load_gsm8k([PROBLEMS[0], {"problem": "?"}])
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.jsonl: No such file"):
        load_gsm8k(tmp_path / "absent.jsonl")
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"question": "\xe9?"}')
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        load_gsm8k(path)
    with pytest.raises(ConfigError, match="found no problems"):
        load_gsm8k([])
    with pytest.raises(ConfigError, match="num_samples must be >= 1 or None; got 0"):
        load_gsm8k(PROBLEMS, num_samples=0)


# --- rewards


def parts_of(rewards: CompletionRewards, text: str, answer: str = "#### 72") -> dict[str, float]:
    action = Completion(token_ids=(1,), text=text, finish_reason="end")
    found = ask_for_rewards(rewards, [{"prompt": "p", "answer": answer}], [action])
    return {"total": float(found.values), **{name: float(part) for name, part in found.components.items()}}


HYBRID_PARTS = [
    ("", 0.3, 0, 0, 0, 0, 0, 0), ("no idea", 0.3, 0, 0, 0, 0, 0, 0), ("72", 0.6, 0, 0, 0, 0, 0.1, 0),
    ("71", 0.2, 0, 0, 0, 0, 0.1, 0), ("#### 72", 0.6, 0, 0, 0, 0.15, 0.1, 0),
    ("The answer is 72", 0.6, 0, 0, 0, 0.1, 0.1, 0), (r"\boxed{71}", 0.2, 0, 0, 0, 0.1, 0.1, 0),
    ("x" * 50, 0.3, 0, 0, 0, 0, 0, 0), ("x" * 51, 0.3, 0.2, 0, 0, 0, 0, 0), (" " * 60, 0.3, 0, 0, 0, 0, 0, 0),
    ("First, hm", 0.3, 0, 0, 0.3, 0, 0, 0), ("footstep", 0.3, 0, 0, 0, 0, 0, 0),
    ("60 + 12 = 72", 0.6, 0, 0.2, 0, 0, 0.1, 0.1),  # + and =
    ("$60+$12=72", 0.6, 0, 0.2, 0, 0, 0.1, 0.1), ("x = 72", 0.6, 0, 0.1, 0, 0, 0.1, 0),
    ("+ - * / = total each times sum left", 0.3, 0, 0.5, 0, 0, 0, 0),  # all ten signs, but at most five count
    ("Then each of 3 * 4 = 12 has 6 / 1 = 6 left, so the total is 72\n#### 72", 0.6, 0.2, 0.5, 0.3, 0.15, 0.1, 0.1),
]  # fmt: skip


def test_the_parts_of_the_hybrid_reward(subtests: pytest.Subtests) -> None:
    names = ("correctness", "length", "mathematics", "steps", "format", "number", "equation")
    for text, *values in HYBRID_PARTS:
        with subtests.test(text=text):
            expected = {"total": sum(values), **dict(zip(names, values, strict=True))}
            assert parts_of(hybrid_reward(), text) == pytest.approx(expected)


CORRECTNESS_FIRST = [
    ("#### 72", 1.2), ("It is 72.0", 1.1), ("#### 71", 0.2), ("It is 71", 0.1), ("72, so #### 71", 0.2), ("", 0.0),
    ("First, then, therefore: the answer is a large number of eggs, each + * / = sum", 0.0),
    ("#### 1/72", 0.2), (r"\boxed{\frac{5}{72}}", 0.1), (r"\boxed{72^2}", 0.1), (r"\boxed{\frac{144}{2}}", 1.1),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CORRECTNESS_FIRST)
def test_the_sum_of_correctness_first(text: Any, expected: Any) -> None:
    parts = parts_of(correctness_first(), text)
    assert parts["total"] == pytest.approx(expected)
    assert parts["correct"] == float(expected > 1)


def test_a_fraction_without_end_equals_itself() -> None:
    assert parts_of(correctness_first(), "#### 1/3", answer=r"\boxed{\frac{2}{6}}")["correct"] == 1.0
    assert parts_of(correctness_first(), "#### 0.3333", answer=r"\boxed{\frac{2}{6}}")["correct"] == 0.0


PIECES = [
    "#### ", "\\boxed{", "}", "The answer is ", "72", "71", "7,200", "-72", "$", ".", "\n", " = ", "then ", "step ",
    "x",
]  # fmt: skip
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=12).map("".join))


@pytest.mark.slow
@given(texts=st.lists(TEXTS, min_size=2, max_size=8))
def test_a_right_answer_beats_a_wrong_answer_and_that_beats_no_answer(texts: list[str]) -> None:
    rewards = correctness_first()
    worth: dict[str, list[float]] = {"right": [1.1], "wrong": [0.1], "silent": [0.0]}
    for text in texts:
        found = extract_answer(text)
        kind = "silent" if found is None else "right" if found == 72 else "wrong"
        worth[kind].append(parts_of(rewards, text)["total"])
    assert min(worth["right"]) > max(worth["wrong"])
    assert min(worth["wrong"]) > max(worth["silent"])


@pytest.mark.parametrize("rewards", [correctness_first(), hybrid_reward()])
def test_a_row_whose_answer_has_no_number_is_refused(rewards: Any) -> None:
    with pytest.raises(RewardError, match="The column 'answer' must hold a number, as in '#### 72'; got 'many'"):
        parts_of(rewards, "#### 72", answer="many")


# --- answers that are mathematics, by the real math-verify: equal forms, absent answers, threads, texts that take for ever


def said(text: str) -> Completion:
    return Completion(token_ids=(1,), text=text, finish_reason="end")


PATIENT = {"timeout": 60}
"""On a busy computer, the first comparison may take longer than the default, because it imports sympy's parts."""


def verdict(answer: Any, text: str, **settings: Any) -> float | None:
    return MathMatch(**PATIENT | settings)(actions=[said(text)], states=[{"prompt": "?", "answer": answer}])[0]


def test_answers_are_compared_as_mathematics(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Any, list[tuple[str, float]]]] = [
        (r"\frac{1}{2}", [("it is 0.5", 1.0), (r"\boxed{1/2}", 1.0), ("$0.51$", 0.0), ("no idea", 0.0), ("", 0.0)]),
        (1000, [("1,000", 1.0), ("first 7, then 1000.", 1.0), ("first 1000, then 7", 0.0)]),
        ("x^2 + 2x + 1", [("$(x+1)^2$", 1.0), ("$(x-1)^2$", 0.0)]),
        (r"We get 3, so \boxed{4}.", [("4", 1.0), ("3", 0.0)]), ("#### $72$", [("72", 1.0)]), (None, [("1", None)]),
        ("", [("1", None)]),
    ]  # fmt: skip
    rows = [(answer, text, expected) for answer, several in cases for text, expected in several]
    actions, states = [said(text) for _, text, _ in rows], [{"answer": row[0]} for row in rows]
    found = MathMatch(**PATIENT)(actions=actions, states=states)
    for row, result in zip(rows, found, strict=True):
        with subtests.test(row=row):
            assert result == row[2]


def test_a_part_of_the_text_and_another_column_can_be_chosen() -> None:
    def after_answer(text: str) -> str | None:
        return text.partition("Answer:")[2] or None

    assert verdict(4, "Answer: 4. Check: 5", extract=lambda text: after_answer(text.partition("Check")[0])) == 1.0
    assert verdict(4, "4", extract=after_answer) == 0.0
    assert MathMatch(column="gold")(actions=[said("1/2")], states=[{"answer": 1, "gold": "0.5"}]) == [1.0]


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

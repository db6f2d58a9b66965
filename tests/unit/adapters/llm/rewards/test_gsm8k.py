"""Answers to GSM8K: what number a text gives, what a row has to have, and what answers are worth."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.llm.completions import Completion
from adapters.llm.rewards.completion_rewards import CompletionRewards
from adapters.llm.rewards.gsm8k import extract_answer, gsm8k_prompt, load_gsm8k
from adapters.llm.rewards.gsm8k_rewards import correctness_first, hybrid_reward
from grpo.errors import ConfigError, RewardError
from grpo.rewards import ask_for_rewards

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
    (r"The answer is 5. \boxed{6}", "6"),
    # stated
    ("The answer is 72. There were 3 of them.", "72"), ("The answer is: $72 for 3", "72"),
    ("**Final Answer:** 72 (of 3)", "72"), ("**Final Answer**: **72** (of 3)", "72"),
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
    ("#### 3x", None), ("#### 5/0", None), (r"\boxed{9^{9^{9^{9}}}}", None),
    # the last number
    ("3 * 4 = 12", "12"), ("He has 1,234 eggs.", "1234"), ("It costs $3.", "3"), ("10-5", "5"),
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


@given(number=st.integers(-(10**9), 10**9), form=FORMS)
def test_the_minus_stands_before_or_after_the_currency(number: int, form: str) -> None:
    sign = "-" if number < 0 else ""
    assert extract_answer(form.format(f"{sign}${abs(number):,}")) == number
    assert extract_answer(form.format(f"${sign}{abs(number):,}")) == number
    assert extract_answer(form.format(f"{sign}{abs(number):,}".replace("-", "\u2212"))) == number


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
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CORRECTNESS_FIRST)
def test_the_sum_of_correctness_first(text: Any, expected: Any) -> None:
    parts = parts_of(correctness_first(), text)
    assert parts["total"] == pytest.approx(expected)
    assert parts["correct"] == float(expected > 1)


def test_a_fraction_is_not_its_denominator(subtests: pytest.Subtests) -> None:
    for text in ("#### 1/72", r"\boxed{\frac{5}{72}}", "The answer is 72/5.", r"\boxed{72^2}", "#### 72/x"):
        with subtests.test(text=text):
            assert parts_of(correctness_first(), text)["correct"] == 0.0
    assert parts_of(correctness_first(), r"\boxed{\frac{144}{2}}")["correct"] == 1.0
    assert parts_of(correctness_first(), "#### 1/3", answer=r"\boxed{\frac{2}{6}}")["correct"] == 1.0


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

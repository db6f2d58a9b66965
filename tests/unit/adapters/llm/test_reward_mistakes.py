"""Mistakes in the use of rewards and answers: each is right all the same, refused, or said in words."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from adapters.llm import (
    Between,
    Completion,
    CompletionRewards,
    ExactMatch,
    JSONSchemaMatch,
    MathMatch,
    OverlongPunishment,
    RegexMatch,
    correctness_first,
    tags_pattern,
)
from grpo.errors import GRPOError
from grpo.rewards import ask_for_rewards

pandas = pytest.importorskip("pandas")


def scored(functions: Any, text: str, **columns: Any) -> list[float]:
    completion = Completion(token_ids=(1, 2), text=text, finish_reason="end")
    reward = functions if isinstance(functions, CompletionRewards) else CompletionRewards(functions)
    return [float(value) for value in ask_for_rewards(reward, [{"prompt": "?", **columns}], [completion]).values]


def exact(text: str, answer: Any) -> list[float]:
    return scored({"exact": ExactMatch()}, text, answer=answer)


def math(text: str, answer: Any) -> list[float]:
    return scored({"math": MathMatch()}, text, answer=answer)


def gsm8k(text: str, answer: Any) -> list[float]:
    return scored(correctness_first(), text, answer=answer)


def with_tags(completion: str) -> float:
    return float("<b>" in completion)


RIGHT: list[tuple[str, Any, list[float]]] = [
    ("an integer column for a text", lambda: exact("7", 7), [1.0]),
    ("a float column, as pandas makes of integers with gaps", lambda: exact("7", 7.0), [1.0]),
    ("a very small float", lambda: math("0.00002", 2e-5), [1.0]),
    ("a numpy number", lambda: exact("7", np.int32(7)), [1.0]),
    ("a tensor", lambda: math("7", torch.tensor(7)), [1.0]),
    ("a series of accepted answers", lambda: exact("b", pandas.Series(["a", "b"])), [1.0]),
    ("a list of accepted answers", lambda: gsm8k("#### 8", [7, 8]), [1.2]),
    ("a bare number as the solution of GSM8K", lambda: gsm8k("#### 8", "8"), [1.2]),
    ("a fraction in a box for its denominator", lambda: gsm8k(r"\boxed{\frac{1}{8}}", "8"), [0.1]),
    ("a completion that hedges", lambda: gsm8k(r"\boxed{8 \text{ or } 9}", "8"), [0.0]),
    ("a completion that hedges in mathematics", lambda: math(r"\boxed{8, 9}", "8"), [0.0]),
    ("a completion that was cut in its box", lambda: math(r"\boxed{8} and \boxed{8", "8"), [0.0]),
    ("a solution with its reasoning", lambda: math("8", r"As $2^3 = 8$, it is \boxed{8}."), [1.0]),
    (
        "a column named state",
        lambda: scored(lambda completion, state: completion == state, "Ohio", state="Ohio"),
        [1.0],
    ),
    ("a verifier beside a column named state", lambda: scored({"e": ExactMatch()}, "7", state="Ohio", answer=7), [1.0]),
    ("spaces and line ends around the answer", lambda: exact(" 7\n", "7"), [1.0]),
    ("numbers of numpy as the reward", lambda: scored(lambda completions: np.ones(1), "x"), [1.0]),
    ("True as the reward", lambda: scored(lambda completion: True, "x"), [1.0]),
]

REFUSED: list[tuple[str, Any]] = [
    ("a dict as the column", lambda: exact("7", {"text": ["7"]})),
    ("a list in a list as the column", lambda: math("7", [["7"]])),
    ("True as the column", lambda: exact("True", True)),
    ("infinity as the column", lambda: exact("inf", float("inf"))),
    ("bytes as the column", lambda: math("7", b"7")),
    ("a column that is not there", lambda: scored({"e": ExactMatch(column="gold")}, "7", answer=7)),
    ("prompts without rows", lambda: CompletionRewards({"e": ExactMatch()}).compute_rewards(
        ["?"], [Completion(token_ids=(1,), text="7", finish_reason="end")])),
    ("a solution of GSM8K without a number", lambda: gsm8k("#### 8", "many")),
    ("parameters of both kinds", lambda: CompletionRewards(lambda prompts, completion: 0.0)),
    ("parameters without names", lambda: CompletionRewards(lambda a, b: 0.0)),
    ("one reward too few", lambda: scored(lambda completions: [], "x")),
    ("one number for all rows", lambda: scored(lambda completions: 1.0, "x")),
    ("a text as the reward", lambda: scored(lambda completion: "1.0", "x")),
    ("a weight without a function", lambda: CompletionRewards({"b": with_tags}, weights={"a": 1.0})),
    ("two functions of one name", lambda: CompletionRewards([with_tags, with_tags])),
    ("texts instead of completions", lambda: CompletionRewards(with_tags).compute_rewards(["?"], ["x"])),  # type: ignore[list-item]
    ("a name instead of a function", lambda: CompletionRewards({"a": "accuracy_reward"})),
    ("a pattern that does not compile", lambda: RegexMatch(pattern="(")),
    ("a group that the pattern lacks", lambda: RegexMatch(pattern="a", column="answer")),
    ("tags with brackets", lambda: tags_pattern("<think>")),
    ("a punishment that is longer than the limit", lambda: OverlongPunishment(max_tokens=8, cache_tokens=9)),
    ("a schema that is none", lambda: JSONSchemaMatch({"type": "text"})),
    ("a mark instead of a function to extract", lambda: ExactMatch(extract="<answer>")),  # type: ignore[arg-type]
    ("a time limit of 0", lambda: MathMatch(timeout=0)),
    ("Between without its end", lambda: Between(start="<a>", end=None)),  # type: ignore[arg-type]
]  # fmt: skip


def test_mistakes_that_cannot_be_wrong_are_right(subtests: pytest.Subtests) -> None:
    for mistake, result, expected in RIGHT:
        with subtests.test(mistake=mistake), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert result() == pytest.approx(expected)


def test_other_mistakes_are_refused_in_words(subtests: pytest.Subtests) -> None:
    for mistake, attempt in REFUSED:
        with subtests.test(mistake=mistake), pytest.raises(GRPOError) as caught:
            attempt()
        assert len(str(caught.value)) > 30, mistake


def test_the_table_has_no_mistake_twice() -> None:
    names = [mistake for mistake, *_ in [*RIGHT, *REFUSED]]
    assert len(set(names)) == len(names) >= 40

"""Columns as accepted answers: every kind of number, list and missing value is converted, and the rest is refused."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from adapters.llm import (
    Completion,
    CompletionRewards,
    ExactMatch,
    MathMatch,
    RegexMatch,
    correctness_first,
    hybrid_reward,
)
from adapters.llm.rewards.columns import accepted_answers
from grpo.errors import RewardError

pandas = pytest.importorskip("pandas")

CONVERTED: list[tuple[Any, list[str]]] = [
    ("Rome", ["Rome"]),
    (np.str_("Rome"), ["Rome"]),
    (7, ["7"]),
    (7.0, ["7"]),
    (-2.5, ["-2.5"]),
    (2e-7, ["0.0000002"]),
    (3e20, ["300000000000000000000"]),
    (np.float32(0.1), ["0.1"]),
    (np.int64(7), ["7"]),
    (np.array(7), ["7"]),
    (np.array([1.5, 2.0]), ["1.5", "2"]),
    (torch.tensor(7), ["7"]),
    (torch.tensor(0.1), ["0.1"]),
    (torch.tensor(0.5, dtype=torch.bfloat16), ["0.5"]),
    (torch.tensor([1, 2]), ["1", "2"]),
    (Decimal("1.50"), ["1.50"]),
    (Fraction(2, 3), ["2/3"]),
    (["Rome", "Roma"], ["Rome", "Roma"]),
    (("4", 4.0, torch.tensor(4)), ["4", "4", "4"]),
    (pandas.Series([1, 2]), ["1", "2"]),
    (pandas.array([1, None], dtype="Int64"), ["1"]),
    (None, []),
    (float("nan"), []),
    (np.float32("nan"), []),
    (torch.tensor(float("nan")), []),
    (pandas.NA, []),
    (pandas.NaT, []),
    (Decimal("nan"), []),
    ([], []),
    ([None, "Rome"], ["Rome"]),
]
REFUSED = [
    True,
    np.True_,
    b"Rome",
    {"text": ["Rome"]},
    [["Rome"]],
    np.zeros((2, 2)),
    1j,
    float("inf"),
    object(),
    range(3),
]


def test_a_column_is_converted_or_refused(subtests: pytest.Subtests) -> None:
    for value, texts in CONVERTED:
        with subtests.test(value=repr(value)):
            assert [answer.text for answer in accepted_answers({"gold": value}, "gold", "Test")] == texts
    for value in REFUSED:
        message = (
            r"Test: the column 'gold' must hold a text, a finite number, None, or a list of accepted answers; got "
        )
        with subtests.test(value=repr(value)), pytest.raises(RewardError, match=message):
            accepted_answers({"gold": value}, "gold", "Test")


def test_all_verifiers_read_columns_through_one_door(subtests: pytest.Subtests) -> None:
    frame = pandas.DataFrame({"prompt": ["?"] * 3, "answer": [4, None, 6]})
    listed: list[dict[str, Any]] = [
        {"prompt": "?", "answer": [4, "four"]},
        {"prompt": "?", "answer": None},
        {"prompt": "?", "answer": 5.0},
    ]
    words = {"exact": ExactMatch(), "regex": RegexMatch(pattern=r"(\d+)", column="answer"), "math": MathMatch()}
    texts = [Completion(token_ids=(1,), text="4", finish_reason="end")] * 3
    for rows in (frame.to_dict("records"), listed):
        for name, verifier in words.items():
            with subtests.test(name=name):
                found = CompletionRewards({name: verifier, "one": lambda completion: 0.0}).compute_rewards(rows, texts)
                assert found.tolist() == [1.0, 0.0, 0.0]
        with subtests.test(name="correctness_first"):
            assert correctness_first().compute_rewards(rows, texts).tolist() == pytest.approx([1.1, 0.1, 0.1])
        with subtests.test(name="hybrid_reward"):
            assert hybrid_reward().compute_rewards(rows, texts).tolist() == pytest.approx([0.7, 0.1, 0.3])


def test_a_number_equals_every_spelling_of_it_and_a_text_only_itself() -> None:
    spellings = ["5", "5.0", " 5 ", "5e0"]
    assert [ExactMatch()(text, {"answer": 5}) for text in spellings] == [1.0] * 4
    assert [ExactMatch()(text, {"answer": 5}) for text in ("5x", "6", "5_0", "nan", "1e999999999")] == [0.0] * 5
    assert ExactMatch()("5.0", {"answer": "5"}) == 0.0
    assert ExactMatch()("0.001", {"answer": 1e-3}) == 1.0
    assert RegexMatch(pattern=r"= (\S+)", column="answer")("= 2.50", {"answer": [7, 2.5]}) == 1.0

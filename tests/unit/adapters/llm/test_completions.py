from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.llm import Completion
from adapters.llm.completions import completion_mask, padded
from grpo.errors import ContractError
from tests.support.llm_models import completion
from tests.support.objective_inputs import as_users_run_it
from tests.support.plain_states import assert_same, through_checkpoint


def test_a_completion_has_a_length_and_knows_whether_it_is_truncated() -> None:
    cut = Completion(token_ids=(5, 6, 7), text="abc", finish_reason="length")
    assert len(cut) == 3
    assert [completion(5, finish_reason=reason).is_truncated for reason in ("end", "stop", "length")] == [
        False,
        False,
        True,
    ]


def test_the_mask_is_as_wide_as_the_longest_completion() -> None:
    mask = completion_mask([completion(5), completion(), completion(5, 6, 7)])
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[True, False, False], [False] * 3, [True] * 3]


def test_truncated_completions_are_masked_on_request_and_keep_their_row() -> None:
    rows = [completion(5, finish_reason="stop"), completion(5, 6, finish_reason="length")]
    assert completion_mask(rows).tolist() == [[True, False], [True, True]]
    assert completion_mask(rows, mask_truncated=True).tolist() == [[True], [False]]  # as wide as what counts


def test_completions_without_tokens_have_an_empty_mask() -> None:
    assert completion_mask([]).shape == (0, 0)
    assert completion_mask([completion(), completion()]).shape == (2, 0)


def test_numbers_are_padded_with_zeros() -> None:
    values = padded([[-1.5], [], [-0.25, -3.0]], 3)
    assert values.dtype == torch.float32
    assert values.tolist() == [[-1.5, 0, 0], [0, 0, 0], [-0.25, -3.0, 0]]


def test_completions_come_back_from_a_checkpoint(tmp_path: Path, subtests: pytest.Subtests) -> None:
    completions = {
        "sampled": Completion(
            token_ids=(5, 2**31, 7),
            text='Grüße,\u2028"\ud800',
            finish_reason="stop",
            behaviour_log_probs=(-0.1, float("nan"), float("-inf")),
        ),
        "given": Completion(token_ids=(5,), text="a", finish_reason="length"),
        "empty": Completion(token_ids=(), text="", finish_reason="end", behaviour_log_probs=()),
    }
    for name, given in completions.items():
        with subtests.test(completion=name):
            assert_same(through_checkpoint(given, tmp_path / name), given)


def test_wrong_values_are_refused(subtests: pytest.Subtests) -> None:
    right: dict[str, Any] = {
        "token_ids": (5, 6),
        "text": "ab",
        "finish_reason": "end",
        "behaviour_log_probs": (-1.0, -2.0),
    }
    assert Completion(**right).token_ids == (5, 6)
    for name, wrongs in {
        "token_ids": [[5, 6], (5, -1), (5, 1.5), None, "ab", torch.tensor([5, 6]), (True, 1)],
        "text": [None, b"ab", 3],
        "finish_reason": ["stopped", None, ["end"]],
        "behaviour_log_probs": [(-1.0,), [-1.0, -2.0], ("a", "b"), torch.zeros(2), 3],
    }.items():
        for wrong in wrongs:
            refusal = pytest.raises(ContractError, match=rf"Completion\.{name} ")
            with subtests.test(name=name, wrong=wrong), as_users_run_it(), refusal:
                Completion(**right | {name: wrong})

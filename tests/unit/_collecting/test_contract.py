"""What a policy may return: the limits of each rule. That a trainer enforces them stands in `test_bad_policies.py`."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import ContractError
from grpo._collecting.contract import fit_state_keys, require_finite, require_same_steps

MASK = torch.tensor([[True, True, False], [True, False, False]])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]),
        ([[1, 2], [4, 5]], [[1, 2, 0], [4, 5, 0]]),
        ([[1, 2, 3, 9], [4, 5, 6, 9]], [[1, 2, 3], [4, 5, 6]]),
    ],
    ids=["as wide", "narrower, where no row has a step", "wider"],
)
def test_state_keys_are_fitted_to_the_batchs_steps(keys: list[list[int]], expected: list[list[int]]) -> None:
    assert fit_state_keys("Policy.state_keys", torch.tensor(keys), MASK).tolist() == expected


@pytest.mark.parametrize(
    ("keys", "got"),
    [
        (torch.zeros(2, 3), r"\[2, 3\] float32"),
        (torch.zeros(2, 3, dtype=torch.complex64), r"\[2, 3\] complex64"),
        (torch.zeros(2, 1, dtype=torch.int64), r"\[2, 1\] int64"),
        (torch.zeros(3, 3, dtype=torch.int64), r"\[3, 3\] int64"),
        (torch.zeros(2, dtype=torch.int64), r"\[2\] int64"),
        ([[1, 2, 3], [4, 5, 6]], "a list of 2"),
    ],
)
def test_state_keys_of_another_kind_are_refused(keys: Any, got: str) -> None:
    with pytest.raises(ContractError, match=rf"Policy\.state_keys must return integers \[2, 3\].*got {got}"):
        fit_state_keys("Policy.state_keys", keys, MASK)


def test_a_narrower_mask_of_the_same_steps_is_the_same() -> None:
    require_same_steps("Policy", MASK, MASK)
    require_same_steps("Policy", MASK[:, :2], MASK)


@pytest.mark.parametrize(
    "scored",
    [MASK[:, :1], torch.nn.functional.pad(MASK, (0, 1)), ~MASK, MASK.flip(0)],
    ids=["a step too few", "wider", "other steps", "other rows"],
)
def test_other_steps_than_the_batchs_are_refused(scored: Tensor) -> None:
    with pytest.raises(ContractError, match=r"Policy must score the batch's steps, and the masks differ"):
        require_same_steps("Policy", scored, MASK)


def log_probs(value: float, row: int, step: int) -> Tensor:
    values = torch.full(MASK.shape, -1.0)
    values[row, step] = value
    return values


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["old_log_probs", "ref_log_probs", "behaviour_log_probs"])
def test_log_probs_of_sampled_steps_are_finite(name: str, bad: float) -> None:
    require_finite("Policy", MASK, {name: log_probs(bad, 1, 1)})  # outside the mask
    if name == "behaviour_log_probs" and math.isnan(bad):
        require_finite("Policy", MASK, {name: log_probs(bad, 1, 0)})  # the step was not scored
        return
    with pytest.raises(ContractError, match=rf"Policy: {name} of sampled steps must be finite; rows \[1\] are not"):
        require_finite("Policy", MASK, {"old_log_probs": log_probs(-1.0, 0, 0), name: log_probs(bad, 1, 0)})


def test_only_log_probs_have_to_be_finite() -> None:
    require_finite("Policy", MASK, {"entropy": log_probs(math.nan, 0, 0), "final_values": torch.full((2,), math.inf)})

"""What a policy may return: the limits of each rule. That the collector enforces them: `test_experience_collector.py`."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from grpo import ActionScores, ContractError, SampledActions
from grpo._collecting.contract import check_sampled, check_scores, fit_state_keys, flatten_actions, require_finite

pytestmark = pytest.mark.usefixtures("without_type_checks")

MASK = torch.tensor([[True, True, False], [True, False, False]])
STEPS = torch.zeros(2, 3)


def all_scores(**changes: Any) -> ActionScores:
    every = ActionScores(
        log_probs=STEPS, mask=MASK, entropy=STEPS, values=STEPS, final_values=torch.zeros(2), kl=STEPS.double()
    )
    return replace(every, **changes)


SAMPLED = SampledActions(actions=[[0, 1]], mask=MASK)


@pytest.mark.parametrize(
    ("check", "returned", "message"),
    [
        (  # `ActionScores` itself checks shapes and dtypes
            check_scores,
            ActionScores(log_probs=torch.zeros(3, 3), mask=torch.ones(3, 3).bool()),
            r": log_probs must be .* N = 2; got \[3, 3\]",
        ),
        (check_sampled, replace(SAMPLED, mask=MASK[:1]), r": mask must be bool \[N, T\] with N = 2; got \[1, 3\] bool"),
        (check_sampled, replace(SAMPLED, scores=all_scores(mask=~MASK)), r": scores\.mask must equal mask"),
    ],
)
def test_scores_and_samples_that_break_their_contract_are_refused(check, returned, message):
    with pytest.raises(ContractError, match=f"^Policy.method{message}"):
        check("Policy.method", returned, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_in_half_precision_become_float32_and_keep_their_gradient(dtype):
    weights = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    scores = all_scores(log_probs=weights * 2, entropy=weights * 3)
    found = check_scores("Policy.score", scores, 2)
    assert (found.log_probs.dtype, found.entropy.dtype) == (torch.float32, torch.float32)
    (found.log_probs * 1e-8 * 65_536).sum().backward()
    assert weights.grad.tolist() == [[pytest.approx(2e-8 * 65_536, rel=1e-2)] * 3] * 2
    sampled = SampledActions(actions=[[0, 1]], mask=MASK, scores=scores, behaviour_log_probs=STEPS.to(dtype))
    told = check_sampled("Policy.sample", sampled, 2)
    assert (told.scores.log_probs.dtype, told.behaviour_log_probs.dtype) == (torch.float32, torch.float32)


def test_actions_of_groups_become_rows_in_the_order_of_the_states() -> None:
    assert flatten_actions("Policy.act", [["a", "b", "c"], ["d", "e", "f"]], 2, 3) == ["a", "b", "c", "d", "e", "f"]
    array = np.arange(24).reshape(2, 3, 2, 2)
    for kind in (array, torch.from_numpy(array)):
        rows: Any = flatten_actions("Policy.act", kind, 2, 3)
        assert type(rows) is type(kind)
        assert rows.tolist() == [*array[0].tolist(), *array[1].tolist()]
    assert flatten_actions("Policy.act", torch.zeros(2, 0), 2, 0).shape == (0,)


@pytest.mark.parametrize(
    ("actions", "got"),
    [
        ([[0, 1, 2]], r"; got 1 groups of \[3\] actions"),
        ([[0, 1, 2]] * 3, r"; got 3 groups of \[3\] actions"),
        ([[0, 1], [0, 1]], r"; got 2 groups of \[2\] actions"),
        ([[0, 1, 2], [0, 1, 2, 3]], r"; got 2 groups of \[3, 4\] actions"),
        ([[0, 1, 2], []], r"; got 2 groups of \[0, 3\] actions"),
        ([], r"; got 0 groups of \[\] actions"),
        ([0, 1], r", as 2 lists; got a list of 2"),
        (None, r", as 2 lists; got NoneType None"),
        (torch.zeros(6, dtype=torch.int64), r", \[B, G, \.\.\.\]; got \[6\] int64"),
        (torch.zeros(3, 2), r", \[B, G, \.\.\.\]; got \[3, 2\] float32"),
        (np.zeros((2, 4, 3)), r", \[B, G, \.\.\.\]; got a numpy array \[2, 4, 3\] float64"),
    ],
)
def test_a_wrong_number_of_actions_is_refused(actions, got):
    with pytest.raises(ContractError, match=f"^Policy.act must return 3 actions for each of 2 states{got}"):
        flatten_actions("Policy.act", actions, 2, 3)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]),
        ([[1, 2], [4, 5]], [[1, 2, 0], [4, 5, 0]]),  # narrower, where no row has a step
        ([[1, 2, 3, 9], [4, 5, 6, 9]], [[1, 2, 3], [4, 5, 6]]),
    ],
)
def test_state_keys_are_padded_or_cut_to_the_width_of_the_batch(keys, expected):
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
def test_state_keys_of_a_wrong_shape_or_dtype_are_refused(keys, got):
    with pytest.raises(ContractError, match=rf"^Policy\.state_keys must return integers \[2, 3\].*got {got}"):
        fit_state_keys("Policy.state_keys", keys, MASK)


def test_the_error_for_non_finite_log_probs_names_at_most_16_rows() -> None:
    mask = torch.ones(20, 2, dtype=torch.bool)
    with pytest.raises(ContractError) as refused:
        require_finite("Policy", mask, {"old_log_probs": torch.full((20, 2), math.nan)})
    assert f"rows {list(range(16))} are not" in str(refused.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("name", "remedy"), [("entropy", "Where logits are -inf"), ("values", "Look for 0/0")])
def test_non_finite_entropies_and_values_of_steps_are_refused(name, remedy, bad):
    """Off the mask, nothing is read. A final value of NaN leads to a loss of NaN, which is skipped and counted."""
    scores = torch.tensor([[bad, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    with pytest.raises(ContractError, match=rf"{name} of sampled steps .* rows \[0\] are not\. {remedy}"):
        require_finite("Policy", MASK, {name: scores})
    require_finite("Policy", MASK, {name: torch.where(MASK, 0.0, bad)})
    require_finite("Policy", MASK, {"final_values": torch.full((2,), bad), "entropy": None})

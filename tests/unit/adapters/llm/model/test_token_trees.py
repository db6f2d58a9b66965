"""Rows that fork: scores and gradients against one forward pass per row, and each shared token computed once."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from adapters.llm import Completion, ValueHead
from adapters.llm.model.token_trees import Edges
from tests.support.llm_models import (
    FLOAT32_GRADIENT,
    FLOAT32_LOG_PROB,
    SHARING,
    encoded,
    forward_shapes,
    gradients,
    policy_of,
    relative_difference,
    row_log_probs,
    tiny_model,
)

STATES = ["12+30=?", "12+30=?", "12+30=?", "abc", "abc", "12+30=?", "z"]
ROWS = [
    ((5, 6, 7, 8, 9, 10), (3, 5)), ((5, 6, 7, 8, 9, 11, 12), (3, 5)), ((5, 6, 7, 20), (3,)),
    ((5, 6, 7, 8), (3,)),  # the same tokens after another prompt
    ((5, 6, 7), (3,)),  # the fork stands at the end
    ((21, 22), ()), ((23,), (1,)),
]  # fmt: skip


def rows_that_fork(sampled: bool = True) -> list[Completion]:
    """Completions in which the second token is context, if there are three or more."""
    rows = [Completion(token_ids=tokens, text="", finish_reason="end", forks=forks) for tokens, forks in ROWS]
    if not sampled:
        return rows
    return [replace(row, sampled=tuple(i != 1 or len(row) < 3 for i in range(len(row)))) for row in rows]


@pytest.mark.parametrize("family", [*SHARING, "gemma2"])
def test_rows_that_fork_have_the_scores_and_gradients_of_single_rows(family: str) -> None:
    policy = policy_of(tiny_model(family))
    weights = torch.randn(len(ROWS), 7, generator=torch.Generator().manual_seed(0))
    scores = policy.score_actions(STATES, rows_that_fork())
    expected, total = [], torch.zeros(())
    for state, row, weight in zip(STATES, rows_that_fork(), weights, strict=True):
        log_probs = row_log_probs(policy.model, encoded(state), row.token_ids) * torch.tensor(row.sampled)
        expected.append(log_probs.detach())
        total = total + (log_probs * weight[: len(row)]).sum()
    for found, log_probs, mask in zip(scores.log_probs, expected, scores.mask, strict=True):
        torch.testing.assert_close(found[: len(log_probs)], log_probs, atol=FLOAT32_LOG_PROB, rtol=0)
        assert not found[~mask].any()
    slopes = gradients(policy.model, (scores.log_probs * weights).sum())
    assert relative_difference(slopes, gradients(policy.model, total)) < FLOAT32_GRADIENT


def test_tokens_before_a_fork_are_computed_once() -> None:
    """Prompts of 3 tokens, padded on the left to 7. Then the passes of all edges at one depth, padded on the right."""
    policy = policy_of()
    shapes = forward_shapes(policy.model)
    policy.score_actions(STATES, rows_that_fork())
    # depth 0: 5 6 7 after "12+30=?", 5 6 7 after "abc", 21 22, 23; depth 1: 8 9, 20, and 8 after "abc"; depth 2: 10, 11 12
    assert shapes == [(3, 7), (4, 3), (3, 2), (2, 2)]


def test_entropies_and_masked_rows_follow_the_rows() -> None:
    policy = policy_of(exact_entropy=True, mask_truncated=True)
    actions = rows_that_fork(sampled=False)
    cut = Completion(token_ids=ROWS[1][0], text="", finish_reason="length", forks=ROWS[1][1])
    scores = policy.score_actions(STATES, [actions[0], cut, *actions[2:]])
    alone = [Completion(token_ids=row.token_ids, text="", finish_reason="end") for row in actions]
    short = Completion(token_ids=(2,), text="", finish_reason="length")
    expected = policy.score_actions(STATES, [alone[0], short, *alone[2:]])
    assert torch.equal(scores.mask, expected.mask)
    for name in ("log_probs", "entropy"):
        found: Any = getattr(scores, name)
        torch.testing.assert_close(found, getattr(expected, name), atol=FLOAT32_LOG_PROB, rtol=0)
    assert not scores.mask[1].any()


def test_the_model_may_be_at_its_last_position() -> None:
    """The padding of a short edge after a long one would be behind it."""
    policy = policy_of(tiny_model("gpt2"))
    longest = 64 - len("abc")
    tokens = tuple(5 + i % 30 for i in range(longest))
    forks = [(tokens, longest - 2), ((*tokens[: longest - 2], 9), longest - 2), ((6, *tokens[1:]), 2)]
    rows = [Completion(token_ids=row, text="", finish_reason="end", forks=(fork,)) for row, fork in forks]
    scores = policy.score_actions(["abc"] * 3, rows).log_probs
    for row, log_probs in zip(rows, scores, strict=True):
        expected = row_log_probs(policy.model, encoded("abc"), row.token_ids)
        torch.testing.assert_close(log_probs[: len(row)], expected, atol=FLOAT32_LOG_PROB, rtol=0)


def test_edges_are_shared_only_by_rows_that_are_equal_up_to_the_fork() -> None:
    prompt_of_row = torch.tensor([0, 0, 1, 0])
    tokens = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 2, 3]]
    mask = torch.tensor([[True] * 3, [True] * 3, [True] * 3, [False, True, True]])
    edges = Edges.of_rows(prompt_of_row, tokens, mask, [(2,), (2,), (2,), (2,)])
    assert edges.tokens.tolist() == [[1, 2], [3, 0], [4, 0], [1, 2], [3, 0], [1, 2], [3, 0]]
    assert edges.parent.tolist() == [-1, 0, 0, -1, 3, -1, 5]
    assert edges.prompt.tolist() == [0, 0, 0, 1, 1, 0, 0]
    assert edges.lengths.tolist() == [2, 1, 1, 2, 1, 2, 1]
    assert edges.place.tolist() == [[0, 1, 2], [0, 1, 4], [6, 7, 8], [10, 11, 12]]


def test_rows_of_a_tree_are_planned_into_one_pass_where_they_fit() -> None:
    """Two trees with a prompt of 3 and a trunk of 20 tokens, whose 4 rows go on for 5 tokens: 23 + 4 * 5 = 43 positions each.
    Without the forks, it would be 3 + 4 * 25 = 103."""
    actions = [
        Completion(token_ids=(*range(4 + tree, 24 + tree), *(30 + row,) * 5), text="", finish_reason="end", forks=(20,))
        for row in range(4)
        for tree in range(2)
    ]
    policy = policy_of(max_tokens_per_forward=43)
    assert sorted(map(sorted, policy.plan_micro_batches(["abc"] * 8, actions))) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_values_and_final_values_follow_the_rows() -> None:
    """Three rows are cut: at a leaf, at a fork where another row goes on, and after a prompt alone."""
    policy = policy_of(tiny_model(), value_head=ValueHead(32, dropout=0.0))
    with torch.no_grad():
        policy.value_head.layers[-1].weight.normal_(generator=torch.Generator().manual_seed(0))
    reasons = ["end", "length", "end", "end", "length", "length", "end"]
    actions = [replace(row, finish_reason=reason) for row, reason in zip(rows_that_fork(), reasons, strict=True)]
    scores = policy.score_actions(STATES, actions)
    expected = policy.score_actions(STATES, [replace(row, forks=()) for row in actions])
    assert (expected.final_values != 0).tolist() == [reason == "length" for reason in reasons]
    torch.testing.assert_close(scores.final_values, expected.final_values, atol=FLOAT32_LOG_PROB, rtol=0)
    torch.testing.assert_close(scores.values, expected.values, atol=FLOAT32_LOG_PROB, rtol=0)

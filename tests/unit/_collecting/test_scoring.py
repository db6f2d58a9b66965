"""Scoring any policy: which method is called, how scores of several forwards are joined, and which scores are kept."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from grpo import ActionScores, ContractError, ExperienceBatch
from grpo._collecting.out_of_memory import PassSizes
from grpo._collecting.scoring import ReferenceScorer, Scorer, batch_fields, score_in_parts
from tests.support.policies import GroupScoring, RowScoring, TablePolicy


def rows_of(widths: list[int]) -> Callable[[Any, Any, Tensor], ActionScores]:
    """State n has `widths[n]` steps, of log-probs -n, -n - 0.1 and so on; a forward is as wide as its longest row."""

    def score(states: Any, actions: Any, group_ids: Tensor) -> ActionScores:
        places = torch.arange(max(widths[state] for state in states))
        return ActionScores(
            log_probs=-torch.tensor(states).unsqueeze(1) - 0.1 * places,
            mask=places < torch.tensor([widths[state] for state in states]).unsqueeze(1),
        )

    return score


def test_a_policy_that_scores_groups_is_scored_in_groups_and_otherwise_by_rows(subtests: pytest.Subtests) -> None:
    for kind, asked in [(GroupScoring, "score_groups"), (RowScoring, "score_actions")]:
        with subtests.test(kind=kind, asked=asked):
            policy = kind()
            method = Mock(wraps=getattr(policy, asked))
            setattr(policy, asked, method)
            scorer = Scorer(policy)
            scorer([0, 0, 1], [(1, 0), (0,), (2, 0)], torch.tensor([0, 0, 1]))
            assert method.call_count == 1
            assert scorer.one_step_device is None


def test_a_plain_policy_that_gives_one_log_prob_per_row_decides_once_per_row() -> None:
    policy = TablePolicy()
    scorer = Scorer(policy)
    assert scorer.one_step_device is None
    scores = scorer(["a", "b"], [0, 1], torch.tensor([0, 1]))
    assert scores.mask.tolist() == [[True], [True]]
    assert scorer.one_step_device == policy.logits.device


def test_scores_of_parts_are_joined_in_the_order_of_the_rows() -> None:
    """Rows 3 and 1 in one forward of two columns, rows 2 and 0 in another of three."""
    parts: list[Any] = [torch.tensor([3, 1]), torch.tensor([2, 0])]
    score = rows_of([1, 2, 3, 1])
    scores = score_in_parts(score, [0, 1, 2, 3], ["x"] * 4, torch.arange(4), lambda _: parts, PassSizes("scoring"))
    assert scores.mask.tolist() == [[True, False, False], [True, True, False], [True, True, True], [True, False, False]]
    found = [
        [round(value, 3) for value in row[mask].tolist()]
        for row, mask in zip(scores.log_probs, scores.mask, strict=True)
    ]
    assert found == [[0.0], [-1.0, -1.1], [-2.0, -2.1, -2.2], [-3.0]]
    assert scores.values is None


def test_final_values_survive_scoring_in_parts() -> None:
    def score(states: Any, actions: Any, group_ids: Tensor) -> ActionScores:
        zeros = torch.zeros(len(states), 1)
        return ActionScores(
            log_probs=zeros,
            mask=torch.ones(len(states), 1, dtype=torch.bool),
            values=zeros,
            final_values=torch.tensor([5.0]) if states[0] == "truncated" else None,
        )

    states, sizes = ["truncated", "terminated"], PassSizes("scoring")
    scores = score_in_parts(score, states, [0, 0], torch.tensor([0, 1]), lambda _: [slice(0, 1), slice(1, 2)], sizes)
    assert scores.final_values.tolist() == [5, 0]


class TwoSteps(TablePolicy):
    """Its reference scores two steps of every row."""

    def reference_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        return torch.tensor([[-1.0, -2.0]])


def test_reference_log_probs_are_padded_to_the_width_of_the_batch_and_never_cut() -> None:
    def scored(mask: list[bool]) -> list[list[float]]:
        batch = ExperienceBatch.from_rows(["a"], [0], [0.0], [0], mask=[mask])
        return ReferenceScorer(TwoSteps(), None, nullcontext)(
            batch, lambda _: [slice(0, 1)], PassSizes("scoring")
        ).tolist()

    assert scored([True, True, False]) == [[-1.0, -2.0, 0.0]]
    with pytest.raises(ContractError, match=r"TwoSteps.reference_log_prob.* at most \[1, 1\]; got \[1, 2\] bool"):
        scored([True])
    with pytest.raises(ContractError, match=r"must score every step that the policy decided, .*; got \[1, 2\] bool"):
        scored([True, True, True])


def test_training_keeps_copies_of_the_scores_that_it_needs(subtests: pytest.Subtests) -> None:
    cases = [
        ((), {"old_log_probs"}),
        (("entropy", "old_log_probs"), {"old_log_probs", "entropy"}),
        (("values", "state_keys"), {"old_log_probs", "values", "final_values"}),
    ]
    for needs, expected in cases:
        with subtests.test(needs=needs, expected=expected):
            weights = torch.ones(2, 1, requires_grad=True)
            view = weights.view(2, 1)
            scores = ActionScores(
                log_probs=view,
                mask=torch.ones(2, 1, dtype=torch.bool),
                entropy=view,
                values=view,
                final_values=view[:, 0],
            )
            fields = batch_fields(scores, needs)
            with torch.no_grad():
                weights.zero_()
            assert set(fields) == expected
            for values in fields.values():
                assert values.flatten().tolist() == [1, 1]
                assert not values.requires_grad


def test_without_scores_no_batch_field_is_kept() -> None:
    assert batch_fields(None, ("values",)) == {}

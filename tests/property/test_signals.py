"""Rewards, demonstrations, observations and an exact KL in one update: no split of the rows changes its gradient."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from grpo import ActionScores, ExperienceBatch, ObjectiveConfig
from grpo.distillation import exact_kl
from tests.support.imitated_ranks import ImitatedRank, on_ranks
from tests.support.trainers import assert_same, updated

pytestmark = pytest.mark.usefixtures("without_type_checks")
NUM_STATES, NUM_CHOICES, LONGEST = 3, 3, 3
Row = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A state, what was chosen at each step, and what was observed."""


def mask_of(rows: list[tuple[int, ...]], more: int = 0) -> Tensor:
    """The mask of rows of these lengths, with `more` further columns of padding."""
    width = max(map(len, rows)) + more
    return torch.arange(width) < torch.tensor([len(row) for row in rows]).unsqueeze(1)


class Signalling(nn.Module):
    """Tables of choices and of observations. What is outside the masks is NaN, in `extra` further columns of observations."""

    def __init__(self, extra: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        tables = torch.randn(3, NUM_STATES, LONGEST, NUM_CHOICES, dtype=torch.float64, generator=generator)
        self.choices, self.answers = nn.Parameter(tables[0]), nn.Parameter(tables[1])
        self.teacher, self.extra = tables[2].log_softmax(-1), extra

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        mask = mask_of([steps for steps, _ in actions])
        observed_mask = mask_of([observed for _, observed in actions], 1 + self.extra)
        chosen = self.choices.log_softmax(-1)
        kl = exact_kl(chosen, self.teacher)

        def table(values: Tensor, rows: list[tuple[int, ...]], mask: Tensor, *, picks: bool) -> Tensor:
            cells = [
                [values[state, place, choice] if picks else values[state, place] for place, choice in enumerate(row)]
                for state, row in zip(states, rows, strict=True)
            ]
            nan = torch.tensor(math.nan, dtype=torch.float64)
            return torch.stack([torch.stack([*row, *[nan] * mask.shape[1]])[: mask.shape[1]] for row in cells])

        steps, observed = zip(*actions, strict=True)
        return ActionScores(
            log_probs=table(chosen, list(steps), mask, picks=True),
            mask=mask,
            kl=table(kl, list(steps), mask, picks=False),
            observed_log_probs=table(self.answers.log_softmax(-1), list(observed), observed_mask, picks=True),
            observed_mask=observed_mask,
        )

    def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        raise AssertionError("it has score_actions")

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        raise AssertionError("its rows are given")

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def batches(sampled: list[tuple[Row, float]], shown: list[Row]) -> list[ExperienceBatch]:
    """The sampled rows, in groups of their states, and the demonstrations."""
    found = []
    if sampled:
        states, actions = [row[0] for row, _ in sampled], [row[1:] for row, _ in sampled]
        mask = mask_of([steps for steps, _ in actions])
        rewards = [reward for _, reward in sampled]
        found.append(ExperienceBatch.from_rows(states, actions, rewards, states, mask=mask))
    if shown:
        found.append(ExperienceBatch.from_demonstrations([row[0] for row in shown], [row[1:] for row in shown]))
    return found


CHOICES = st.lists(st.integers(0, NUM_CHOICES - 1), max_size=LONGEST).map(tuple)
STEPS = st.lists(st.integers(0, NUM_CHOICES - 1), min_size=1, max_size=LONGEST).map(tuple)
REWARDS = st.sampled_from([0.0, 0.5, 2.0])


def rows_in(first: int, last: int) -> Any:
    """A strategy of rows in these states."""
    return st.tuples(st.integers(first, last), STEPS, CHOICES)


def sampled_in(first: int, last: int) -> Any:
    """A strategy of sampled rows in these states, with rewards."""
    return st.lists(st.tuples(rows_in(first, last), REWARDS), min_size=1, max_size=4)


@settings(max_examples=15, deadline=None)
@given(
    here=sampled_in(0, 1),
    there=sampled_in(2, 2),
    shown=st.lists(rows_in(0, 2), min_size=2, max_size=5),
    aggregation=st.sampled_from(["row_mean", "step_mean", "row_sum", "fixed_length"]),
    size=st.integers(1, 4),
    extra=st.integers(1, 3),
    cut=st.integers(1, 4),
)
def test_no_split_changes_the_gradient(
    here: list[tuple[Row, float]],
    there: list[tuple[Row, float]],
    shown: list[Row],
    aggregation: Any,
    size: int,
    extra: int,
    cut: int,
) -> None:
    """Micro-batches, more padding, another order, and two ranks with whole groups and some demonstrations each."""
    sampled = here + there
    objective = ObjectiveConfig(
        aggregation=aggregation,
        fixed_length=5 if aggregation == "fixed_length" else None,
        kl_coef=0.3,
        kl_estimator="exact",
        demonstration_coef=0.7,
        observation_coef=0.2,
    )

    def gradient(policy: Any, given: list[ExperienceBatch], **options: Any) -> tuple[Tensor, list[float]]:
        (found,), metrics = updated(policy, *given, objective=objective, **options)
        return found, [metrics["train/total_loss"], metrics["train/observation_loss"]]

    whole, losses = gradient(Signalling(), batches(sampled, shown))
    assert bool(whole.isfinite().all())
    for found, same in (
        gradient(Signalling(), batches(sampled, shown), micro_batch_size=size),
        gradient(Signalling(extra), batches(sampled, shown)),
        gradient(Signalling(), batches(sampled[::-1], shown[::-1])),
    ):
        assert_same(found, whole)
        assert same == pytest.approx(losses)
    at = min(cut, len(shown) - 1)
    shares = [batches(here, shown[:at]), batches(there, shown[at:])]
    start = Signalling()

    def on_rank(engine: ImitatedRank) -> tuple[Tensor, list[float]]:
        return gradient(copy.deepcopy(start), shares[engine.rank], engine=engine, micro_batch_size=size)

    for found, same in on_ranks(2, on_rank):
        assert_same(found, whole)
        assert same == pytest.approx(losses)

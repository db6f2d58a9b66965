"""The gradient of an update equals a brute-force one, for every aggregation."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer, ObjectiveConfig
from tests.support.policies import RecordingSGD, RowScoring, SequencePolicy, gradient_of

STATES = [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3]
GROUP_IDS = [7, 7, 7, 1, 1, 1, 1, 5, 5, 2, 2, 2]
ACTIONS: list[tuple[int | None, ...]] = [
    (1, 2, 0), (0,), (2, None, 1, 0),
    (1, 1, 1, 1), (), (2, 0), (None, 2),
    (1, 0), (2, 2, 2),
    (0,), (1, None, None, 2), (2, 1, 0),
]  # fmt: skip
REWARDS = [1.0, 0.0, 0.5, 2.0, 0.0, 1.0, 1.0, 0.3, 0.9, 0.0, 1.0, 0.0]
MASK = torch.tensor([[t < len(a) and a[t] is not None for t in range(4)] for a in ACTIONS])
AGGREGATIONS = ["row_mean", "step_mean", "fixed_length", "row_sum", "group_mean"]
KL_COEF, ENTROPY_COEF, LENGTH, LEARNING_RATE = 0.3, 0.2, 6, 0.5


def built(
    kind: type[SequencePolicy], dtype: torch.dtype, aggregation: Any, entropy_aggregation: Any = None, **options: Any
) -> tuple[GRPOTrainer, RecordingSGD]:
    """A trainer for two passes over the batch, so that the second sees ratios other than 1; and its optimizer."""
    torch.manual_seed(5)
    policy = kind(dtype=dtype)
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        for tensor in reference.parameters():
            tensor.add_(0.3 * torch.randn_like(tensor))
    optimizer = RecordingSGD(policy, lr=LEARNING_RATE)
    uses_length = "fixed_length" in (aggregation, entropy_aggregation)
    config = GRPOConfig(
        num_epochs_per_update=2,
        max_grad_norm=None,
        seed=1,
        objective=ObjectiveConfig(
            kl_coef=KL_COEF,
            entropy_coef=ENTROPY_COEF,
            aggregation=aggregation,
            entropy_aggregation=entropy_aggregation,
            fixed_length=LENGTH if uses_length else None,
        ),
        **options,
    )
    trainer = GRPOTrainer(
        config=config,
        policy=policy,
        reward_model=lambda states, actions: [0.0] * len(states),
        reference_policy=reference,
        optimizer=optimizer,
    )
    return trainer, optimizer


def batch() -> ExperienceBatch:
    return ExperienceBatch.from_rows(list(STATES), list(ACTIONS), list(REWARDS), list(GROUP_IDS), mask=MASK)


def weight(aggregation: str, row: int, rows: list[int]) -> float:
    """The weight of each step of `row` in an update of `rows`, from the formulas in words."""
    length = {n: int(MASK[n].sum()) for n in rows}
    mates = [n for n in rows if GROUP_IDS[n] == GROUP_IDS[row]]
    divisor = {
        "row_mean": length[row] * len(rows),
        "step_mean": sum(length.values()),
        "fixed_length": len(rows) * LENGTH,
        "row_sum": len(rows),
        "group_mean": sum(length[n] for n in mates) * len({GROUP_IDS[n] for n in rows}),
    }[aggregation]
    return 1.0 / divisor


def brute_force(
    policy: RowScoring, old: RowScoring, reference: RowScoring, aggregation: str, entropy_aggregation: str
) -> Tensor:
    """The gradient, row by row and step by step, each row scored alone."""
    rows = range(len(STATES))
    means = {g: sum(REWARDS[n] for n in rows if GROUP_IDS[n] == g) / GROUP_IDS.count(g) for g in GROUP_IDS}
    loss = torch.zeros((), dtype=torch.float64)
    for n in rows:
        if not ACTIONS[n]:
            continue
        now = policy.score_actions([STATES[n]], [ACTIONS[n]])
        with torch.no_grad():
            before = old.score_actions([STATES[n]], [ACTIONS[n]])
            ref = reference.score_actions([STATES[n]], [ACTIONS[n]])
        advantage = REWARDS[n] - means[GROUP_IDS[n]]
        for t, token in enumerate(ACTIONS[n]):
            if token is None:
                continue
            ratio = (now.log_probs[0, t] - before.log_probs[0, t]).exp()
            surrogate = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            x = now.log_probs[0, t] - ref.log_probs[0, t]
            k3 = (-x).exp() + x - 1
            loss = loss + weight(aggregation, n, list(rows)) * (surrogate + KL_COEF * k3)
            loss = loss - weight(entropy_aggregation, n, list(rows)) * ENTROPY_COEF * now.entropy[0, t]
    return gradient_of(policy, loss)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


PAIRS = [*zip(AGGREGATIONS, [None, "row_sum", "step_mean", None, "step_mean"], strict=True)]
"""Aggregations of the loss, and of the entropy; None: the same."""


def test_the_gradient_of_an_unsplit_update_equals_brute_force(subtests: pytest.Subtests) -> None:
    for aggregation, entropy_aggregation in PAIRS:
        with subtests.test(aggregation=aggregation, entropy_aggregation=entropy_aggregation):
            trainer, optimizer = built(RowScoring, torch.float64, aggregation, entropy_aggregation)
            old = copy.deepcopy(trainer.policy)
            trainer.update(batch())
            first, second = optimizer.gradients
            names = aggregation, entropy_aggregation or aggregation
            assert relative(first, brute_force(copy.deepcopy(old), old, trainer.reference_policy, *names)) < 1e-10

            after_first = copy.deepcopy(old)
            with torch.no_grad():  # one step of plain SGD, by hand
                start = 0
                for tensor in after_first.parameters():
                    stop = start + tensor.numel()
                    tensor -= LEARNING_RATE * first[start:stop].view_as(tensor)
                    start = stop
            assert relative(second, brute_force(after_first, old, trainer.reference_policy, *names)) < 1e-10

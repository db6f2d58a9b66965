"""The gradient of an update equals a brute-force one, for every aggregation."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import ExperienceBatch, GRPOTrainer, ObjectiveConfig
from tests.support.policies import RecordingSGD, RowScoring, gradient_of
from tests.support.trainers import by_hand

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
KL_COEF, ENTROPY_COEF, LENGTH, LEARNING_RATE = 0.3, 0.2, 6, 0.5


def built(aggregation: Any, entropy_aggregation: Any) -> tuple[GRPOTrainer, RecordingSGD]:
    """A trainer for two passes over the batch, so that the second sees ratios other than 1; and its optimizer."""
    torch.manual_seed(5)
    policy = RowScoring(dtype=torch.float64)
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        for tensor in reference.parameters():
            tensor.add_(0.3 * torch.randn_like(tensor))
    objective = ObjectiveConfig(
        kl_coef=KL_COEF,
        entropy_coef=ENTROPY_COEF,
        aggregation=aggregation,
        entropy_aggregation=entropy_aggregation,
        fixed_length=LENGTH if "fixed_length" in (aggregation, entropy_aggregation) else None,
    )
    optimizer = RecordingSGD(policy, lr=LEARNING_RATE)
    config = {"group_size": 8, "num_epochs_per_update": 2, "seed": 1, "objective": objective}
    return by_hand(policy=policy, config=config, reference_policy=reference, optimizer=optimizer)[0], optimizer


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


@pytest.mark.parametrize(
    ("aggregation", "entropy_aggregation"),  # None: the same
    [
        ("row_mean", None),
        ("step_mean", "row_sum"),
        ("fixed_length", "step_mean"),
        ("row_sum", None),
        ("group_mean", "step_mean"),
    ],
)
def test_the_gradient_of_an_unsplit_update_equals_brute_force(aggregation, entropy_aggregation):
    trainer, optimizer = built(aggregation, entropy_aggregation)
    old = copy.deepcopy(trainer.policy)
    trainer.update(ExperienceBatch.from_rows(STATES, ACTIONS, REWARDS, GROUP_IDS, mask=MASK))
    first, second = optimizer.gradients
    names = aggregation, entropy_aggregation or aggregation
    expected = brute_force(copy.deepcopy(old), old, trainer.reference_policy, *names)
    assert (first - expected).norm() < 1e-10 * expected.norm()
    after_first = copy.deepcopy(old)
    with torch.no_grad():  # one step of plain SGD, by hand
        tensors = [*after_first.parameters()]
        for tensor, gradient in zip(tensors, first.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor -= LEARNING_RATE * gradient.view_as(tensor)
    expected = brute_force(after_first, old, trainer.reference_policy, *names)
    assert (second - expected).norm() < 1e-10 * expected.norm()

"""Rollouts, references and advantages that do not fit the policy's steps, and those that just do."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo import ActionScores, ContractError, ExperienceBatch, GRPOConfig, GRPOTrainer, Learner, ObjectiveConfig
from tests.support.objective_inputs import as_users_run_it
from tests.support.policies import RowScoring, SequencePolicy, TablePolicy
from tests.support.trainers import ROLLOUTS, by_hand, state_of, trainer_of, without_time


class AnotherStep(RowScoring):
    """Masks the first step of row 1."""

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        scores = super().score_actions(states, actions)
        mask = scores.mask.clone()
        mask[1, 0] = False
        return ActionScores(log_probs=scores.log_probs, mask=mask)


def test_a_forward_may_leave_out_columns_that_are_masked_for_all_rows() -> None:
    """Rows of one forward are padded to their own longest."""
    policy = RowScoring()
    actions = [(1, 2, 2, 0), (0,), (0,), (1, 0)]
    mask = torch.tensor([[place < len(action) for place in range(4)] for action in actions])
    trainer = trainer_of(policy, micro_batch_size=2)
    batch = ExperienceBatch.from_rows([0, 0, 1, 1], actions, [0.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], mask=mask)
    assert trainer.update(batch)["train/num_updates"] == 1


@pytest.mark.parametrize("mask", [None, [[True, True], [True, True]], [[True, False], [True, True]]])
def test_rollouts_whose_mask_differs_from_the_policys_are_refused(mask: Any) -> None:
    """The policy decided two steps and one. The batch says one each, two each, or one and two."""
    batch = ExperienceBatch.from_rows([0, 0], [(1, 0), (0,)], [0.0, 1.0], [0, 0], mask=mask)
    with pytest.raises(ContractError, match=r"masks differ.*ExperienceBatch\.from_rows the mask"):
        trainer_of(RowScoring(), num_epochs_per_update=2).update(batch)


class OwnReference(RowScoring):
    """`ScoresReference`, with so many steps per row."""

    reference_is_start = False

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps

    def reference_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        return torch.full((len(actions), self.num_steps), -1.0, dtype=torch.float64)


def trainer_with_reference(reference: Any, **settings: Any) -> GRPOTrainer:
    config, own = {"objective": ObjectiveConfig(kl_coef=0.1), **settings}, isinstance(reference, OwnReference)
    policy, given = (reference, None) if own else (RowScoring(), reference)
    return by_hand(policy=policy, reference_policy=given, config=config)[0]


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize(("reference", "name"), [
    (lambda: OwnReference(1), r"OwnReference\.reference_log_probabilities"),
    (lambda: OwnReference(2), r"OwnReference\.reference_log_probabilities"),
    (SequencePolicy, "reference SequencePolicy"),
    (AnotherStep, "reference AnotherStep"),
])  # fmt: skip
def test_a_reference_that_leaves_out_steps_is_refused(reference: Any, name: str, micro_batch_size: int | None) -> None:
    """A step it says nothing of must not count as one it is sure of."""
    trainer = trainer_with_reference(reference(), micro_batch_size=micro_batch_size)
    before = state_of(trainer)
    with pytest.raises(ContractError, match=rf"{name} must score every step"):
        trainer.update(ExperienceBatch.from_rows(**ROLLOUTS))
    assert state_of(trainer) == before


def test_a_reference_need_not_score_what_is_masked_for_all() -> None:
    """A fourth step that no row has: three are enough."""
    mask = torch.nn.functional.pad(ROLLOUTS["mask"], (0, 1), value=False)
    trainer = trainer_with_reference(OwnReference(3))
    metrics = trainer.update(ExperienceBatch.from_rows(**{**ROLLOUTS, "mask": mask}))
    assert metrics["train/kl_mean"] > 0


def test_rows_without_a_step_are_legal_and_carry_no_loss() -> None:
    """Two rows, the second empty: the mean over rows counts both, so the gradient is that of the first, halved."""
    mask = torch.tensor([[True, True], [False, False]])
    batch = ExperienceBatch.from_rows([0, 0], [(1, 0), ()], [1.0, 0.0], [0, 0], mask=mask)
    metrics = trainer_of(RowScoring()).update(batch)
    assert metrics["steps/mean"] == 1.0
    assert metrics["train/policy_loss"] == pytest.approx(-0.5 * 0.5)  # advantage 1/2, ratio 1, weight 1/2


def test_invalid_advantages_are_refused_and_change_nothing() -> None:
    trainer, _ = by_hand(rewards=[0.0, 1.0, 2.0, 3.0], advantages=lambda batch: torch.ones(batch.num_rows, 2))
    before = state_of(trainer)
    message = r"advantages must be a tensor \[N\] = \[4\].*got \[4, 2\] float32"
    with as_users_run_it(), pytest.raises(ContractError, match=message):
        trainer.step(["a", "b"])
    assert state_of(trainer) == before


def with_advantages(values: list[list[float]], filler: float) -> tuple[str, dict[str, float]]:
    """Three updates on `ROLLOUTS` with these advantages on its mask, and `filler` off it: the state after, the metrics."""
    torch.manual_seed(1)
    own = lambda batch: torch.tensor(values).where(batch.mask, filler)  # noqa: E731
    trainer, _ = by_hand(policy=RowScoring(), advantages=own)
    for _ in range(3):
        metrics = trainer.update(ExperienceBatch.from_rows(**ROLLOUTS))
    return state_of(trainer), without_time(metrics)


def test_advantages_outside_the_mask_are_never_read() -> None:
    """NaN outside the mask gives exactly the same updates as 0, and does not keep a row from being skipped."""
    values = [[1.0, -2.0, 0.5], [-1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [3.0, 0.0, 0.0]]
    state, metrics = with_advantages(values, math.nan)
    assert (state, metrics) == with_advantages(values, 0.0)
    assert math.isfinite(metrics["train/grad_norm"])
    _, metrics = with_advantages([[1.0, -2.0, 0.5], [0.0] * 3, [0.0] * 3, [3.0, 0.0, 0.0]], math.nan)
    assert metrics["rows/skipped_zero_advantage"] == 2.0


MASK, LIKE_MASK = r"mask must be bool \[N, T\] with N = 4; got", r"behaviour_log_probs must be like mask, \[4, 3\]; got"


@pytest.mark.parametrize(("changes", "message"), [
    ({"states": [0]}, r"states must have one entry per row = 4; got a list of 1"),
    ({"actions": [0]}, r"actions must have one entry per row = 4; got a list of 1"),
    ({"mask": ROLLOUTS["mask"].double()}, rf"{MASK} \[4, 3\] float64"),
    ({"mask": ROLLOUTS["mask"].long()}, rf"{MASK} \[4, 3\] int64"),
    ({"mask": ROLLOUTS["mask"][:3]}, rf"{MASK} \[3, 3\] bool"),
    ({"mask": ROLLOUTS["mask"][:, 0]}, rf"{MASK} \[4\] bool"),
    ({"behaviour_log_probs": torch.zeros(4, 2)}, rf"{LIKE_MASK} \[4, 2\]"),
    ({"behaviour_log_probs": torch.zeros(4)}, rf"{LIKE_MASK} \[4, 1\]"),
    ({"behaviour_log_probs": torch.zeros(3, 3)}, r"behaviour_log_probs must .*\[4\] or \[N, T\]; got \[3, 3\]"),
    ({"rewards": torch.zeros(4, 2)}, r"rewards per step must be like mask, \[4, 3\]; got \[4, 2\]"),
    ({"group_ids": [[0], [0], [1], [1]]}, r"group_ids must be \[N\].*got \[4, 1\] int64"),
    ({"group_ids": torch.tensor(0)}, r"group_ids must be \[N\].*got \[\] int64"),
])  # fmt: skip
def test_rollouts_of_a_wrong_shape_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=rf"ExperienceBatch\.from_rows: {message}"):
        ExperienceBatch.from_rows(**{**ROLLOUTS, **changes})


@pytest.mark.parametrize(("name", "bad"), [
    *itertools.product(("old_log_probs", "ref_log_probs"), (-math.inf, math.inf, math.nan)),
    *itertools.product(["behaviour_log_probs"], (-math.inf, math.inf)),  # NaN: not scored
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::grpo.GRPOWarning")  # the supplied log-probs are not the policy's
def test_supplied_log_probs_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    """Only where the policy decided a step: padding may hold anything."""
    trainer = trainer_of(RowScoring(), num_epochs_per_update=2)
    before, mask = state_of(trainer), torch.tensor([[True, True], [True, False]])
    wrong, right = torch.tensor([[-1.0, bad], [-1.0, -1.0]]), torch.tensor([[-1.0, -1.0], [-1.0, bad]])
    batch = replace(ExperienceBatch.from_rows([0, 0], [(1, 0), (0,)], [0.0, 1.0], [0, 0], mask=mask), **{name: wrong})
    with pytest.raises(ContractError, match=rf"the batch: {name} of sampled steps must be finite; rows \[0\]"):
        trainer.update(batch)
    assert state_of(trainer) == before
    assert trainer.update(replace(batch, **{name: right}))["train/num_updates"] == 2


def test_an_exact_entropy_of_nan_is_refused_even_if_no_term_of_the_loss_reads_it() -> None:
    """An action is masked with logits of -inf, and the entropy is computed as the sum of p log p, which is then NaN."""
    policy, log_probs = RowScoring(), torch.tensor([0.5, 0.5, 0.0]).log()
    score = policy.score_actions
    entropy = -(log_probs.exp() * log_probs).sum().expand(2, 1)
    policy.score_actions = lambda *rows: replace(score(*rows), entropy=entropy)  # type: ignore[method-assign]
    batch = ExperienceBatch.from_rows([0, 0], [(1,), (0,)], [0.0, 1.0], [0, 0])
    with pytest.raises(ContractError, match=r"RowScoring: .*exact entropy.*some are not.*finfo\(dtype\)\.min"):
        trainer_of(policy).update(batch)


DENSITIES = torch.tensor([0.5, 0.25, 0.25, 0.5])


def updated(actions: Any, behaviour_log_probs: Tensor) -> None:
    """Train once, without a run, on four rows with actions of any kind, which the policy does not look at."""

    class Blind(TablePolicy):
        def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
            return self.logits.log_softmax(1)[[0] * len(actions), [place % 2 for place in range(len(actions))]]

    learner = Learner(
        config=GRPOConfig(group_size=2), policy=Blind(), reward_model=lambda states, actions: [0.0] * len(actions)
    )
    rows = ExperienceBatch.from_rows([0] * 4, actions, [0.0] * 4, [0] * 4, behaviour_log_probs=behaviour_log_probs)
    learner.update(rows)


@pytest.mark.parametrize("values", [DENSITIES, torch.ones(4)])
@pytest.mark.parametrize("labels", [
    *([0, 1, 0, 1], torch.tensor([0, 1, 0, 1]), np.array([0, 1, 0, 1], np.uint8), list("abcd")),
    *([(0, 1)] * 4, [True, False] * 2, [object()] * 4),
])  # fmt: skip
def test_probabilities_are_refused_as_log_probs(labels: Any, values: Tensor) -> None:
    """Values from 0 to 1 alone are no log-probs of labels, texts or objects."""
    with pytest.raises(ContractError, match=r"probabilities\.log"):
        updated(labels, values)


def test_densities_and_log_probs_are_taken_for_what_they_are() -> None:
    """Densities of real numbers may be above 1."""
    updated(list("abcd"), DENSITIES - 0.5)  # some are below 0
    for actions in [torch.randn(4, 2), [0.3, 0.1, 0.5, 0.2], [(0.5, 1), (0.1, 2), (1.5, 0), (2.5, 1)]]:
        updated(actions, DENSITIES)
    updated([object()] * 4, DENSITIES * 5)
    for allowed in (DENSITIES.log(), torch.zeros(4), torch.tensor([math.nan, -1.0, math.nan, -2.0])):
        updated([0, 1, 0, 1], allowed)

"""What the gradient of the loss is, by enumeration: every action (or row) once, with its probability as its weight.

The estimators as functions have such tests in `tests/unit/test_divergence.py`; here they are terms of `grpo_objective`, or go
through the trainer.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import (
    AdvantageConfig,
    AdvantageEstimator,
    ExperienceBatch,
    GRPOConfig,
    ObjectiveConfig,
    ObjectiveInputs,
    Truncate,
    grpo_objective,
)
from grpo._objective.metrics import MeasuredLoss
from grpo.grpo_objective import unchecked_objective
from grpo.surrogates import Cispo, Clip, KlCov
from tests.support.configs import EVERY, PRESETS, Rows, make_policy, make_trainer
from tests.support.objective_inputs import FourActions, objective_inputs
from tests.support.policies import RowScoring, gradient_of

pytestmark = pytest.mark.usefixtures("without_type_checks")

NO_BOUND = {"low": 1.0, "high": 1e9}


# One decision: the terms of the loss

OTHER_POLICY = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)


def only_kl(estimator: str, **others: Any) -> ObjectiveConfig:
    return ObjectiveConfig(kl_coef=1.0, kl_estimator=estimator, **others)


def only_entropy(estimator: str) -> ObjectiveConfig:
    return ObjectiveConfig(surrogate=Clip(low=0.01), entropy_coef=1.0, entropy_estimator=estimator, kl_coef=0.0)


def nothing(policy: FourActions) -> Tensor:
    return torch.zeros(4, dtype=torch.float64)


def minus_entropy(policy: FourActions) -> Tensor:
    return -policy.gradient_of_entropy()  # a bonus is subtracted from the loss


TO_REFERENCE, FROM_REFERENCE = FourActions.gradient_of_kl_to_ref, FourActions.gradient_of_kl_from_ref
TERMS: dict[str, tuple[ObjectiveConfig, Tensor | None, Any]] = {
    "k1": (only_kl("k1"), None, nothing),
    "k2": (only_kl("k2"), None, TO_REFERENCE),
    "k3": (only_kl("k3"), None, FROM_REFERENCE),
    "k3_weighted": (only_kl("k3_weighted"), None, TO_REFERENCE),
    # the bounds are narrow: they are for the surrogate, and must not stop the pull
    **{
        f"k3_weighted off policy by {level}": (
            only_kl("k3_weighted", surrogate=Clip(low=0.01, high=0.01, level=level)), OTHER_POLICY, TO_REFERENCE
        )
        for level in ("step", "row", "row_sum", "row_step")
    },
    "sampled entropy": (only_entropy("score_function"), None, minus_entropy),
    "sampled entropy off policy": (only_entropy("score_function"), OTHER_POLICY, minus_entropy),
    "exact entropy": (only_entropy("exact"), None, minus_entropy),
}  # fmt: skip
"""A loss of one term, who samples (None: the policy), and the gradient that the term has in expectation."""


@pytest.mark.parametrize("name", TERMS)
def test_a_term_of_the_loss_has_its_gradient_in_expectation(name):
    config, sampler, truth = TERMS[name]
    policy = FourActions.example()
    log_probs = policy.log_probs()
    often = policy.probs if sampler is None else sampler
    inputs = objective_inputs(
        log_probs,
        torch.zeros(4, dtype=torch.float64),
        old_log_probs=None if sampler is None else sampler.log().unsqueeze(1),
        weights=often.unsqueeze(1),
        ref_log_probs=policy.ref_log_probs(),
        # each row carries the entropy of the whole distribution, and the weights add up to 1
        entropy=-(log_probs.exp() * log_probs).sum().expand(4, 1),
    )
    (gradient,) = torch.autograd.grad(grpo_objective(inputs, config).loss, policy.theta)
    assert gradient.tolist() == pytest.approx(truth(policy).tolist(), rel=1e-12, abs=1e-15)


# Two decisions: the importance of a row


@dataclass(frozen=True)
class TwoSteps:
    """Two moves of three each, the second's odds depending on the first: nine rows, enumerated.

    J = sum over rows of p(row) R(row), so that dJ = sum of R dp, which autograd takes of the nine products themselves.
    """

    first: Tensor
    second: Tensor

    @classmethod
    def example(cls, seed: int = 0) -> "TwoSteps":
        generator = torch.Generator().manual_seed(seed)
        first, second = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (1, 3))
        return cls(first.requires_grad_(), second.requires_grad_())

    def log_probs(self) -> Tensor:
        """[9, 2]: log-probs of both moves in every row."""
        first = self.first.log_softmax(1).squeeze(0).repeat_interleave(3)
        return torch.stack([first, self.second.log_softmax(1).flatten()], dim=1)

    def probs(self) -> Tensor:
        return self.log_probs().sum(1).exp()

    def gradient(self, value: Tensor) -> Tensor:
        parts = torch.autograd.grad(value, [self.first, self.second])
        return torch.cat([part.flatten() for part in parts])


REWARDS = torch.tensor([0.3, -1.0, 2.0, 0.0, 0.7, -0.4, 1.1, -2.0, 0.5], dtype=torch.float64)


def rows(policy: TwoSteps, often: Tensor, *, per_row: float, **others: Any) -> ObjectiveInputs:
    """The nine rows; each step weighs `per_row` times how often its row is sampled."""
    weights = (per_row * often.detach()).unsqueeze(1).expand(9, 2)
    return objective_inputs(policy.log_probs(), REWARDS, weights=weights, **others)


def minus_dj(policy: TwoSteps) -> Tensor:
    return -policy.gradient((policy.probs() * REWARDS).sum())


def test_row_importance_weights_give_the_on_policy_gradient_under_another_sampler(subtests):
    for surrogate, per_row in [
        # The row's ratio is in the loss once per step, so each step counts half. CISPO's weight multiplies the log-prob of
        # each step, so each step counts once.
        (Clip(level="row_sum", **NO_BOUND), 0.5),
        (KlCov(level="row_sum", coef=0.0), 0.5),
        (Cispo(level="row_sum", **NO_BOUND), 1.0),
    ]:
        with subtests.test(surrogate=surrogate, per_row=per_row):
            policy, sampler = TwoSteps.example(), TwoSteps.example(seed=1)
            config = ObjectiveConfig(surrogate=surrogate, kl_coef=0.0)
            inputs = rows(policy, sampler.probs(), per_row=per_row, old_log_probs=sampler.log_probs().detach())
            found = policy.gradient(grpo_objective(inputs, config).loss)
            expected = minus_dj(policy)
            assert torch.allclose(found, expected, rtol=1e-12, atol=1e-15)
            # Ratios per step do not make up for it: this is what the level is for.
            per_step = grpo_objective(
                rows(policy, sampler.probs(), per_row=1.0, old_log_probs=inputs.old_log_probs),
                replace(config, surrogate=replace(surrogate, level="step")),
            ).loss
            assert not torch.allclose(policy.gradient(per_step), expected, rtol=0.1)


def test_the_sampler_correction_gives_the_on_policy_gradient_through_the_trainer(subtests):
    for aggregation in ["row_sum", "row_mean"]:
        with subtests.test(aggregation=aggregation):
            # a sampler that takes each of the nine rows equally often: a batch of each of them once is its expectation
            policy = make_policy(RowScoring, num_states=1)
            actions = [(first, second) for first in range(1, 4) for second in range(1, 4)]
            scores = policy.score_actions([0] * 9, actions)
            often = torch.full((9, 2), 1 / 3, dtype=torch.float64).log()
            config = GRPOConfig(
                max_grad_norm=None,
                advantage=AdvantageConfig(baseline="none"),
                objective=ObjectiveConfig(aggregation=aggregation, sampler_correction=Truncate(high=None, level="row")),
            )
            trainer, optimizer = make_trainer(config, policy)
            row_log_probs = scores.log_probs.sum(1)
            length = 1 if aggregation == "row_sum" else 2
            # sum over rows of p(row) R(row), since u / 9 = p
            expected = gradient_of(policy, -(row_log_probs.exp() * REWARDS).sum() / length)
            trainer.update(ExperienceBatch.from_rows([0] * 9, actions, REWARDS, [0] * 9, behaviour_log_probs=often))
            (found,) = optimizer.gradients
            assert torch.allclose(found, expected, rtol=1e-11, atol=1e-15)


# The first update


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ObjectiveInputs, dict[str, Tensor]]]:
    """What each update's loss is given, and its metrics."""
    kept: list[tuple[ObjectiveInputs, dict[str, Tensor]]] = []

    def watched(inputs: ObjectiveInputs, config: ObjectiveConfig) -> MeasuredLoss:
        output = unchecked_objective(inputs, config)
        kept.append((inputs, output.measured.moments()))
        return output

    monkeypatch.setattr("grpo._updating.loss.unchecked_objective", watched)
    return kept


def without_other_terms(config: GRPOConfig) -> GRPOConfig:
    return replace(config, kl_control=None, objective=replace(config.objective, kl_coef=0.0, entropy_coef=0.0))


WITH_OLD_LOG_PROBS = [*PRESETS, "top_entropy", "kl_cov", "clip_cov"]
"""Settings whose first ratio is looked at. The last three store log-probs or entropies even for a single update."""


def test_the_ratio_of_a_single_update_is_exactly_1(seen, subtests):
    for name in WITH_OLD_LOG_PROBS:
        with subtests.test(name=name):
            seen.clear()
            config = replace(EVERY[name], num_epochs_per_update=1)
            trainer, _ = make_trainer(config, make_policy(), reference=make_policy(RowScoring, seed=1))
            trainer.update(Rows.example().batch(config))
            ((inputs, metrics),) = seen
            # stored log-probs may serve to select steps, but the current policy is the one that sampled
            assert inputs.old_log_probs is None
            count, total, squares = metrics["ratio"].tolist()
            assert count == total == squares == int(inputs.mask.sum()) > 0
            assert metrics["clip_fraction"].tolist() == [count, 0, 0]


def test_the_ratio_of_the_first_of_several_updates_is_1_up_to_rounding(seen, subtests):
    # that of a forward of all rows, where this one leaves out those without an advantage
    for name in WITH_OLD_LOG_PROBS:
        with subtests.test(name=name):
            seen.clear()
            config = EVERY[name]
            trainer, _ = make_trainer(
                config, make_policy(dtype=torch.float32), reference=make_policy(RowScoring, torch.float32, seed=1)
            )
            trainer.update(Rows.example(torch.float32).batch(config))
            assert len(seen) == 2
            inputs, metrics = seen[0]
            assert inputs.old_log_probs is not None
            moved = (inputs.log_probs - inputs.old_log_probs)[inputs.mask].abs().max()
            assert moved <= 8 * torch.finfo(torch.float32).eps
            if len(inputs.mask) == len(Rows.example()):
                assert moved == 0
            assert metrics["clip_fraction"][1] == 0


def test_the_first_gradient_of_every_preset_is_that_of_reinforce(subtests):
    for name, num_epochs in product(PRESETS, [1, 2]):
        with subtests.test(name=name, num_epochs=num_epochs):
            config = without_other_terms(replace(EVERY[name], num_epochs_per_update=num_epochs))
            policy = make_policy(RowScoring)
            trainer, optimizer = make_trainer(config, policy)
            batch = Rows.example().batch(config)
            advantages = AdvantageEstimator(config.advantage)(batch)
            weights = reference_weights(batch, config.objective)
            log_probs = policy.score_actions(batch.states, batch.actions).log_probs
            expected = gradient_of(policy, -(weights * advantages.unsqueeze(1) * log_probs)[batch.mask].sum())
            trainer.update(batch)
            assert (optimizer.gradients[0] - expected).norm() <= 1e-12 * expected.norm()


def reference_weights(batch: ExperienceBatch, config: ObjectiveConfig) -> Tensor:
    """Row by row, from the names of the aggregations alone."""
    lengths = batch.mask.sum(1).tolist()
    weights = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for row, length in enumerate(lengths):
        divisor = {
            "row_mean": length * len(lengths),
            "step_mean": sum(lengths),
            "fixed_length": len(lengths) * (config.fixed_length or 0),
            "row_sum": len(lengths),
        }[config.aggregation]
        weights[row] = 1.0 / divisor if length else 0.0
    return weights

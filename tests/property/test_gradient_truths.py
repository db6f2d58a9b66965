"""What the gradient of the loss is, by enumeration: every action (or row) once, with its probability as its weight.

The estimators as functions have such tests in `tests/unit/test_divergence.py`; here they are terms of `grpo_objective`, or go
through the trainer.
"""

import math
from dataclasses import dataclass, fields, replace
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import (
    AdvantageConfig,
    AdvantageEstimator,
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    ObjectiveConfig,
    ObjectiveInputs,
    RewardConfig,
    Truncate,
    grpo_objective,
)
from grpo._objective.metrics import MeasuredLoss
from grpo.config import SURROGATES
from grpo.grpo_objective import unchecked_objective
from grpo.surrogates import Cispo, Clip, Dppo, Dro, KlCov, Reinforce, Sapo
from tests.support.configs import EVERY, PRESETS, Rows, make_policy, make_trainer
from tests.support.objective_inputs import FourActions, objective_inputs
from tests.support.policies import RowScoring, TablePolicy, gradient_of, weights_of

pytestmark = pytest.mark.usefixtures("without_type_checks")

NO_BOUND = {"low": 1.0, "high": 1e9}


# One decision: the terms of the loss

OTHER_POLICY = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)


def expected_gradient(config: ObjectiveConfig, sampler: Tensor | None, **others: Any) -> Tensor:
    """The gradient of the loss of all four actions, weighted by the probabilities of `sampler` (None: of the policy)."""
    policy = FourActions.example()
    often = policy.probs if sampler is None else sampler
    inputs = objective_inputs(
        policy.log_probs(),
        torch.zeros(4, dtype=torch.float64),
        old_log_probs=None if sampler is None else sampler.log().unsqueeze(1),
        weights=often.unsqueeze(1),
        ref_log_probs=policy.ref_log_probs(),
        **others,
    )
    (gradient,) = torch.autograd.grad(grpo_objective(inputs, config).loss, policy.theta)
    return gradient


def only_kl(estimator: str, **others: Any) -> ObjectiveConfig:
    return ObjectiveConfig(kl_coef=1.0, kl_estimator=estimator, **others)


def test_k1_in_the_loss_has_no_gradient_in_expectation():
    assert expected_gradient(only_kl("k1"), None).tolist() == pytest.approx([0] * 4, abs=1e-15)


def test_k2_and_weighted_k3_have_the_gradient_of_kl_to_the_reference(subtests):
    for estimator in ["k2", "k3_weighted"]:
        with subtests.test(estimator=estimator):
            expected = FourActions.example().gradient_of_kl_to_ref().tolist()
            assert expected_gradient(only_kl(estimator), None).tolist() == pytest.approx(expected, rel=1e-12)


def test_k3_has_the_gradient_of_kl_from_the_reference():
    expected = FourActions.example().gradient_of_kl_from_ref().tolist()
    assert expected_gradient(only_kl("k3"), None).tolist() == pytest.approx(expected, rel=1e-12)


def test_weighted_k3_has_the_right_gradient_off_policy_and_past_the_clip_bounds(subtests):
    for level in ["step", "row", "row_sum", "row_step"]:
        with subtests.test(level=level):
            # the bounds are narrow: they are for the surrogate, and must not stop the pull
            config = only_kl("k3_weighted", surrogate=Clip(low=0.01, high=0.01, level=level))
            expected = FourActions.example().gradient_of_kl_to_ref().tolist()
            assert expected_gradient(config, OTHER_POLICY).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_sampled_entropy_bonus_has_the_gradient_of_the_entropy(subtests):
    for sampler in [None, OTHER_POLICY]:
        with subtests.test(sampler=sampler):
            config = ObjectiveConfig(
                surrogate=Clip(low=0.01), entropy_coef=1.0, entropy_estimator="score_function", kl_coef=0.0
            )
            expected = (-FourActions.example().gradient_of_entropy()).tolist()  # a bonus is subtracted from the loss
            assert expected_gradient(config, sampler).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_exact_entropy_bonus_has_the_gradient_of_the_entropy():
    # each row carries the entropy of the whole distribution, and the weights add up to 1
    policy = FourActions.example()
    log_probs = policy.log_probs()
    entropy = -(log_probs.exp() * log_probs).sum().expand(4, 1)
    inputs = objective_inputs(
        log_probs,
        torch.zeros(4, dtype=torch.float64),
        weights=policy.probs.unsqueeze(1),
        entropy=entropy,
    )
    loss = grpo_objective(inputs, ObjectiveConfig(entropy_coef=1.0, kl_coef=0.0)).loss
    (gradient,) = torch.autograd.grad(loss, policy.theta)
    assert gradient.tolist() == pytest.approx((-policy.gradient_of_entropy()).tolist(), rel=1e-12)


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


def test_a_row_level_sampler_correction_gives_the_on_policy_gradient(subtests):
    for surrogate in [Clip(), Reinforce(), Cispo(), Sapo(), Dro(), Dppo(tv_limit=1.0)]:
        with subtests.test(surrogate=surrogate):
            policy, sampler = TwoSteps.example(), TwoSteps.example(seed=1)
            config = ObjectiveConfig(
                surrogate=surrogate, sampler_correction=Truncate(high=None, level="row"), kl_coef=0.0
            )
            elsewhere = rows(policy, sampler.probs(), per_row=1.0, behaviour_log_probs=sampler.log_probs().detach())
            own = rows(policy, policy.probs(), per_row=1.0)
            corrected = policy.gradient(grpo_objective(elsewhere, config).loss)
            assert torch.allclose(corrected, minus_dj(policy), rtol=1e-12, atol=1e-15)
            uncorrected = policy.gradient(grpo_objective(own, replace(config, sampler_correction=None)).loss)
            assert torch.allclose(corrected, uncorrected, rtol=1e-12, atol=1e-15)


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


def reinforce(inputs: ObjectiveInputs, correction: Any = 1.0) -> Tensor:
    """-sum of w A log pi, of the steps under the mask."""
    advantages = inputs.advantages if inputs.advantages.dim() == 2 else inputs.advantages.unsqueeze(1)
    return -(inputs.weights * correction * advantages * inputs.log_probs)[inputs.mask].sum()


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


TIMES_LOG_PROBS = {"reinforce", "cispo", "dro", "vespo"}
"""Surrogates whose gradient goes through the log-prob of each step, whatever the level of their ratio."""

LEVELS = ["step", "row", "row_sum", "row_step", "none"]


def test_at_ratio_1_every_surrogate_has_the_reinforce_gradient_at_every_level(subtests):
    for name, given_as_old in product(SURROGATES, [False, True]):
        with subtests.test(name=name, given_as_old=given_as_old):
            # Clip-Cov is asked to leave nothing out here. DRO and KL-Cov pull by 0 where nothing has moved.
            surrogate = SURROGATES[name](**({"cov_low": 1e6, "cov_high": 1e7} if name == "clip_cov" else {}))
            has_level = "level" in {field.name for field in fields(surrogate)}
            for at in [replace(surrogate, level=level) for level in LEVELS] if has_level else [surrogate]:
                generator = torch.Generator().manual_seed(0)
                log_probs = -torch.rand(4, 3, generator=generator, dtype=torch.float64)
                log_probs.requires_grad_()
                mask = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 0], [0, 0, 0]]).bool()
                lengths = mask.sum(1, keepdim=True)
                inputs = objective_inputs(
                    log_probs,
                    torch.tensor([1.5, -0.5, 0.25, 2.0], dtype=torch.float64),
                    mask=mask,
                    # each step of a row has the same weight
                    weights=torch.where(mask, 1.0 / (4 * lengths.clamp(min=1)), 0.0).double(),
                    old_log_probs=log_probs.detach() if given_as_old else None,
                )
                loss = grpo_objective(inputs, ObjectiveConfig(surrogate=at, kl_coef=0.0)).loss
                (found,) = torch.autograd.grad(loss, log_probs)
                # the sum over a row is in the loss once per step, so each step has the gradient of all
                is_repeated = getattr(at, "level", "step") == "row_sum" and name not in TIMES_LOG_PROBS
                (expected,) = torch.autograd.grad(reinforce(inputs, lengths if is_repeated else 1.0), log_probs)
                assert torch.allclose(found, expected, rtol=1e-14, atol=0), at
                assert (found[~mask] == 0).all(), at


# Nothing to learn from

SIZES = [1, 2, 3, 7, 8, 64, 1000, 1024]
CONSTANTS = [0.3, 0.9, 0.1, 1 / 3, 0.7, 0.2, 0.6, 0.99]
LEARNS_BY_ADVANTAGE_ALONE = [
    name
    for name, config in EVERY.items()
    if name in PRESETS and not config.objective.kl_coef and not config.objective.entropy_coef
]


def constant_groups(dtype: torch.dtype, *, shift: int = 0) -> tuple[list[int], list[int], Tensor]:
    """States, actions and rewards of groups of 1 to 1,024 rows, each of equal rewards that no binary fraction hits."""
    states = [state for state, size in enumerate(SIZES) for _ in range(size)]
    actions = [row % 3 for row in range(len(states))]
    values = CONSTANTS[shift:] + CONSTANTS[:shift]
    return states, actions, torch.tensor([values[state] for state in states], dtype=dtype)


def table_policy() -> TablePolicy:
    torch.manual_seed(0)
    return TablePolicy(range(len(SIZES) + 1), 3, logits=torch.randn(len(SIZES) + 1, 3))


def test_the_presets_that_learn_by_the_advantage_alone_are_found():
    assert {"dapo", "dr_grpo", "gspo", "cispo", "sapo", "gmpo", "gpg", "maxrl", "bnpo"} <= {*LEARNS_BY_ADVANTAGE_ALONE}


def test_groups_of_equal_rewards_change_no_bit_of_any_weight(subtests):
    for name, dtype in product(LEARNS_BY_ADVANTAGE_ALONE, [torch.float32, torch.float64]):
        with subtests.test(name=name, dtype=dtype):
            policy = table_policy()
            before = weights_of(policy)
            trainer = GRPOTrainer(
                config=replace(EVERY[name], batch_size=1000),
                policy=policy,
                reward_model=lambda states, actions: actions,
            )
            for shift in (0, 3):
                states, actions, rewards = constant_groups(dtype, shift=shift)
                metrics = trainer.update(ExperienceBatch.from_rows(states, actions, rewards, states))
                assert metrics["train/num_updates"] == 0
                assert metrics["rows/skipped_zero_advantage"] == len(states)
                assert metrics["group_stats/zero_variance_fraction"] == 1
            assert torch.equal(weights_of(policy), before)


def test_groups_of_equal_rewards_do_not_move_when_other_groups_learn(subtests):
    # one more state, whose four rewards differ: its logits change, and no bit of the other states' logits does
    configs = {name: without_other_terms(EVERY[name]) for name in PRESETS}
    # a median is not the mean, so that whitening moves every row but these
    median = AdvantageConfig(baseline="group_median", scale="whiten")
    configs["median, whiten"] = replace(configs["dapo"], advantage=median)
    for name, config in configs.items():
        with subtests.test(name=name):
            policy = table_policy()
            before = policy.logits.detach().clone()
            states, actions, rewards = constant_groups(torch.float32)
            states, actions = [*states, *[len(SIZES)] * 4], [*actions, 0, 1, 2, 0]
            rewards = torch.cat([rewards, torch.tensor([0.3, 0.9, 0.3, 0.5])])
            trainer, _ = make_trainer(config, policy)
            trainer.update(ExperienceBatch.from_rows(states, actions, rewards, states))
            moved = (policy.logits.detach() != before).any(1).tolist()
            assert moved == [False] * len(SIZES) + [True]


def test_dro_and_kl_cov_have_no_gradient_before_the_policy_has_moved(subtests):
    for name in ["dro", "kl_cov"]:
        with subtests.test(name=name):
            # these losses act on rows without an advantage too, but only once the policy has moved
            config, policy = replace(EVERY[name], num_epochs_per_update=1), table_policy()
            trainer, optimizer = make_trainer(config, policy)
            states, actions, rewards = constant_groups(torch.float32)
            trainer.update(ExperienceBatch.from_rows(states, actions, rewards, states))
            assert (torch.cat(optimizer.gradients) == 0).all()


# Rows that were rejected

TRUE_REWARDS = {"a": [0.3, 0.9, 0.4, 0.1], "b": [0.2, 0.2, 0.8, 0.5]}
REJECTED = {("a", 1), ("b", 0), ("b", 2)}


def collected(config: GRPOConfig, reward: Any) -> tuple[ExperienceBatch, Tensor]:
    """What is left of two groups of four, and its advantages."""
    policy = TablePolicy(("a", "b"), 4, script=[[0, 1, 2, 3], [0, 1, 2, 3]])
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward)
    batch = trainer.collect(["a", "b"])
    return batch, AdvantageEstimator(config.advantage)(batch)


def not_finite(value: float) -> Any:
    return RewardConfig(non_finite="drop"), lambda states, actions: [
        value if (state, action) in REJECTED else TRUE_REWARDS[state][action]
        for state, action in zip(states, actions, strict=True)
    ]


def failing() -> Any:
    def reward(states: list[str], actions: list[int]) -> list[float]:
        pairs = list(zip(states, actions, strict=True))
        if REJECTED & set(pairs):
            raise ValueError("no reward for some of these")
        return [TRUE_REWARDS[state][action] for state, action in pairs]

    return RewardConfig(on_failure="drop"), reward


def test_the_advantage_of_a_kept_row_ignores_rejected_rows_of_its_group(subtests):
    kept = [(s, a) for s in TRUE_REWARDS for a in range(4) if (s, a) not in REJECTED]
    # the same rows as if there had never been others
    alone = ExperienceBatch.from_rows(
        [s for s, _ in kept], [a for _, a in kept], [TRUE_REWARDS[s][a] for s, a in kept], [s == "b" for s, _ in kept]
    )
    rejections = cycle([not_finite(math.nan), not_finite(math.inf), not_finite(-math.inf), failing()])
    for name, (settings, reward) in zip(PRESETS, rejections, strict=False):
        with subtests.test(name=name, settings=settings):
            config = replace(without_other_terms(EVERY[name]), reward=settings, num_epochs_per_update=1)
            batch, advantages = collected(config, reward)
            assert list(zip(batch.states, batch.actions, strict=True)) == kept
            assert torch.equal(advantages, AdvantageEstimator(config.advantage)(alone))
            assert (advantages != 0).all()

"""The loss of an update, and the metrics of an iteration."""

import json
import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch

from grpo import (
    AdvantageConfig,
    ContractError,
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    GRPOWarning,
    JSONLSink,
    ObjectiveConfig,
    ObjectiveInputs,
    ObjectiveOutput,
    WeightedRewards,
)
from grpo._updating.loss import MeteredObjective
from grpo._updating.report import batch_metrics
from grpo._updating.training_rows import TrainingRows
from grpo.metrics import Meter
from tests.support.policies import TablePolicy
from tests.support.trainers import SCRIPT, by_hand, poisoned, quarters, without_time

NAMED = {
    "kl_coef": ({"kl_coef": 0.5}, r"kl_coef=0\.5"),
    "entropy_coef": ({"entropy_coef": 0.25}, r"entropy_coef=0\.25"),
    "value loss": ({"value_coef": 0.75}, r"value_coef=0\.75"),
}
"""Settings of a term -> what the warning calls the term."""

REPORTED_AS = {"kl_coef": "kl_penalty", "entropy_coef": "entropy_bonus", "value loss": "value_loss"}


def inputs_for(config: ObjectiveConfig, *, has_critic: bool) -> ObjectiveInputs:
    """One row of one step, with the coefficients as the trainer passes them."""
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    return ObjectiveInputs(
        log_probs=log_probs,
        old_log_probs=None,
        advantages=torch.tensor([1.0]),
        mask=torch.tensor([[True]]),
        weights=torch.tensor([[1.0]]),
        kl_coef=config.kl_coef or 0.0,
        entropy_coef=config.entropy_coef,
        values=log_probs if has_critic else None,
        returns=torch.tensor([[1.0]]) if has_critic else None,
    )


def total(inputs: ObjectiveInputs) -> ObjectiveOutput:
    """A loss of the user's own, with one metric of its own: 7 + 9, and 49 + 81 for the squares."""
    metrics = {"answer": torch.tensor([2.0, 16.0, 130.0], dtype=torch.float64)}
    return ObjectiveOutput(loss=(inputs.log_probs.squeeze(1) * inputs.advantages).sum(), metrics=metrics)


def that_reports(*names: str) -> Any:
    """An objective that reports these metrics."""
    metrics = {name: torch.zeros(3, dtype=torch.float64) for name in names}
    return lambda inputs: ObjectiveOutput(loss=inputs.log_probs.sum(), metrics=metrics)


def warnings_of(settings: dict[str, Any], own: Any, *, has_critic: bool = True, num_calls: int = 1) -> list[str]:
    """The texts of the warnings that calls of an objective with these settings give."""
    config = ObjectiveConfig(**settings)
    loss = MeteredObjective(GRPOConfig(objective=config), own, Meter())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_calls):
            loss.of_sampled(inputs_for(config, has_critic=has_critic))
    assert all(warning.category is GRPOWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def test_metrics_a_user_objective_does_not_report_are_absent(tmp_path: Path) -> None:
    """loss = sum of A log pi over (a: 0, 1) and (b: 1, 0) with A = +-1/2: 0 at first; |gradient| = sqrt(4 (1/2)^2) = 1."""
    trainer, _ = by_hand(objective=total)
    with JSONLSink(tmp_path / "metrics.jsonl") as sink:
        (metrics,) = trainer.train(["a", "b"], num_iterations=1, sinks=[sink], progress=False)
    unmeasured = [
        "policy_loss", "kl_penalty", "kl_mean", "kl_std", "entropy_bonus", "entropy", "value_loss", "ratio_mean",
        "ratio_std", "clip_fraction", "clip_fraction_low", "clip_fraction_high", "ratio_clamped_fraction",
    ]  # fmt: skip
    assert not {f"train/{name}" for name in unmeasured} & set(metrics)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["train/total_loss"] == pytest.approx(0.0, abs=1e-12)
    assert (metrics["train/grad_norm"], metrics["train/answer"]) == (pytest.approx(1.0), 8.0)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (set(line), line["train/answer"]) == ({"iteration", *metrics}, 8.0)


@pytest.mark.parametrize("size", [None, 1])
def test_an_unreported_user_loss_is_reported_as_the_sum_over_micro_batches(size) -> None:
    """Rows of loss log 1/2 each: 4 log 1/2 for the update, in forwards of 4 rows or of 1."""
    trainer, _ = by_hand(objective=that_reports(), config={"micro_batch_size": size})
    assert trainer.step(["a", "b"])["train/total_loss"] == pytest.approx(4 * math.log(0.5))


@pytest.mark.parametrize("returned", [None, torch.tensor(1.0), (torch.tensor(1.0), {})])
def test_an_objective_that_returns_no_objective_output_is_refused(returned):
    trainer, policy = by_hand(objective=lambda inputs: returned)
    with pytest.raises(
        ContractError, match=r"objective must return ObjectiveOutput\(loss=\.\.\., metrics=\.\.\.\); got"
    ):
        trainer.step(["a", "b"])
    assert policy.logits.tolist() == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("name", NAMED)
def test_each_configured_term_missing_from_a_user_objective_is_named(name):
    settings, pattern = NAMED[name]
    (message,) = warnings_of(settings, total, has_critic=(name == "value loss"))
    assert "objective=... replaces the whole loss, and does not report" in message
    assert re.search(rf"the terms of {pattern}\. Compute these terms", message), message
    assert warnings_of(settings, that_reports(REPORTED_AS[name]), has_critic=name == "value loss") == []


def test_all_dropped_terms_are_named_in_one_warning_and_a_loss_of_the_policy_too(recwarn: pytest.WarningsRecorder):
    settings = {key: value for part, _ in NAMED.values() for key, value in part.items()}
    (message,) = warnings_of(settings, total, num_calls=3)
    assert all(message.count(f"{key}=") == 1 for key in settings)
    inputs = replace(inputs_for(ObjectiveConfig(), has_critic=False), auxiliary_loss=torch.tensor([[1.0]]))
    for own in (that_reports("auxiliary_loss"), total):
        MeteredObjective(GRPOConfig(), own, Meter()).of_sampled(inputs)
    (warning,) = recwarn
    assert "the terms of auxiliary_loss=" in str(warning.message)


@pytest.mark.parametrize(
    ("settings", "own", "has_critic"),
    [
        ({}, total, False),
        ({"surrogate": "cispo"}, total, False),  # part of the whole loss that is replaced
        ({"kl_coef": 0.0}, total, False),
        ({"value_coef": 0.75}, total, False),
        ({"value_coef": 0.0}, total, True),
        # the built-in one
        ({"entropy_coef": 0.5, "entropy_estimator": "score_function", "surrogate": "cispo"}, None, True),
    ],
)
def test_no_term_is_named_if_none_is_configured_or_dropped(settings, own, has_critic):
    assert warnings_of(settings, own, has_critic=has_critic) == []


LN2 = math.log(2.0)

# log(pi/ref) is ln 2 for action 0 and ln 2/3 for action 1; k3 = exp(-x) + x - 1; each action is taken twice.
K3 = [0.5 + LN2 - 1.0, 1.5 + math.log(2.0 / 3.0) - 1.0]
KL_MEAN, KL_STD = sum(K3) / 2, (K3[0] - K3[1]) / 2
# the KL's gradient adds, per row, 0.04 (1 - exp(-x)) (e - p) / 4: for a logit pair (g, -g) with
G = -0.125 + 0.04 / 4 * 0.5 * ((1 - 0.5) - (1 - 1.5))
OF_ONE_STEP = {
    "train/policy_loss": 0.0,  # ratios are 1 and advantages sum to 0
    **dict.fromkeys(["train/total_loss", "train/kl_penalty"], 0.04 * KL_MEAN),
    "train/kl_mean": KL_MEAN,
    "train/kl_std": KL_STD,
    **dict.fromkeys(["train/kl_coef", "train/kl_coef_next"], 0.04),
    **dict.fromkeys(["train/entropy_bonus", "train/entropy_coef", "train/entropy_coef_next", "train/value_loss"], 0.0),
    "train/entropy": LN2,
    "train/ratio_mean": 1.0,
    **dict.fromkeys(["train/ratio_std", "train/ratio_clamped_fraction", "train/clip_fraction"], 0.0),
    **dict.fromkeys(["train/clip_fraction_low", "train/clip_fraction_high", "train/advantages_mean"], 0.0),
    "train/advantages_std": 0.5,
    "train/grad_norm": 2.0 * abs(G),
    "train/learning_rate": 1.0,
    "train/num_updates": 1.0,
    "train/skipped_updates": 0.0,
    "rewards/mean": 2.0,
    "rewards/std": math.sqrt((1 + 4 + 1 + 4) / 3),
    "rewards/max": 4.0,
    "rewards/min": 0.0,
    "rewards/median": 2.0,
    "rewards/q25": 0.75,
    "rewards/q75": 3.25,
    **dict.fromkeys(["group_stats/num_groups", "group_stats/avg_group_size"], 2.0),
    "group_stats/zero_variance_fraction": 0.0,
    **dict.fromkeys(["rows/dropped", "rows/replayed", "rows/skipped_zero_advantage"], 0.0),
    **dict.fromkeys(["steps/mean", "steps/max"], 1.0),
}
METRICS = {*OF_ONE_STEP, *(f"time/{name}" for name in ("sample", "reward", "score", "update", "iteration"))}
"""Metrics that every iteration reports."""


def test_metrics_of_a_step_equal_hand_worked_values() -> None:
    metrics = by_hand(reference_policy=quarters())[0].step(["a", "b"])
    assert set(metrics) >= METRICS
    assert {name: metrics[name] for name in OF_ONE_STEP} == pytest.approx(OF_ONE_STEP, rel=1e-9, abs=1e-12)
    assert min(metrics[f"time/{part}"] for part in ("sample", "reward", "score")) >= 0
    assert metrics["time/iteration"] >= metrics["time/update"] > 0
    assert all(isinstance(value, float) for value in metrics.values())


def test_metrics_of_a_second_pass_see_the_changed_policy() -> None:
    """SGD of rate 8 moves the logits to (1, -1): p = e / (e + 1/e) = 0.8808, so ratios are 1.7616 and 0.2384.

    Both lie outside [0.8, 1.2]: the higher ones have advantage 1/2, the lower ones -1/2, so the second pass is
    clipped everywhere. Metrics are means over both passes; the loss of the second is -(1.2 - 0.8) / 4.
    """
    policy = TablePolicy(script=SCRIPT)
    optimizer = torch.optim.SGD(policy.parameters(), lr=8.0)
    trainer, _ = by_hand(policy=policy, optimizer=optimizer, config={"num_epochs_per_update": 2})
    metrics, high = trainer.step(["a", "b"]), 2 * math.e / (math.e + 1 / math.e)
    ratios = [1.0] * 4 + [high, 2 - high] * 2
    assert metrics["train/ratio_mean"] == pytest.approx(1.0)
    assert metrics["train/ratio_std"] == pytest.approx(float(np.std(ratios)))
    assert (metrics["train/clip_fraction"], metrics["train/clip_fraction_low"]) == (0.5, 0.25)
    assert metrics["train/clip_fraction_high"] == 0.25
    assert metrics["train/policy_loss"] == pytest.approx((0.0 - 0.1) / 2)
    assert metrics["train/grad_norm"] == pytest.approx((0.25 + 0.0) / 2)
    assert torch.equal(policy.logits.detach(), torch.tensor([[1.0, -1.0]] * 2, dtype=torch.float64))


UNMEASURED = {"train/entropy", "train/ratio_mean", "train/ratio_std"}
"""Metrics that need a forward pass."""


def test_without_a_forward_pass_losses_are_0_and_nothing_is_nan() -> None:
    """Without an advantage, no row is forwarded: there is no ratio, no entropy and no loss. The learning rate is reported."""
    metrics = by_hand(rewards=[1.0] * 4)[0].step(["a", "b"])
    assert set(metrics) >= METRICS - UNMEASURED
    assert (metrics["train/grad_norm"], metrics["train/learning_rate"]) == (0.0, 1.0)
    losses = ("total_loss", "policy_loss", "kl_penalty", "entropy_bonus", "value_loss")
    assert [metrics[f"train/{name}"] for name in losses] == [0.0] * 5
    assert not UNMEASURED & set(metrics)
    assert not any(math.isnan(value) for value in metrics.values())


@pytest.mark.parametrize("when", [(0,), (0, 1)])
def test_losses_are_means_over_the_updates_that_were_computed(when):
    """Two updates of two rows, none of which changes what the next one sees: the loss is that of all four rows."""
    policy = poisoned(TablePolicy(script=SCRIPT), *when)
    metrics = by_hand(policy=policy, reference_policy=quarters(), config={"batch_size": 2})[0].step(["a", "b"])
    assert metrics["train/skipped_updates"] == len(when)
    for name in ("kl_mean", "kl_penalty", "policy_loss", "total_loss"):
        assert metrics[f"train/{name}"] == pytest.approx(OF_ONE_STEP[f"train/{name}"]), name


def test_a_skipped_update_does_not_count_in_the_mean_of_the_losses() -> None:
    """One of two updates has a group without advantages and is never forwarded. The loss of the other is -(3 + 1)/2."""
    trainer, _ = by_hand(advantages=lambda batch: torch.tensor([3.0, 1.0, 0.0, 0.0]), config={"batch_size": 2})
    metrics = trainer.step(["a", "b"])
    assert metrics["train/skipped_updates"] == 1.0
    assert metrics["train/policy_loss"] == metrics["train/total_loss"] == -2.0


def test_an_update_that_raised_leaves_nothing_in_the_next_metrics() -> None:
    """The first of two forwards succeeds and the second raises. The next step has the metrics of an undisturbed trainer."""
    seen = []
    for breaks in (False, True):
        trainer, policy = by_hand(reference_policy=quarters(), config={"micro_batch_size": 2})
        score = policy.get_log_probabilities
        if breaks:  # both parts without gradient, then the first with one
            results = [DEFAULT, DEFAULT, DEFAULT, RuntimeError("out of memory")]
            policy.get_log_probabilities = Mock(wraps=score, side_effect=results)
            with pytest.raises(RuntimeError, match="out of memory"):
                trainer.step(["a", "b"])
            policy.get_log_probabilities = score
        seen.append((without_time(trainer.step(["a", "b"])), policy.logits.tolist()))
    assert seen[0] == seen[1]


def test_an_update_from_external_rollouts_reports_every_metric() -> None:
    trainer, _ = by_hand(policy=TablePolicy())
    metrics = trainer.update(ExperienceBatch.from_rows(["a", "a"], [0, 1], [1.0, 0.0], [0, 0]))
    assert set(metrics) >= METRICS
    assert metrics["rows/dropped"] == metrics["time/sample"] == metrics["time/reward"] == 0.0


def test_weighted_rewards_that_differ_by_rounding_alone_are_equal() -> None:
    """In float32, 0.1 + 0.2 and 0.3 are apart by 7e-9 before they are rounded; divided by their std they would be +-0.7."""
    parts = {"x": lambda s, a: torch.tensor([0.3, 0.1] * 2), "y": lambda s, a: torch.tensor([0.0, 0.2] * 2)}
    config = GRPOConfig(group_size=2, advantage=AdvantageConfig(scale="group"))
    trainer = GRPOTrainer(config=config, policy=TablePolicy(), reward_model=WeightedRewards(parts))
    assert trainer.advantages(trainer.collect(["a", "b"])).tolist() == [0.0] * 4


def test_advantages_of_valid_steps_are_averaged_and_their_rewards_are_summed() -> None:
    """(1, 3, 5): mean 3, std sqrt(8 / 3). Rows of two steps and of one: 1.5 on average."""
    mask = torch.tensor([[True, True], [True, False]])
    batch = ExperienceBatch.from_rows([0, 0], [0, 0], [[1.0, 2.0], [4.0, 50.0]], [0, 0], mask=mask)
    metrics = batch_metrics(TrainingRows(batch=batch, advantages=torch.tensor([[1.0, 3.0], [5.0, 99.0]])))
    assert metrics["train/advantages_mean"] == 3.0
    assert metrics["train/advantages_std"] == pytest.approx(math.sqrt(8 / 3))
    assert (metrics["steps/mean"], metrics["steps/max"]) == (1.5, 2.0)
    assert (metrics["rewards/mean"], metrics["rewards/max"], metrics["rewards/min"]) == (3.5, 4.0, 3.0)

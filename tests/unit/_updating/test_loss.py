"""The loss of an update. Metrics that a user objective does not report are NaN, and configured terms it drops are named."""

import json
import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from grpo import (
    ContractError,
    GRPOConfig,
    GRPOWarning,
    JSONLSink,
    ObjectiveConfig,
    ObjectiveInputs,
    ObjectiveOutput,
    grpo_objective,
)
from grpo._updating.loss import MeteredObjective
from grpo.metrics import Meter
from tests.support.trainers import by_hand, quarters

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


def test_metrics_of_a_user_objective_are_reported_as_it_returns_them() -> None:
    """It calls the built-in objective, so all that this one measures is measured; there is no critic."""
    loss = ObjectiveConfig(entropy_coef=0.1, entropy_estimator="score_function")
    ours, _ = by_hand(reference_policy=quarters(), config={"objective": loss})
    own = lambda inputs: grpo_objective(inputs, loss)  # noqa: E731
    theirs, _ = by_hand(reference_policy=quarters(), config={"objective": loss}, objective=own)
    expected, found = ours.step(["a", "b"]), theirs.step(["a", "b"])
    names = [name for name in expected if name.startswith("train/") and name != "train/value_loss"]
    assert {name: found[name] for name in names} == {name: pytest.approx(expected[name]) for name in names}


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
        (
            {"entropy_coef": 0.5, "entropy_estimator": "score_function", "surrogate": "cispo"},
            None,
            True,
        ),  # the built-in one
    ],
)
def test_no_term_is_named_if_none_is_configured_or_dropped(settings, own, has_critic):
    assert warnings_of(settings, own, has_critic=has_critic) == []


def test_a_trainer_warns_once_of_dropped_terms_and_does_not_require_their_inputs() -> None:
    """The policy has neither entropy nor behaviour log-probs. Only the built-in objective reads them, so they are not required.
    The KL is on by default."""
    objective = ObjectiveConfig(top_entropy_fraction=0.5, sampler_correction="truncate", surrogate="clip_cov")
    config = {"objective": objective, "batch_size": 2, "num_epochs_per_update": 2}
    trainer, policy = by_hand(reference_policy=quarters(), objective=total, config=config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.step(["a", "b"])
    (warning,) = caught
    assert warning.category is GRPOWarning
    assert "kl_coef=0.04" in str(warning.message)
    assert policy.logits.isfinite().all()


@pytest.mark.parametrize(("is_on", "num_compiled"), [(True, 1), (False, 0)])
def test_the_objective_is_compiled_only_on_request(is_on, num_compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Mock(side_effect=lambda function: function)
    monkeypatch.setattr(torch, "compile", compiled)
    trainer, policy = by_hand(objective=None, config={"compile_objective": is_on})
    trainer.step(["a", "b"])
    assert (compiled.call_count, policy.logits.tolist()) == (num_compiled, [[0.125, -0.125]] * 2)

"""`check_objective` on the losses of this library, and on losses that break one rule each."""

import pytest
import torch

from grpo import ObjectiveConfig, ObjectiveOutput
from grpo.checks import check_objective
from grpo.checks.objective import OBJECTIVE_RULES
from grpo.config import SURROGATES
from grpo.errors import ContractError
from grpo.surrogates import Clip
from tests.support.objective_inputs import as_users_run_it
from tests.support.published_bugs import loss, loss_with


def test_every_surrogate_and_ratio_level_of_this_library_keeps_the_identities(subtests) -> None:
    levels = [Clip(level=level) for level in ("row", "row_step", "none")]
    for surrogate in [*(name for name in SURROGATES if name != "clip_cov"), *levels]:  # clip_cov leaves steps out
        with subtests.test(surrogate=surrogate), as_users_run_it():
            for seed in range(3):
                report = check_objective(ObjectiveConfig(surrogate=surrogate), seed=seed)
                assert report.ok, str(report)


def test_kl_estimators_lower_the_kl_except_the_log_ratio_itself(subtests) -> None:
    for estimator, status in (("k1", "failed"), ("k2", "passed"), ("k3", "passed"), ("k3_weighted", "passed")):
        with subtests.test(estimator=estimator):
            assert check_objective(ObjectiveConfig(kl_estimator=estimator))["kl"].status == status


def test_the_product_over_the_row_is_told_to_differ_from_reinforce() -> None:
    [failure] = check_objective(ObjectiveConfig(surrogate=Clip(level="row_sum"))).failures
    assert failure.name == "policy gradient"


def scaled(output: ObjectiveOutput, factor: float) -> ObjectiveOutput:
    return ObjectiveOutput(loss=output.loss * factor, metrics={})


BROKEN = [
    (lambda inputs: loss(inputs).loss, "output", "must return ObjectiveOutput"),
    (lambda inputs: ObjectiveOutput(loss=loss(inputs).loss.detach(), metrics={}), "output", "carry a gradient"),
    (lambda inputs: scaled(loss(inputs), -1.0), "policy gradient", "-1 times as large"),
    (loss_with(advantages=lambda a: a.unsqueeze(0)), "policy gradient", "advantages.unsqueeze(1)"),
    (loss_with(log_ratio=lambda now, old: (now - old).detach()), "output", "carry a gradient"),
    (loss_with(valid=lambda values, mask: values), "mask", "no influence"),
    (
        lambda inputs: scaled(loss(inputs), 4 / inputs.mask.shape[1]),
        "padding",
        "Take no means over columns",
    ),
    (lambda inputs: scaled(loss(inputs), 4 / inputs.mask.shape[0]), "micro-batches", "Take no statistics over rows"),
    (loss_with(surrogate=torch.maximum), "bounds", "minimum of the two"),
    (loss_with(kl=lambda now, ref: now - ref), "kl", "expected gradient is 0"),
    (loss_with(kl=lambda now, ref: ref - now - (ref - now).exp()), "kl", "raises the KL"),
    (loss_with(log_probs=lambda values: values), "half precision", "float32 first"),
]


@pytest.mark.parametrize("broken", BROKEN, ids=[f"{name}: {fragment}" for _, name, fragment in BROKEN])
def test_a_broken_loss_fails_by_the_name_of_its_rule(broken) -> None:
    objective, name, fragment = broken
    with as_users_run_it():
        report = check_objective(objective)
    assert report[name].status == "failed", str(report)
    assert fragment in report[name].message


def test_every_rule_has_a_loss_that_breaks_it_and_a_correct_loss_breaks_none() -> None:
    assert {name for _, name, _ in BROKEN} == {rule.name for rule in OBJECTIVE_RULES}
    assert check_objective(loss, strict=True).ok
    with pytest.raises(ContractError, match=r"check_objective\(<lambda>\) breaks 1 of 8 rules:\n- kl"):
        check_objective(loss_with(kl=lambda now, ref: now - ref), strict=True)
    assert check_objective(loss_with(kl=lambda now, ref: now - ref), skip=["kl"]).ok

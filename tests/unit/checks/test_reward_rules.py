"""The conformance kit for rewards: conforming rewards pass, and for every rule there is one that breaks just that rule."""

import copy
import math

import pytest
import torch

from grpo import ObjectiveConfig, ObjectiveOutput, WeightedRewards
from grpo.checks import check_objective, check_reward_model
from grpo.checks.kit import REWARD_RULES
from grpo.checks.objective import OBJECTIVE_RULES
from grpo.config import SURROGATES
from grpo.errors import ContractError
from grpo.surrogates import Clip
from tests.support.checked_policies import raising, statuses
from tests.support.objective_inputs import as_users_run_it
from tests.support.published_bugs import loss, loss_with


def right(states, actions):
    return [float(action == "yes") for action in actions]


ROW_STATES, ROW_ACTIONS = [{"q": 1}, {"q": 1}, {"q": 2}, {"q": 2}], ["yes", "no", "no", "yes"]


class Reward:
    """All methods of a reward model."""

    def compute_rewards(self, states, actions):
        return torch.tensor(right(states, actions))

    def train(self): ...

    def eval(self): ...

    def to(self, device): ...


@pytest.mark.parametrize("reward", [right, Reward(), WeightedRewards({"right": right, "other": Reward()})])
def test_conforming_rewards_pass_every_check(reward):
    report = check_reward_model(reward, ROW_STATES, ROW_ACTIONS, strict=True)
    expected = dict.fromkeys([rule.name for rule in REWARD_RULES], "passed")
    if not isinstance(reward, WeightedRewards):
        expected["components"] = "absent"
    assert statuses(report) == expected


def reward(**methods):
    return type("BrokenReward", (Reward,), methods)()


def forgetting_copies(states, actions):
    for state in states:
        state["q"] = 0
    return right(states, actions)


def popping(states, actions):
    found = right(states, actions)
    actions.pop()
    return found


BROKEN_REWARDS = [
    (object(), "methods", "failed", "lacks compute_rewards(), train(), eval(), to()"),
    (reward(eval=raising), "methods", "failed", "not today"),
    (reward(in_group=raising), "methods", "failed", "Rename in_group to in_groups"),
    (reward(compute_rewards=raising), "inputs unchanged", "failed", "not today"),
    (forgetting_copies, "inputs unchanged", "failed", "it changed states"),
    (popping, "inputs unchanged", "failed", "it changed actions"),
    (lambda states, actions: right(states, actions)[1:], "reward shape", "failed", "[N] = [4]"),
    (lambda states, actions: torch.ones(4, 1), "reward shape", "failed", "Squeeze the last axis"),
    (lambda states, actions: ["good"] * 4, "reward shape", "failed", "tensor of numbers"),
    (lambda states, actions: [1.0, math.nan, 0.0, 1.0], "rewards finite", "failed", "rows [1] are not"),
    (
        WeightedRewards({"a": right, "b": lambda states, actions: [math.inf, 1, 1, 1]}),
        "components",
        "failed",
        "components must be finite; b is not",
    ),
    (lambda states, actions: torch.rand(4), "repeatable", "note", "random or depend on earlier calls"),
    (lambda s, a: [1.0, 2.0, 3.0, 4.0], "order of rows", "note", "depend on the order of rows, by up to 1.5"),
]


@pytest.mark.parametrize(("broken", "name", "status", "fragment"), BROKEN_REWARDS)
def test_a_broken_reward_fails_by_the_name_of_its_rule(broken, name, status, fragment):
    report = check_reward_model(broken, copy.deepcopy(ROW_STATES), list(ROW_ACTIONS))
    assert report[name].status == status, str(report)
    assert fragment in report[name].message
    assert not {result.name for result in report.failures} - {name}, str(report)


def test_every_reward_rule_has_a_reward_that_breaks_it():
    assert {name for _, name, *_ in BROKEN_REWARDS} == {rule.name for rule in REWARD_RULES}


def test_a_strict_reward_check_raises_and_lengths_have_to_agree():
    with pytest.raises(ContractError, match="rewards finite: "):
        check_reward_model(lambda states, actions: [math.nan] * 4, ROW_STATES, ROW_ACTIONS, strict=True)
    with pytest.raises(ContractError, match="actions must have one entry per row = 4"):
        check_reward_model(right, ROW_STATES, ROW_ACTIONS[1:])


LEVELS = [Clip(level=level) for level in ("row", "row_step", "none")]


@pytest.mark.parametrize("surrogate", [*(name for name in SURROGATES if name != "clip_cov"), *LEVELS])
def test_every_surrogate_and_ratio_level_of_this_library_keeps_the_identities(surrogate) -> None:
    """`clip_cov` leaves steps out."""
    with as_users_run_it():
        for seed in range(3):
            report = check_objective(ObjectiveConfig(surrogate=surrogate), seed=seed)
            assert report.ok, str(report)


@pytest.mark.parametrize(
    ("estimator", "status"), [("k1", "failed"), ("k2", "passed"), ("k3", "passed"), ("k3_weighted", "passed")]
)
def test_kl_estimators_lower_the_kl_except_the_log_ratio_itself(estimator, status):
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
    (lambda inputs: scaled(loss(inputs), 4 / inputs.mask.shape[1]), "padding", "Take no means over columns"),
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

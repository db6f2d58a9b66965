"""The conformance kit for rewards: conforming rewards pass, and for every rule there is one that breaks just that rule."""

import copy
import math

import pytest
import torch

from grpo import WeightedRewards
from grpo.checks import check_reward_model
from grpo.checks.kit import REWARD_RULES
from grpo.errors import ContractError
from tests.support.checked_policies import raising, statuses


def right(states, actions):
    return [float(action == "yes") for action in actions]


ROW_STATES, ROW_ACTIONS = [{"q": 1}, {"q": 1}, {"q": 2}, {"q": 2}], ["yes", "no", "no", "yes"]


class Reward:
    """All methods of a reward model."""

    def compute_rewards(self, states, actions):
        return torch.tensor(right(states, actions))

    def train(self):
        pass

    def eval(self):
        pass

    def to(self, device):
        pass


def test_conforming_rewards_pass_every_check(subtests):
    for reward in [right, Reward(), WeightedRewards({"right": right, "other": Reward()})]:
        with subtests.test(reward=type(reward).__name__):
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
    (
        lambda states, actions: [1.0, 2.0, 3.0, 4.0],
        "order of rows",
        "note",
        "depend on the order of rows, by up to 1.5",
    ),
]


def test_a_broken_reward_fails_by_the_name_of_its_rule(subtests):
    for broken, name, status, fragment in BROKEN_REWARDS:
        with subtests.test(rule=name, fragment=fragment):
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

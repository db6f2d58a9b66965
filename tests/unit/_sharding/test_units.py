"""Which modules are gathered on their own, and which are gathered with the modules around them."""

from typing import Any

import pytest
import torch
from torch import nn

from grpo._sharding.units import undivided, units_of
from grpo.errors import ConfigError, ContractError


class Policy(nn.Module):
    def __init__(self, units: Any = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2)])
        self.scalar = nn.Parameter(torch.zeros(()))
        if units is not None:
            self.shard_units = lambda: units(self)


class Holder:
    def __init__(self, units: Any) -> None:
        self.shard_units = lambda: units


def test_a_module_without_units_is_one_unit() -> None:
    policy = Policy()
    assert units_of(policy) == ([], [policy])
    assert undivided([policy]) == {policy.scalar}


def test_units_are_divided_inside_out_and_the_policy_is_around_them() -> None:
    policy = Policy(lambda self: [self.blocks[0], self.blocks[0][0], self.blocks[1]])
    inner, outer = units_of(policy)
    assert inner == [policy.blocks[0][0], policy.blocks[1], policy.blocks[0]]
    assert outer == [policy]


def test_a_policy_that_is_no_module_names_its_modules_and_what_is_around_them() -> None:
    model, head = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 1)
    assert units_of(Holder([*model, model, head])) == ([*model], [model, head])
    assert units_of(Holder((head, head))) == ([], [head])


def test_units_that_are_no_modules_are_refused() -> None:
    for units in ("model", [1], [nn.Linear(1, 1), "head"], {1}):
        with pytest.raises(ContractError, match=r"Holder[.]shard_units must return a list of modules; got"):
            units_of(Holder(units))
    for policy in (Holder([]), object()):
        with pytest.raises(ConfigError, match=r"is no torch[.]nn[.]Module[.] Add a method shard_units"):
            units_of(policy)


def test_a_weight_of_two_units_is_refused_unless_one_contains_the_other() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    with pytest.raises(ConfigError, match=r"each weight in one unit; weight of Holder is in two"):
        units_of(Holder([first, second, nn.Sequential(first, second)]))
    whole = nn.Sequential(first, second)
    assert units_of(Holder([whole])) == ([], [whole])
    outer = nn.Sequential(whole)
    assert units_of(Holder([first, whole, outer]))[0] == [first, whole]


def test_one_unit_has_one_trained_dtype() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(
        ConfigError, match=r"one dtype in each unit of Holder; one unit has torch[.]float32, torch[.]float64"
    ):
        units_of(Holder([model]))
    assert units_of(Holder([*model, model]))[0] == [*model]
    model[1].requires_grad_(False)
    assert units_of(Holder([model])) == ([], [model])
    model[1] = nn.Linear(2, 2).to(torch.float32)
    model[1].register_parameter("codes", nn.Parameter(torch.ones(1, dtype=torch.uint8), requires_grad=False))
    with pytest.raises(ConfigError, match=r"cannot divide quantised weights; 1[.]codes of Holder is torch[.]uint8"):
        units_of(Holder([model]))

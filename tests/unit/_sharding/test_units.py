"""Which modules are gathered on their own, and which are gathered with the modules around them."""

from typing import Any

import pytest
import torch
from torch import nn

from grpo._sharding.tensors import address_of, copy_into, in_parts, is_sharded, local, own_rows
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


def test_units_are_divided_inside_out_and_what_is_around_them_comes_last():
    policy = Policy()
    assert (units_of(policy), undivided([policy])) == (([], [policy]), {policy.scalar})
    policy = Policy(lambda self: [self.blocks[0], self.blocks[0][0], self.blocks[1]])
    inner, outer = units_of(policy)
    assert (inner, outer) == ([policy.blocks[0][0], policy.blocks[1], policy.blocks[0]], [policy])
    model, head = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 1)
    assert units_of(Holder([*model, model, head])) == ([*model], [model, head])
    assert units_of(Holder((head, head))) == ([], [head])


@pytest.mark.parametrize("units", ["model", [1], [nn.Linear(1, 1), "head"], {1}])
def test_units_that_are_no_modules_are_refused(units):
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
    assert units_of(Holder([first, whole, nn.Sequential(whole)]))[0] == [first, whole]


def test_one_unit_has_one_trained_dtype() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    message = r"one dtype in each unit of Holder; one unit has torch[.]float32, torch[.]float64"
    with pytest.raises(ConfigError, match=message):
        units_of(Holder([model]))
    assert units_of(Holder([*model, model]))[0] == [*model]
    model[1].requires_grad_(False)
    assert units_of(Holder([model])) == ([], [model])
    model[1] = nn.Linear(2, 2).to(torch.float32)
    model[1].register_parameter("codes", nn.Parameter(torch.ones(1, dtype=torch.uint8), requires_grad=False))
    with pytest.raises(ConfigError, match=r"cannot divide quantised weights; 1[.]codes of Holder is torch[.]uint8"):
        units_of(Holder([model]))


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 5, 7, 8, 12])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_the_rows_of_a_rank_are_those_of_its_chunk(num_rows: int, num_ranks: int) -> None:
    rows = torch.arange(num_rows)
    chunks = [chunk.tolist() for chunk in rows.chunk(num_ranks)] if num_rows else []
    found = [rows[own_rows(num_rows, rank, num_ranks)].tolist() for rank in range(num_ranks)]
    assert found == (chunks + [[]] * num_ranks)[:num_ranks]


def test_an_ordinary_tensor_is_its_only_part() -> None:
    value = torch.arange(3.0)
    address = value.data_ptr()
    assert not is_sharded(value)
    assert local(value) is value
    assert (in_parts([value]), address_of(value), address_of(value[1:])) == (([], [value]), address, address + 4)
    assert (address_of(value[3:]), address_of(torch.empty(0))) == (address, 0)  # a part without rows
    copy_into(value, torch.tensor([1.0, 2.0, 4.0]))
    assert (value.tolist(), value.data_ptr()) == ([1.0, 2.0, 4.0], address)

"""Composite distributions: entropies of parts, large integers, and masks without categories."""

import pytest
import torch
from gymnasium import spaces

from adapters.control.policy.distributions import Composite, distribution_for
from grpo.errors import ConfigError, ContractError
from tests.support.control_distributions import BOX, EVERY, NESTED, random_parameters


def test_the_entropy_is_the_sum_over_the_parts() -> None:
    nested = EVERY["nested"]
    parameters = random_parameters(nested)
    parts = zip(nested.parts, parameters.split([9, 5, 4], -1), strict=True)
    torch.testing.assert_close(nested.entropy(parameters), sum(part.entropy(own) for part, own in parts))
    assert distribution_for(NESTED["arm"], "squashed").entropy(torch.zeros(1, 9)) is None  # a part has no closed form


def test_large_integer_actions_are_exact() -> None:
    distribution = distribution_for(spaces.Tuple([spaces.Discrete(100_000, start=2**40), spaces.Box(0, 1, (1,))]))
    parameters = torch.zeros(1, 100_002)
    parameters[0, 99_999] = 100.0
    assert distribution.mode(parameters)[0, 0] == 99_999
    assert distribution.to_env(distribution.mode(parameters))[0][0] == 2**40 + 99_999


def test_a_composite_of_boxes_refuses_masks() -> None:
    boxes = distribution_for(spaces.Tuple([BOX, BOX]))
    with pytest.raises(ContractError, match="Composite has no categories that a mask could exclude"):
        boxes.mode(torch.zeros(4, 8), torch.ones(4, 2, dtype=torch.bool))


def test_at_least_one_part_is_required() -> None:
    with pytest.raises(ConfigError, match="needs at least one part"):
        distribution_for(spaces.Tuple([]))
    with pytest.raises(ConfigError, match="needs at least one part"):
        Composite({})

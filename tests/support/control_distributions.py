"""Action distributions of every kind, samples and masks for them, and torch's distributions to compare with."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import distributions as oracle

from adapters.control.policy.distributions import (
    ActionDistribution,
    Categorical,
    Composite,
    MultiCategorical,
    distribution_for,
)

LOW, HIGH = np.array([-2.0, 0.5], np.float32), np.array([1.0, 0.75], np.float32)
DISCRETE = spaces.Discrete(5, start=-3)
RAGGED = spaces.MultiDiscrete(np.array([[3, 2], [4, 1]]), start=np.array([[1, 0], [-2, 7]]))
EVEN = spaces.MultiDiscrete([3, 3])
BITS = spaces.MultiBinary([2, 2])
BOX = spaces.Box(LOW, HIGH)
NESTED = spaces.Dict(  # Gymnasium sorts the names: arm, gripper, speed
    {
        "gripper": spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiBinary(2)]),
        "arm": spaces.Dict({"wheels": spaces.MultiDiscrete([2, 3]), "joints": BOX}),
        "speed": spaces.Box(-np.inf, np.inf, (1, 2)),
    }
)
EVERY: dict[str, Any] = {
    "discrete": distribution_for(DISCRETE),
    "ragged": distribution_for(RAGGED),
    "even": distribution_for(EVEN),
    "bits": distribution_for(BITS),
    "gaussian": distribution_for(BOX),
    "squashed": distribution_for(BOX, "squashed"),
    "beta": distribution_for(BOX, "beta"),
    "nested": distribution_for(NESTED),
}
ROUNDING = {torch.float64: 1e-10, torch.float32: 2e-5}
"""Tolerance of a log-prob or entropy. In float32: about 30 roundings of 6e-8 each, in numbers up to about 10."""

MASKED = ("discrete", "ragged", "even", "nested")
"""The distributions that support masks."""


def random_parameters(
    distribution: ActionDistribution, num_rows: int = 40, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    return torch.randn(num_rows, distribution.num_parameters, dtype=dtype)


def draw(
    distribution: ActionDistribution, parameters: torch.Tensor, allowed: torch.Tensor | None = None, seed: int = 0
) -> torch.Tensor:
    noise = distribution.noise(np.random.default_rng(seed), len(parameters))
    assert noise.shape == (len(parameters), distribution.num_noise)
    assert noise.dtype == np.float32
    return distribution.sample(parameters, torch.from_numpy(noise), allowed)


def random_mask(distribution: ActionDistribution, num_rows: int) -> torch.Tensor:
    """A mask that allows about half of the categories, and always the first one of every variable."""
    allowed = torch.rand(num_rows, distribution.num_categories) < 0.5
    allowed[:, first_categories(distribution)] = True
    return allowed


def first_categories(distribution: ActionDistribution) -> list[int]:
    match distribution:
        case Categorical():
            return [0]
        case MultiCategorical():
            return [sum(distribution.sizes[:d]) for d in range(len(distribution.sizes))]
        case Composite():
            offsets = np.cumsum([0, *(part.num_categories for part in distribution.parts)])
            pairs = zip(offsets, distribution.parts, strict=False)
            return [int(offset) + first for offset, part in pairs for first in first_categories(part)]
    return []


def logit_columns(distribution: ActionDistribution) -> list[int]:
    """Columns of the parameters that are logits of maskable categories."""
    if distribution is EVERY["nested"]:  # joints 4 | wheels 5 | grip 3 | bits 2 | speed 4
        return [*range(4, 12)]
    return list(range(distribution.num_categories))


def box_oracle(name: str, parameters: torch.Tensor) -> oracle.Distribution:
    first, second = parameters.chunk(2, -1)
    std = second.clamp(-20, 2).exp()
    low, high = torch.from_numpy(LOW).double(), torch.from_numpy(HIGH).double()
    match name:
        case "gaussian":
            return oracle.Normal((low + high) / 2 + (high - low) / 2 * first, (high - low) / 2 * std)
        case "unbounded":
            return oracle.Normal(first, std)
        case "squashed":
            affine = oracle.AffineTransform((low + high) / 2, (high - low) / 2)
            return oracle.TransformedDistribution(oracle.Normal(first, std), [oracle.TanhTransform(), affine])
        case "beta":
            shapes = (1 + torch.nn.functional.softplus(values) for values in (first, second))
            return oracle.TransformedDistribution(oracle.Beta(*shapes), [oracle.AffineTransform(low, high - low)])
    raise AssertionError(name)


def expected_log_prob(name: str, parameters: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    match name:
        case "discrete":
            return oracle.Categorical(logits=parameters).log_prob(actions)
        case "ragged" | "even":
            parts = parameters.split(EVERY[name].sizes, -1)
            columns = zip(parts, actions.unbind(-1), strict=True)
            return sum(oracle.Categorical(logits=logits).log_prob(taken) for logits, taken in columns)
        case "bits":
            return oracle.Bernoulli(logits=parameters).log_prob(actions.double()).sum(-1)
        case "nested":  # arm (joints, wheels), gripper (discrete, bits), speed: names in alphabetical order
            joints, wheels, grip, bits, speed = parameters.split([4, 5, 3, 2, 4], -1)
            return (
                box_oracle("gaussian", joints).log_prob(actions[:, :2]).sum(-1)
                + oracle.Categorical(logits=wheels[:, :2]).log_prob(actions[:, 2])
                + oracle.Categorical(logits=wheels[:, 2:]).log_prob(actions[:, 3])
                + oracle.Categorical(logits=grip).log_prob(actions[:, 4])
                + oracle.Bernoulli(logits=bits).log_prob(actions[:, 5:7]).sum(-1)
                + box_oracle("unbounded", speed).log_prob(actions[:, 7:]).sum(-1)
            )
    return box_oracle(name, parameters).log_prob(actions).sum(-1)

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


def parts_of(name: str, parameters: torch.Tensor) -> list[tuple[oracle.Distribution, Any]]:
    """Independent distributions, and the columns of an action that they are of."""
    match name:
        case "discrete":
            return [(oracle.Categorical(logits=parameters), 0)]
        case "ragged" | "even":
            parts = parameters.split(EVERY[name].sizes, -1)
            return [(oracle.Categorical(logits=logits), column) for column, logits in enumerate(parts)]
        case "bits":
            return [(oracle.Bernoulli(logits=parameters), slice(None))]
        case "nested":  # arm (joints, wheels), gripper (discrete, bits), speed: names in alphabetical order
            joints, wheels, grip, bits, speed = parameters.split([4, 5, 3, 2, 4], -1)
            return [
                (box_oracle("gaussian", joints), slice(0, 2)),
                (oracle.Categorical(logits=wheels[:, :2]), 2),
                (oracle.Categorical(logits=wheels[:, 2:]), 3),
                (oracle.Categorical(logits=grip), 4),
                (oracle.Bernoulli(logits=bits), slice(5, 7)),
                (box_oracle("unbounded", speed), slice(7, 9)),
            ]
    return [(box_oracle(name, parameters), slice(None))]


def expected_log_prob(name: str, parameters: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    columns = actions.double().reshape(len(actions), -1)
    log_probs = [law.log_prob(columns[:, place]) for law, place in parts_of(name, parameters)]
    return torch.stack([each.reshape(len(actions), -1).sum(-1) for each in log_probs]).sum(0)


def expected_entropy(name: str, parameters: torch.Tensor) -> torch.Tensor:
    def of(law: oracle.Distribution) -> torch.Tensor:
        if isinstance(law, oracle.TransformedDistribution):  # from [0, 1] to the bounds of a box
            (affine,) = law.transforms
            return law.base_dist.entropy() + affine.scale.log()  # type: ignore[attr-defined]
        return law.entropy()

    laws = [law for law, _ in parts_of(name, parameters)]
    return torch.stack([of(law).reshape(len(parameters), -1).sum(-1) for law in laws]).sum(0)

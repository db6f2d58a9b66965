"""Observations as tensors: what Gymnasium's `flatten` gives, and running moments as numpy computes them."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from adapters.control.policy.observations import MAX_DEVIATION, ObservationEncoder, RunningNormalizer
from grpo.errors import ConfigError
from tests.support.control_environments import GOALS, space_of_everything

FLAT = [
    spaces.Box(-1.0, 1.0, (3,), np.float64),
    spaces.Box(-1.0, 1.0, (2, 3), np.float32),
    spaces.Box(-5, 5, (), np.int64),
    spaces.Box(0, 255, (4, 4), np.uint8),
    spaces.Discrete(5),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([3, 2, 4]),
    spaces.MultiDiscrete([[3, 2], [4, 2]], start=[[1, 0], [-3, 2]]),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
    spaces.Tuple((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float64))),
    GOALS,
    space_of_everything(),
]


def batch_of(space: spaces.Space, num_rows: int) -> tuple[list[Any], Any]:
    """Samples, and the same as environments' pools give them."""
    space.seed(3)
    samples = [space.sample() for _ in range(num_rows)]
    return samples, concatenate(space, samples, create_empty_array(space, num_rows))


@pytest.mark.parametrize("space", FLAT, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_as_gymnasium_flattens(space: spaces.Space, num_rows: int) -> None:
    samples, batch = batch_of(space, num_rows)
    encoder = ObservationEncoder(space)
    encoded = encoder(batch)
    assert encoded.dtype == encoder.dtype == torch.float32
    assert encoder.shape == (spaces.flatdim(space),)
    expected = np.stack([spaces.flatten(space, sample).astype(np.float32) for sample in samples])
    np.testing.assert_array_equal(encoded.numpy(), expected)
    assert len(np.unique(expected, axis=0)) == 1 if num_rows == 1 else len(np.unique(expected, axis=0)) > 1


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_images_stay_as_they_are(dtype: Any) -> None:
    space = spaces.Box(0, 255, (6, 5, 3), dtype)
    encoder = ObservationEncoder(space)
    _, batch = batch_of(space, 2)
    encoded = encoder(batch)
    assert (encoder.is_image, encoder.shape, encoded.dtype) == (True, (6, 5, 3), encoder.dtype)
    np.testing.assert_array_equal(encoded.numpy(), batch, strict=True)


@pytest.mark.parametrize("space", [FLAT[1], spaces.Box(0, 255, (6, 5, 3), np.uint8)], ids=str)
def test_what_is_encoded_is_a_copy(space: spaces.Space) -> None:
    _, batch = batch_of(space, 2)
    encoded = ObservationEncoder(space)(batch)
    before = encoded.clone()
    batch[:] = 0
    torch.testing.assert_close(encoded, before, rtol=0, atol=0)
    assert before.any()


@pytest.mark.parametrize(
    "space", [spaces.Text(3), spaces.Sequence(spaces.Discrete(2)), spaces.Dict(words=spaces.Text(3))], ids=str
)
def test_spaces_without_a_fixed_size(space: spaces.Space) -> None:
    with pytest.raises(ConfigError, match=r"no fixed size. Wrap the environment"):
        ObservationEncoder(space)


@pytest.mark.parametrize("sizes", [[60], [1, 59], [20, 20, 20], [7, 1, 1, 51]])
@pytest.mark.parametrize("num_begins", [1, 99])
def test_moments_are_those_of_everything_seen(sizes: list[int], num_begins: int) -> None:
    seen = torch.randn(60, 3, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 300.0]) + torch.tensor([5.0, 0.0, 1e4])
    normalizer = RunningNormalizer((3,))
    for place, part in enumerate(seen.split(sizes)):
        normalizer.see(part)
        if place < num_begins - 1:
            normalizer.begin()
    normalizer.begin()
    np.testing.assert_allclose(normalizer.mean, seen.numpy().mean(0), rtol=1e-12)
    np.testing.assert_allclose(normalizer.squares / normalizer.count, seen.numpy().var(0), rtol=1e-9)
    x = torch.tensor([[5.001, 0.5, 10100.0]])
    expected = (x.double() - seen.mean(0)) / (seen.var(0, correction=0) + 1e-8).sqrt()
    torch.testing.assert_close(normalizer(x), expected.float(), rtol=1e-3, atol=1e-3)  # float32: 10100 has 7 digits


def test_what_is_seen_counts_from_the_next_beginning() -> None:
    normalizer = RunningNormalizer((1,))
    x = torch.tensor([[3.0]])
    assert normalizer(x).item() == 3.0  # nothing is known: as it is
    normalizer.begin()
    normalizer.see(torch.tensor([[1.0], [3.0]]))  # mean 2, variance 1
    assert normalizer(x).item() == 3.0
    normalizer.begin()
    assert normalizer(x).item() == pytest.approx(1.0)
    normalizer.begin()  # nothing new
    assert normalizer(x).item() == pytest.approx(1.0)


def test_bounded_and_constants_are_zero() -> None:
    normalizer = RunningNormalizer((2,))
    normalizer.see(torch.tensor([[7.0, 0.0], [7.0, 2.0]]))
    normalizer.begin()
    assert normalizer(torch.tensor([[7.0, 1e9], [7.0, -1e9]])).tolist() == [[0.0, MAX_DEVIATION], [0.0, -MAX_DEVIATION]]


def test_moments_are_state() -> None:
    first, second = RunningNormalizer((2,)), RunningNormalizer((2,))
    first.see(torch.randn(5, 2))
    first.begin()
    first.see(torch.randn(4, 2))
    second.load_state_dict(first.state_dict())
    x = torch.randn(3, 2)
    for normalizer in (first, second):
        normalizer.train()
    torch.testing.assert_close(second(x), first(x), rtol=0, atol=0)
    first.begin()
    second.begin()
    torch.testing.assert_close(second(x), first(x), rtol=0, atol=0)

"""Observations are encoded as Gymnasium's `flatten` does, and normalised by the moments that numpy computes."""

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
    """Samples, and the batch of them that a pool returns."""
    space.seed(3)
    samples = [space.sample() for _ in range(num_rows)]
    return samples, concatenate(space, samples, create_empty_array(space, num_rows))


def test_observations_are_encoded_as_gymnasium_flattens_them(subtests: pytest.Subtests) -> None:
    for space in FLAT:
        for num_rows in (1, 5):
            with subtests.test(space=str(space), num_rows=num_rows):
                samples, batch = batch_of(space, num_rows)
                encoder = ObservationEncoder(space)
                encoded = encoder(batch)
                assert encoded.dtype == encoder.dtype == torch.float32
                assert encoder.shape == (spaces.flatdim(space),)
                expected = np.stack([spaces.flatten(space, sample).astype(np.float32) for sample in samples])
                np.testing.assert_array_equal(encoded.numpy(), expected)
                assert (len(np.unique(expected, axis=0)) > 1) == (num_rows > 1)


def test_images_keep_shape_and_dtype(subtests: pytest.Subtests) -> None:
    for dtype in (np.uint8, np.float32):
        with subtests.test(dtype=dtype):
            space = spaces.Box(0, 255, (6, 5, 3), dtype)
            encoder = ObservationEncoder(space, keeps_images=True)
            _, batch = batch_of(space, 2)
            encoded = encoder(batch)
            assert ObservationEncoder(space).shape == (90,)
            assert ObservationEncoder(spaces.Box(0, 255, (36, 36, 1), dtype)).is_image
            assert (encoder.is_image, encoder.shape, encoded.dtype) == (True, (6, 5, 3), encoder.dtype)
            np.testing.assert_array_equal(encoded.numpy(), batch, strict=True)


def test_the_encoded_observations_are_a_copy(subtests: pytest.Subtests) -> None:
    for space in (FLAT[1], spaces.Box(0, 255, (6, 5, 3), np.uint8)):
        with subtests.test(space=str(space)):
            _, batch = batch_of(space, 2)
            encoded = ObservationEncoder(space)(batch)
            before = encoded.clone()
            batch[:] = 0
            torch.testing.assert_close(encoded, before, rtol=0, atol=0)
            assert before.any()


def test_spaces_without_a_fixed_size_are_refused(subtests: pytest.Subtests) -> None:
    for space in (spaces.Text(3), spaces.Sequence(spaces.Discrete(2)), spaces.Dict(words=spaces.Text(3))):
        with (
            subtests.test(space=str(space)),
            pytest.raises(ConfigError, match=r"no fixed size. Wrap the environment"),
        ):
            ObservationEncoder(space)


def test_moments_include_all_observations(subtests: pytest.Subtests) -> None:
    seen = torch.randn(60, 3, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 300.0]) + torch.tensor([5.0, 0.0, 1e4])
    for sizes in ([60], [1, 59], [20, 20, 20], [7, 1, 1, 51]):
        for num_begins in (1, 99):
            with subtests.test(sizes=sizes, num_begins=num_begins):
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
                # float32 rounds 5.001 by up to 2.4e-7, which is 2.4e-4 standard deviations of 1e-3
                torch.testing.assert_close(normalizer(x), expected.float(), rtol=1e-3, atol=1e-3)


def test_new_observations_take_effect_when_the_next_iteration_begins() -> None:
    normalizer = RunningNormalizer((1,))
    x = torch.tensor([[3.0]])
    assert normalizer(x).item() == 3.0  # unchanged without statistics
    normalizer.begin()
    normalizer.see(torch.tensor([[1.0], [3.0]]))  # mean 2, variance 1
    assert normalizer(x).item() == 3.0
    normalizer.begin()
    assert normalizer(x).item() == pytest.approx(1.0)
    normalizer.begin()  # without new observations
    assert normalizer(x).item() == pytest.approx(1.0)


def test_normalised_observations_are_clamped_and_constants_become_0() -> None:
    normalizer = RunningNormalizer((2,))
    normalizer.see(torch.tensor([[7.0, 0.0], [7.0, 2.0]]))
    normalizer.begin()
    assert normalizer(torch.tensor([[7.0, 1e9], [7.0, -1e9]])).tolist() == [[0.0, MAX_DEVIATION], [0.0, -MAX_DEVIATION]]


def test_statistics_are_saved_with_the_state() -> None:
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

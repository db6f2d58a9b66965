"""Episode starts, and how the steps of episodes are padded to a batch."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adapters.control.environments.episodes import Episode, EpisodeStart, episode_mask, episode_starts, pad_to_steps
from grpo.errors import ConfigError
from tests.support.plain_states import assert_same, through_checkpoint


def episode(length: int) -> Episode:
    return Episode(
        observations=torch.zeros(length, 2),
        actions=torch.zeros(length, dtype=torch.int64),
        rewards=torch.zeros(length, dtype=torch.float64),
        terminated=True,
        truncated=False,
        final_observation=torch.zeros(2),
        log_probs=torch.zeros(length),
    )


def test_starts_repeat_in_every_run_and_differ_between_iterations() -> None:
    drawn = [start.seed for iteration in range(50) for start in episode_starts(3)(iteration)]
    assert drawn == [start.seed for iteration in range(50) for start in episode_starts(3)(iteration)]
    assert len(set(drawn)) == 150
    assert all(seed is not None and 0 <= seed < 2**32 for seed in drawn)  # the range that Gymnasium accepts
    assert not set(drawn) & {start.seed for iteration in range(50) for start in episode_starts(3, seed=1)(iteration)}


def test_at_least_one_group_is_required() -> None:
    with pytest.raises(ConfigError, match="num_groups must be an integer >= 1; got int 0"):
        episode_starts(0)
    with pytest.raises(ConfigError, match="seed must be an integer >= 0; got int -1"):
        episode_starts(1, seed=-1)


def test_episode_starts_are_compared_by_value() -> None:
    assert EpisodeStart(seed=3, options={"x": 1}) == EpisodeStart(seed=3, options={"x": 1}) != EpisodeStart(seed=4)


def test_episodes_are_compared_by_identity() -> None:
    """Comparison by value would raise, because comparing tensors gives no single bool."""
    first, second = episode(3), episode(3)
    assert [second, first].index(first) == 1
    assert len({first, second}) == 2


def test_steps_are_padded_row_by_row_and_differentiably() -> None:
    mask = episode_mask([episode(2), episode(3), episode(1)])
    assert mask.tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    values = torch.arange(1.0, 7.0, requires_grad=True)
    padded = pad_to_steps(values, mask)
    assert padded.tolist() == [[1.0, 2.0, 0.0], [3.0, 4.0, 5.0], [6.0, 0.0, 0.0]]
    (padded * torch.tensor([[1.0, 1.0, math.pi], [1.0, 1.0, 2.0], [3.0, math.pi, math.pi]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 1.0, 1.0, 1.0, 2.0, 3.0]


def test_episodes_come_back_from_a_checkpoint(tmp_path: Path, subtests: pytest.Subtests) -> None:
    record = torch.rand(5, 2)  # episodes are views of one record
    first = replace(episode(3), observations=record[:3], log_probs=torch.tensor([-0.1, float("nan"), -0.0]))
    second = replace(
        episode(2),
        observations=record[3:],
        actions=torch.tensor([[0.5, 1.5], [2.5, 3.5]], dtype=torch.float64),
        terminated=False,
        truncated=True,
        allowed=torch.tensor([[True, False], [True, True]]),
    )
    images = replace(episode(1), observations=torch.zeros(1, 2, 2, dtype=torch.uint8))
    for name, given in {"first": first, "second": second, "images": images, "empty": episode(0)}.items():
        with subtests.test(episode=name):
            assert_same(through_checkpoint(given, tmp_path / name), given)
    assert first.to_state()["observations"] is first.observations

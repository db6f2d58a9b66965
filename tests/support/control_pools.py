"""Episodes through a pool and through single environments, to be compared bit for bit."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from adapters.control.environments.episodes import EpisodeStart
from adapters.control.environments.pools import EnvironmentPool

Row = tuple[Any, float, bool, bool]
"""Observation, reward, terminated, truncated."""


def starts_of(*seeds: int) -> list[EpisodeStart]:
    return [EpisodeStart(seed=seed) for seed in seeds]


def action_of(space: gymnasium.Space, rng: np.random.Generator) -> Any:
    if isinstance(space, spaces.Discrete):
        return rng.integers(space.n)
    assert isinstance(space, spaces.Box)
    return rng.uniform(space.low, space.high).astype(space.dtype)


def stepped_by_hand(env: gymnasium.Env, start: EpisodeStart, number: int, max_steps: int = 999) -> list[Row]:
    """One episode of a single environment. Its actions are drawn from a generator with the seed `number`."""
    rng = np.random.default_rng(number)
    observation, _ = env.reset(seed=start.seed, options=None if start.options is None else dict(start.options))
    rows: list[Row] = [(np.array(observation), 0.0, False, False)]
    while len(rows) <= max_steps and not rows[-1][2] and not rows[-1][3]:
        observation, reward, terminated, truncated, _ = env.step(action_of(env.action_space, rng))
        rows.append((np.array(observation), float(reward), terminated, truncated))
    return rows


def stepped_by_pool(pool: EnvironmentPool, starts: list[EpisodeStart], max_steps: int = 999) -> list[list[Row]]:
    """The same episodes through a pool. A member whose episode ends starts the next waiting episode."""
    rows: list[list[Row]] = [[] for _ in starts]
    rngs = [np.random.default_rng(number) for number in range(len(starts))]
    waiting, free = list(range(len(starts))), list(range(pool.num_members))
    running: dict[int, int] = {}
    while waiting or running:
        started = {free.pop(): waiting.pop(0) for _ in range(min(len(free), len(waiting)))}
        if started:
            observations, infos = pool.reset(list(started), [starts[number] for number in started.values()])
            assert len(infos) == len(started)
            for row, number in enumerate(started.values()):
                rows[number].append((np.array(observations[row]), 0.0, False, False))
        running.update(started)
        members = np.array(list(running), dtype=np.int64)
        step = pool.step(members, np.array([action_of(pool.action_space, rngs[running[m]]) for m in members.tolist()]))
        assert step.rewards.dtype == np.float64
        for row, member in enumerate(members.tolist()):
            number = running[member]
            ends = bool(step.terminated[row]), bool(step.truncated[row])
            rows[number].append((np.array(step.observations[row]), step.rewards[row], *ends))
            if any(ends) or len(rows[number]) > max_steps:
                free.append(member)
                del running[member]
    return rows


def assert_same_rows(got: list[Row], expected: list[Row]) -> None:
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine[0], theirs[0], strict=True)
        assert mine[1:] == theirs[1:]

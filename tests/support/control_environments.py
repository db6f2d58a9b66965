"""Small and fast environments that the tests of adapters/control share, and a pool that records its calls."""

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from adapters.control.environments.episodes import EpisodeStart
from adapters.control.environments.pools import EnvironmentPool, PoolStep, WorkerLost

UNIT = spaces.Box(-1.0, 1.0, (2,), np.float32)
LIMIT = 1_000
"""Time limit of the environments here that end their episodes themselves, long before."""


class Chance(gymnasium.Env):
    """Observes (a number drawn at the reset, the step's number, a number drawn at the step). The last one is the reward.

    An episode ends after `length` steps, or when the drawn number is above `end_above`. Actions change nothing.
    """

    spec = EnvSpec("Chance", max_episode_steps=LIMIT)
    observation_space = spaces.Box(0.0, 100.0, (3,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, length: int = 5, end_above: float = 2.0) -> None:
        self.length, self.end_above = length, end_above
        self.num_steps = 0
        self.first = 0.0
        self.time = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.first, self.time = (options or {}).get("first", self.np_random.random()), 0
        return np.array([self.first, 0.0, 0.0], dtype=np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        self.time += 1
        drawn = self.np_random.random()
        ended = self.time >= self.length or drawn > self.end_above
        return np.array([self.first, self.time, drawn], dtype=np.float32), float(drawn), ended, False, {}


class Walk(gymnasium.Env):
    """A walk with wind. `snapshot` and `restore` are its own. Each step draws from the environment's generator."""

    spec = EnvSpec("Walk", max_episode_steps=30)
    observation_space = spaces.Box(-100.0, 100.0, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self) -> None:
        self.place, self.wind = 0.0, 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.wind = float(self.np_random.normal()), 0.0
        return self.look(), {}

    def look(self) -> Any:
        return np.array([self.place, self.wind], dtype=np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.wind = 0.5 * self.wind + float(self.np_random.normal())
        self.place += float(action) - 1.0 + self.wind
        return self.look(), self.place, bool(abs(self.place) > 20.0), False, {}

    def snapshot(self) -> Any:
        return self.place, self.wind

    def restore(self, state: Any) -> None:
        self.place, self.wind = state


class Spaces(gymnasium.Env):
    """An environment of any spaces: observations are seeded samples, and the reward is a weighted sum of the action's numbers.

    An episode ends after `length` steps: it is truncated if `is_cut_off`, otherwise terminated.
    """

    spec = EnvSpec("Spaces", max_episode_steps=LIMIT)

    def __init__(
        self, observation_space: spaces.Space, action_space: spaces.Space, length: int = 4, is_cut_off: bool = False
    ) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.length, self.is_cut_off = length, is_cut_off
        self.time = 0
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.time = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.actions.append(action)
        self.time += 1
        over = self.time >= self.length
        flat = spaces.flatten(self.action_space, action)
        reward = float(flat @ np.arange(1.0, len(flat) + 1.0))
        return self.observation_space.sample(), reward, over and not self.is_cut_off, over and self.is_cut_off, {}


class Crossing(gymnasium.Env):
    """Five actions. `info["action_mask"]` allows different ones at every step, and any other action is an error."""

    spec = EnvSpec("Crossing", max_episode_steps=LIMIT)
    observation_space = spaces.Box(0.0, 1.0, (5,), np.float32)
    action_space = spaces.Discrete(5)

    def __init__(self, tells: bool = True, allows: int = 2, length: int = 6) -> None:
        self.tells, self.allows, self.length = tells, allows, length
        self.time = 0
        self.mask = np.ones(5, dtype=np.int8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._look()

    def _look(self) -> tuple[Any, dict[str, Any]]:
        self.mask = np.zeros(5, dtype=np.int8)
        self.mask[self.np_random.permutation(5)[: self.allows]] = 1
        return self.mask.astype(np.float32), {"action_mask": self.mask} if self.tells else {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.mask[action], f"{action} is not allowed, {self.mask}"
        self.time += 1
        observation, info = self._look()
        return observation, float(action), self.time >= self.length, False, info


GOALS = spaces.Dict(
    {
        "observation": spaces.Box(-1.0, 1.0, (3,), np.float64),
        "achieved_goal": spaces.Box(-1.0, 1.0, (2,), np.float64),
        "desired_goal": spaces.Box(-1.0, 1.0, (2,), np.float64),
    }
)


def space_of_everything() -> spaces.Dict:
    """A nested space with every kind of space that has a fixed size."""
    return spaces.Dict(
        {
            "pair": spaces.Tuple((spaces.Discrete(4, start=2), spaces.Box(-1.0, 1.0, (2, 3), np.float32))),
            "bits": spaces.MultiBinary([2, 2]),
            "wheels": spaces.MultiDiscrete([3, 2]),
            "deep": spaces.Dict({"one": spaces.Discrete(2), "two": spaces.Box(-1.0, 1.0, (), np.float64)}),
        }
    )


class Watched:
    """A pool that records its calls, and loses a worker in the calls of `step` in `lost_in` (counted from 0)."""

    def __init__(self, pool: EnvironmentPool, lost_in: Sequence[int] = (), *, lost_at_reset: bool = False) -> None:
        self.pool = pool
        self.lost_in, self.lost_at_reset = lost_in, lost_at_reset
        self.num_members, self.observation_space = pool.num_members, pool.observation_space
        self.action_space, self.max_episode_steps = pool.action_space, pool.max_episode_steps
        self.num_calls = 0
        self.stepped: list[list[int]] = []
        self.begun: list[tuple[int, EpisodeStart]] = []
        self.stale: set[int] = set()

    def reset(self, members: Sequence[int], starts: Sequence[EpisodeStart]) -> tuple[Any, list[dict[str, Any]]]:
        if self.lost_at_reset:
            self.lost_at_reset = False
            raise WorkerLost(members, "member 0, which ended with exit code 7")
        self.begun += zip(members, starts, strict=True)
        self.stale -= set(members)
        return self.pool.reset(members, starts)

    def step(self, members: Any, actions: Any) -> PoolStep:
        call, self.num_calls = self.num_calls, self.num_calls + 1
        if call in self.lost_in:
            self.stale = set(range(self.num_members))  # every member has to be reset
            raise WorkerLost(members.tolist()[:1], f"member {members[0]}, which ended with exit code 7")
        assert not self.stale & set(members.tolist())
        self.stepped.append(members.tolist())
        return self.pool.step(members, actions)

    def close(self) -> None:
        self.pool.close()


class Command(IntEnum):
    """The actions of `Scripted`."""

    FINE = 0
    END = 1
    RAISE = 2
    EXIT = 3
    HANG = 4
    """Sleeps for a minute, and ignores SIGTERM."""
    INTERRUPT = 5
    """Sends SIGUSR1 to the process that owns the pool, and answers later."""
    NAN = 6
    WRONG_SHAPE = 7
    """As many numbers as the space, in another shape."""
    WRONG_DTYPE = 8
    NARROWED = 9
    """float64 where the space has float32, which is allowed."""
    INFINITE_REWARD = 10
    NO_REWARD = 11


class Scripted(gymnasium.Env):
    """Does what its action says. Observes (a number drawn at the reset or given as an option, the step of the episode).

    The reset option `observation` is returned as the first observation, whatever it is.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(len(Command))

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_closed = 0
        self.time = 0
        self.number = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        options = options or {}
        if options.get("raises"):
            raise TypeError("no such start")
        self.number, self.time = options.get("number", self.np_random.random()), 0
        return options.get("observation", self._observation()), {"starts": True}

    def _observation(self) -> Any:
        return np.array([self.number, self.time], dtype=np.float32)

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        self.time += 1
        observation: Any = self._observation()
        reward: Any = 2.0
        match Command(int(action)):
            case Command.RAISE:
                raise ArithmeticError("out of paper")
            case Command.EXIT:
                os._exit(7)
            case Command.HANG:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(60)
            case Command.INTERRUPT:
                owner = multiprocessing.parent_process()
                assert owner.pid is not None
                os.kill(owner.pid, signal.SIGUSR1)
                time.sleep(0.1)
            case Command.NAN:
                observation[1] = np.nan
            case Command.WRONG_SHAPE:
                observation = observation[:, None]
            case Command.WRONG_DTYPE:
                observation = observation.astype(np.complex64)
            case Command.NARROWED:
                observation = observation.astype(np.float64)
            case Command.INFINITE_REWARD:
                reward = -np.inf
            case Command.NO_REWARD:
                reward = "much"
        return observation, reward, action == Command.END, False, {"step": self.time}

    def close(self) -> None:
        self.num_closed += 1


class Nested(gymnasium.Env):
    """Observes samples of a nested space, drawn from the reset's seed."""

    observation_space = spaces.Dict(
        {
            "pair": spaces.Tuple((spaces.Discrete(9), spaces.Box(-9, 9, (3,), np.float64))),
            "bits": spaces.MultiBinary(2),
            "wheels": spaces.MultiDiscrete([3, 4]),
        }
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 0.0, False, False, {}

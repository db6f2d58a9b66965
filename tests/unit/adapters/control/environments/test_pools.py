"""Pools: bit for bit what environments stepped by hand give, and what happens when environments misbehave."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from adapters.control.environments.episodes import EpisodeStart
from adapters.control.environments.pool_base import find_misfit
from adapters.control.environments.pools import (
    AsyncPool,
    EnvironmentPool,
    NativeCartPole,
    SerialPool,
    WorkerLost,
    make_pool,
)
from adapters.control.environments.snapshots import take_snapshot
from grpo.errors import ConfigError, ContractError

FINE, RAISE, EXIT, HANG, IGNORE_SIGTERM, PAUSE, NAN, SHAPE, DTYPE, NARROW, INF_REWARD, NO_REWARD, END = range(13)


class Obedient(gymnasium.Env):
    """Does what its action says; observes (seeded number, step of the episode)."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(13)

    def __init__(self) -> None:
        self.calls = 0
        self.step_of_episode = 0
        self.number = 0.0
        self.closed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.number = (options or {}).get("number", self.np_random.random())
        self.step_of_episode = 0
        return self.observe(), {"begins": True}

    def observe(self) -> Any:
        return np.array([self.number, self.step_of_episode], dtype=np.float32)

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.calls += 1
        self.step_of_episode += 1
        observation, reward = self.observe(), 2.0
        match int(action):
            case 1:  # RAISE
                raise ArithmeticError("out of paper")
            case 2:  # EXIT
                os._exit(7)
            case 3:  # HANG
                time.sleep(60)
            case 4:  # IGNORE_SIGTERM
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(60)
            case 5:  # PAUSE
                time.sleep(0.3)
            case 6:  # NAN
                observation[1] = np.nan
            case 7:  # SHAPE: as many numbers
                observation = observation[:, None]
            case 8:  # DTYPE
                observation = observation.astype(np.complex64)
            case 9:  # NARROW
                observation = observation.astype(np.float64)
            case 10:  # INF_REWARD
                reward = -np.inf
            case 11:  # NO_REWARD
                return observation, "much", False, False, {}
        return observation, reward, action == END, False, {"step": self.step_of_episode}

    def close(self) -> None:
        self.closed += 1


class Nested(gymnasium.Env):
    """Observes a nest of everything that can be batched."""

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


@pytest.fixture
def opened() -> Iterator[Callable[[EnvironmentPool], Any]]:
    """Closes what it was given, and sees that no worker stays behind."""
    pools: list[EnvironmentPool] = []

    def keep(pool: EnvironmentPool) -> Any:
        pools.append(pool)
        return pool

    yield keep
    for pool in pools:
        pool.close()
        pool.close()
    assert multiprocessing.active_children() == []


def starts_of(*seeds: int) -> list[EpisodeStart]:
    return [EpisodeStart(seed=seed) for seed in seeds]


def action_of(space: gymnasium.Space, rng: np.random.Generator) -> Any:
    if isinstance(space, spaces.Discrete):
        return rng.integers(space.n)
    assert isinstance(space, spaces.Box)
    return rng.uniform(space.low, space.high).astype(space.dtype)


def by_hand(env: gymnasium.Env, start: EpisodeStart, number: int, max_steps: int) -> list[tuple[Any, ...]]:
    """Rows (observation, reward, terminated, truncated), the actions drawn from the episode's own generator."""
    rng = np.random.default_rng(number)
    observation, _ = env.reset(seed=start.seed, options=None if start.options is None else dict(start.options))
    rows: list[tuple[Any, ...]] = [(np.array(observation), 0.0, False, False)]
    while len(rows) <= max_steps and not rows[-1][2] and not rows[-1][3]:
        observation, reward, terminated, truncated, _ = env.step(action_of(env.action_space, rng))
        rows.append((np.array(observation), float(reward), terminated, truncated))
    return rows


def through_pool(pool: EnvironmentPool, starts: list[EpisodeStart], max_steps: int) -> list[list[tuple[Any, ...]]]:
    """The same with replacement: whoever ends begins the next episode that waits, until none is left."""
    rows: list[list[tuple[Any, ...]]] = [[] for _ in starts]
    rngs = [np.random.default_rng(number) for number in range(len(starts))]
    waiting, running, free = list(range(len(starts))), {}, list(range(pool.num_members))
    while waiting or running:
        begun = {free.pop(): waiting.pop(0) for _ in range(min(len(free), len(waiting)))}
        if begun:
            observations, infos = pool.reset(list(begun), [starts[number] for number in begun.values()])
            assert len(infos) == len(begun)
            for row, number in enumerate(begun.values()):
                rows[number].append((np.array(observations[row]), 0.0, False, False))
        running.update(begun)
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


def assert_same(got: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine[0], theirs[0], strict=True)
        assert mine[1:] == theirs[1:]


NO_WARNING_FOR_V0 = pytest.mark.filterwarnings(
    "ignore:.*CartPole-v0 is out of date:DeprecationWarning"
)  # its 200 steps


@NO_WARNING_FOR_V0
@pytest.mark.parametrize(
    ("env_id", "vectorization", "max_steps"),
    [
        ("CartPole-v1", "native", 999),
        ("CartPole-v0", "native", 999),
        ("CartPole-v1", "sync", 999),
        ("CartPole-v1", "async", 999),
        ("Pendulum-v1", "sync", 999),  # truncated by TimeLimit
        ("FrozenLake-v1", "sync", 999),  # Discrete observations, random transitions
        ("HalfCheetah-v5", "sync", 20),
        ("HalfCheetah-v5", "async", 20),
    ],
)
def test_episodes_are_those_of_environments_stepped_by_hand(
    env_id: str, vectorization: Any, max_steps: int, opened: Callable
) -> None:
    starts = starts_of(*range(7))
    if env_id.startswith("CartPole"):
        starts[3] = EpisodeStart(seed=3, options={"low": -0.2, "high": 0.1})
        starts[4] = EpisodeStart(seed=4, options={"low": -0.01})
    pool = opened(make_pool(env_id, 3, vectorization=vectorization))
    single = gymnasium.make(env_id)
    for number, episode in enumerate(through_pool(pool, starts, max_steps)):
        assert_same(episode, by_hand(single, starts[number], number, max_steps))
    single.close()


@pytest.mark.parametrize("num_members", [1, 2, 5, 64])
def test_native_arithmetic_does_not_depend_on_the_number_of_columns(num_members: int) -> None:
    pool, single = NativeCartPole(num_members), gymnasium.make("CartPole-v1")
    episodes = through_pool(pool, starts_of(*range(num_members)), 999)
    for number, episode in enumerate(episodes):
        assert_same(episode, by_hand(single, EpisodeStart(seed=number), number, 999))


@NO_WARNING_FOR_V0
@pytest.mark.parametrize(
    ("env_id", "env_kwargs", "limit"),
    [("CartPole-v0", {}, 200), ("CartPole-v1", {}, 500), ("CartPole-v1", {"max_episode_steps": 30}, 30)],
)
def test_native_time_limit(env_id: str, env_kwargs: dict[str, Any], limit: int) -> None:
    """A balancing rule keeps the pole up until it is cut off."""
    pool = make_pool(env_id, 2, **env_kwargs)
    assert isinstance(pool, NativeCartPole)
    observations, _ = pool.reset([0, 1], starts_of(0, 1))
    for number in range(1, limit + 1):
        actions = (observations[:, 2] + 0.3 * observations[:, 3] + 0.05 * observations[:, 1] > 0).astype(np.int64)
        step = pool.step(np.array([0, 1]), actions)
        observations = step.observations
        assert step.truncated.tolist() == [number == limit] * 2
        assert not step.terminated.any()


def test_native_sutton_barto_reward() -> None:
    pool = make_pool("CartPole-v1", 1, sutton_barto_reward=True)
    assert isinstance(pool, NativeCartPole)
    pool.reset([0], starts_of(0))
    rewards, ended = [], False
    while not ended:
        step = pool.step(np.array([0]), np.array([1]))
        rewards.append(step.rewards[0])
        ended = step.terminated[0]
    assert rewards == [0.0] * (len(rewards) - 1) + [-1.0]


def test_native_generators_go_on_without_a_seed() -> None:
    pool, single = NativeCartPole(2), gymnasium.make("CartPole-v1")
    pool.reset([0, 1], starts_of(5, 6))
    again, _ = pool.reset([1], [EpisodeStart()])
    single.reset(seed=6)
    np.testing.assert_array_equal(again[0], single.reset()[0])


def test_native_actions_are_not_cut_off() -> None:
    pool = NativeCartPole(1)
    pool.reset([0], starts_of(0))
    with pytest.raises(ContractError, match=r"whole numbers, 0 or 1; got float64 \[1\]"):
        pool.step(np.array([0]), np.array([0.7]))
    for action in (2, -1):
        with pytest.raises(ContractError, match=rf"whole numbers, 0 or 1; got \[{action}\]"):
            pool.step(np.array([0]), np.array([action]))


@pytest.mark.parametrize("integrator", ["euler", "semi-implicit euler"])
def test_native_settings_are_those_of_the_vector_environment(integrator: str) -> None:
    """Each of them another than CartPole's; the episode goes on past the angle at which CartPole's would end."""
    settings = {"kinematics_integrator": integrator, "gravity": 7.0, "force_mag": 5.0, "tau": 0.01}
    settings |= {"masspole": 0.3, "total_mass": 1.7, "length": 0.8, "polemass_length": 0.24}
    settings |= {"theta_threshold_radians": 0.7, "x_threshold": 0.5}
    vector: Any = gymnasium.make_vec("CartPole-v1", 1, vectorization_mode="vector_entry_point")
    single: Any = gymnasium.make("CartPole-v1")
    for env in (vector.unwrapped, single.unwrapped):
        vars(env).update(settings)
    for number, episode in enumerate(through_pool(make_pool(vector, 1), starts_of(3, 4), 999)):
        assert_same(episode, by_hand(single, EpisodeStart(seed=3 + number), number, 999))
        assert max(abs(observation[2]) for observation, *_ in episode) > 0.25


def test_a_cart_pole_that_computes_something_else_is_not_native() -> None:
    class Other(CartPoleVectorEnv):
        pass

    with pytest.raises(ConfigError, match="Other cannot be stepped member by member"):
        make_pool(Other(2), 2)


@pytest.mark.parametrize("vectorization", ["native", "sync", "async"])
def test_who_is_not_named_does_not_move(vectorization: Any, opened: Callable) -> None:
    """Member 1 rests, in the middle of its episode, while member 0 runs to its end and beyond."""
    pool, single = opened(make_pool("CartPole-v1", 2, vectorization=vectorization)), gymnasium.make("CartPole-v1")
    pool.reset([0, 1], starts_of(0, 1))
    single.reset(seed=1)
    for action in (0, 1, 1):
        pool.step(np.array([1, 0]), np.array([action, 0]))
        single.step(action)
    ended = False
    while not ended:
        ended = pool.step(np.array([0]), np.array([1])).terminated[0]
    pool.reset([0], starts_of(9))
    pool.step(np.array([0]), np.array([0]))
    observations = pool.step(np.array([1]), np.array([1])).observations
    np.testing.assert_array_equal(observations[0], single.step(1)[0])


def test_native_members_rest_just_before_their_end() -> None:
    """One step before it would fall, and one before it is cut off: what the columns do meanwhile leaves no trace."""
    single = gymnasium.make("CartPole-v1")
    single.reset(seed=1)
    fall = [single.step(1)]
    while not fall[-1][2]:
        fall.append(single.step(1))
    pool = NativeCartPole(2, max_episode_steps=len(fall))
    pool.reset([0, 1], starts_of(0, 1))
    for _ in fall[:-1]:
        pool.step(np.array([1]), np.array([1]))
    for number in range(len(fall)):
        if number % 5 == 0:  # member 0 stays alive
            pool.reset([0], starts_of(0))
        pool.step(np.array([0]), np.array([0]))
    step = pool.step(np.array([1]), np.array([1]))
    np.testing.assert_array_equal(step.observations[0], fall[-1][0])
    assert (step.rewards[0], step.terminated[0], step.truncated[0]) == (1.0, True, True)
    pool.reset([1], starts_of(1))
    for action in [0, 1] * 3:
        assert not pool.step(np.array([1]), np.array([action])).truncated.any()
        pool.reset([0], starts_of(0))
        for _ in range(4):
            pool.step(np.array([0]), np.array([0]))
    assert not pool.step(np.array([1]), np.array([0])).truncated.any()  # its 7th step, after 24 of the columns'


def test_a_sync_vector_env_is_stepped_member_by_member() -> None:
    vector = SyncVectorEnv([Obedient] * 3)
    pool = make_pool(vector, 3, infos=True)
    pool.reset([0, 1, 2], starts_of(0, 1, 2))
    step = pool.step(np.array([2, 0]), np.array([END, FINE]))
    assert step.terminated.tolist() == [True, False]
    assert step.infos == [{"step": 1}, {"step": 1}]
    pool.step(np.array([0]), np.array([FINE]))
    assert [env.calls for env in vector.envs] == [2, 0, 1]
    observations, infos = pool.reset([2], [EpisodeStart(options={"number": 4.0})])
    assert observations.tolist() == [[4.0, 0.0]]
    assert infos == [{"begins": True}]
    pool.close()
    pool.close()
    assert [env.closed for env in vector.envs] == [1, 1, 1]


def test_infos_only_where_asked(opened: Callable) -> None:
    for pool in (SerialPool([Obedient()]), NativeCartPole(1), opened(AsyncPool([Obedient]))):
        pool.reset([0], starts_of(0))
        assert pool.step(np.array([0]), np.array([FINE])).infos is None
    pool = opened(AsyncPool([Obedient], infos=True))
    pool.reset([0], starts_of(0))
    assert list(pool.step(np.array([0]), np.array([FINE])).infos) == [{"step": 1}]
    native = NativeCartPole(2, infos=True)
    native.reset([0, 1], starts_of(0, 1))
    assert native.step(np.array([0, 1]), np.array([0, 0])).infos == [{}, {}]


def test_nests_of_observations(opened: Callable) -> None:
    single = Nested()
    for pool in (SerialPool([Nested(), Nested()]), opened(AsyncPool([Nested, Nested]))):
        pool.reset([0, 1], starts_of(0, 1))
        observations, _ = pool.reset([1, 0], starts_of(8, 9))
        if isinstance(pool, AsyncPool):  # the serial pool's members share one space, and its generator
            expected, _ = single.reset(seed=8)
            np.testing.assert_array_equal(observations["pair"][1][0], expected["pair"][1])
            assert observations["pair"][0][0] == expected["pair"][0]
        step = pool.step(np.array([1]), np.array([0]))
        assert isinstance(step.observations["pair"], tuple)
        shapes = [part.shape for part in (*step.observations["pair"], step.observations["bits"])]
        assert shapes == [(1,), (1, 3), (1, 2)]
        assert Nested.observation_space.contains(
            {
                "pair": tuple(part[0] for part in step.observations["pair"]),
                "bits": step.observations["bits"][0],
                "wheels": step.observations["wheels"][0],
            }
        )


@pytest.mark.parametrize("vectorization", ["native", "sync", "async"])
def test_members_begin_from_a_snapshot(vectorization: Any, opened: Callable) -> None:
    """The trunk and two branches, one of them in a member that was never reset, up to the time limit."""
    trunk = gymnasium.make("CartPole-v1", max_episode_steps=12)
    trunk.reset(seed=3)
    for action in (0, 1, 1, 0, 1):
        observation, *_ = trunk.step(action)
    snapshot = take_snapshot(trunk, observation)
    pool = opened(make_pool("CartPole-v1", 2, vectorization=vectorization, max_episode_steps=12))
    observations, _ = pool.reset([1], [EpisodeStart(snapshot=snapshot)])
    np.testing.assert_array_equal(observations[0], observation)
    observations, _ = pool.reset([0], [EpisodeStart(snapshot=snapshot)])
    for action in (0, 1, 0, 1, 0, 1, 0):
        expected = trunk.step(action)
        step = pool.step(np.array([0, 1]), np.array([action, action]))
        np.testing.assert_array_equal(step.observations, np.stack([expected[0]] * 2))
        assert step.truncated.tolist() == [expected[3]] * 2
    assert step.truncated.all()
    after, _ = pool.reset([1], [EpisodeStart()])  # the generator came with the snapshot
    np.testing.assert_array_equal(after[0], trunk.reset()[0])


def test_a_snapshot_with_other_settings_does_not_fit_the_columns() -> None:
    trunk = gymnasium.make("CartPole-v1", max_episode_steps=50)
    observation, _ = trunk.reset(seed=0)
    with pytest.raises(ConfigError, match=r"\['max_episode_steps'\] differ. Use vectorization='sync'"):
        NativeCartPole(1).reset([0], [EpisodeStart(snapshot=take_snapshot(trunk, observation))])
    trunk.unwrapped.gravity = 1.6
    with pytest.raises(ConfigError, match=r"\['gravity', 'max_episode_steps'\] differ"):
        NativeCartPole(1).reset([0], [EpisodeStart(snapshot=take_snapshot(trunk, observation))])


def test_a_foreign_snapshot_is_not_a_lost_worker(opened: Callable) -> None:
    trunk = gymnasium.make("Acrobot-v1")
    snapshot = take_snapshot(trunk, trunk.reset(seed=0)[0])
    pool = opened(make_pool("CartPole-v1", 2, vectorization="async"))
    with pytest.raises(ContractError, match=r"CartPole-v1, member 1, step 0: restore_snapshot: .*Acrobot-v1"):
        pool.reset([1], [EpisodeStart(snapshot=snapshot)])


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        (NAN, "the observation holds NaN or infinity"),
        (SHAPE, r"the observation must be float32 \[2\]; got float32 \[2, 1\]"),
        (DTYPE, r"the observation must be float32 \[2\]; got complex64 \[2\]"),
        (INF_REWARD, "the reward must be finite; got -inf"),
        (NO_REWARD, "the reward must be a number; got 'much'"),
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_bad_environments_are_named(kind: str, command: int, fault: str, opened: Callable) -> None:
    pool = opened(make_pool(Obedient, 2, vectorization=kind))
    for _ in range(2):  # the pool goes on to be of use
        pool.reset([0, 1], starts_of(0, 1))
        for _ in range(2):
            pool.step(np.array([0, 1]), np.array([FINE, NARROW]))
        with pytest.raises(ContractError, match=f"Obedient, member 1, step 3: {fault}"):
            pool.step(np.array([0, 1]), np.array([FINE, command]))


class BadStart(Obedient):
    """Its first observation is what it was made with."""

    def __init__(self, first: Any) -> None:
        super().__init__()
        self.first = first

    def observe(self) -> Any:
        return self.first


@pytest.mark.parametrize(
    ("first", "fault"),
    [(np.array([0, np.inf], dtype=np.float32), "holds NaN"), (np.float32(1.0), r"\[2\]; got float32 \[\]")],
)
def test_bad_beginnings_are_named(first: Any, fault: str, opened: Callable) -> None:
    for pool in (SerialPool([Obedient(), BadStart(first)]), opened(AsyncPool([Obedient, partial(BadStart, first)]))):
        with pytest.raises(ContractError, match=f"Obedient, member 1, step 0: the observation .*{fault}"):
            pool.reset([0, 1], starts_of(0, 1))


@pytest.mark.parametrize(
    ("space", "observation", "misfit"),
    [
        (spaces.Discrete(3), 2, None),
        (spaces.Discrete(3), np.int32(2), None),
        (spaces.Discrete(3), 2.0, "must be int64 []; got float64 []"),
        (spaces.Box(0, 1, (2,)), [0, 1], None),
        (spaces.Box(0, 1, (2,)), None, "must be float32 [2]; got object []"),
        (spaces.Box(0, 1, (2,)), [[1], [1, 2]], "must be float32 [2]; got list of uneven rows"),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"b": 1}, "must be a dict with the keys ['a']; got the keys ['b']"),
        (spaces.Dict({"a": spaces.Discrete(2)}), 1, "must be a dict with the keys ['a']; got int"),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"a": [1]}, "['a'] must be int64 []; got int64 [1]"),
        (spaces.Tuple([spaces.Discrete(2)]), (1, 2), "must be a tuple of 1; got 2"),
        (spaces.Tuple([spaces.Discrete(2)]), [1], "must be a tuple of 1; got list"),
    ],
)
def test_misfits_in_words(space: gymnasium.Space, observation: Any, misfit: str | None) -> None:
    assert find_misfit(space, observation) == misfit


@pytest.mark.parametrize("vectorization", ["native", "sync", "async"])
def test_only_running_episodes_are_stepped(vectorization: Any, opened: Callable) -> None:
    pool = opened(make_pool("CartPole-v1", 2, vectorization=vectorization))
    pool.reset([0], starts_of(0))
    with pytest.raises(ContractError, match=r"CartPole-v1: step\(\) takes members.*\[1\] were not reset"):
        pool.step(np.array([0, 1]), np.array([0, 0]))
    ended = False
    while not ended:
        ended = pool.step(np.array([0]), np.array([0])).terminated[0]
    with pytest.raises(ContractError, match=r"\[0\] were not reset"):
        pool.step(np.array([0]), np.array([0]))


@pytest.mark.parametrize("vectorization", ["native", "sync", "async"])
def test_closed_pools(vectorization: Any) -> None:
    pool = make_pool("CartPole-v1", 1, vectorization=vectorization)
    pool.reset([0], starts_of(0))
    pool.close()
    pool.close()
    with pytest.raises(ConfigError, match="the pool is closed"):
        pool.step(np.array([0]), np.array([0]))
    with pytest.raises(ConfigError, match="the pool is closed"):
        pool.reset([0], starts_of(0))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (RAISE, "raised ArithmeticError: out of paper"),
        (EXIT, "ended with exit code 7"),
        (HANG, "gave no answer within 1 s"),
        (IGNORE_SIGTERM, "gave no answer within 1 s"),
    ],
)
def test_lost_workers_are_named_and_the_pool_goes_on(command: int, reason: str, opened: Callable) -> None:
    pool = opened(AsyncPool([Obedient] * 3, timeout=1.0))
    pool.reset([0, 1, 2], starts_of(0, 1, 2))
    pool.step(np.array([0, 1, 2]), np.array([FINE] * 3))
    began = time.monotonic()
    with pytest.raises(WorkerLost, match=f"Lost the worker of member 2, which {reason}") as lost:
        pool.step(np.array([0, 2]), np.array([FINE, command]))
    assert time.monotonic() - began < 20.0  # nobody waits for the sleeper
    assert lost.value.members == [2]
    assert pool.num_rebuilds == 1
    with pytest.raises(ContractError, match=r"\[0, 1\] were not reset"):
        pool.step(np.array([0, 1]), np.array([FINE] * 2))
    observations, _ = pool.reset([2, 0], starts_of(2, 0))
    np.testing.assert_array_equal(observations[0], Obedient().reset(seed=2)[0])
    assert pool.step(np.array([2]), np.array([FINE])).rewards.tolist() == [2.0]


def kill_worker(member: int) -> None:
    (worker,) = (child for child in multiprocessing.active_children() if child.name.endswith(f"-{member}"))
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()


def test_a_killed_worker_is_found_when_it_is_called(opened: Callable) -> None:
    pool = opened(AsyncPool([Obedient] * 3))
    pool.reset([0, 1, 2], starts_of(0, 1, 2))
    kill_worker(1)
    assert pool.step(np.array([0]), np.array([FINE])).rewards.tolist() == [2.0]  # it is not asked
    with pytest.raises(WorkerLost, match="member 1, which ended with exit code -9") as lost:
        pool.reset([2, 1], starts_of(2, 1))
    assert lost.value.members == [1]
    pool.reset([1], starts_of(1))


def test_several_lost_at_once(opened: Callable) -> None:
    pool = opened(AsyncPool([Obedient] * 3))
    pool.reset([0, 1, 2], starts_of(0, 1, 2))
    with pytest.raises(WorkerLost, match=r"member 0, which raised .*; member 2, which ended") as lost:
        pool.step(np.array([2, 1, 0]), np.array([EXIT, FINE, RAISE]))
    assert lost.value.members == [0, 2]
    assert "In the worker" in lost.value.__notes__[0]
    assert str(pickle.loads(pickle.dumps(lost.value))) == str(lost.value)


class NeverCloses(Obedient):
    """Hangs in its worker's close()."""

    def close(self) -> None:
        if multiprocessing.parent_process() is not None:
            time.sleep(60)


def test_closing_does_not_wait_for_the_dead_or_the_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """AsyncVectorEnv.close() raises at the first, and waits for the second without end."""
    monkeypatch.setattr("adapters.control.environments.async_pools.GRACE", 0.2)
    pool = AsyncPool([Obedient, NeverCloses])
    pool.reset([0, 1], starts_of(0, 1))
    kill_worker(0)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 20.0
    assert multiprocessing.active_children() == []


def test_rebuilding_comes_to_an_end(opened: Callable) -> None:
    pool = opened(AsyncPool([Obedient] * 2, max_rebuilds=1))
    for _ in range(3):  # each time the lost member completes a step in between: the row ends
        pool.reset([0, 1], starts_of(0, 1))
        pool.step(np.array([1]), np.array([FINE]))
        with pytest.raises(WorkerLost):
            pool.step(np.array([0, 1]), np.array([FINE, EXIT]))
    pool.reset([0, 1], starts_of(0, 1))
    pool.step(np.array([0]), np.array([FINE]))  # another member's step is no sign that member 1 is well
    with pytest.raises(ContractError, match=r"Obedient: workers were lost 2 times.*Look at the\s+environment"):
        pool.step(np.array([1]), np.array([EXIT]))
    assert pool.num_rebuilds == 3
    with pytest.raises(ConfigError, match="closed"):
        pool.reset([0], starts_of(0))


def test_answers_to_an_interrupted_call_are_not_read_as_the_next_ones(opened: Callable) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    pool = opened(AsyncPool([Obedient] * 2))
    pool.reset([0, 1], starts_of(0, 1))
    earlier = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.step(np.array([0, 1]), np.array([FINE, PAUSE]))
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, earlier)
    with pytest.raises(WorkerLost, match="interrupted"):
        pool.step(np.array([0]), np.array([FINE]))
    assert pool.reset([0], starts_of(0))[0][0, 1] == 0.0


def die_in_worker(parent: int) -> gymnasium.Env:
    """The dummy that Gymnasium makes in the parent is well."""
    if os.getpid() != parent:
        os._exit(1)
    return Obedient()


def test_a_worker_that_ends_while_it_makes_its_environment() -> None:
    with pytest.raises(ContractError, match="a worker ended while it made its environment"):
        AsyncPool([partial(die_in_worker, os.getpid())])
    assert multiprocessing.active_children() == []


def test_make_pool_chooses(opened: Callable) -> None:
    assert isinstance(make_pool("CartPole-v1", 2), NativeCartPole)
    assert isinstance(make_pool("CartPole-v1", 2, max_episode_steps=-1), SerialPool)
    assert isinstance(make_pool("CartPole-v1", 2, disable_env_checker=True), SerialPool)
    assert isinstance(make_pool("Acrobot-v1", 2), SerialPool)
    assert isinstance(make_pool(Obedient, 2), SerialPool)
    pendulum = make_pool("Pendulum-v1", 3, g=1.0)
    assert isinstance(pendulum, EnvironmentPool)
    assert (pendulum.num_members, pendulum.observation_space.shape, pendulum.action_space.shape) == (3, (3,), (1,))
    vector = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point", max_episode_steps=5)
    native = make_pool(vector, 2)
    assert isinstance(native, NativeCartPole)
    native.reset([0, 1], starts_of(0, 1))
    for _ in range(5):
        step = native.step(np.array([0, 1]), np.array([0, 1]))
    assert step.truncated.all()
    asynchronous = opened(make_pool(AsyncVectorEnv([Obedient] * 2), 2))
    assert isinstance(asynchronous, AsyncPool)
    assert len(multiprocessing.active_children()) == 2


def test_ids_that_are_not_there() -> None:
    with pytest.raises(
        ConfigError, match=r"registered as 'CartPol-v1'\. Did you mean 'CartPole-v1'.*import the package"
    ):
        make_pool("CartPol-v1", 2)
    with pytest.raises(ConfigError, match=r"'HalfCheetah-v9'.*Did you mean 'HalfCheetah-v"):
        make_pool("HalfCheetah-v9", 2)
    with pytest.raises(ConfigError, match=r"'nowhere/Qqqqqqqqqq-v0'\. If it comes"):
        make_pool("nowhere/Qqqqqqqqqq-v0", 2)


def test_missing_mujoco(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with pytest.raises(ConfigError, match=r'HalfCheetah-v5 needs .* pip install "model-agnostic-grpo\[robots\]"'):
        make_pool("HalfCheetah-v5", 1)


class OtherSpace(Obedient):
    """Observes three numbers."""

    observation_space = spaces.Box(0, 1, (3,))


class Speaks(Obedient):
    """Observes text."""

    observation_space = spaces.Text(5)


def test_settings_that_have_no_meaning(opened: Callable) -> None:
    one = Obedient()
    with pytest.raises(ConfigError, match=r"num_members must be >= 1 .* got 0"):
        make_pool("CartPole-v1", 0)
    with pytest.raises(ConfigError, match=r"vectorization one of .* 'threads'"):
        make_pool("CartPole-v1", 1, vectorization="threads")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'native' takes CartPole-v0 or CartPole-v1"):
        make_pool("Acrobot-v1", 1, vectorization="native")
    with pytest.raises(ConfigError, match=r"only an id takes keywords.*\['g'\]"):
        make_pool(Obedient, 1, g=1.0)
    with pytest.raises(ConfigError, match=r"got Obedient\. A single environment cannot be copied"):
        make_pool(one, 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_members=2 and vectorization='auto'; got 3 and 'sync'"):
        make_pool(SyncVectorEnv([Obedient] * 2), 3, vectorization="sync")
    with pytest.raises(ConfigError, match="RecordEpisodeStatistics cannot be stepped member by member"):
        make_pool(RecordEpisodeStatistics(SyncVectorEnv([Obedient])), 1)
    with pytest.raises(ConfigError, match="another one for each member"):
        make_pool(lambda: one, 2)
    with pytest.raises(ConfigError, match=r"member 1 \(Obedient\) has Box\(0.0, 1.0, \(3,\)"):
        SerialPool([Obedient(), OtherSpace()])
    with pytest.raises(ConfigError, match="fixed shape; got Text"):
        SerialPool([Speaks()])
    with pytest.raises(ConfigError, match="fixed shape; got Text"):
        AsyncPool([Speaks])
    with pytest.raises(ConfigError, match="timeout > 0 or None"):
        AsyncPool([Obedient], timeout=0.0)
    with pytest.raises(ConfigError, match="at least one member"):
        NativeCartPole(0)

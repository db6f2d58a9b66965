"""Every kind of pool gives the episodes of environments stepped by hand, and `make_pool` chooses the kind."""

import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any, get_args

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces, wrappers
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from adapters.control.environments.episodes import EpisodeStart
from adapters.control.environments.pool_base import WorkerLost
from adapters.control.environments.pools import (
    AsyncPool,
    EnvironmentPool,
    NativeCartPole,
    SerialPool,
    Vectorization,
    make_pool,
)
from adapters.control.environments.snapshots import take_snapshot
from grpo.errors import ConfigError, ContractError
from tests.support.control_environments import Chance, Command, Nested, Scripted
from tests.support.control_pools import assert_same_rows, starts_of, stepped_by_hand, stepped_by_pool

LIMIT = 16
"""Steps of an episode in `cartpoles`: random actions let some poles fall before, and others not."""


@pytest.fixture(scope="module")
def cartpoles() -> Iterator[dict[str, EnvironmentPool]]:
    """One pool of two CartPoles of each kind, and a native one of 64. Each test resets the members first."""
    kinds: list[Any] = [kind for kind in get_args(Vectorization) if kind != "auto"]
    pools = {kind: make_pool("CartPole-v1", 2, vectorization=kind, max_episode_steps=LIMIT) for kind in kinds}
    assert [type(pool) for pool in pools.values()] == [SerialPool, AsyncPool, NativeCartPole]
    pools["native, 64 members"] = make_pool("CartPole-v1", 64, max_episode_steps=LIMIT)
    yield pools
    for pool in pools.values():
        pool.close()


Pools = dict[str, EnvironmentPool]


def test_every_kind_gives_the_episodes_of_an_environment_stepped_by_hand(
    cartpoles: Pools, subtests: pytest.Subtests
) -> None:
    starts = starts_of(*range(7))
    starts[3] = EpisodeStart(seed=3, options={"low": -0.2, "high": 0.1})
    starts[4] = EpisodeStart(seed=4, options={"low": -0.01})
    single = gymnasium.make("CartPole-v1", max_episode_steps=LIMIT)
    expected = [stepped_by_hand(single, start, number) for number, start in enumerate(starts)]
    assert {rows[-1][2:] for rows in expected} >= {(True, False), (False, True)}
    for kind, pool in cartpoles.items():
        with subtests.test(kind=kind):
            for got, wanted in zip(stepped_by_pool(pool, starts), expected, strict=True):
                assert_same_rows(got, wanted)


def test_only_listed_members_with_a_running_episode_are_stepped(cartpoles: Pools, subtests: pytest.Subtests) -> None:
    """Member 1 rests in the middle of its episode while member 0 runs to its end and starts another one. It then goes on to the
    time limit, which counts its own steps."""
    for kind, pool in cartpoles.items():
        with subtests.test(kind=kind):
            single = gymnasium.make("CartPole-v1", max_episode_steps=LIMIT)
            pool.reset([0, 1], starts_of(0, 1))
            single.reset(seed=1)
            for action in (0, 1, 1):
                pool.step(np.array([1, 0]), np.array([action, 0]))
                single.step(action)
            ended = False
            while not ended:
                ended = pool.step(np.array([0]), np.array([1])).terminated[0]
            with pytest.raises(ContractError, match=r"CartPole-v1: step\(\) needs .* members \[0\] have none. Call"):
                pool.step(np.array([0, 1]), np.array([0, 0]))
            pool.reset([0], starts_of(9))
            pool.step(np.array([0]), np.array([0]))
            for number in range(3, LIMIT):
                step, expected = pool.step(np.array([1]), np.array([number % 2])), single.step(number % 2)
                np.testing.assert_array_equal(step.observations[0], expected[0])
                assert (step.terminated[0], step.truncated[0]) == expected[2:4] == (False, number == LIMIT - 1)
            again, _ = pool.reset([1], [EpisodeStart()])  # without a seed, the member's own generator continues
            np.testing.assert_array_equal(again[0], single.reset()[0])


def test_members_start_from_a_snapshot(cartpoles: Pools, subtests: pytest.Subtests) -> None:
    """Two branches follow the environment of the snapshot up to the time limit, and its generator after that."""
    for kind, pool in cartpoles.items():
        with subtests.test(kind=kind):
            trunk = gymnasium.make("CartPole-v1", max_episode_steps=LIMIT)
            trunk.reset(seed=3)
            for number in range(LIMIT - 4):
                observation, *_ = trunk.step(number % 2)
            start = EpisodeStart(snapshot=take_snapshot(trunk, observation))
            observations, infos = pool.reset([1], [start])
            np.testing.assert_array_equal(observations[0], observation)
            assert infos == [{}]
            pool.reset([0], [start])
            for number in range(4):
                expected = trunk.step(number % 2)
                step = pool.step(np.array([0, 1]), np.array([number % 2] * 2))
                np.testing.assert_array_equal(step.observations, np.stack([expected[0]] * 2))
                assert step.truncated.tolist() == [expected[3]] * 2 == [number == 3] * 2
            after, _ = pool.reset([1], [EpisodeStart()])
            np.testing.assert_array_equal(after[0], trunk.reset()[0])


def test_closed_pools_refuse_to_work(subtests: pytest.Subtests) -> None:
    env = Scripted()
    for pool in (NativeCartPole(1), SerialPool([env])):  # test_async_pools.py closes the third kind
        with subtests.test(kind=type(pool).__name__):
            pool.reset([0], starts_of(0))
            pool.close()
            pool.close()
            with pytest.raises(ConfigError, match=r"the pool is closed. Create a new one"):
                pool.step(np.array([0]), np.array([0]))
            with pytest.raises(ConfigError, match="the pool is closed"):
                pool.reset([0], starts_of(0))
    assert env.num_closed == 1


@pytest.mark.parametrize(("vector", "kind"), [(SyncVectorEnv, SerialPool), (AsyncVectorEnv, AsyncPool)])
def test_a_vector_environment_is_stepped_member_by_member(vector: Any, kind: type) -> None:
    pool = make_pool(vector([Scripted] * 2), 2, infos=True)
    assert isinstance(pool, kind)
    try:
        observations, infos = pool.reset([1, 0], [EpisodeStart(options={"number": 4.0}), EpisodeStart(seed=7)])
        np.testing.assert_array_equal(observations, [[4.0, 0.0], Scripted().reset(seed=7)[0]])
        assert infos == [{"starts": True}] * 2
        step = pool.step(np.array([1]), np.array([Command.FINE]))
        assert (step.observations.tolist(), list(step.infos or ())) == ([[4.0, 1.0]], [{"step": 1}])
        step = pool.step(np.array([1, 0]), np.array([Command.END, Command.NARROWED]))
        assert step.observations[:, 1].tolist() == [2.0, 1.0]
        assert (step.rewards.tolist(), step.terminated.tolist()) == ([2.0, 2.0], [True, False])
        with pytest.raises(ContractError, match=r"Scripted: step\(\) needs .* episode; members \[1\] have none"):
            pool.step(np.array([0, 1]), np.array([Command.FINE, Command.FINE]))
    finally:
        pool.close()


@pytest.mark.parametrize(
    "make", [lambda: SerialPool([Nested(), Nested()]), lambda: AsyncPool([Nested] * 2)], ids=["serial", "async"]
)
def test_nested_observations_are_batches_of_those_of_the_environment(make: Callable[[], EnvironmentPool]) -> None:
    pool, space = make(), Nested.observation_space
    try:
        for seed in (8, 9):
            observations, _ = pool.reset([1], starts_of(seed))
            expected = concatenate(space, [Nested().reset(seed=seed)[0]], create_empty_array(space, 1))
            assert data_equivalence(observations, expected, exact=True), observations
        step = pool.step(np.array([1]), np.array([0]))
        assert step.observations["pair"][1].shape == (1, 3)
        assert step.infos is None  # not requested
    finally:
        pool.close()


def test_an_environment_that_raises_is_named_and_the_pool_remains_usable() -> None:
    pool = make_pool(Scripted, 2)
    for _ in range(2):
        pool.reset([0, 1], starts_of(0, 1))
        message = "Scripted, member 1, step 1, seed 1: the environment raised ArithmeticError: out of paper"
        with pytest.raises(ContractError, match=message):
            pool.step(np.array([0, 1]), np.array([Command.FINE, Command.RAISE]))
    with pytest.raises(ContractError, match="member 0, step 0, seed 5: the environment raised TypeError") as raised:
        pool.reset([0], [EpisodeStart(seed=5, options={"raises": True})])
    assert isinstance(raised.value.__cause__, TypeError)


@pytest.mark.filterwarnings("ignore:.*CartPole-v0 is out of date:DeprecationWarning")
def test_a_pool_knows_the_time_limit_of_its_environments(subtests: pytest.Subtests) -> None:
    own = gymnasium.wrappers.TimeLimit
    for environment, options, limit in (
        ("CartPole-v1", {}, 500),
        ("CartPole-v0", {}, 200),
        ("CartPole-v1", {"max_episode_steps": 7}, 7),
        ("CartPole-v1", {"max_episode_steps": -1}, None),
        ("CartPole-v1", {"vectorization": "async"}, 500),
        ("Acrobot-v1", {}, 500),
        ("CliffWalking-v1", {}, None),
        (Scripted, {}, None),
        (Scripted, {"vectorization": "async"}, None),
        (lambda: own(Scripted(), 9), {}, 9),
        (lambda: gymnasium.wrappers.FlattenObservation(own(gymnasium.make("Acrobot-v1"), 9)), {}, 9),
    ):
        with subtests.test(environment=environment, options=options):
            pool = make_pool(environment, 1, **options)
            assert pool.max_episode_steps == limit
            pool.close()
    some, none = own(Scripted(), 9), Scripted()
    assert SerialPool([some, own(Scripted(), 11)]).max_episode_steps == 11
    assert SerialPool([some, none]).max_episode_steps is None


def test_a_pool_names_the_keywords_of_its_environments_also_long_ones() -> None:
    def name(*rows: str) -> str:
        return make_pool(lambda: gymnasium.make("FrozenLake-v1", desc=list(rows)), 1).layers[-1]

    assert name("SF", "FG") == "FrozenLakeEnv(map_name='4x4', desc=['SF', 'FG'])"
    start = ("S" + "F" * 60, "F" * 61)
    one, other = name(*start, "F" * 60 + "G"), name(*start, "G" + "F" * 60)
    assert one[:130] == other[:130]
    assert one != other


def test_make_pool_chooses_the_kind() -> None:
    assert isinstance(make_pool("CartPole-v1", 2), NativeCartPole)
    for options in ({"max_episode_steps": -1}, {"disable_env_checker": True}):
        assert isinstance(make_pool("CartPole-v1", 2, **options), SerialPool)
    assert [type(make_pool(env, 2)) for env in ("Acrobot-v1", Scripted)] == [SerialPool] * 2
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


def test_an_unknown_id_is_answered_with_similar_ids() -> None:
    for env_id, words in (
        ("CartPol-v1", r"registered as 'CartPol-v1'\. Did you mean 'CartPole-v1'.*import the package"),
        ("HalfCheetah-v9", "'HalfCheetah-v9'.*Did you mean 'HalfCheetah-v"),
        ("nowhere/Qqqqqqqqqq-v0", r"'nowhere/Qqqqqqqqqq-v0'\. If it comes"),
        ("no_such_module:Some-v0", "'no_such_module:Some-v0' cannot be created: .*no_such_module"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_pool(env_id, 2)


def test_a_missing_mujoco_is_answered_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with pytest.raises(ConfigError, match=r'HalfCheetah-v5 needs .* pip install "\.\[robots\]" in the checkout'):
        make_pool("HalfCheetah-v5", 1)


class ObservesThreeNumbers(Scripted):
    observation_space = spaces.Box(0, 1, (3,))


class ObservesText(Scripted):
    observation_space = spaces.Text(5)


class OtherCartPoles(CartPoleVectorEnv): ...


def test_settings_that_contradict_each_other_are_refused(subtests: pytest.Subtests) -> None:
    one: Any = Scripted()
    number: Any = 3
    sync = SyncVectorEnv([Scripted] * 2)
    normalized, paid = wrappers.NormalizeObservation, wrappers.NormalizeReward
    for make, message in (
        (lambda: make_pool("CartPole-v1", 0), "num_members must be an integer >= 1; got int 0"),
        (lambda: make_pool("CartPole-v1", 1, vectorization="threads"), r"vectorization must be one of .* 'threads'"),
        (lambda: make_pool("Acrobot-v1", 1, vectorization="native"), "'native' supports CartPole-v0 and CartPole-v1"),
        (lambda: make_pool(Scripted, 1, g=1.0), r"keywords of gymnasium.make need an environment id; got \['g'\]"),
        (lambda: make_pool(one, 1), r"Scripted\. A single instance cannot be copied. Pass a function that creates it"),
        (lambda: make_pool(number, 1), r"got int\. Pass a function that creates the environment"),
        (lambda: make_pool("FrozenLake-v1", 1, map_name="9x9"), "-v1 cannot be created: it raised KeyError: '9x9'"),
        (lambda: make_pool(sync, 3, vectorization="sync"), "num_members=2 and vectorization='auto'; got 3 and 'sync'"),
        (lambda: make_pool(sync, 2, vectorization="sync"), "num_members=2 and vectorization='auto'; got 2 and 'sync'"),
        (lambda: make_pool(RecordEpisodeStatistics(sync), 2), "Statistics cannot be stepped member by member"),
        (lambda: make_pool(OtherCartPoles(2), 2), "OtherCartPoles cannot be stepped member by member"),
        (lambda: make_pool(lambda: one, 2), "a separate one for each member; got 1 for 2 members"),
        (lambda: SerialPool([]), "got 0 for 0 members"),
        (lambda: NativeCartPole(0), "members must be an integer >= 1; got int 0"),
        (lambda: SerialPool([Scripted(), ObservesThreeNumbers()]), r"member 1 \(Scripted\) has Box\(0.0, 1.0, \(3,\)"),
        (lambda: SerialPool([ObservesText()]), "fixed shape; got Text"),
        (lambda: AsyncPool([ObservesText]), "fixed shape; got Text"),
        (lambda: AsyncPool([]), r"AsyncPool needs at least one environment.* got 0 environments"),
        (lambda: AsyncPool([Scripted], timeout=0.0), "timeout > 0 or None, .* got 1 environments, timeout=0.0"),
        (lambda: AsyncPool([Scripted], max_rebuilds=-1), "max_rebuilds >= 0; got 1 environments, .*max_rebuilds=-1"),
        (
            lambda: AsyncPool([lambda: normalized(Chance())]),
            r"NormalizeObservation keeps a running mean\. .*normalize_observations=True",
        ),
        (
            lambda: make_pool(lambda: wrappers.ClipReward(paid(Chance()), -1.0, 1.0), 1),
            "NormalizeReward keeps a running",
        ),
    ):
        with subtests.test(message), pytest.raises(ConfigError, match=message):
            make()
    frozen = normalized(Chance())
    frozen.update_running_mean = False
    SerialPool([frozen]).reset([0], starts_of(1))


def test_a_lost_workers_error_survives_pickling() -> None:
    lost = WorkerLost((0, 2), "member 0, which raised ValueError: x; member 2, which ended with exit code 7")
    again = pickle.loads(pickle.dumps(lost))
    assert again.members == [0, 2]
    assert str(again) == (
        "Lost the worker of member 0, which raised ValueError: x; member 2, which ended with exit code 7. "
        "The pool was rebuilt: reset its members and run their episodes again."
    )


# --- CartPole in one array


def test_the_sutton_barto_reward_is_minus_one_at_the_fall() -> None:
    pool = make_pool("CartPole-v1", 1, sutton_barto_reward=True)
    assert isinstance(pool, NativeCartPole)
    pool.reset([0], starts_of(0))
    rewards, ended = [], False
    while not ended:
        step = pool.step(np.array([0]), np.array([1]))
        rewards.append(step.rewards[0])
        ended = step.terminated[0]
    assert rewards == [0.0] * (len(rewards) - 1) + [-1.0]


def test_a_fall_in_the_last_step_of_the_time_limit_is_both_ends() -> None:
    single = gymnasium.make("CartPole-v1")
    single.reset(seed=0)
    fall = [single.step(1)]
    while not fall[-1][2]:
        fall.append(single.step(1))
    pool = NativeCartPole(1, max_episode_steps=len(fall))
    pool.reset([0], starts_of(0))
    for _ in fall:
        step = pool.step(np.array([0]), np.array([1]))
    assert (step.rewards[0], step.terminated[0], step.truncated[0]) == (1.0, True, True)


def test_steps_before_a_reset_and_actions_other_than_0_and_1_are_refused() -> None:
    pool = NativeCartPole(1)
    with pytest.raises(ContractError, match=r"members \[0\] have none"):
        pool.step(np.array([0]), np.array([0]))
    pool.reset([0], starts_of(0))
    with pytest.raises(ContractError, match=r"must be integers, 0 \(push left\) or 1 .*; got float64 \[1\]"):
        pool.step(np.array([0]), np.array([0.7]))
    for action in (2, -1):
        with pytest.raises(ContractError, match=rf"must be integers, 0 .* or 1 .*; got \[{action}\]"):
            pool.step(np.array([0]), np.array([action]))


def test_a_vector_environments_settings_are_used(subtests: pytest.Subtests) -> None:
    """Every setting differs from CartPole's. The pole passes the angle at which CartPole's own episode would end."""
    settings: dict[str, Any] = {"gravity": 7.0, "force_mag": 5.0, "tau": 0.01}
    settings |= {"masspole": 0.3, "total_mass": 1.7, "length": 0.8, "polemass_length": 0.24}
    settings |= {"theta_threshold_radians": 0.7, "x_threshold": 0.5}
    for integrator in ("euler", "semi-implicit euler"):
        with subtests.test(integrator=integrator):
            vector: Any = gymnasium.make_vec("CartPole-v1", 1, vectorization_mode="vector_entry_point")
            single: Any = gymnasium.make("CartPole-v1")
            for env in (vector.unwrapped, single.unwrapped):
                vars(env).update(settings, kinematics_integrator=integrator)
            for number, episode in enumerate(stepped_by_pool(make_pool(vector, 1), starts_of(3, 4))):
                assert_same_rows(episode, stepped_by_hand(single, EpisodeStart(seed=3 + number), number))
                assert max(abs(observation[2]) for observation, *_ in episode) > 0.25


def test_a_snapshot_with_other_settings_is_refused() -> None:
    trunk = gymnasium.make("CartPole-v1", max_episode_steps=50)
    observation, _ = trunk.reset(seed=0)
    with pytest.raises(ConfigError, match=r"\['max_episode_steps'\] differ. Use vectorization='sync'"):
        NativeCartPole(1).reset([0], [EpisodeStart(snapshot=take_snapshot(trunk, observation))])
    trunk.unwrapped.gravity = 1.6
    with pytest.raises(ConfigError, match=r"\['gravity', 'max_episode_steps'\] differ"):
        NativeCartPole(1).reset([0], [EpisodeStart(snapshot=take_snapshot(trunk, observation))])


def test_infos_are_empty_dicts_if_requested() -> None:
    for infos, expected in ((True, [{}, {}]), (False, None)):
        pool = NativeCartPole(2, infos=infos)
        assert pool.reset([0, 1], starts_of(0, 1))[1] == [{}, {}]
        assert pool.step(np.array([0, 1]), np.array([0, 0])).infos == expected

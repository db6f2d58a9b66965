"""CartPole in one array: bit for bit the episodes of Gymnasium's single environment."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from adapters.control.environments.episodes import EpisodeStart
from adapters.control.environments.pools import NativeCartPole, make_pool
from adapters.control.environments.snapshots import take_snapshot
from grpo.errors import ConfigError, ContractError
from tests.support.control_pools import assert_same_rows, starts_of, stepped_by_hand, stepped_by_pool


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


def test_actions_other_than_0_and_1_are_refused() -> None:
    pool = NativeCartPole(1)
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


def test_a_subclass_of_the_vector_environment_is_refused() -> None:
    class Other(CartPoleVectorEnv):
        pass

    with pytest.raises(ConfigError, match="Other cannot be stepped member by member"):
        make_pool(Other(2), 2)


def test_a_member_that_is_not_stepped_keeps_its_state_just_before_its_end() -> None:
    """Member 1 rests one step before its fall, and one step before the limit, while member 0 runs other episodes."""
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
        if number % 5 == 0:  # before member 0 falls
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
    assert not pool.step(np.array([1]), np.array([0])).truncated.any()  # its 7th step, after 24 steps of member 0


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

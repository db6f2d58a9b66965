"""A branch from a snapshot behaves as its trunk, the environment of the snapshot, does."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import wrappers

from adapters.control.environments.snapshots import (
    Snapshot,
    Snapshotable,
    environment_state,
    restore_environment_state,
    restore_snapshot,
    take_snapshot,
)
from grpo.errors import ConfigError, ContractError

TABLES_AND_CONTROL = [
    "CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "FrozenLake-v1",
    "CliffWalking-v1", "CliffWalkingSlippery-v1", "Taxi-v4", "Blackjack-v1",
]  # fmt: skip
MUJOCO = [
    "HalfCheetah-v5", "Hopper-v5", "Reacher-v5", "Pusher-v5", "Walker2d-v5", "Ant-v5", "Swimmer-v5",
    "InvertedPendulum-v5", "InvertedDoublePendulum-v5", "Humanoid-v5", "HumanoidStandup-v5",
]  # fmt: skip

Make = Callable[[], gymnasium.Env]


def played(env: gymnasium.Env, seed: int, num_steps: int) -> Any:
    """Reset and `num_steps` random actions, an episode after the other; the last observation."""
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    for _ in range(num_steps):
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            observation, _ = env.reset()
    return observation


def future(env: gymnasium.Env, actions: list[Any]) -> list[Any]:
    """Observations, rewards, ends and further resets, as bytes: equal means equal in every bit."""
    seen: list[Any] = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        seen.append((as_bytes(observation), float(reward), terminated, truncated))
        if terminated or truncated:
            seen.append(as_bytes(env.reset()[0]))
    return seen


def as_bytes(observation: Any) -> Any:
    if isinstance(observation, dict):
        return {key: as_bytes(value) for key, value in observation.items()}
    return np.asarray(observation).tobytes()


def sampled(env: gymnasium.Env, num_actions: int = 20) -> list[Any]:
    env.action_space.seed(99)
    return [env.action_space.sample() for _ in range(num_actions)]


def assert_branches_like_its_trunk(make: Make, num_steps: int = 7) -> None:
    """Restore in a fresh instance, in one that ran other episodes, and in the trunk itself after it continued."""
    trunk, fresh, used = make(), make(), make()
    observation = played(trunk, seed=1, num_steps=num_steps)
    snapshot = pickle.loads(pickle.dumps(take_snapshot(trunk, observation)))
    saved = Snapshot.from_state(copy.deepcopy(snapshot.to_state()))
    expected_draws = np.random.Generator(type(trunk.unwrapped.np_random.bit_generator)())
    expected_draws.bit_generator.state = trunk.unwrapped.np_random.bit_generator.state
    draws = expected_draws.random(3).tolist()
    actions = sampled(trunk)
    expected = future(trunk, actions)
    played(used, seed=2, num_steps=4)
    for branch, kept in ((fresh, snapshot), (used, saved), (trunk, snapshot), (trunk, saved)):
        restored = restore_snapshot(branch, kept)
        assert as_bytes(restored) == as_bytes(observation)
        assert future(branch, actions) == expected
        restore_snapshot(branch, kept)
        assert branch.unwrapped.np_random.random(3).tolist() == draws
    for env in (trunk, fresh, used):
        env.close()


def test_a_branch_equals_its_trunk_bit_for_bit(subtests: pytest.Subtests) -> None:
    for env_id in TABLES_AND_CONTROL + MUJOCO:
        with subtests.test(env_id=env_id):
            assert_branches_like_its_trunk(partial(gymnasium.make, env_id))


def test_a_branch_from_the_first_steps_passes_the_environment_checker(subtests: pytest.Subtests) -> None:
    """The passive checker compares the first two steps with earlier calls."""
    for env_id, num_steps, disable in (
        ("CartPole-v1", 0, False),
        ("Hopper-v5", 1, False),
        ("Taxi-v4", 0, False),
        ("Taxi-v4", 1, False),
        ("CartPole-v1", 1, True),
        ("Hopper-v5", 0, True),
    ):
        with subtests.test(env_id=env_id, num_steps=num_steps, disable=disable):
            assert_branches_like_its_trunk(partial(gymnasium.make, env_id, disable_env_checker=disable), num_steps)


def test_a_maze_with_a_robot_inside_is_restored(subtests: pytest.Subtests) -> None:
    gymnasium.register_envs(pytest.importorskip("gymnasium_robotics"))
    for goals in ({}, {"reset_target": True, "continuing_task": True, "reward_type": "dense"}):
        with subtests.test(goals=goals):
            assert_branches_like_its_trunk(partial(gymnasium.make, "PointMaze_UMaze-v3", **goals))


WRAPPED: dict[str, Callable[[gymnasium.Env], gymnasium.Env]] = {
    "flatten": lambda env: wrappers.FlattenObservation(wrappers.RescaleAction(env, np.float32(-1), np.float32(1))),
    "stack": lambda env: wrappers.FrameStackObservation(env, 3),
    "sticky": lambda env: wrappers.StickyAction(env, 0.5),
    "normalize": lambda env: wrappers.NormalizeReward(wrappers.NormalizeObservation(env)),
    "time": lambda env: wrappers.TransformReward(wrappers.TimeAwareObservation(env), lambda reward: 2 * reward),
    "statistics": lambda env: wrappers.RecordEpisodeStatistics(env),
}


def test_the_state_of_wrappers_is_restored(subtests: pytest.Subtests) -> None:
    for name, wrap in WRAPPED.items():
        with subtests.test(name):
            assert_branches_like_its_trunk(lambda wrap=wrap: wrap(gymnasium.make("Pendulum-v1")))  # type: ignore[misc]


def test_contacts_are_those_of_the_restored_state() -> None:
    """Contacts of the instance's earlier state are gone: only the lying robot touches the ground."""
    standing, lying = gymnasium.make("Humanoid-v5"), gymnasium.make("Humanoid-v5", terminate_when_unhealthy=False)
    in_the_air = take_snapshot(standing, standing.reset(seed=0)[0])
    played(lying, seed=0, num_steps=60)
    assert lying.unwrapped.data.ncon > 0
    restore_snapshot(lying, in_the_air)
    assert lying.unwrapped.data.ncon == standing.unwrapped.data.ncon == 0


def test_a_finished_cartpole_stays_finished() -> None:
    trunk, branch = gymnasium.make("CartPole-v1"), gymnasium.make("CartPole-v1")
    observation, _ = trunk.reset(seed=0)
    terminated = False
    while not terminated:
        observation, _, terminated, _, _ = trunk.step(1)
    restore_snapshot(branch, take_snapshot(trunk, observation))
    assert branch.unwrapped.steps_beyond_terminated == 0


class Plain(gymnasium.Env):
    """Its state is its attributes."""

    action_space = gymnasium.spaces.Discrete(2)

    def snapshot(self) -> Any:
        return environment_state(self)

    def restore(self, state: Any) -> None:
        restore_environment_state(self, state)


def test_a_generator_that_does_not_exist_yet_is_restored() -> None:
    class Dice(Plain):
        """Draws only in step, so at the snapshot its generator does not exist."""

        observation_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return 0, {}

        def step(self, action):
            return 0, self.np_random.random(), False, False, {}

    trunk, branch = Dice(), Dice()
    restore_snapshot(branch, take_snapshot(trunk, trunk.reset()[0]))
    assert [branch.step(0)[1] for _ in range(5)] == [trunk.step(0)[1] for _ in range(5)]


def test_neither_the_environment_nor_a_branch_changes_a_snapshot() -> None:
    env = gymnasium.make("Blackjack-v1")
    observation, _ = env.reset(seed=5)
    snapshot = take_snapshot(env, observation)
    hand = list(env.unwrapped.player)
    env.step(1)  # appends to the hand in place
    restore_snapshot(env, snapshot)
    env.step(1)
    restore_snapshot(env, snapshot)
    assert env.unwrapped.player == hand
    array_env = gymnasium.make("Hopper-v5")
    observation, _ = array_env.reset(seed=0)
    snapshot = take_snapshot(array_env, observation)
    kept = observation.copy()
    observation[:] = 7.0
    restore_snapshot(array_env, snapshot)[:] = 8.0
    np.testing.assert_array_equal(restore_snapshot(array_env, snapshot), kept)


def test_restoring_does_not_change_earlier_observations() -> None:
    """MountainCarContinuous returns its state array: writing into it would change recorded observations."""
    env = gymnasium.make("MountainCarContinuous-v0")
    snapshot = take_snapshot(env, played(env, seed=0, num_steps=1))
    recorded = env.step(np.ones(1, np.float32))[0]
    kept = recorded.copy()
    restore_snapshot(env, snapshot)
    np.testing.assert_array_equal(recorded, kept)


def test_render_mode_and_window_of_the_instance_are_kept() -> None:
    trunk, branch = gymnasium.make("CartPole-v1"), gymnasium.make("CartPole-v1", render_mode="rgb_array")
    played(branch, seed=0, num_steps=1)
    window = branch.unwrapped.screen = lambda: "a window"
    restore_snapshot(branch, take_snapshot(trunk, played(trunk, seed=0, num_steps=3)))
    assert branch.unwrapped.render_mode == "rgb_array"
    assert branch.unwrapped.screen is window


def test_images_loaded_for_rendering_are_not_state() -> None:
    pytest.importorskip("pygame")

    def rendered() -> gymnasium.Env:
        env = gymnasium.make("Taxi-v4", render_mode="rgb_array")
        env.reset()
        env.render()  # loads images into lists
        return env

    assert_branches_like_its_trunk(rendered)


def test_the_memory_of_a_recording_wrapper_is_not_state() -> None:
    pytest.importorskip("pygame")
    trunk = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    branch = wrappers.RenderCollection(gymnasium.make("CartPole-v1", render_mode="rgb_array"))
    snapshot = take_snapshot(trunk, played(trunk, seed=0, num_steps=3))
    played(branch, seed=1, num_steps=2)
    restore_snapshot(branch, snapshot)
    assert len(branch.frame_list) == 3  # the branch's own reset and two steps
    np.testing.assert_array_equal(branch.unwrapped.state, trunk.unwrapped.state)


class Counter(gymnasium.Env):
    """Counts steps in an iterator, which is not plain data."""

    observation_space = gymnasium.spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.counted = iter(range(100))
        self.count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.restore(0)
        return self.observation(), {}

    def step(self, action):
        self.count = next(self.counted)
        return self.observation(), float(self.np_random.normal()), self.count > 50, False, {}

    def observation(self) -> np.ndarray:
        return np.array([self.count], np.float32)


class SnapshotableCounter(Counter):
    def snapshot(self) -> Any:
        return {"count": self.count}

    def restore(self, state: Any) -> None:
        self.count = state["count"] if state else 0
        self.counted = iter(range(self.count + 1, 100))


class Repeat(gymnasium.Wrapper):
    """A wrapper with state in an iterator, so it implements its own methods."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.memory = iter([1.0] * 5 + [2.0] * 100)
        self.num_read = 0

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.num_read += 1
        return observation, reward * next(self.memory), terminated, truncated, info

    def snapshot(self) -> Any:
        return self.num_read

    def restore(self, state: Any) -> None:
        self.num_read = state
        self.memory = iter(([1.0] * 5 + [2.0] * 100)[state:])


def test_custom_environments_and_wrappers_restore_their_own_state() -> None:
    assert isinstance(SnapshotableCounter(), Snapshotable)
    assert_branches_like_its_trunk(SnapshotableCounter)
    assert_branches_like_its_trunk(lambda: wrappers.TimeLimit(Repeat(SnapshotableCounter()), 20), num_steps=3)


def test_np_random_is_restored_in_place() -> None:
    class Dealer(SnapshotableCounter):
        """A bound method holds the environment's generator, so replacing `np_random` would not reach it."""

        def reset(self, *, seed=None, options=None):
            returned = super().reset(seed=seed)
            self.draw = self.np_random.normal
            return returned

        def step(self, action):
            observation, *_ = super().step(action)
            return observation, self.draw(), False, False, {}

    trunk, branch = Dealer(), Dealer()
    snapshot = take_snapshot(trunk, played(trunk, seed=0, num_steps=3))
    played(branch, seed=1, num_steps=5)
    restore_snapshot(branch, snapshot)
    assert future(branch, [0] * 5) == future(trunk, [0] * 5)


def test_a_custom_environment_restores_its_attributes() -> None:
    class Windy(Plain):
        """Has state in attributes and in two kinds of generators."""

        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.position = np.zeros(2)
            self.path: list[np.ndarray] = []
            self.wind = np.random.Generator(np.random.MT19937(seed))
            self.gusts = self.np_random.spawn(1)[0]
            return self.position.copy(), {}

        def step(self, action):
            self.path.append(self.position.copy())
            self.position += self.wind.normal(size=2) + self.gusts.normal(size=2)
            return self.position.copy(), float(np.sum(self.path)), False, False, {}

    assert_branches_like_its_trunk(Windy)


def test_the_error_for_an_unsupported_environment_says_what_to_implement() -> None:
    with pytest.raises(ConfigError, match=r"Counter must be .*implement Snapshotable.*snapshot\(self\).*restore"):
        take_snapshot(Counter(), 0)


def test_an_attribute_of_an_unknown_type_is_named() -> None:
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    env.unwrapped.motor = object()
    with pytest.raises(ConfigError, match=r"CartPoleEnv\.motor must be plain data.*got object"):
        take_snapshot(env, observation)


def test_state_that_cannot_be_pickled_is_refused() -> None:
    env = SnapshotableCounter()
    observation, _ = env.reset(seed=0)
    env.snapshot = lambda: {"count": lambda: 0}  # type: ignore[method-assign]
    with pytest.raises(ContractError, match=r"SnapshotableCounter must be picklable"):
        take_snapshot(env, observation)


def test_a_snapshot_of_another_environment_is_refused() -> None:
    cartpole, pendulum = gymnasium.make("CartPole-v1"), gymnasium.make("Pendulum-v1")
    snapshot = take_snapshot(cartpole, played(cartpole, seed=0, num_steps=2))
    assert isinstance(snapshot, Snapshot)
    with pytest.raises(
        ContractError, match=r"Pendulum-v1 with the layers .* needs a snapshot .* got one of CartPole-v1"
    ):
        restore_snapshot(pendulum, snapshot)
    with pytest.raises(
        ContractError,
        match=r"CartPole-v1 with the layers \['FlattenObservation', .*got one of CartPole-v1 .*\['TimeLimit'",
    ):
        restore_snapshot(wrappers.FlattenObservation(cartpole), snapshot)


def test_a_snapshot_of_another_mujoco_model_is_refused() -> None:
    pendulum, double = gymnasium.make("InvertedPendulum-v5"), gymnasium.make("InvertedDoublePendulum-v5")
    state = environment_state(double.unwrapped)
    with pytest.raises(ContractError, match=r"needs a state of \d+ numbers; got \d+"):
        restore_environment_state(pendulum.unwrapped, state)


@pytest.mark.slow
def test_the_module_does_not_import_mujoco() -> None:
    code = "import sys, adapters.control.environments.snapshots; sys.exit('mujoco' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

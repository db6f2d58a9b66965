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
from tests.support.control_environments import Nested, Walk

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


def test_neither_snapshot_nor_restored_state_is_an_array_that_others_hold() -> None:
    """MountainCarContinuous returns its state array."""
    env = gymnasium.make("MountainCarContinuous-v0")
    observation = played(env, seed=0, num_steps=1)
    snapshot, kept = take_snapshot(env, observation), observation.copy()
    recorded = env.step(np.ones(1, np.float32))[0]
    expected = recorded.copy()
    observation[:] = 7.0
    restored = restore_snapshot(env, snapshot)
    restored[:] = 8.0
    np.testing.assert_array_equal(restore_snapshot(env, snapshot), kept)
    np.testing.assert_array_equal(recorded, expected)


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


class Repeat(gymnasium.Wrapper):
    """A wrapper with state in an iterator, which is not plain data, so it implements its own methods."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.restore(0)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.num_read += 1
        return observation, reward * next(self.memory), terminated, truncated, info

    def snapshot(self) -> Any:
        return self.num_read

    def restore(self, state: Any) -> None:
        self.num_read, self.memory = state, iter(([1.0] * 5 + [2.0] * 100)[state:])


def test_custom_environments_and_wrappers_restore_their_own_state() -> None:
    assert isinstance(Walk(), Snapshotable)
    assert_branches_like_its_trunk(Walk)
    assert_branches_like_its_trunk(lambda: wrappers.TimeLimit(Repeat(Walk()), 20), num_steps=3)


def test_np_random_is_restored_in_place_also_where_it_did_not_exist() -> None:
    class Dealer(Walk):
        """A bound method holds the environment's generator, so replacing `np_random` would not reach it."""

        def step(self, action):
            vars(self).setdefault("draw", self.np_random.normal)
            observation, *_ = super().step(action)
            return observation, self.draw(), False, False, {}

    trunk, branch = Dealer(), Dealer()
    for num_steps in (0, 3):
        future(trunk, [0] * num_steps)
        restore_snapshot(branch, take_snapshot(trunk, trunk.look()))
        assert future(branch, [0] * 5) == future(trunk, [0] * 5)


def test_a_custom_environment_restores_its_attributes() -> None:
    class Windy(Walk):
        """Has state in attributes, which it changes in place, and in three kinds of generators."""

        snapshot, restore = environment_state, restore_environment_state

        def reset(self, **options: Any) -> Any:
            returned = super().reset(**options)
            self.path, self.gust = list[np.ndarray](), np.zeros(2)
            self.generators = np.random.Generator(np.random.MT19937(options.get("seed")))
            self.spawned = self.np_random.spawn(1)[0]
            return returned

        def step(self, action: Any) -> Any:
            self.path.append(self.gust.copy())
            self.gust += self.generators.normal(size=2) + self.spawned.normal(size=2)
            observation, *_ = super().step(action)
            return observation, float(np.sum(self.path)), False, False, {}

    assert_branches_like_its_trunk(Windy)


def test_what_cannot_be_copied_or_restored_is_refused(subtests: pytest.Subtests) -> None:
    cartpole, motorised, unpicklable = gymnasium.make("CartPole-v1"), gymnasium.make("CartPole-v1"), Walk()
    snapshot = take_snapshot(cartpole, played(cartpole, seed=0, num_steps=2))
    observation, _ = motorised.reset(seed=0)
    motorised.unwrapped.motor = object()
    unpicklable.snapshot = lambda: {"count": lambda: 0}  # type: ignore[method-assign]
    pendulum, double = gymnasium.make("InvertedPendulum-v5"), gymnasium.make("InvertedDoublePendulum-v5")
    state = environment_state(double.unwrapped)
    flat, other = wrappers.FlattenObservation(cartpole), gymnasium.make("Pendulum-v1")
    implement, layers = r"must be .*implement Snapshotable.*snapshot\(self\).*restore", r"CartPole-v1 with the layers"
    theirs = rf"{layers} \['FlattenObservation', .*got one of CartPole-v1 .*\['TimeLimit'"
    cases: tuple[tuple[Callable[[], Any], type[Exception], str], ...] = (
        (lambda: take_snapshot(Nested(), 0), ConfigError, f"Nested {implement}"),
        (
            lambda: take_snapshot(motorised, observation),
            ConfigError,
            r"CartPoleEnv\.motor must be plain data.*got object",
        ),
        (lambda: take_snapshot(unpicklable, unpicklable.reset(seed=0)[0]), ContractError, "Walk must be picklable"),
        (lambda: restore_snapshot(other, snapshot), ContractError, "Pendulum-v1 with the .* got one of CartPole-v1"),
        (lambda: restore_snapshot(flat, snapshot), ContractError, theirs),
        (
            lambda: restore_environment_state(pendulum.unwrapped, state),
            ContractError,
            r"a state of \d+ numbers; got \d+",
        ),
    )
    for call, error, words in cases:
        with subtests.test(words), pytest.raises(error, match=words):
            call()


@pytest.mark.slow
def test_the_module_does_not_import_mujoco() -> None:
    code = "import sys, adapters.control.environments.snapshots; sys.exit('mujoco' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

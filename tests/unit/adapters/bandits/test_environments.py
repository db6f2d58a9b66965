"""The Gymnasium environments: Gymnasium's own conformance check, and an episode against its testbed."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from adapters.bandits import abrupt_testbed
from adapters.bandits.environments import register_environments

NAMES = {"bandits/DynamicBandit-v0": (5, 100), "bandits/AbruptBandit-v0": (3, 10_000)}
NAMES["bandits/RandomWalkBandit-v0"] = (10, 10_000)


def test_environments_are_made_by_name_and_pass_gymnasiums_checker(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name):
            environment = gymnasium.make(name)
            assert environment.action_space.n == NAMES[name][0]
            check_env(environment.unwrapped)


def test_an_episode_is_truncated_after_the_last_step(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name):
            environment = gymnasium.make(name)
            environment.reset(seed=0)
            ends = [environment.step(0)[2:4] for _ in range(NAMES[name][1])]
            assert ends[:-1] == [(False, False)] * (NAMES[name][1] - 1)
            assert ends[-1] == (False, True)


def test_info_holds_the_best_arm_of_the_next_pull() -> None:
    environment = gymnasium.make("bandits/DynamicBandit-v0")
    _, info = environment.reset(seed=1)
    assert (info["step"], info["best_arm"]) == (0, 0)
    for _ in range(20):
        _, reward, _, _, info = environment.step(3)
        assert reward == 0.4
    assert (info["step"], info["best_arm"]) == (20, 3)
    np.testing.assert_array_equal(info["means"], [0.1, 0.2, 0.0, 0.8, 0.3])
    assert environment.step(3)[1] == 0.8


def test_rewards_are_those_of_the_testbed() -> None:
    environment = gymnasium.make("bandits/AbruptBandit-v0")
    environment.reset(seed=3)
    testbed = abrupt_testbed(seed=environment.unwrapped.testbed.seed)
    rewards = [environment.step(arm)[1] for arm in (0, 1, 2) * 10]
    np.testing.assert_array_equal(rewards, testbed.pull(np.zeros(30, dtype=int), np.array([0, 1, 2] * 10)))


def test_every_episode_has_a_new_random_walk() -> None:
    environment = gymnasium.make("bandits/RandomWalkBandit-v0", num_steps=20)
    environment.reset(seed=0)
    first = environment.unwrapped.testbed.means.copy()
    environment.reset()
    assert not np.array_equal(environment.unwrapped.testbed.means, first)
    environment.reset(seed=0)
    np.testing.assert_array_equal(environment.unwrapped.testbed.means, first)


def test_registering_again_changes_nothing() -> None:
    before = gymnasium.spec("bandits/AbruptBandit-v0")
    register_environments()  # Gymnasium warns when a name is overridden, and warnings are errors here
    assert gymnasium.spec("bandits/AbruptBandit-v0") is before


@pytest.mark.slow
def test_only_the_environments_need_gymnasium() -> None:
    script = (
        "import sys; sys.modules['gymnasium'] = None; import adapters.bandits; "
        "print('imported', hasattr(adapters.bandits, 'other')); from adapters.bandits import AbruptBanditEnv"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert ran.stdout == "imported False\n"
    assert 'The environments of adapters.bandits need Gymnasium: pip install ".[gym]" in the checkout' in ran.stderr

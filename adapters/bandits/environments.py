"""The testbeds as Gymnasium environments: one run, one pull per step, and a constant observation.

`import adapters.bandits.environments` registers them. Then `gymnasium.make("bandits/AbruptBandit-v0")` creates one, and
`gymnasium.make("adapters.bandits.environments:bandits/AbruptBandit-v0")` does both.
"""

from typing import Any

import numpy as np

from grpo.arguments import install_command, require_instances

from .testbeds import Testbed, abrupt_testbed, dynamic_testbed, random_walk_testbed

try:
    import gymnasium
except ImportError as error:
    raise ImportError(f"The environments of adapters.bandits need Gymnasium: {install_command('gym')}") from error


class BanditEnv(gymnasium.Env[np.int64, np.int64 | int]):
    """One run of a testbed. The observation is always 0, the action is an arm, and the last step truncates the episode.

    `info` holds `means` (expected rewards of the arms at the next pull), `best_arm` (the first if several are best) and
    `step` (the time step of the next pull).

    Args:
        testbed: A testbed with one run. `reset` draws the testbed's seed from the environment's generator.
    """

    def __init__(self, testbed: Testbed) -> None:
        require_instances("BanditEnv", Testbed, "a Testbed", testbed=testbed)
        self.testbed = testbed
        self.observation_space = gymnasium.spaces.Discrete(1)
        self.action_space = gymnasium.spaces.Discrete(testbed.num_arms)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.int64, dict[str, Any]]:
        """Start a new run. The same seed gives the same means and rewards."""
        super().reset(seed=seed)
        self.testbed.reset(int(self.np_random.integers(2**31)))
        return np.int64(0), self._info()

    def step(self, action: np.int64 | int) -> tuple[np.int64, float, bool, bool, dict[str, Any]]:
        """Pull one arm."""
        reward = float(self.testbed.pull([0], [int(action)])[0])
        truncated = bool(self.testbed.pulls[0] >= self.testbed.num_steps * self.testbed.pulls_per_step)
        return np.int64(0), reward, False, truncated, self._info()

    def _info(self) -> dict[str, Any]:
        means = self.testbed.means_now([0])[0]
        return {
            "means": means,
            "best_arm": int(means.argmax()),
            "step": int(self.testbed.steps_at(self.testbed.pulls[0])),
        }


class DynamicBanditEnv(BanditEnv):
    """Five arms, 100 steps and deterministic rewards; see `dynamic_testbed`."""

    def __init__(self) -> None:
        super().__init__(dynamic_testbed(pulls_per_step=1))


class AbruptBanditEnv(BanditEnv):
    """Three Bernoulli arms and 10,000 steps. The best arm changes twice; see `abrupt_testbed`."""

    def __init__(self) -> None:
        super().__init__(abrupt_testbed())


class RandomWalkBanditEnv(BanditEnv):
    """Ten Gaussian arms whose means follow random walks, new ones in every episode; see `random_walk_testbed`."""

    def __init__(self, num_steps: int = 10_000, step_std: float = 0.01) -> None:
        super().__init__(random_walk_testbed(num_steps=num_steps, step_std=step_std))


def register_environments() -> None:
    """Register the three environments with Gymnasium. A second call has no effect."""
    for environment in (DynamicBanditEnv, AbruptBanditEnv, RandomWalkBanditEnv):
        name = f"bandits/{environment.__name__.removesuffix('Env')}-v0"
        if name not in gymnasium.registry:
            gymnasium.register(id=name, entry_point=f"{environment.__module__}:{environment.__name__}")


register_environments()

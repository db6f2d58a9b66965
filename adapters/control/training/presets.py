"""Training settings of each environment."""

from dataclasses import MISSING, dataclass, replace
from importlib import import_module
from typing import Any, Literal

import gymnasium
import torch

from adapters.control.policy.episode_policy import EpisodePolicy
from adapters.control.policy.options import EpisodeOptions
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig, preserved_random_state
from grpo.arguments import Settings, require_integers, setting
from grpo.surrogates import Clip

from .episode_rewards import EnvironmentReward
from .fitted_value import FittedAdvantages

Credit = Literal["group", "fitted"]
"""The baseline of a return: the group's mean, or a fitted value function."""

ADAM_EPS = 1e-5
"""Adam's epsilon as in PPO implementations. Parameters with tiny gradients then take small steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPreset(Settings):
    """Training settings of one environment. `make_config` adds the settings that all presets share."""

    env_id: str
    """Registered id of the environment, or its name if it has none."""
    environment: Any = None
    """A function that creates the environment. None: `env_id` does."""
    total_steps: int = setting(MISSING, at_least=1)
    """Environment steps of a whole run, without evaluations."""
    threshold: float | None
    """Mean return (20 episodes, most likely actions) that counts as learned. None if no threshold is defined."""
    gamma: float = setting(MISSING, at_least=0.0, at_most=1.0)
    """Discount factor. A smaller discount gives less weight to later rewards and reduces the
    variance of returns, which is large without a critic."""
    credit: Credit = "group"
    """Baseline of a return. `fitted`: `FittedAdvantages`, with groups of one."""
    num_steps: int | None = setting(None, at_least=1)
    """Environment steps per member and iteration, after which an episode goes on in the next one. None: episodes are whole."""
    action_mask: Literal["info"] | None = None
    """Source of the mask of allowed actions: `info` takes the environment's."""
    num_groups: int = setting(2, at_least=1)
    """Episode starts per iteration. A larger number averages over more starts and updates less often."""
    group_size: int = setting(8, at_least=1)
    """Episodes per start. A larger number has a better baseline and updates less often."""
    batch_size: int = setting(256, at_least=1)
    """Steps per update. A larger number makes gradients less noisy and updates less often."""
    num_epochs: int = setting(4, at_least=1)
    """Passes over an iteration's steps. More passes learn more from each step, until clipping stops the updates."""
    learning_rate: float = setting(1e-3, at_least=0.0)
    """Learning rate of Adam. A larger value learns faster and is less stable."""
    clip: float = setting(0.2, at_least=0.0, at_most=1.0)
    """Clip range of the ratio on both sides. A larger value allows larger changes of the policy per iteration."""
    entropy_coef: float = 0.0
    """Entropy coefficient. A larger value explores longer."""
    initial_log_std: float = 0.0
    """Initial log standard deviation of Gaussian actions, in units of half the box's width. A smaller value explores less."""
    normalize_observations: bool = False
    """Whether observations are normalised by running statistics. Use it if their parts differ in scale."""
    max_episode_steps: int | None = setting(None, at_least=1)
    """Maximum length of training episodes. A smaller limit updates more often and sees fewer late steps."""
    repeat: int = setting(1, at_least=1)
    """Environment steps for which each action is repeated. A larger value decides less often."""
    evaluate_every: int = setting(10_000, at_least=1)
    """Training steps between evaluations."""
    why: str = ""
    """What `preset_for` has found, and chosen for it. Empty: the settings were measured, or are your own."""

    def make_policy(self, *, seed: int | None = None, **arguments: Any) -> EpisodePolicy:
        """Create a policy with its own environments.

        Args:
            seed: Seed of the initial weights. None: they are drawn from torch's global generator.
            arguments: Other arguments of `EpisodePolicy`. `options` replaces those of the preset.
        """
        options = EpisodeOptions(
            initial_log_std=self.initial_log_std,
            normalize_observations=self.normalize_observations,
            max_episode_steps=self.max_episode_steps,
            repeat=self.repeat,
            num_steps=self.num_steps,
        )
        own: dict[str, Any] = {"num_members": self.num_groups * self.group_size, "options": options}
        own["action_mask"] = self.action_mask
        environment = self.env_id if self.environment is None else self.environment
        if seed is None:
            return EpisodePolicy(environment, **own | arguments)
        require_integers("make_policy", 0, seed=seed)
        with preserved_random_state():
            torch.manual_seed(seed)
            return EpisodePolicy(environment, **own | arguments)

    def make_config(self, seed: int | None = None) -> GRPOConfig:
        """Create the trainer's settings."""
        return GRPOConfig(
            group_size=self.group_size,
            batch_size=self.batch_size,
            num_epochs_per_update=self.num_epochs,
            learning_rate=self.learning_rate,
            max_grad_norm=0.5,  # as in PPO implementations
            seed=seed,
            advantage=AdvantageConfig(gamma=self.gamma, scale="batch"),
            objective=ObjectiveConfig(
                surrogate=Clip(low=self.clip, high=self.clip),
                entropy_coef=self.entropy_coef,
                aggregation="step_mean",
            ),
        )

    def make_trainer(
        self, policy: EpisodePolicy | None = None, *, seed: int | None = None, reward_model: Any = None, **options: Any
    ) -> GRPOTrainer:
        """Create a trainer with Adam.

        Args:
            policy: The policy, from `make_policy`. None: the trainer makes one, `trainer.policy`.
            seed: Seed of the trainer, and of the first weights of a policy that it makes.
            reward_model: Reward model. None uses the environment's own rewards, per step.
            options: Other arguments of `GRPOTrainer`.
        """
        policy = self.make_policy(seed=seed) if policy is None else policy
        if self.credit == "fitted":
            options = {"advantages": FittedAdvantages(policy, gamma=self.gamma), **options}
        return GRPOTrainer(
            config=self.make_config(seed),
            policy=policy,
            reward_model=EnvironmentReward() if reward_model is None else reward_model,
            optimizer=torch.optim.Adam(policy.parameters(), lr=self.learning_rate, eps=ADAM_EPS, fused=True),
            **options,
        )


MUJOCO = ControlPreset(  # settings that robots share
    env_id="",
    total_steps=500_000,
    threshold=None,
    gamma=0.99,
    batch_size=512,
    num_epochs=10,
    learning_rate=3e-4,
    normalize_observations=True,
    evaluate_every=50_000,
)

PRESETS = {
    preset.env_id: preset
    for preset in (
        ControlPreset(
            env_id="CartPole-v1",
            total_steps=30_000,
            threshold=475.0,
            gamma=0.99,
            num_groups=1,
            normalize_observations=True,
            evaluate_every=2_000,
        ),
        ControlPreset(env_id="Acrobot-v1", total_steps=120_000, threshold=-100.0, gamma=0.99),
        ControlPreset(env_id="Pendulum-v1", total_steps=250_000, threshold=-200.0, gamma=0.97, num_epochs=10),
        replace(
            MUJOCO,
            env_id="Reacher-v5",
            total_steps=300_000,
            threshold=-5.5,
            gamma=0.9,
            num_groups=4,
            initial_log_std=-1.0,
        ),
        # its task is the same at every step, so short episodes only mean more updates
        replace(MUJOCO, env_id="HalfCheetah-v5", threshold=1300.0, gamma=0.9, num_groups=1, max_episode_steps=250),
        replace(
            MUJOCO, env_id="Hopper-v5", threshold=1500.0, gamma=0.995, num_groups=1, group_size=16, learning_rate=6e-4
        ),
    )
}
"""The presets by environment id."""


FITTED = ControlPreset(
    env_id="",
    total_steps=20_000,
    threshold=None,
    gamma=0.99,
    credit="fitted",
    num_steps=64,
    num_groups=8,
    group_size=1,
    batch_size=256,
    normalize_observations=True,
)

FITTED_BOX = replace(FITTED, num_epochs=10, num_steps=128, batch_size=64)

FITTED_ROBOT = replace(FITTED_BOX, total_steps=100_000, num_steps=256, learning_rate=3e-4)

# observations are one-hot, and have one scale already
FITTED_TABLE = replace(
    FITTED, num_groups=16, total_steps=60_000, batch_size=64, normalize_observations=False, entropy_coef=0.01
)

DOOR_KEY = "MiniGrid-DoorKey-5x5-v0"


def door_key() -> gymnasium.Env:
    """DoorKey's grid, without its mission, which is always the same text. Needs `pip install minigrid`."""
    grid_alone: Any = import_module("minigrid.wrappers").ImgObsWrapper  # the import registers the id, too
    return grid_alone(gymnasium.make(DOOR_KEY))


FITTED_PRESETS = {
    preset.env_id: preset
    for preset in (
        replace(FITTED, env_id="CartPole-v1", threshold=475.0),
        replace(FITTED, env_id="Acrobot-v1", threshold=-95.0, total_steps=40_000),
        replace(FITTED, env_id="MountainCar-v0", threshold=-140.0, total_steps=60_000, num_steps=128, repeat=4),
        replace(FITTED, env_id="LunarLander-v3", total_steps=50_000, num_steps=128, gamma=0.995),
        replace(FITTED_BOX, env_id="Pendulum-v1", threshold=-250.0, total_steps=40_000, gamma=0.95),
        replace(FITTED_BOX, env_id="MountainCarContinuous-v0", threshold=90.0),
        replace(FITTED_BOX, env_id="InvertedPendulum-v5", threshold=800.0, initial_log_std=-1.0),
        replace(FITTED_BOX, env_id="Swimmer-v5", total_steps=40_000, num_steps=256, repeat=4),
        replace(FITTED_BOX, env_id="Reacher-v5", total_steps=100_000, gamma=0.95, initial_log_std=-1.0),
        # its noise is as wide as its box by default, which costs more than half of the return
        replace(FITTED_ROBOT, env_id="HalfCheetah-v5", gamma=0.98, initial_log_std=-2.0),
        replace(FITTED_ROBOT, env_id="Hopper-v5", gamma=0.995),
        replace(FITTED, env_id=DOOR_KEY, environment=door_key, total_steps=100_000),
        # with gamma = 0.99, standing still for ever would cost no more than a fall
        replace(FITTED_TABLE, env_id="CliffWalking-v1", threshold=-15.0, num_groups=8, gamma=0.999, entropy_coef=0.03),
        replace(FITTED_TABLE, env_id="Taxi-v4", threshold=0.0, action_mask="info"),
        replace(FITTED_TABLE, env_id="FrozenLake-v1", threshold=0.5, num_groups=32, learning_rate=3e-4),
    )
}
"""The presets with a fitted value function, by environment id."""

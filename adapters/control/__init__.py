"""Gymnasium environments and robots: groups of episodes with the same start, compared step by step, without a critic.

Requires Gymnasium (`pip install ".[gym]"`), and `[robots]` for MuJoCo and videos.

Example:
    Learn CartPole in a few seconds::

        from adapters.control import EnvironmentReward, EpisodePolicy, episode_starts, evaluate_policy
        from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer

        policy = EpisodePolicy("CartPole-v1", num_members=16)
        config = GRPOConfig(
            group_size=8, batch_size=256, num_epochs_per_update=4, max_grad_norm=0.5,
            advantage=AdvantageConfig(gamma=0.98, scale="batch"),
        )
        trainer = GRPOTrainer(config=config, policy=policy, reward_model=EnvironmentReward())
        trainer.train(episode_starts(num_groups=2), num_iterations=20)
        print(evaluate_policy(policy))

`preset_for(environment)` has measured settings of 14 environments, and chooses those of others by what it finds.
"""

try:
    import gymnasium as _gymnasium  # noqa: F401  # the one place that says what to install
except ImportError as error:
    from grpo.arguments import install_command

    raise ImportError(f"adapters.control needs Gymnasium: {install_command('gym')}") from error

from .environments.checks import check_environment
from .environments.episodes import Episode, EpisodeStart, episode_starts
from .environments.pools import AsyncPool, EnvironmentPool, NativeCartPole, PoolStep, SerialPool, WorkerLost, make_pool
from .environments.snapshots import Snapshot, Snapshotable, restore_snapshot, take_snapshot
from .policy.distributions import (
    ActionDistribution,
    Bernoulli,
    Beta,
    Categorical,
    Composite,
    FromTorch,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
    distribution_for,
)
from .policy.episode_policy import EpisodePolicy
from .policy.networks import CNNTorso, mlp_torso
from .policy.options import EpisodeOptions
from .training.choice import preset_for
from .training.episode_rewards import EnvironmentReward, StepReward, effort
from .training.evaluation import Evaluation, evaluate_policy
from .training.fitted_value import FittedAdvantages
from .training.plots import plot_learning_curves
from .training.presets import FITTED_PRESETS, PRESETS, ControlPreset
from .training.runs import LearningCurve, train_control
from .training.video import record_frames, record_video

__all__ = [
    "FITTED_PRESETS",
    "PRESETS",
    "ActionDistribution",
    "AsyncPool",
    "Bernoulli",
    "Beta",
    "CNNTorso",
    "Categorical",
    "Composite",
    "ControlPreset",
    "EnvironmentPool",
    "EnvironmentReward",
    "Episode",
    "EpisodeOptions",
    "EpisodePolicy",
    "EpisodeStart",
    "Evaluation",
    "FittedAdvantages",
    "FromTorch",
    "Gaussian",
    "LearningCurve",
    "MultiCategorical",
    "NativeCartPole",
    "PoolStep",
    "SerialPool",
    "Snapshot",
    "Snapshotable",
    "SquashedGaussian",
    "StepReward",
    "WorkerLost",
    "check_environment",
    "distribution_for",
    "effort",
    "episode_starts",
    "evaluate_policy",
    "make_pool",
    "mlp_torso",
    "plot_learning_curves",
    "preset_for",
    "record_frames",
    "record_video",
    "restore_snapshot",
    "take_snapshot",
    "train_control",
]

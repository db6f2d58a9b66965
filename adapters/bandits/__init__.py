"""Non-stationary bandits: testbeds, policies, rewards, classic strategies for comparison, and metrics.

Only the environments require Gymnasium (`pip install ".[gym]"`). `import adapters.bandits.environments`
registers `bandits/DynamicBandit-v0`, `bandits/AbruptBandit-v0` and `bandits/RandomWalkBandit-v0`.

Example:
    Train a softmax policy with GRPO, and play sliding-window UCB on the same testbed::

        from adapters.bandits import BanditReward, SlidingWindowUCB, SoftmaxPolicy, dynamic_testbed, play
        from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig
        from grpo.surrogates import Clip

        testbed = dynamic_testbed(pulls_per_step=32)
        policy = SoftmaxPolicy(num_actions=testbed.num_arms)
        clip = Clip(low=0.3, high=0.3)
        objective = ObjectiveConfig(surrogate=clip, entropy_coef=0.1)  # the bonus keeps all arms in play
        config = GRPOConfig(group_size=32, learning_rate=0.05, num_epochs_per_update=10, objective=objective)
        trainer = GRPOTrainer(config=config, policy=policy, reward_model=BanditReward(testbed))
        for _ in range(100):
            trainer.step([0])   # one state, 32 pulls: the testbed moves by one step
        print(policy.probabilities(), testbed.regrets)

        testbed.reset()
        record = play(SlidingWindowUCB(num_runs=1, num_arms=5, horizon=3_200), testbed, num_pulls=3_200)
        print(record.regrets.sum())
"""

from typing import TYPE_CHECKING, Any

from .baselines import EXP3S, GradientBandit, ThompsonSampling
from .metrics import (
    best_arm_probability,
    cumulative_regret,
    mean_by_regime,
    pull_fractions,
    segment_starts,
    structured_reward,
    time_to_reach,
)
from .play import Baseline, Oracle, PlayRecord, Uniform, play
from .policies import MLPPolicy, SoftmaxPolicy
from .rewards import BanditReward
from .testbeds import Testbed, abrupt_testbed, dynamic_regimes, dynamic_testbed, random_walk_testbed
from .upper_confidence import UCB1, DiscountedUCB, SlidingWindowUCB

__all__ = [
    "EXP3S", "UCB1", "AbruptBanditEnv", "BanditEnv", "BanditReward", "Baseline", "DiscountedUCB",
    "DynamicBanditEnv", "GradientBandit", "MLPPolicy", "Oracle", "PlayRecord", "RandomWalkBanditEnv",
    "SlidingWindowUCB", "SoftmaxPolicy", "Testbed", "ThompsonSampling", "Uniform", "abrupt_testbed",
    "best_arm_probability", "cumulative_regret", "dynamic_regimes", "dynamic_testbed", "mean_by_regime", "play",
    "pull_fractions", "random_walk_testbed", "segment_starts", "structured_reward", "time_to_reach",
]  # fmt: skip

if TYPE_CHECKING:
    from .environments import AbruptBanditEnv, BanditEnv, DynamicBanditEnv, RandomWalkBanditEnv


def __getattr__(name: str) -> Any:
    """Import the environments, and with them Gymnasium, when one of their names is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import environments

    return getattr(environments, name)

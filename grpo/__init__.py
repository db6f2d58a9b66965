"""Group Relative Policy Optimization for any policy and any reward.

Start with `GRPOTrainer`, `GRPOConfig`, and the two protocols `PolicyModel` and `RewardModel`; `grpo/README.md` is the map.
"""

from .advantage_estimator import (
    AdvantageConfig,
    AdvantageEstimator,
    discounted_returns,
    group_relative_advantages,
    group_relative_returns,
)
from .checkpoint import best_checkpoint
from .config import GRPOConfig
from .divergence import kl_k1, kl_k2, kl_k3, kl_k3_weighted, score_function_entropy
from .errors import (
    CheckpointError,
    ConfigError,
    ContractError,
    GRPOError,
    GRPOWarning,
    NonFiniteGradientError,
    ProtocolError,
    RewardError,
)
from .experience_collector import ExperienceCollector
from .grpo_objective import ObjectiveConfig, grpo_objective, step_weights
from .metrics import JSONLSink, MetricSink
from .off_policy import sampler_weights
from .policy_base import (
    HasState,
    PlansMicroBatches,
    PolicyModel,
    SamplesWithScores,
    ScoresActions,
    ScoresGroups,
    ScoresReference,
    SplitsSteps,
    SyncsSampler,
)
from .reward_calls import RewardConfig
from .reward_model_base import RewardFunction, RewardModel, WeightedRewards
from .surrogates import clipped_surrogate
from .trainer import GRPOTrainer
from .types import ActionScores, ExperienceBatch, ObjectiveInputs, ObjectiveOutput, SampledActions

__all__ = [
    "ActionScores",
    "AdvantageConfig",
    "AdvantageEstimator",
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "ExperienceBatch",
    "ExperienceCollector",
    "GRPOConfig",
    "GRPOError",
    "GRPOTrainer",
    "GRPOWarning",
    "HasState",
    "JSONLSink",
    "MetricSink",
    "NonFiniteGradientError",
    "ObjectiveConfig",
    "ObjectiveInputs",
    "ObjectiveOutput",
    "PlansMicroBatches",
    "PolicyModel",
    "ProtocolError",
    "RewardConfig",
    "RewardError",
    "RewardFunction",
    "RewardModel",
    "SampledActions",
    "SamplesWithScores",
    "ScoresActions",
    "ScoresGroups",
    "ScoresReference",
    "SplitsSteps",
    "SyncsSampler",
    "WeightedRewards",
    "best_checkpoint",
    "clipped_surrogate",
    "discounted_returns",
    "group_relative_advantages",
    "group_relative_returns",
    "grpo_objective",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_weighted",
    "sampler_weights",
    "score_function_entropy",
    "step_weights",
]

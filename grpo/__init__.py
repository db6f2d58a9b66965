"""Group Relative Policy Optimization for any policy and any reward.

Start with `GRPOTrainer`, `GRPOConfig`, and the two protocols `PolicyModel` and `RewardModel`; `grpo/README.md` is the map.
"""

from .adaptive_coefficients import EntropyControl, KLControl
from .advantage_estimator import (
    AdvantageConfig,
    AdvantageEstimator,
    decoupled_advantages,
    discounted_returns,
    generalized_advantages,
    group_relative_advantages,
    group_relative_returns,
)
from .aggregation import step_weights
from .buffers import ExperienceBuffer, GroupBuffer, mini_batches
from .checkpoint import best_checkpoint
from .config import GRPOConfig
from .distributed import Engine, Replicated
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
from .evaluation import ComparisonReport, compare_policies
from .experience_collector import ExperienceCollector
from .grpo_objective import grpo_objective
from .measurement import PolicyMeasurement, measure_policy
from .metrics import JSONLSink, MetricSink
from .objective_config import ObjectiveConfig
from .off_policy import sampler_weights
from .policy_base import (
    HasState,
    KeysStates,
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
from .running_statistics import RunningStatistics
from .surrogates import (
    cispo_surrogate,
    clipped_surrogate,
    dppo_tv_surrogate,
    dro_surrogate,
    gmpo_surrogate,
    kl_cov_surrogate,
    reinforce_surrogate,
    sapo_surrogate,
    vespo_surrogate,
)
from .trainer import GRPOTrainer
from .types import ActionScores, ExperienceBatch, ObjectiveInputs, ObjectiveOutput, SampledActions

__all__ = [
    "ActionScores",
    "AdvantageConfig",
    "AdvantageEstimator",
    "CheckpointError",
    "ComparisonReport",
    "ConfigError",
    "ContractError",
    "Engine",
    "EntropyControl",
    "ExperienceBatch",
    "ExperienceBuffer",
    "ExperienceCollector",
    "GRPOConfig",
    "GRPOError",
    "GRPOTrainer",
    "GRPOWarning",
    "GroupBuffer",
    "HasState",
    "JSONLSink",
    "KLControl",
    "KeysStates",
    "MetricSink",
    "NonFiniteGradientError",
    "ObjectiveConfig",
    "ObjectiveInputs",
    "ObjectiveOutput",
    "PlansMicroBatches",
    "PolicyMeasurement",
    "PolicyModel",
    "ProtocolError",
    "Replicated",
    "RewardConfig",
    "RewardError",
    "RewardFunction",
    "RewardModel",
    "RunningStatistics",
    "SampledActions",
    "SamplesWithScores",
    "ScoresActions",
    "ScoresGroups",
    "ScoresReference",
    "SplitsSteps",
    "SyncsSampler",
    "WeightedRewards",
    "best_checkpoint",
    "cispo_surrogate",
    "clipped_surrogate",
    "compare_policies",
    "decoupled_advantages",
    "discounted_returns",
    "dppo_tv_surrogate",
    "dro_surrogate",
    "generalized_advantages",
    "gmpo_surrogate",
    "group_relative_advantages",
    "group_relative_returns",
    "grpo_objective",
    "kl_cov_surrogate",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_weighted",
    "measure_policy",
    "mini_batches",
    "reinforce_surrogate",
    "sampler_weights",
    "sapo_surrogate",
    "score_function_entropy",
    "step_weights",
    "vespo_surrogate",
]

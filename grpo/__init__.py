"""Group Relative Policy Optimization for any policy and any reward.

Start with `GRPOTrainer`, `GRPOConfig`, and the protocols `PolicyModel` and `RewardModel`. `grpo/README.md` lists all modules.
Surrogates, KL estimators and `Steps` are imported from `grpo.surrogates` and `grpo.divergence`, helpers for adapters from
`grpo.writing`, buffers from `grpo.buffers`, engines for several processes from `grpo.distributed`.
"""

from ._objective.sampler import Mask, Truncate
from .advantage_estimator import AdvantageEstimator, group_relative_advantages, group_relative_returns
from .callbacks import Callback, EarlyStopping, KeepBestPolicy, TimeBudget
from .checkpoint import load_weights
from .config import AdvantageConfig, EntropyControl, GRPOConfig, KLControl, ObjectiveConfig, RewardConfig
from .errors import (
    CheckpointError,
    ConfigError,
    ContractError,
    GRPOError,
    GRPOWarning,
    NonFiniteGradientError,
    ProtocolError,
    RankError,
    RewardError,
    TrainingInterrupted,
)
from .evaluation import compare_policies, measure_policy
from .grpo_objective import grpo_objective, step_weights
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
from .reward_model_base import ComparesActions, RewardModel
from .rewards import PairwiseRewards, WeightedRewards
from .sinks import JSONLSink, MetricSink, Samples
from .trainer import GRPOTrainer
from .types import ActionScores, ExperienceBatch, ObjectiveInputs, ObjectiveOutput, SampledActions

__all__ = [  # noqa: RUF022 - in groups, not in alphabetical order
    # start here
    "GRPOTrainer",
    "GRPOConfig",
    "AdvantageConfig",
    "ObjectiveConfig",
    "RewardConfig",
    "KLControl",
    "EntropyControl",
    "PolicyModel",
    "RewardModel",
    "WeightedRewards",
    "PairwiseRewards",
    "load_weights",
    # write a domain
    "ActionScores",
    "SampledActions",
    "ExperienceBatch",
    "ScoresActions",
    "ScoresGroups",
    "SamplesWithScores",
    "ScoresReference",
    "SyncsSampler",
    "PlansMicroBatches",
    "SplitsSteps",
    "KeysStates",
    "HasState",
    "ComparesActions",
    # watch a run
    "MetricSink",
    "JSONLSink",
    "Samples",
    "Callback",
    "EarlyStopping",
    "KeepBestPolicy",
    "TimeBudget",
    # write a variant
    "ObjectiveInputs",
    "ObjectiveOutput",
    "grpo_objective",
    "step_weights",
    "Truncate",
    "Mask",
    "AdvantageEstimator",
    "group_relative_advantages",
    "group_relative_returns",
    # compare
    "measure_policy",
    "compare_policies",
    # errors
    "GRPOError",
    "ProtocolError",
    "ConfigError",
    "ContractError",
    "RewardError",
    "NonFiniteGradientError",
    "CheckpointError",
    "RankError",
    "TrainingInterrupted",
    "GRPOWarning",
]

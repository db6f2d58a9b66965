"""Group Relative Policy Optimization for any policy and any reward.

Start with `GRPOTrainer`, `GRPOConfig`, and the protocols `PolicyModel` and `RewardModel`. `grpo/README.md` lists all modules.
Surrogates, KL estimators and `Steps` are imported from `grpo.surrogates` and `grpo.divergence`, helpers for adapters from
`grpo.arguments`, calls with deadlines from `grpo.rewards`, engines for several processes from `grpo.distributed`.
"""

from ._common.global_state import seed_everything
from ._common.preserved import preserved_random_state
from ._common.settings_by_name import with_settings
from ._objective.sampler import KPop, Mask, Truncate
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
from .learner import Learner
from .policy_base import (
    BeginsSampling,
    HasPenalty,
    HasShardUnits,
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
from .reward_model_base import ComparesActions, RewardModel, Rewards
from .rewards import PairwiseRewards, WeightedRewards
from .sinks import JSONLSink, MetricSink, Samples
from .trainer import GRPOTrainer
from .types import ActionScores, ExperienceBatch, ObjectiveInputs, ObjectiveOutput, SampledActions

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - in groups, not in alphabetical order
    # start here
    "GRPOTrainer", "Learner", "GRPOConfig", "AdvantageConfig", "ObjectiveConfig", "RewardConfig", "KLControl",
    "EntropyControl", "with_settings", "PolicyModel", "RewardModel", "WeightedRewards", "PairwiseRewards",
    "load_weights",
    # write a domain
    "ActionScores", "SampledActions", "Rewards", "ExperienceBatch", "ScoresActions", "ScoresGroups",
    "SamplesWithScores", "ScoresReference", "SyncsSampler", "BeginsSampling", "PlansMicroBatches", "SplitsSteps",
    "KeysStates", "HasState", "HasShardUnits", "HasPenalty", "ComparesActions", "seed_everything", "preserved_random_state",
    # watch a run
    "MetricSink", "JSONLSink", "Samples", "Callback", "EarlyStopping", "KeepBestPolicy", "TimeBudget",
    # write a variant
    "ObjectiveInputs", "ObjectiveOutput", "grpo_objective", "step_weights", "Truncate", "Mask", "KPop",
    "AdvantageEstimator", "group_relative_advantages", "group_relative_returns",
    # compare
    "measure_policy", "compare_policies",
    # errors
    "GRPOError", "ProtocolError", "ConfigError", "ContractError", "RewardError", "NonFiniteGradientError",
    "CheckpointError", "RankError", "TrainingInterrupted", "GRPOWarning",
]  # fmt: skip

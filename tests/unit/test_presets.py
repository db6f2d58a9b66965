"""Every preset, field by field, compared with its paper, and a run of each.

The tables were written from the papers and from the code of their authors, not from `grpo.presets`.
"""

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import GRPOConfig, GRPOTrainer, presets
from tests.support.configs import PRESETS
from tests.support.policies import RowScoring

TOOLS: dict[str, Any] = {
    "group_size": 8, "batch_size": 32, "num_epochs_per_update": 4, "learning_rate": 1e-5, "max_grad_norm": 1.0,
    "kl_control": {"rule": "threshold", "target": 0.01, "coef_min": 0.001, "coef_max": 0.1, "gain": 0.1},
    "advantage": {"scale": "group", "std_ddof": 0, "gamma": 0.99, "gae_lambda": 0.95},
    "objective": {"surrogate": {"low": 0.2, "high": 0.2}, "kl_coef": 0.02, "entropy_coef": 0.01},
}  # fmt: skip
CONVERSATIONS: dict[str, Any] = {
    "lr_schedule": "cosine", "advantage": {"reward_clip": 10.0},
    "objective": {"surrogate": {"low": 0.2, "high": 0.2}, "kl_coef": 0.1, "entropy_coef": 0.01},
}  # fmt: skip


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`settings` with `changes` in their place, in nested dicts too. A dict that names its kind replaces the old one."""
    result = dict(settings)
    for name, value in changes.items():
        nested = isinstance(value, dict) and isinstance(result.get(name), dict) and "kind" not in value
        result[name] = merged(result[name], value) if nested else value
    return result


SAID: dict[str, dict[str, Any]] = {
    # 64 answers to each of 16 questions, in one update; sec. 4.2
    "deepseek_math": {"group_size": 64, "num_states_per_iteration": 16, "learning_rate": 1e-6, "advantage": {"scale": "group"},
        "objective": {"kl_coef": 0.04, "kl_estimator": "k3", "aggregation": "row_mean"}},
    # 512 prompts of 16, mini-batches of 512 answers: 16 updates; sec. 4.1. Ten draws in all: max_num_gen_batches
    "dapo": {"group_size": 16, "num_states_per_iteration": 512, "batch_size": 512, "learning_rate": 1e-6,
        "dynamic_sampling_rounds": 9, "advantage": {"scale": "group"},
        "objective": {"surrogate": {"low": 0.2, "high": 0.28}, "kl_coef": 0.0, "aggregation": "step_mean"}},
    # 128 questions of 8, mini-batches of 128 answers: 8 updates; generate_max_length=3000
    "dr_grpo": {"group_size": 8, "num_states_per_iteration": 128, "batch_size": 128, "learning_rate": 1e-6,
        "advantage": {"scale": "none"}, "objective": {"kl_coef": 0.0, "aggregation": "fixed_length", "fixed_length": 3000}},
    # 512 x 16 / 4 = 2048 rows per update; the clip of sec. 5.1
    "gspo": {"group_size": 16, "num_states_per_iteration": 512, "batch_size": 2048, "learning_rate": 1e-6,
        "advantage": {"scale": "group"},
        "objective": {"surrogate": {"low": 3e-4, "high": 4e-4, "level": "row"}, "kl_coef": 0.0}},
    # no lower bound (1 - 1 = 0), and 1 + 4 = 5 above
    "cispo": {"group_size": 16, "num_states_per_iteration": 512, "batch_size": 512, "learning_rate": 1e-6,
        "dynamic_sampling_rounds": 9, "advantage": {"scale": "group"},
        "objective": {"surrogate": {"kind": "cispo", "low": 1.0, "high": 4.0, "level": "step"},
                      "kl_coef": 0.0, "aggregation": "step_mean"}},
    "sapo": {"group_size": 16, "num_states_per_iteration": 512, "batch_size": 2048, "learning_rate": 1e-6,
        "advantage": {"scale": "group"},
        "objective": {"surrogate": {"kind": "sapo", "temperature_pos": 1.0, "temperature_neg": 1.05, "level": "step"},
                      "kl_coef": 0.0, "aggregation": "row_mean"}},
    # cliprange 0.4 is that of the log-ratio: exp(-0.4) = 0.6703 and exp(0.4) = 1.4918
    "gmpo": {"group_size": 8, "num_states_per_iteration": 128, "batch_size": 128, "learning_rate": 1e-6,
        "advantage": {"scale": "group"},
        "objective": {"surrogate": {"kind": "gmpo", "low": pytest.approx(0.32967995, abs=1e-8),
                                    "high": pytest.approx(0.49182470, abs=1e-8)},
                      "kl_coef": 0.0, "aggregation": "row_mean"}},
    # k = 4; beta 0.03 is that of TL;DR
    "rloo": {"group_size": 4, "learning_rate": 1e-6, "advantage": {"baseline": "leave_one_out", "scale": "none"},
        "objective": {"surrogate": {"kind": "reinforce"}, "kl_coef": 0.03, "kl_estimator": "k2", "aggregation": "row_sum"}},
    # train_reinforce_baseline_hybrid_engine.sh of OpenRLHF
    "reinforce_plus_plus_baseline": {"group_size": 8, "num_states_per_iteration": 128, "learning_rate": 5e-7,
        "advantage": {"baseline": "group_mean", "scale": "whiten"},
        "objective": {"kl_coef": 1e-5, "kl_estimator": "k2", "aggregation": "row_mean"}},
    # F_norm = 1, alpha = B / (B - M)
    "gpg": {"group_size": 8, "learning_rate": 1e-6, "advantage": {"scale": "none", "upweight_live_groups": True},
        "objective": {"surrogate": {"kind": "reinforce"}, "kl_coef": 0.0, "aggregation": "step_mean"}},
    # run_qwen3_training.sh: one update of 256 prompts
    "maxrl": {"group_size": 16, "num_states_per_iteration": 256, "learning_rate": 1e-6, "max_grad_norm": 0.3,
        "advantage": {"scale": "mean", "std_eps": 1e-6},
        "objective": {"surrogate": {"low": 0.2, "high": 0.2}, "kl_coef": 0.0, "aggregation": "step_mean"}},
    # recipe/bnpo/run.sh: seq-mean-token-sum
    "bnpo": {"group_size": 16, "num_states_per_iteration": 32, "learning_rate": 1e-6, "advantage": {"scale": "beta"},
        "objective": {"surrogate": {"high": 0.28, "dual": 10.0}, "kl_coef": 0.0, "aggregation": "row_sum"}},
    # algorithm 1 with lambda = 1: all outputs are the student's; k2 has the gradient of the reverse KL, beta = 1
    "on_policy_distillation": {"group_size": 4, "learning_rate": 1e-6,
        "objective": {"kl_coef": 1.0, "kl_estimator": "k2", "aggregation": "step_mean"}},
    "tool_default": TOOLS,
    "tool_use": merged(TOOLS, {"group_size": 4, "batch_size": 16, "num_epochs_per_update": 2, "learning_rate": 5e-6,
        "kl_control": {"target": 0.02},
        "objective": {"surrogate": {"low": 0.15, "high": 0.15}, "kl_coef": 0.05, "entropy_coef": 0.005}}),
    "tool_exploration": merged(TOOLS, {
        "objective": {"surrogate": {"low": 0.3, "high": 0.3}, "kl_coef": 0.01, "entropy_coef": 0.05}}),
    "tool_stable": merged(TOOLS, {"num_epochs_per_update": 2, "learning_rate": 1e-6,
        "objective": {"surrogate": {"low": 0.1, "high": 0.1}, "kl_coef": 0.1}}),
    # accumulation over 8, 4 and 2 groups: rows per update = groups x group size, one group per forward
    "conservative": merged(CONVERSATIONS, {"group_size": 32, "batch_size": 256, "micro_batch_size": 32,
        "learning_rate": 1e-6, "max_grad_norm": 0.5, "warmup_ratio": 0.2}),
    "balanced": merged(CONVERSATIONS, {"group_size": 16, "batch_size": 64, "micro_batch_size": 16,
        "learning_rate": 5e-6, "max_grad_norm": 1.0, "warmup_ratio": 0.1}),
    "aggressive": merged(CONVERSATIONS, {"group_size": 8, "batch_size": 16, "micro_batch_size": 8,
        "learning_rate": 1e-5, "max_grad_norm": 2.0, "warmup_ratio": 0.05}),
}  # fmt: skip
"""What each source says, and what stands for what it does not say; all else is at its default."""

LEFT_ALONE: dict[str, Any] = {
    "num_epochs_per_update": 1, "num_states_per_iteration": None, "batch_size": None, "micro_batch_size": None,
    "lr_schedule": "constant", "warmup_ratio": 0.0, "max_grad_norm": 1.0, "autocast_dtype": None,
    "compile_objective": False, "kl_control": None, "entropy_control": None, "reference_sync_every": None,
    "dynamic_sampling_rounds": 0, "replay_iterations": 0, "iterations_ahead": 0,
    "advantage": {
        "credit": None, "baseline": "group_mean", "scale": "none", "std_ddof": 1, "std_eps": 0.0,
        "several_rewards": "sum", "gamma": 1.0, "upweight_live_groups": False, "positive_weight": 1.0,
        "negative_only": False, "clip": None, "reward_clip": None, "normalize_rewards": False,
    },
    "objective": {
        "surrogate": {"kind": "clip", "low": 0.2, "high": 0.2, "delta": None, "dual": None, "level": "step"},
        "top_entropy_fraction": 1.0, "off_policy_threshold": None, "sampler_correction": None, "kl_estimator": "k3",
        "entropy_coef": 0.0, "entropy_estimator": "exact", "entropy_aggregation": None, "aggregation": "row_mean",
    },
}  # fmt: skip
"""Defaults that the sources agree with, or do not speak of: a change of one of them would be a change of every preset."""


def test_every_preset_is_in_the_table() -> None:
    assert set(SAID) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_exactly_the_values_of_its_source(name: Any) -> None:
    assert PRESETS[name]().to_dict() == merged(GRPOConfig().to_dict(), SAID[name])


def test_the_defaults_that_presets_rely_on_are_unchanged() -> None:
    defaults = GRPOConfig().to_dict()
    assert merged(defaults, LEFT_ALONE) == defaults


def test_dr_grpo_divides_by_the_given_length() -> None:
    changed = dataclasses.replace(presets.dr_grpo().objective, fixed_length=8)
    assert presets.dr_grpo(max_length=8) == dataclasses.replace(presets.dr_grpo(), objective=changed)


class ShareOfOnes:
    """The share of a row's steps that are 1. Records its arguments."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.seen: list[tuple[Any, Any, Tensor]] = []

    def __call__(self, states: list[int], actions: list[tuple[int, ...]]) -> Tensor:
        rewards = torch.tensor([action.count(1) / self.max_steps for action in actions], dtype=torch.float64)
        self.seen.append((states, actions, rewards))
        return rewards


@pytest.mark.filterwarnings("ignore:step.. does not honour")
@pytest.mark.parametrize("name", PRESETS)
def test_one_step_of_a_preset_makes_better_rows_more_likely(name: Any) -> None:
    """As it stands, learning rate and all, on ragged rows in float64: a step of 1e-6 shows in the eighth digit.

    The reference stands a little beside the policy, so that the KL is there from the first update. How much likelier rows
    became is held against how much better than their group's mean they were, whose sign every preset's advantage has.
    """
    torch.manual_seed(0)
    config = PRESETS[name]()
    policy = RowScoring(num_states=3)
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    reward_model = ShareOfOnes(policy.max_steps)
    trainer = GRPOTrainer(config=config, policy=policy, reference_policy=reference, reward_model=reward_model)
    before = copy.deepcopy(policy)
    metrics = trainer.step([0, 1, 2])
    ((states, actions, rewards),) = reward_model.seen
    updates = config.num_epochs_per_update * math.ceil(len(actions) / (config.batch_size or len(actions)))
    assert metrics["train/num_updates"] == updates
    assert metrics["train/learning_rate"] == config.learning_rate
    assert (metrics["train/kl_penalty"] > 0) == (metrics["train/kl_mean"] > 0) == bool(config.objective.kl_coef)
    assert (metrics["train/entropy_bonus"] > 0) == (config.objective.entropy_coef > 0)
    better = rewards - rewards.view(3, -1).mean(1).repeat_interleave(config.group_size)
    rise = policy.get_log_probabilities(states, actions) - before.get_log_probabilities(states, actions)
    assert better @ rise > 0.5 * better.norm() * rise.norm()

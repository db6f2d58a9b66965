"""Each field of each configuration, changed alone, changes what a small run does: no option is there that nothing reads."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig, RewardConfig, SampledActions
from grpo.errors import GRPOError
from tests.policies import ExactSampling, digest, weights_of


class Sampler(ExactSampling):
    """Sequences from a sampler that is a little off, and tells so."""

    def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
        sampled = super().sample_actions(states, num_actions_per_state)
        assert sampled.behaviour_log_probs is not None
        shifts = torch.linspace(-1.5, 1.5, sampled.mask.numel(), dtype=torch.float64).view(sampled.mask.shape)
        return dataclasses.replace(sampled, behaviour_log_probs=sampled.behaviour_log_probs + shifts)

    def to(self, *arguments: Any, **keywords: Any) -> Any:
        self.calls["to"] += 1
        return super().to(*arguments, **keywords)


class Rewards:
    """By the number of ones, per row or per step; may fail in the ways that `RewardConfig` is about."""

    def __init__(self, *, per_step: bool, first_is_nan: bool, first_call_raises: bool) -> None:
        self.per_step, self.first_is_nan, self.raises = per_step, first_is_nan, first_call_raises

    def __call__(self, states: Any, actions: Any) -> Any:
        if self.raises:
            self.raises = False
            raise ConnectionError("not yet")
        width = max(len(action) for action in actions)
        rewards = torch.zeros(len(actions), width, dtype=torch.float64)
        for row, action in enumerate(actions):
            for place, token in enumerate(action):
                rewards[row, place] = float(token == 1) + 0.1 * place + 0.01 * (row % 3)
        if self.first_is_nan:
            rewards[0] = math.nan
        return rewards if self.per_step else rewards.sum(1)


def outcome(config: GRPOConfig, monkeypatch: pytest.MonkeyPatch, scene: dict[str, bool]) -> str:
    """Everything a run of two iterations leaves behind, as one hash: weights, forwards, seconds slept, the error."""
    slept: list[float] = []
    monkeypatch.setattr("grpo.reward_calls.time.sleep", slept.append)
    torch.manual_seed(0)
    dtype = torch.float32 if scene.get("float32") else torch.float64  # autocast leaves float64 alone
    policy, reference = Sampler(max_steps=3, dtype=dtype), Sampler(max_steps=3, dtype=dtype)
    if scene.get("nan_gradients"):
        policy.head.weight.register_hook(lambda gradient: gradient * math.nan)
    rewards = Rewards(
        per_step=scene.get("per_step", False),
        first_is_nan=scene.get("first_is_nan", False),
        first_call_raises=scene.get("first_call_raises", False),
    )
    error = ""
    try:
        trainer = GRPOTrainer(config=config, policy=policy, reward_model=rewards, reference_policy=reference)
        trainer.train([0, 1, 2, 3], num_iterations=2, progress=False)
    except GRPOError as raised:
        error = f"{type(raised).__name__}: {raised}"
    calls = sorted(policy.calls.items())
    return digest(weights_of(policy), policy.rows_scored, calls, slept, error)


BASE: dict[str, Any] = {"group_size": 4, "batch_size": 6, "num_epochs_per_update": 2, "learning_rate": 0.05, "seed": 0}
STEPS, NAN = {"per_step": True}, {"first_is_nan": True}

CASES: dict[type, dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, bool]]]] = {
    GRPOConfig: {
        "group_size": ({}, {"group_size": 3}, {}),
        "num_states_per_iteration": ({}, {"num_states_per_iteration": 2}, {}),
        "batch_size": ({}, {"batch_size": 5}, {}),
        "micro_batch_size": ({}, {"micro_batch_size": 2}, {}),
        "num_epochs_per_update": ({}, {"num_epochs_per_update": 3}, {}),
        "learning_rate": ({}, {"learning_rate": 0.01}, {}),
        "lr_schedule": ({}, {"lr_schedule": "linear"}, {}),
        "warmup_ratio": ({}, {"warmup_ratio": 0.9}, {}),
        "max_grad_norm": ({}, {"max_grad_norm": 1e-9}, {}),
        "max_skipped_updates": ({}, {"max_skipped_updates": 2}, {"nan_gradients": True}),
        "autocast_dtype": ({}, {"autocast_dtype": "bfloat16"}, {"float32": True}),
        "device": ({}, {"device": "cpu"}, {}),
        "seed": ({}, {"seed": 1}, {}),
    },
    AdvantageConfig: {
        "credit": ({}, {"credit": "row"}, STEPS),
        "baseline": ({}, {"baseline": "none"}, {}),
        "scale": ({}, {"scale": "batch"}, {}),
        "std_ddof": ({"scale": "group"}, {"scale": "group", "std_ddof": 0}, {}),
        "std_eps": ({"scale": "group"}, {"scale": "group", "std_eps": 0.5}, {}),
        "gamma": ({}, {"gamma": 0.5}, STEPS),
        "clip": ({}, {"clip": 0.05}, {}),
    },
    ObjectiveConfig: {
        "clip_low": ({}, {"clip_low": 0.01}, {}),
        "clip_high": ({}, {"clip_high": 0.01}, {}),
        "kl_coef": ({}, {"kl_coef": 0.5}, {}),
        "kl_estimator": ({}, {"kl_estimator": "k2"}, {}),
        "entropy_coef": ({}, {"entropy_coef": 0.5}, {}),
        "entropy_estimator": ({"entropy_coef": 0.5}, {"entropy_coef": 0.5, "entropy_estimator": "score_function"}, {}),
        "entropy_aggregation": ({"entropy_coef": 0.5}, {"entropy_coef": 0.5, "entropy_aggregation": "step_mean"}, {}),
        "aggregation": ({}, {"aggregation": "step_mean"}, {}),
        "fixed_length": (
            {"aggregation": "fixed_length", "fixed_length": 3},
            {"aggregation": "fixed_length", "fixed_length": 9},
            {},
        ),
        "sampler_correction": ({}, {"sampler_correction": "mask"}, {}),
        "sampler_ratio_low": (
            {"sampler_correction": "truncate"},
            {"sampler_correction": "truncate", "sampler_ratio_low": 0.9},
            {},
        ),
        "sampler_ratio_high": (
            {"sampler_correction": "truncate"},
            {"sampler_correction": "truncate", "sampler_ratio_high": 1.1},
            {},
        ),
    },
    RewardConfig: {
        "non_finite": ({"non_finite": "drop"}, {"non_finite": "zero"}, NAN),
        "on_failure": ({}, {"on_failure": "drop"}, {"first_call_raises": True}),
        "num_retries": ({}, {"num_retries": 1}, {"first_call_raises": True}),
        "retry_delay": ({"num_retries": 1}, {"num_retries": 1, "retry_delay": 5.0}, {"first_call_raises": True}),
    },
}
PARTS = {AdvantageConfig: "advantage", ObjectiveConfig: "objective", RewardConfig: "reward"}


@pytest.mark.parametrize("kind", CASES)
def test_every_field_is_among_the_cases(kind: type) -> None:
    fields = {field.name for field in dataclasses.fields(kind)}
    assert fields - set(PARTS.values()) == set(CASES[kind])


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, cases in CASES.items() for name in cases])
@pytest.mark.filterwarnings("ignore::grpo.errors.GRPOWarning")  # bfloat16 moves log-probs, and that is said
def test_changed_alone_it_changes_what_a_run_does(kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, scene = CASES[kind][name]

    def config(values: dict[str, Any]) -> GRPOConfig:
        return GRPOConfig(**(BASE | values if kind is GRPOConfig else BASE | {PARTS[kind]: kind(**values)}))

    first = outcome(config(before), monkeypatch, scene)
    assert first == outcome(config(before), monkeypatch, scene), "the scene itself is not repeatable"
    assert first != outcome(config(after), monkeypatch, scene)

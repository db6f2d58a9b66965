"""The settings to start with: what their reasons claim, and that a run with them trains an adapter."""

import re
from dataclasses import fields, replace
from typing import Any

import pytest
from peft import LoraConfig

from adapters.llm import CompletionRewards, HFPolicy, SamplingConfig, add_lora, lora_start
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig, presets
from tests.support.llm_models import character_tokenizer, tiny_model


def changed(values: Any, defaults: Any) -> set[str]:
    return {field.name for field in fields(values) if getattr(values, field.name) != getattr(defaults, field.name)}


def test_every_setting_that_differs_from_the_defaults_has_a_reason() -> None:
    config, text = lora_start(), lora_start.__doc__ or ""
    names = set(re.findall(r"(?:objective\.|advantage\.)?(\w+)=", text)) | {"surrogate", "advantage", "objective"}
    assert changed(config, GRPOConfig()) <= names
    assert changed(config.objective, ObjectiveConfig()) <= names
    assert changed(config.advantage, AdvantageConfig()) <= names


def test_an_adapter_learns_with_ten_times_the_learning_rate_of_all_weights() -> None:
    assert lora_start().learning_rate == pytest.approx(10 * presets.dapo().learning_rate)


@pytest.mark.filterwarnings("ignore:step.. does not honour")  # of the lone collect() at its end
def test_a_run_starts_on_policy_without_a_reference_and_trains_the_adapter() -> None:
    policy = HFPolicy(
        add_lora(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)),
        character_tokenizer(),
        sampling=SamplingConfig(max_new_tokens=4),
    )
    before = {name: value.detach().clone() for name, value in policy.get_parameters().items()}
    rewards = CompletionRewards(lambda completion: float("1" in completion))
    config = replace(lora_start(), num_states_per_iteration=4)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=rewards)
    (metrics,) = trainer.train(["1+1=", "2+1=", "3+1=", "4+1="], num_iterations=1, progress=False)
    assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["train/clip_fraction"] == 0.0
    assert "train/kl_mean" not in metrics or metrics["train/kl_penalty"] == 0.0
    assert trainer.collect(["1+1="]).ref_log_probs is None
    assert any(not value.equal(before[name]) for name, value in policy.get_parameters().items())

"""What rounding does to mixtures of experts below float32 is reported by name, and is not taken for a broken model."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from adapters.llm import HFPolicy, SamplingConfig
from adapters.llm.model.causal_lm import CausalLM
from grpo.errors import ConfigError
from tests.support.llm_models import character_tokenizer
from tests.support.tiny_architectures import tiny_of

STATES = ["1+1=", "12+30=?"]


def policy_of(model_type: str, dtype: torch.dtype, **sampling: Any) -> HFPolicy:
    sampling_config = SamplingConfig(max_new_tokens=4, **sampling)
    return HFPolicy(tiny_of(model_type).to(dtype), character_tokenizer(), sampling=sampling_config)


def reports(policy: HFPolicy, caplog: pytest.LogCaptureFixture, *, times: int = 1) -> list[str]:
    """What the log says if the first token had a log-prob that was 1.5 higher at sampling."""
    caplog.clear()
    for _ in range(times):
        groups = [list(group) for group in policy.sample_actions(STATES, 2).actions]
        first, *rest = groups[0][0].behaviour_log_probs
        groups[0][0] = replace(groups[0][0], behaviour_log_probs=(first + 1.5, *rest))
        policy.score_groups(STATES, groups)
    return [record.getMessage() for record in caplog.records if "experts" in record.getMessage()]


def test_tokens_whose_experts_are_others_are_reported_once_by_the_name_of_the_class(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (message,) = reports(policy_of("mixtral", torch.bfloat16), caplog, times=2)
    assert "MixtralForCausalLM is a mixture of experts in half precision" in message
    assert "differs by up to 1.5, and that of " in message
    assert "ObjectiveConfig(sampler_correction='truncate')" in message


def test_other_models_precisions_and_distributions_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert reports(policy_of("mixtral", torch.float32), caplog) == []
    assert reports(policy_of("llama", torch.bfloat16), caplog) == []
    assert reports(policy_of("mixtral", torch.bfloat16, top_k=5), caplog) == []
    with_dropout = policy_of("mixtral", torch.bfloat16)
    with_dropout.model.dropout = torch.nn.Dropout()
    with_dropout.train()
    assert reports(with_dropout, caplog) == []


def test_scores_after_an_update_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    policy = policy_of("mixtral", torch.bfloat16)
    actions = policy.sample_actions(STATES, 2).actions
    policy.score_groups(STATES, actions)
    moved = [[replace(action, behaviour_log_probs=(0.0,) * len(action)) for action in group] for group in actions]
    caplog.clear()
    policy.score_groups(STATES, moved)
    assert "experts" not in caplog.text


def test_one_token_whose_experts_are_others_is_no_reason_to_refuse_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = CausalLM.log_probs_alone

    def with_others(self: CausalLM, prompt: Any, tokens: Any) -> torch.Tensor:
        return alone(self, prompt, tokens) + torch.tensor([1.7, *[0.0] * (len(tokens) - 1)])

    monkeypatch.setattr(CausalLM, "log_probs_alone", with_others)
    monkeypatch.setattr("adapters.llm.scoring.CHECKED_LENGTHS", [((10, 3), 8)])
    policy_of("mixtral", torch.bfloat16)
    with pytest.raises(ConfigError, match=r"must use the same distribution"):
        policy_of("llama", torch.bfloat16)
    with pytest.raises(ConfigError, match=r"must use the same distribution"):
        policy_of("mixtral", torch.float32)

"""A policy refuses a model that samples from another distribution than it scores."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from adapters.llm import HFPolicy, SampledTokens, SamplingConfig
from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.sampling.decoding import DecodingSampler
from adapters.llm.scoring import check_scores
from grpo.errors import ConfigError
from tests.support.llm_models import (
    FAMILIES,
    FLOAT32_LOG_PROB,
    character_tokenizer,
    completion,
    forward_shapes,
    tiny_model,
)
from tests.support.tiny_architectures import tiny_of

TOKENIZER = character_tokenizer()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_decoding_loses_the_state_is_refused(dtype: Any) -> None:
    """`generate` gives RWKV every new token without the state of the tokens before."""
    with pytest.raises(ConfigError, match=r"with RwkvForCausalLM, .* differs by [\d.]+ between .* Use another"):
        HFPolicy(tiny_of("rwkv").to(dtype), TOKENIZER)


def test_a_model_that_keeps_its_state_between_calls_is_refused() -> None:
    """RecurrentGemma keeps its state in its modules and reads a prompt of one token as the next token of the last batch."""
    with pytest.raises(ConfigError, match="same distribution; with RecurrentGemmaForCausalLM, the log-prob"):
        HFPolicy(tiny_of("recurrent_gemma"), TOKENIZER)


@pytest.mark.parametrize(("make", "of", "loop"), [
    *((tiny_model, family, "decoding") for family in FAMILIES), (tiny_of, "qwen3_next", "decoding"),
    (tiny_model, "qwen3", "generate"), (tiny_model, "mamba", "generate"), (tiny_of, "falcon_h1", "generate"),
])  # fmt: skip
def test_models_that_score_what_they_sample_are_accepted(make: Any, of: str, loop: Any) -> None:
    model = make(of)
    assert HFPolicy(model, TOKENIZER, sampler=loop).model is model


def test_prompts_of_one_token_are_sampled_as_they_are_scored() -> None:
    """The refused models fail with such prompts, at the latest in the second call."""
    policy = HFPolicy(tiny_model("mamba"), TOKENIZER, sampling=SamplingConfig(max_new_tokens=6))
    for _ in range(2):
        sampled = policy.sample_actions(["a", "b"], 2)
    again = policy.score_groups(["a", "b"], sampled.actions)
    torch.testing.assert_close(again.log_probs, sampled.behaviour_log_probs, atol=FLOAT32_LOG_PROB, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_the_check_changes_neither_the_model_nor_the_random_state(family: Any) -> None:
    """The random state, the mode and `requires_grad` stay the same, and dropout does not disturb the check."""
    model = get_peft_model(tiny_model(family), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5))
    model.gradient_checkpointing_enable()
    model.train()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    before = torch.get_rng_state()
    HFPolicy(model, TOKENIZER)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained
    assert all(parameter.grad is None for parameter in model.parameters())


class Elsewhere:
    """A sampler that must not be called."""

    def sample(self, *args: Any, **options: Any) -> SampledTokens:
        raise AssertionError

    def sync(self, model: Any) -> None: ...


def test_another_sampler_is_not_checked() -> None:
    policy = HFPolicy(tiny_of("rwkv"), TOKENIZER, sampler=Elsewhere())
    assert policy.score_actions(["ab"], [completion(3, 4)]).log_probs.shape == (1, 2)


def test_the_check_takes_eighteen_forward_passes_of_short_rows() -> None:
    """Eight tokens after prompts of 10 and 3 tokens, and two tokens after prompts of one token: drawn, alone, and scored."""
    model = tiny_model()
    shapes = forward_shapes(model)
    lm = CausalLM(model)
    check_scores(lm, DecodingSampler(lm, TOKENIZER))
    drawn = [(2, 10), *[(2, 1)] * 7, (2, 1), (2, 1)]
    assert shapes == [*drawn, (1, 18), (1, 11), (2, 10), (2, 7), (1, 3), (1, 3), (2, 1), (2, 1)]


@pytest.mark.parametrize("positions", [8, 9, 17])
def test_the_check_fits_into_a_model_of_few_positions(positions: Any) -> None:
    HFPolicy(tiny_model("gpt2", n_positions=positions), TOKENIZER)


# --- mixtures of experts below float32


PROMPTS = ["1+1=", "12+30=?"]


def experts(model_type: str, dtype: torch.dtype, **sampling: Any) -> HFPolicy:
    return HFPolicy(tiny_of(model_type).to(dtype), TOKENIZER, sampling=SamplingConfig(max_new_tokens=4, **sampling))


def reports(policy: HFPolicy, caplog: pytest.LogCaptureFixture, *, times: int = 1) -> list[str]:
    """What the log says if the first token had a log-prob that was 1.5 higher at sampling."""
    caplog.clear()
    for _ in range(times):
        groups = [list(group) for group in policy.sample_actions(PROMPTS, 2).actions]
        first, *rest = groups[0][0].behaviour_log_probs
        groups[0][0] = replace(groups[0][0], behaviour_log_probs=(first + 1.5, *rest))
        policy.score_groups(PROMPTS, groups)
    return [record.getMessage() for record in caplog.records if "experts" in record.getMessage()]


def test_tokens_with_other_experts_are_reported_once_with_the_class(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = reports(experts("mixtral", torch.bfloat16), caplog, times=2)
    assert "MixtralForCausalLM is a mixture of experts in half precision" in message
    assert "differs by up to 1.5, and that of " in message
    assert "ObjectiveConfig(sampler_correction='truncate')" in message


def test_other_models_precisions_and_distributions_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert reports(experts("mixtral", torch.float32), caplog) == []
    assert reports(experts("llama", torch.bfloat16), caplog) == []
    assert reports(experts("mixtral", torch.bfloat16, top_k=5), caplog) == []
    with_dropout = experts("mixtral", torch.bfloat16)
    with_dropout.model.dropout = torch.nn.Dropout()
    with_dropout.train()
    assert reports(with_dropout, caplog) == []


def test_scores_after_an_update_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    policy = experts("mixtral", torch.bfloat16)
    actions = policy.sample_actions(PROMPTS, 2).actions
    policy.score_groups(PROMPTS, actions)
    moved = [[replace(action, behaviour_log_probs=(0.0,) * len(action)) for action in group] for group in actions]
    caplog.clear()
    policy.score_groups(PROMPTS, moved)
    assert "experts" not in caplog.text


def test_one_token_whose_experts_are_others_is_no_reason_to_refuse_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = CausalLM.log_probs_alone

    def with_others(self: CausalLM, prompt: Any, tokens: Any) -> torch.Tensor:
        return alone(self, prompt, tokens) + torch.tensor([1.7, *[0.0] * (len(tokens) - 1)])

    monkeypatch.setattr(CausalLM, "log_probs_alone", with_others)
    monkeypatch.setattr("adapters.llm.scoring.CHECKED_LENGTHS", [((10, 3), 8)])
    experts("mixtral", torch.bfloat16)
    for model_type, dtype in (("llama", torch.bfloat16), ("mixtral", torch.float32)):
        with pytest.raises(ConfigError, match=r"must use the same distribution"):
            experts(model_type, dtype)

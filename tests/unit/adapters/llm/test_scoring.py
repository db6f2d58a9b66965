"""What is drawn is what is scored: models for which that is not so are refused when the policy is made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from adapters.llm import HFPolicy, SampledTokens
from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.sampling.decoding import DecodingSampler
from adapters.llm.scoring import check_sampler
from grpo.errors import ConfigError
from tests.support.llm_models import (
    ENDS,
    FAMILIES,
    LAYERS,
    LLAMA,
    VOCABULARY_SIZE,
    character_tokenizer,
    completion,
    tiny_model,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning",  # transformers renames it; PEFT asks for it
)

TOKENIZER = character_tokenizer()
SIZES = {"vocab_size": VOCABULARY_SIZE, **LAYERS, **ENDS}


def rwkv() -> Any:
    return RwkvForCausalLM(RwkvConfig(**SIZES, attention_hidden_size=32, context_length=64))


def recurrent_gemma() -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "lru_width": 32}
    return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**SIZES | heads | {"num_hidden_layers": 3}))


def qwen3_next() -> Any:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    heads |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8}
    layers = {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 8}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**LLAMA | experts | heads | layers))


def falcon_h1() -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "mamba_n_heads": 4, "mamba_d_head": 8}
    return FalconH1ForCausalLM(FalconH1Config(**SIZES | heads, mamba_d_ssm=32, mamba_d_state=8, mamba_chunk_size=8))


def of_seed_0(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_decoding_loses_is_refused(dtype: torch.dtype) -> None:
    """`generate` gives RWKV every new token without the state of those before."""
    with pytest.raises(ConfigError, match=r"RwkvForCausalLM draws tokens from another .* differs by 0\.\d+, .* Use an"):
        HFPolicy(of_seed_0(rwkv).to(dtype), TOKENIZER)


def test_a_state_that_outlives_its_call_is_refused() -> None:
    """RecurrentGemma keeps its state in its modules: a prompt of one token is read as what goes on from the last batch."""
    with pytest.raises(ConfigError, match="RecurrentGemmaForCausalLM draws tokens from another"):
        HFPolicy(of_seed_0(recurrent_gemma), TOKENIZER)


@pytest.mark.parametrize("loop", ["decoding", "generate"])
@pytest.mark.parametrize("make", [*FAMILIES, qwen3_next, falcon_h1])
def test_the_others_are_not(make: Any, loop: Any) -> None:
    model = tiny_model(make) if isinstance(make, str) else of_seed_0(make)
    assert HFPolicy(model, TOKENIZER, sampler=loop).model is model


def test_a_single_token_is_enough_of_a_prompt_for_them() -> None:
    """Such as the above would draw wrongly, twice in a row."""
    policy = HFPolicy(tiny_model("mamba"), TOKENIZER)
    for _ in range(2):
        sampled = policy.sample_actions(["a", "b"], 2)
    again = policy.score_groups(["a", "b"], sampled.actions)
    torch.testing.assert_close(again.log_probs, sampled.behaviour_log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_nothing_is_changed_by_looking(family: str) -> None:
    """Neither the random numbers, nor the mode, nor what requires a gradient; dropout does not disturb it."""
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
    """A sampler that is never asked here."""

    def sample(self, *args: Any, **options: Any) -> SampledTokens:
        raise AssertionError

    def sync(self, model: Any) -> None: ...


def test_of_another_engine_nothing_is_asked_and_any_model_can_be_scored() -> None:
    policy = HFPolicy(of_seed_0(rwkv), TOKENIZER, sampler=Elsewhere())
    assert policy.score_actions(["ab"], [completion(3, 4)]).log_probs.shape == (1, 2)


def test_looking_costs_eight_forwards_of_two_short_rows() -> None:
    """Two batches of prompts and two tokens, drawn and scored, whatever the size of the model."""
    model = tiny_model()
    shapes: list[tuple[int, ...]] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    lm = CausalLM(model)
    check_sampler(lm, DecodingSampler(lm, TOKENIZER))
    assert shapes == [(2, 3), (2, 1), (2, 1), (2, 1), (2, 3), (2, 1), (2, 1), (2, 1)]

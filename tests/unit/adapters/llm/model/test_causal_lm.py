from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from adapters.llm.model.causal_lm import CausalLM, LogitsPostprocessing
from grpo.errors import ContractError
from tests.support.llm_models import ENDS, FAMILIES, LLAMA, SHARING, VOCABULARY_SIZE, tiny_model

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_the_decoders_hidden_states_is_what_the_model_says(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    lm = CausalLM(model)
    hidden = lm.decoder(input_ids=TOKENS, use_cache=False).last_hidden_state
    expected = model(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(lm.head(hidden).to(expected.dtype), expected, atol=1e-12, rtol=0)
    is_plain = family not in ("granite", "cohere", "gemma2")
    assert (type(lm.head) is nn.Linear) == is_plain  # whose gradient is taken in blocks
    lm.check_head()


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_of_windows_and_states_are_not_shared(family: str) -> None:
    assert CausalLM(tiny_model(family)).shares_prompts == (family in SHARING)


def test_nor_are_those_of_hybrids() -> None:
    sizes = LLAMA | {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    layers = {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 8}
    assert not CausalLM(Qwen3NextForCausalLM(Qwen3NextConfig(**sizes | heads | layers))).shares_prompts


def test_a_layer_that_is_alternately_windowed_is_enough() -> None:
    windowed = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    assert not CausalLM(tiny_model("qwen3", **windowed)).shares_prompts
    assert CausalLM(tiny_model("mistral", sliding_window=None)).shares_prompts


@pytest.mark.parametrize(
    ("settings", "logits", "expected"),
    [
        ({}, [2.0, -8.0], [2.0, -8.0]),
        ({"logits_scaling": 4.0}, [2.0, -8.0], [0.5, -2.0]),  # Granite divides
        ({"logit_scale": 0.25}, [2.0, -8.0], [0.5, -2.0]),  # Cohere multiplies
        ({"final_logit_softcapping": 2.0}, [2.0, 0.0], [2 * 0.76159416, 0.0]),  # Gemma: 2 tanh(2 / 2)
        ({"final_logit_softcapping": None, "logit_scale": None}, [1.0, 2.0], [1.0, 2.0]),
    ],
)
def test_what_becomes_of_logits(settings: dict[str, Any], logits: list[float], expected: list[float]) -> None:
    class Config:
        pass

    config = Config()
    for name, value in settings.items():
        setattr(config, name, value)
    post = LogitsPostprocessing(config)
    torch.testing.assert_close(post(torch.tensor(logits)), torch.tensor(expected))
    assert post.is_identity == (logits == expected)


class Doubled(Qwen3ForCausalLM):
    """Post-processes its logits in a way of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output


def test_a_head_that_is_not_all_there_is_is_refused() -> None:
    model = Doubled(tiny_model().config)
    model.load_state_dict(tiny_model().state_dict())
    model.train()
    with pytest.raises(ContractError, match="Doubled makes its logits in a way that is not known here"):
        CausalLM(model).check_head()
    assert model.training


def test_falcons_multiplier_is_noticed() -> None:
    sizes = {"vocab_size": VOCABULARY_SIZE, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "mamba_n_heads": 4, "mamba_d_head": 8}
    rest = {"mamba_d_ssm": 32, "mamba_d_state": 8, "mamba_chunk_size": 8, **ENDS}
    torch.manual_seed(0)
    CausalLM(FalconH1ForCausalLM(FalconH1Config(**sizes | heads | rest))).check_head()
    multiplied = FalconH1ForCausalLM(FalconH1Config(**sizes | heads | rest, lm_head_multiplier=0.5))
    with pytest.raises(ContractError, match="FalconH1ForCausalLM makes its logits"):
        CausalLM(multiplied).check_head()


def test_what_is_no_decoder_with_a_head_is_refused() -> None:
    t5 = T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=50)
    for model in (T5ForConditionalGeneration(t5), Qwen3Model(tiny_model().config), nn.Linear(2, 2)):
        with pytest.raises(ContractError, match=rf"decoder-only .* got {type(model).__name__}\. Load it with"):
            CausalLM(model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_adapters_in_the_layers_are_seen_through_and_virtual_tokens_refused() -> None:
    adapted = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    lm = CausalLM(adapted)
    assert isinstance(lm.plain, Qwen3ForCausalLM)
    assert isinstance(lm.decoder, Qwen3Model)
    with pytest.raises(ContractError, match="virtual tokens"):
        CausalLM(get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_which_precisions_are_exact_enough(dtype: torch.dtype) -> None:
    lm = CausalLM(tiny_model(dtype=dtype))
    assert lm.computes_in_float32 == (dtype in (torch.float32, torch.float64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not lm.computes_in_float32


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_checkpointing_counts_in_training_alone() -> None:
    model = tiny_model()
    lm = CausalLM(model)
    assert not lm.checkpoints_gradients
    model.gradient_checkpointing_enable()
    assert not lm.checkpoints_gradients
    model.train()
    assert lm.checkpoints_gradients
    with lm.evaluating():
        assert not lm.checkpoints_gradients
    assert lm.checkpoints_gradients


def test_the_longest_sequence() -> None:
    assert CausalLM(tiny_model("qwen3")).max_positions == 64
    assert CausalLM(tiny_model("gpt2", n_positions=32)).max_positions == 32  # by another name
    assert CausalLM(tiny_model("mamba")).max_positions is None


def test_rotary_positions_that_change_with_the_length_end_where_they_change() -> None:
    rotary = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "factor": 4.0,
    }
    model = tiny_model("llama", rope_parameters=rotary, max_position_embeddings=64)
    assert CausalLM(model).max_positions == 16
    assert CausalLM(tiny_model("llama")).max_positions == 64

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LilyConfig, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import Qwen3ForCausalLM, Qwen3Model, T5Config, T5ForConditionalGeneration

from adapters.llm.model.causal_lm import CausalLM, LogitsPostprocessing
from grpo.errors import ContractError
from tests.support.llm_models import FAMILIES, tiny_model
from tests.support.tiny_architectures import tiny_of

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_of_the_hidden_states_gives_the_logits_of_the_model(family: Any) -> None:
    model = tiny_model(family, dtype=torch.float64)
    lm = CausalLM(model)
    hidden = lm.decoder(input_ids=TOKENS, use_cache=False).last_hidden_state
    expected = model(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(lm.head(hidden).to(expected.dtype), expected, atol=1e-12, rtol=0)
    is_plain = family not in ("granite", "cohere", "gemma2")
    assert (type(lm.head) is nn.Linear) == is_plain  # a plain linear head has its gradient in blocks
    lm.check_logits()


def test_forks_are_shared_with_full_attention_only(subtests: pytest.Subtests) -> None:
    """Padding between edges would move a sliding window."""
    one_window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    for family, changes, shares in [
        ("qwen3", {}, True), ("qwen3", one_window, False), ("mistral", {}, False),
        ("mistral", {"sliding_window": None}, True), ("mamba", {}, False),
    ]:  # fmt: skip
        with subtests.test(family=family, changes=changes):
            assert CausalLM(tiny_model(family, **changes)).shares_forks == shares


POSTPROCESSING = [
    ({}, [2.0, -8.0], [2.0, -8.0]),
    ({"logits_scaling": 4.0}, [2.0, -8.0], [0.5, -2.0]),  # Granite divides
    ({"logit_scale": 0.25}, [2.0, -8.0], [0.5, -2.0]),  # Cohere multiplies
    ({"final_logit_softcapping": 2.0}, [2.0, 0.0], [2 * 0.76159416, 0.0]),  # Gemma: 2 tanh(2 / 2)
    ({"final_logit_softcapping": None, "logit_scale": None}, [1.0, 2.0], [1.0, 2.0]),
]


@pytest.mark.parametrize(("settings", "logits", "expected"), POSTPROCESSING)
def test_logits_are_capped_and_scaled_as_the_config_says(settings: Any, logits: Any, expected: Any) -> None:
    post = LogitsPostprocessing(SimpleNamespace(**settings))
    torch.testing.assert_close(post(torch.tensor(logits)), torch.tensor(expected))
    assert post.is_identity == (logits == expected)


class Doubled(Qwen3ForCausalLM):
    """Doubles its logits after the head."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output


def test_a_model_that_changes_its_logits_after_the_head_is_refused() -> None:
    model = Doubled(tiny_model().config)
    model.load_state_dict(tiny_model().state_dict())
    model.train()
    with pytest.raises(ContractError, match=r"with Doubled they differ, .* Report the"):
        CausalLM(model).check_logits()
    assert model.training


def test_the_logit_multiplier_of_falcon_h1_is_refused() -> None:
    CausalLM(tiny_of("falcon_h1")).check_logits()
    with pytest.raises(ContractError, match="with FalconH1ForCausalLM they differ"):
        CausalLM(tiny_of("falcon_h1", lm_head_multiplier=0.5)).check_logits()


def test_models_that_are_not_decoders_with_a_head_are_refused() -> None:
    t5 = T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=50)
    for model in (T5ForConditionalGeneration(t5), Qwen3Model(tiny_model().config), nn.Linear(2, 2)):
        with pytest.raises(ContractError, match=rf"decoder-only .* got {type(model).__name__}\. Load it with"):
            CausalLM(model)


def test_adapters_in_layers_are_unwrapped_and_virtual_tokens_are_refused() -> None:
    adapted = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    lm = CausalLM(adapted)
    assert isinstance(lm.plain, Qwen3ForCausalLM)
    assert isinstance(lm.decoder, Qwen3Model)
    with pytest.raises(ContractError, match="virtual tokens"):
        CausalLM(get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_float32_and_float64_without_autocast_count_as_float32(dtype: Any) -> None:
    lm = CausalLM(tiny_model(dtype=dtype))
    assert lm.computes_in_float32 == (dtype in (torch.float32, torch.float64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not lm.computes_in_float32


def test_gradient_checkpointing_counts_in_training_mode_only() -> None:
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


def test_the_maximum_sequence_length_is_read_from_the_config() -> None:
    assert CausalLM(tiny_model("qwen3")).max_positions == 64
    assert CausalLM(tiny_model("gpt2", n_positions=32)).max_positions == 32  # GPT-2 calls it n_positions
    assert CausalLM(tiny_model("mamba")).max_positions is None
    # longrope is limited to its original length
    rotary = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0,
    }  # fmt: skip
    model = tiny_model("llama", rope_parameters=rotary, max_position_embeddings=64)
    assert CausalLM(model).max_positions == 16
    assert CausalLM(tiny_model("llama")).max_positions == 64


@pytest.mark.filterwarnings("ignore")  # PEFT and transformers warn of what is tested here
def test_what_only_looks_trainable_is_refused_for_its_reason(subtests: pytest.Subtests) -> None:
    linear = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}

    def merged() -> Any:
        model = get_peft_model(tiny_model(), LoraConfig(**linear))
        model.merge_adapter()
        return model

    def compiled_in_place() -> Any:
        model = tiny_model()
        model.compile(backend="eager")
        return model

    def on_two_devices() -> Any:
        model = tiny_model()
        model.hf_device_map = {"model": 0, "lm_head": 1}
        return model

    cases: dict[str, Callable[[], Any]] = {
        "must be on one device": on_two_devices,
        "got aLoRA, which acts only": lambda: get_peft_model(tiny_model(),
            LoraConfig(**linear, alora_invocation_tokens=[5, 6])),
        "got LILY, which mixes its experts": lambda: get_peft_model(tiny_model(), LilyConfig(**linear)),
        "got PREFIX_TUNING, which adds virtual tokens": lambda: get_peft_model(tiny_model(),
            PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
        "must not be merged": merged,
        "must not be compiled as a whole": lambda: torch.compile(tiny_model(), backend="eager"),
        r"must not be compiled as a whole.*layer\.compile": compiled_in_place,
        "must not be a PeftMixedModel": lambda: get_peft_model(tiny_model(), LoraConfig(**linear), mixed=True),
        "on the meta device": lambda: tiny_model().to("meta"),
    }  # fmt: skip
    for message, make in cases.items():
        with subtests.test(message=message), pytest.raises(ContractError, match=message):
            CausalLM(make())

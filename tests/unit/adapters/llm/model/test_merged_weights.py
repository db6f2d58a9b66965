"""The weights that a sampler gets are the weights that the trainer computes with."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from adapters.llm.model.merged_weights import merged_weights
from grpo.errors import ConfigError
from tests.support.llm_models import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.*ensure_weight_tying:UserWarning")  # PEFT warns of what is refused
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@torch.no_grad()
def adapted(model: Any, **options: Any) -> Any:
    """A model with random adapters. PEFT starts with B = 0."""
    peft_model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **options)).eval()
    for name, parameter in peft_model.named_parameters():
        if parameter.requires_grad and "lora_magnitude_vector" not in name:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return peft_model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits


ADAPTERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "LoRA, tied embeddings": ("qwen3", {"tie_word_embeddings": True}, {"target_modules": ["q_proj", "down_proj"]}),
    "LoRA of every linear layer": ("qwen3", {}, {"target_modules": "all-linear"}),
    "rank-stabilised LoRA": ("qwen3", {}, {"target_modules": ["v_proj"], "use_rslora": True}),
    "DoRA": ("qwen3", {}, {"target_modules": ["o_proj"], "use_dora": True}),
    "a head that is trained whole": ("qwen3", {}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "transposed weights": ("gpt2", {}, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_merged_weights_in_a_plain_model_give_the_adapted_logits(kind: str) -> None:
    family, changes, options = ADAPTERS[kind]
    plain = tiny_model(family, **changes)
    before = logits(plain)
    other = copy.deepcopy(plain)
    model = adapted(plain, **options)
    expected = logits(model)
    assert (expected - before).abs().max() > 0.05  # the adapter has an effect
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    other.load_state_dict(dict(merged_weights(model)), strict=True)

    torch.testing.assert_close(logits(other), expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_a_plain_model_gives_its_own_tensors_under_all_their_names() -> None:
    model = tiny_model(tie_word_embeddings=True)
    weights = dict(merged_weights(model))
    assert weights.keys() == model.state_dict().keys()
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]  # one tensor, two names, no copy
    assert not any(tensor.requires_grad and tensor.grad_fn for tensor in weights.values())


def test_disabled_or_merged_adapters_give_the_weights_of_the_base() -> None:
    model = adapted(tiny_model(), target_modules=["q_proj"])
    base = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    with model.disable_adapter():
        assert dict(merged_weights(model))["model.layers.0.self_attn.q_proj.weight"] is base
    expected = logits(model)
    model.merge_adapter()
    other = tiny_model()
    other.load_state_dict(dict(merged_weights(model)))
    torch.testing.assert_close(logits(other), expected, rtol=1e-4, atol=1e-4)


def test_weights_of_experts_have_the_names_of_their_checkpoint(tmp_path: Any) -> None:
    """In memory, all experts are one tensor. Checkpoints, and engines that read them, have one tensor per expert."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16, "vocab_size": 24}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 1}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_attention_heads=2, initializer_range=0.2, **sizes, **experts)).eval()
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.2.gate_proj.weight" in names

    model = adapted(model, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    weights = dict(merged_weights(model))

    assert weights.keys() == names
    save_file({name: weight.clone() for name, weight in weights.items()}, tmp_path / "model.safetensors")
    other = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(other), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_on_one_of_two_tied_weights_is_refused(target: Any) -> None:
    model = get_peft_model(tiny_model(tie_word_embeddings=True), LoraConfig(r=2, target_modules=[target]))
    with pytest.raises(ConfigError, match="one weight for its input embeddings and its output head"):
        dict(merged_weights(model))


@pytest.fixture
def four_bit(tmp_path: Any) -> Any:
    """A model with weights in NF4 that computes in float32."""
    pytest.importorskip("bitsandbytes")
    tiny_model(hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path)
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantised, dtype=torch.float32).eval()


@pytest.mark.filterwarnings("ignore")
def test_four_bit_weights_are_dequantised_and_merged(four_bit: Any) -> None:
    model = adapted(four_bit, target_modules=["q_proj", "up_proj"])
    logits(model)  # on some processors, evaluation packs the weights and multiplies in bfloat16
    other = tiny_model(hidden_size=64, intermediate_size=128, head_dim=16)
    other.load_state_dict(dict(merged_weights(model)), strict=True)
    torch.testing.assert_close(logits(other), logits(model.train()), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_dora_on_four_bit_weights_is_refused(four_bit: Any) -> None:
    model = adapted(four_bit, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(ConfigError, match=r"plain LoRA; the adapter of model.layers.0.self_attn.q_proj is not"):
        dict(merged_weights(model))

"""A tiny model of every causal language model class of transformers that can be built without data or other packages."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY_SIZE = 96
MOST_PARAMETERS = 8_000_000

_SIZES: dict[int, str] = {
    VOCABULARY_SIZE: "vocab_size vocab_size_per_layer_input",
    32: "hidden_size d_model n_embd dim embed_dim embedding_size d_embed attention_hidden_size lru_width hidden_dim emb_dim "
    "word_embed_proj_dim cross_attention_hidden_size",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner dff ffn_hidden_size moe_intermediate_size "
    "shared_expert_intermediate_size d_ff feed_forward_size shared_intermediate_size moe_shared_expert_intermediate_size "
    "ffn_intermediate_size expert_ffn_hidden_size dense_intermediate_size intermediate_size_mlp",
    64: "max_position_embeddings n_positions n_ctx max_seq_len context_length max_sequence_length index_topk mamba_d_ssm "
    "original_max_position_embeddings",
    16: "q_lora_rank kv_lora_rank qk_head_dim mamba_d_head mamba_head_dim index_head_dim",
    8: "head_dim kv_channels attention_head_dim global_head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim "
    "mamba_d_state mamba_chunk_size ssm_state_size chunk_size state_size linear_key_head_dim linear_value_head_dim "
    "hidden_size_per_layer_input query_pre_attn_scalar",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts num_routed_experts mamba_n_heads mamba_num_heads sliding_window "
    "time_step_rank rotary_dim attention_chunk_size",
    2: "num_key_value_heads n_kv_heads num_kv_heads num_query_groups multi_query_group_num num_hidden_layers n_layer n_layers "
    "num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers layers num_experts_per_tok moe_k moe_topk "
    "top_k_experts moe_top_k num_experts_per_token linear_num_key_heads linear_num_value_heads index_n_heads",
    1: "n_group topk_group n_groups first_k_dense_replace moe_layer_start_index",
}
SIZES = {name: size for size, names in _SIZES.items() for name in names.split()}
"""The size of each setting of a config, whatever the class."""

FOUR_LAYERS = ["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "kimi_linear", "lfm3"]
ALL_HEADS = [
    "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "longcat_flash",
    "minicpm3", "youtu",
]  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    **{name: {"num_hidden_layers": 4} for name in FOUR_LAYERS},
    **{name: {"num_key_value_heads": 4} for name in [*ALL_HEADS, "dots3_note", "dots3_note_text"]},
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v4": {"layer_types": ["sliding_attention", "compressed_sparse_attention"]},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "nemotron_h": {"n_groups": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "roc_bert": {"pronunciation_vocab_size": 10, "shape_vocab_size": 10},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "attention_hidden_size": 64, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings that a class needs besides, or that bring out what is special about it."""


PAGE = (Path(__file__).parents[2] / "docs" / "llm.md").read_text(encoding="utf-8")
"""The page that counts these models."""


def is_of_page() -> bool:
    """Whether the page counts the classes of the installed version of transformers."""
    major, minor, *_ = transformers.__version__.split(".")
    return f"transformers {major}.{minor}'s classes" in PAGE


def model_types() -> list[str]:
    """The model types with a causal language model."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            settings[name] = _settings(value)
        elif (name in SIZES and type(value) is int) or (name == "head_dim" and value is None):
            settings[name] = SIZES[name]
        elif name.endswith("token_id") and type(value) is int and value >= VOCABULARY_SIZE:
            settings[name] = 3
        elif name == "eos_token_id" and isinstance(value, list):
            settings[name] = 1
    return settings


def tiny_of(model_type: str, *, scale: float = 5.0, **changes: Any) -> Any:
    """A tiny model of this type with random weights, which are scaled up so that distributions are not flat.

    Raises:
        ValueError: The model is not tiny, because its config has other names. The config may raise any other error.
    """
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    cls = getattr(transformers, names if isinstance(names, str) else names[0])
    config_class = cls.config_class or CONFIG_MAPPING[model_type]
    default = config_class()
    own = OWN.get(model_type, {}) | changes
    settings = _settings(default)
    for name, value in settings.items():
        if isinstance(value, dict) and "num_hidden_layers" in value:
            settings[name] = value | {key: own[key] for key in own if hasattr(getattr(default, name), key)}
    config = config_class(**settings | own)
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "is_decoder"):
            part.is_decoder = True
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{cls.__name__} is not tiny: it has {size} parameters.")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = cls(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model.eval()

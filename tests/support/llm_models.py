"""Tiny language models of several families, a character tokenizer, and what scores come to one row at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from adapters.llm import Completion, SamplingConfig

CHARACTERS = "0123456789+=? abcdefghijklmnopqrstuvwxyz.\n"
PAD, END = 0, 1
VOCABULARY_SIZE = len(CHARACTERS) + 2
ENDS = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}
LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA = {"vocab_size": VOCABULARY_SIZE, **LAYERS, **HEADS, **ENDS}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, "final_logit_softcapping": 3.0}


def character_tokenizer(*, pad: bool = True, end: bool = True) -> PreTrainedTokenizerFast:
    """One token per character; 0 pads and 1 ends, where there are such tokens."""
    vocabulary = {"<pad>": PAD, "<eos>": END} | {character: i + 2 for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = ({"pad_token": "<pad>"} if pad else {}) | ({"eos_token": "<eos>"} if end else {})
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _gpt2(**changes: Any) -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": VOCABULARY_SIZE}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes | drops | ENDS | changes))


def _mamba(**changes: Any) -> Any:
    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "vocab_size": VOCABULARY_SIZE}
    return MambaForCausalLM(MambaConfig(**sizes | ENDS | changes))


FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen3": lambda **changes: Qwen3ForCausalLM(Qwen3Config(**LLAMA | {"head_dim": 8} | changes)),
    "llama": lambda **changes: LlamaForCausalLM(LlamaConfig(**LLAMA | changes)),
    "gpt2": _gpt2,
    "granite": lambda **changes: GraniteForCausalLM(GraniteConfig(**LLAMA | {"logits_scaling": 2.0} | changes)),
    "cohere": lambda **changes: CohereForCausalLM(CohereConfig(**LLAMA | {"logit_scale": 0.5} | changes)),
    "mistral": lambda **changes: MistralForCausalLM(MistralConfig(**LLAMA | {"sliding_window": 4} | changes)),
    "gemma2": lambda **changes: Gemma2ForCausalLM(Gemma2Config(**LLAMA | GEMMA | changes)),
    "mamba": _mamba,
}
"""Full attention; then sliding windows (of 4 positions) and states, whose caches no completions can share."""
SHARING = ("qwen3", "llama", "gpt2", "granite", "cohere")


def tiny_model(family: str = "qwen3", *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The same weights at every call, larger than they are made, so that distributions are neither flat nor peaked."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FAMILIES[family](**changes)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(2.0 if family == "mamba" else 5.0)
            model.get_output_embeddings().weight.mul_(3.0)
    return model.to(dtype).eval()


def completion(*token_ids: int, finish_reason: Any = "end") -> Completion:
    """Of which nothing but the tokens is known."""
    return Completion(token_ids=token_ids, text="", finish_reason=finish_reason)


def row_logits(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """[T, V]: the logits each token is drawn from, by a forward pass of this row alone, without cache or padding."""
    row = torch.tensor([[*prompt, *tokens]])
    return model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : len(prompt) - 1 + len(tokens)]


def row_log_probs(model: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[T]: log-probabilities of the tokens, computed in the same way."""
    all_log_probs = (row_logits(model, prompt, tokens) / temperature).log_softmax(1)
    return all_log_probs[torch.arange(len(tokens)), torch.tensor(list(tokens), dtype=torch.int64)]


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Of the loss, for every parameter that is trained; 0 where it has none."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    slopes = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(named[name]) if slope is None else slope
        for name, slope in zip(named, slopes, strict=True)
    }


def relative_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """|found - expected| / |expected|, all parameters together."""
    assert found.keys() == expected.keys()
    error = torch.stack([(found[name] - expected[name]).double().norm() for name in expected]).norm()
    return float(error / torch.stack([slope.double().norm() for slope in expected.values()]).norm())


def sampling_distribution(
    logits: np.ndarray,
    config: SamplingConfig,
    *,
    written: Sequence[int],
    step: int,
    end_token_ids: Sequence[int] = (END,),
    excludes: bool = False,
) -> np.ndarray:
    """What one token is drawn from, in plain float64: penalty, temperature, top-k, top-p, min-p, XTC, in this order.

    Args:
        logits: of the model, [V].
        written: prompt and completion so far.
        excludes: XTC acts at this step.
    """
    values = np.array(logits, dtype=np.float64)
    for token in set(written):
        values[token] *= 1 / config.repetition_penalty if values[token] > 0 else config.repetition_penalty
    if step < config.min_new_tokens:
        values[list(end_token_ids)] = -np.inf
    probs = _softmax(values / config.scoring_temperature)
    likeliest_first = np.argsort(-probs)
    if config.top_k is not None:
        probs = _only(probs, likeliest_first[: config.top_k])
    if config.top_p < 1:
        before = np.cumsum(probs[likeliest_first]) - probs[likeliest_first]
        probs = _only(probs, likeliest_first[before < config.top_p])
    probs = _only(probs, np.flatnonzero(probs >= config.min_p * probs.max()))
    tops = [token for token in likeliest_first if probs[token] >= config.xtc_threshold]
    if excludes and len(tops) > 1:
        probs[tops[:-1]] = 0
        probs /= probs.sum()
    return probs


def _softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def _only(probs: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """`probs` on these tokens alone."""
    chosen = np.zeros_like(probs)
    chosen[kept] = probs[kept]
    return chosen / chosen.sum()

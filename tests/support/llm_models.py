"""Tiny language models of several families, a character tokenizer, and scores that are computed one row at a time."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
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

from adapters.llm import Completion, HFOptions, HFPolicy, SamplingConfig
from grpo import GRPOConfig, GRPOTrainer

CHARACTERS = "0123456789+=? abcdefghijklmnopqrstuvwxyz.\n"
PAD, END = 0, 1
VOCABULARY_SIZE = len(CHARACTERS) + 2
ENDS = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}
LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA = {"vocab_size": VOCABULARY_SIZE, **LAYERS, **HEADS, **ENDS}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, "final_logit_softcapping": 3.0}


def one_token_each(tokens: Sequence[str]) -> Tokenizer:
    """One token per character or mark, numbered in their order. The first is for padding."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def character_tokenizer(*, pad: bool = True, end: bool = True) -> PreTrainedTokenizerFast:
    """One token per character. Token 0 is for padding and 1 ends a text, unless `pad` or `end` is False."""
    special = ({"pad_token": "<pad>"} if pad else {}) | ({"eos_token": "<eos>"} if end else {})
    return PreTrainedTokenizerFast(tokenizer_object=one_token_each(["<pad>", "<eos>", *CHARACTERS]), **special)


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
"""Models with full attention, then two with sliding windows (4 positions), and one with states."""
SHARING = ("qwen3", "llama", "gpt2", "granite", "cohere", "mistral", "gemma2")
"""Models whose completions share the cache of a prompt."""

ROUNDING = 2**-24
"""Largest relative error of one rounding to float32."""
FLOAT32_LOG_PROB = 2 * 8 * ROUNDING * 20
"""Tolerance for a log-prob of a tiny model that is computed in float32 in two ways, for example alone and in a batch.

Logits are at most 20 in size. The two layers move a logit by at most 8 roundings of that size. (The largest distance to
float64 is 6 roundings, over all families and vector instructions.) Both results have such an error: 2 * 8 * ROUNDING * 20.
"""
FLOAT32_GRADIENT = 2 * 32 * ROUNDING
"""Tolerance for `relative_difference` of gradients of a tiny model that are computed in float32 in two ways.

The forward and the backward pass move a gradient by at most 32 roundings of its norm (the largest distance to float64 is 14,
over all families and vector instructions). Both results have such an error: 2 * 32 * ROUNDING.
"""
FLOAT64 = 2.0**-29
"""What a tolerance for float32 is multiplied by where everything is computed in float64."""


def tiny_model(family: str = "qwen3", *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with the same weights in every call. They are scaled up, so that distributions are neither flat nor peaked."""
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
    """A completion with these tokens and without text."""
    return Completion(token_ids=token_ids, text="", finish_reason=finish_reason)


def row_logits(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """[T, V]: the logits of each token, from a forward pass of this row alone, without cache or padding."""
    row = torch.tensor([[*prompt, *tokens]])
    return model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : len(prompt) - 1 + len(tokens)]


def row_log_probs(model: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[T]: log-probs of the tokens, from a forward pass of this row alone, without cache or padding."""
    all_log_probs = (row_logits(model, prompt, tokens) / temperature).log_softmax(1)
    return all_log_probs[torch.arange(len(tokens)), torch.tensor(list(tokens), dtype=torch.int64)]


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of the loss for each trained parameter. It is 0 for a parameter that the loss does not use."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    slopes = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(named[name]) if slope is None else slope
        for name, slope in zip(named, slopes, strict=True)
    }


def relative_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """|found - expected| / |expected|, where | | is the norm over all parameters together."""
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
    """The distribution of one token, in float64: penalty, temperature, top-k, top-p, min-p and XTC, in this order.

    Args:
        logits: Logits of the model, [V].
        written: Tokens of the prompt and of the completion so far.
        excludes: Whether XTC excludes the top choices at this step.
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
    """`probs` restricted to these tokens and normalised."""
    chosen = np.zeros_like(probs)
    chosen[kept] = probs[kept]
    return chosen / chosen.sum()


STATES = ["1+1=", "12+30=?", "abc"]
ROWS = [completion(5, 6, 7), completion(9), completion(4, 12, 30, 2)]
"""One completion of each of `STATES`."""


def hf_policy(model: Any, tokenizer: Any, **arguments: Any) -> HFPolicy:
    """A policy whose options stand among its arguments, so that tests can give some of both."""
    options = {field.name: arguments.pop(field.name) for field in fields(HFOptions) if field.name in arguments}
    return HFPolicy(model, tokenizer, **arguments, options=HFOptions.from_dict(options))


def policy_of(model: Any = None, *, max_new_tokens: int = 8, **options: Any) -> HFPolicy:
    """A policy of a tiny model, with the character tokenizer unless `options` has another."""
    sampling = options.pop("sampling", SamplingConfig(max_new_tokens=max_new_tokens))
    tokenizer = options.pop("tokenizer", None) or character_tokenizer()
    return hf_policy(model or tiny_model(), tokenizer, sampling=sampling, **options)


def sum_of_tokens(states: Any, actions: Any) -> list[float]:
    return [float(sum(action.token_ids)) for action in actions]


def trainer_of(policy: HFPolicy, reward: Any = sum_of_tokens, **settings: Any) -> GRPOTrainer:
    """A trainer with four completions of each prompt, unless the settings say more or fewer."""
    config = GRPOConfig(**{"group_size": 4, "seed": 0} | settings)
    return GRPOTrainer(config=config, policy=policy, reward_model=reward)


def saved_model(folder: Path, model: Any = None) -> Path:
    """The folder, with a tiny model and the character tokenizer in it, as on the Hub."""
    (model or tiny_model()).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def adapted_model(model: Any = None, **options: Any) -> Any:
    """A tiny model with a random LoRA adapter. PEFT starts with B = 0, which would change nothing."""
    peft_model = get_peft_model(model or tiny_model(), LoraConfig(r=4, **{"target_modules": ["q_proj"]} | options))
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return peft_model.eval()


def encoded(state: str) -> list[int]:
    """Token ids of a text."""
    return [CHARACTERS.index(character) + 2 for character in state]


def log_probs_of_rows(model: Any, temperature: float = 1.0) -> list[Tensor]:
    """Log-probs of `ROWS` after `STATES`, one forward pass per row."""
    return [
        row_log_probs(model, encoded(state), action.token_ids, temperature)
        for state, action in zip(STATES, ROWS, strict=True)
    ]


def assert_rows(values: Tensor, expected: Sequence[Tensor], tolerance: float = FLOAT32_LOG_PROB) -> None:
    """Each row of `values` begins with the expected numbers, up to rounding."""
    for row, numbers in zip(values, expected, strict=True):
        torch.testing.assert_close(row[: len(numbers)], numbers, atol=tolerance, rtol=0)


def forward_shapes(model: Any) -> list[tuple[int, ...]]:
    """A list that gets the shape of the token ids of each forward pass of the decoder from now on."""
    shapes: list[tuple[int, ...]] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def gaps_after_updates(policy: HFPolicy, states: list[str], *, autocast: bool) -> list[float]:
    """The largest difference of sampled and scored log-probs: at first, after an update in place, and by replacement.

    A sampler that keeps the first weights would be off by more than 1 nat.
    """
    weights = list(policy.model.parameters())

    def gap() -> float:
        with torch.autocast(weights[0].device.type, dtype=torch.bfloat16, enabled=autocast), torch.no_grad():
            sampled = policy.sample_actions(states, 4)
            scored = policy.score_groups(states, sampled.actions).log_probs
        assert getattr(policy._sampler, "records", True)  # else it has sampled as by default
        return float((sampled.behaviour_log_probs - scored)[sampled.mask].abs().max())

    gaps = [gap()]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(1.3)
    gaps.append(gap())
    for weight in weights:
        weight.data = weight.data * 0.7
    return [*gaps, gap()]

"""The task, the tokenizer and the model of `examples.scale.train`. They are made here: nothing is downloaded."""

import itertools
import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = ["<end>", *"0123456789="]
NUM_DIGITS = 3
HEAD_SIZE = 32


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    tokenizer = Tokenizer(models.WordLevel({character: number for number, character in enumerate(CHARACTERS)}, "<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def make_model(hidden_size: int, num_layers: int) -> Qwen3ForCausalLM:
    """A Qwen3 model with random weights. A hidden size of 64 with two layers has 0.1 million parameters."""
    config = Qwen3Config(
        vocab_size=len(CHARACTERS),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // HEAD_SIZE,
        num_key_value_heads=max(hidden_size // HEAD_SIZE // 2, 1),
        head_dim=HEAD_SIZE,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        initializer_range=hidden_size**-0.5,  # the default, 0.02, is for wider models
        bos_token_id=None,
        eos_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def make_prompts(seed: int) -> tuple[list[str], list[str]]:
    """Prompts such as "482=": 900 to train on, and 100 others to evaluate on."""
    prompts = ["".join(digits) + "=" for digits in itertools.product("0123456789", repeat=NUM_DIGITS)]
    random.Random(seed).shuffle(prompts)
    return prompts[100:], prompts[:100]


def repeated(completions: list[str], prompts: list[str], **_: object) -> list[float]:
    """The reward function: the share of the prompt's digits that the completion repeats in their places."""
    return [
        sum(said == digit for said, digit in zip(completion, prompt, strict=False)) / NUM_DIGITS
        for completion, prompt in zip(completions, prompts, strict=True)
    ]

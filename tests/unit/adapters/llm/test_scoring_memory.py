"""What scoring takes at its peak, measured block by block by the allocator, does not grow with the vocabulary."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from adapters.llm.causal_lm import CausalLM
from adapters.llm.shared_prompts import hidden_with_shared_prompts
from adapters.llm.token_log_probs import BLOCK_BYTES, token_log_probs
from benchmarks._memory import peak_extra_memory

HIDDEN, ROWS, STEPS = 16, 16, 96


def peak_of_scoring(vocabulary_size: int, *, trains_vocabulary: bool) -> int:
    """Bytes beyond the weights, of one scoring pass with its gradient."""
    config = Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.get_input_embeddings().weight.requires_grad_(trains_vocabulary)
    lm = CausalLM(model)
    prompts = [[1, 2, 3], [4, 5, 6]]
    prompt_of_row = torch.arange(2).repeat_interleave(ROWS // 2)
    tokens = torch.randint(vocabulary_size, (ROWS, STEPS))

    def score() -> None:
        model.zero_grad()
        hidden = hidden_with_shared_prompts(lm, prompts, prompt_of_row, tokens)
        log_probs, _ = token_log_probs(hidden.flatten(0, 1), lm.head, tokens.flatten())
        log_probs.sum().backward()

    return peak_extra_memory(score)


@pytest.mark.parametrize("trains_vocabulary", [False, True])
def test_a_larger_vocabulary_adds_its_weights_gradient_at_most(trains_vocabulary: bool) -> None:
    small, large = 32_000, 151_936
    added = peak_of_scoring(large, trains_vocabulary=trains_vocabulary) - peak_of_scoring(
        small, trains_vocabulary=trains_vocabulary
    )
    # tied: the gradient of the head, and that of the embeddings until they are added up
    weights = 2 * 4 * HIDDEN * (large - small) if trains_vocabulary else 0
    assert added < weights + 2**20
    all_logits = 4 * ROWS * STEPS * large
    assert all_logits > 8 * BLOCK_BYTES  # what would have to be seen if all of them stood in memory at once

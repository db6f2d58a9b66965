"""What scoring takes at its peak, measured block by block by the allocator, does not grow with the vocabulary."""

from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from adapters.llm.model import token_log_probs as module
from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.model.shared_prompts import hidden_with_shared_prompts
from adapters.llm.model.token_log_probs import token_log_probs
from benchmarks._memory import peak_extra_memory

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks


HIDDEN, ROWS, STEPS, RANK = 16, 16, 90, 2

BLOCK_BYTES = 8 * 2**20
"""An eighth of what it is, and vocabularies as much smaller: the same picture, sooner."""

Trained = Literal["layers", "everything", "adapted head"]

VOCABULARY_FLOATS = {
    "layers": 0,
    "everything": 2 * HIDDEN,  # tied: the gradient of the head, and that of the embeddings until they are added up
    "adapted head": RANK,  # B of the adapter
}
"""Numbers that have a gradient, per word."""


def model_of(vocabulary_size: int, trained: Trained) -> Any:
    config = Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=trained != "adapted head",
    )
    model = Qwen3ForCausalLM(config)
    if trained == "adapted head":  # no plain linear layer any more: its blocks are run again in the backward pass
        return get_peft_model(model, LoraConfig(r=RANK, target_modules=["q_proj", "lm_head"]))
    model.get_input_embeddings().weight.requires_grad_(trained == "everything")
    return model


def peak_of_scoring(vocabulary_size: int, trained: Trained, *, with_entropy: bool) -> int:
    """Bytes beyond the weights, of one scoring pass with its gradient."""
    model = model_of(vocabulary_size, trained)
    lm = CausalLM(model)
    prompts = [[1, 2, 3], [4, 5, 6]]
    prompt_of_row = torch.arange(2).repeat_interleave(ROWS // 2)
    tokens = torch.randint(vocabulary_size, (ROWS, STEPS))

    def score() -> None:
        model.zero_grad()
        hidden = hidden_with_shared_prompts(lm, prompts, prompt_of_row, tokens)
        log_probs, entropy = token_log_probs(hidden.flatten(0, 1), lm.head, tokens.flatten(), with_entropy=with_entropy)
        (log_probs if entropy is None else log_probs + entropy).sum().backward()

    return peak_extra_memory(score)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("trained", VOCABULARY_FLOATS)
def test_a_larger_vocabulary_adds_its_weights_gradient_at_most(
    trained: Trained, with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK_BYTES)
    small, large = 4_000, 20_000
    found = [peak_of_scoring(size, trained, with_entropy=with_entropy) for size in (small, large)]
    weights = 4 * VOCABULARY_FLOATS[trained] * (large - small)
    assert found[1] - found[0] < weights + 2**20
    all_logits = 4 * ROWS * STEPS * large
    assert all_logits > 8 * BLOCK_BYTES  # what would have to be seen if all of them stood in memory at once

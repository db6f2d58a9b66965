"""The peak memory of scoring does not grow with the vocabulary. The allocator's own records are the measurement."""

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

HIDDEN, ROWS, STEPS, RANK = 16, 16, 40, 2
BLOCK_BYTES = 3 * 2**20
"""A tenth of the real size, with small vocabularies, so that the test is fast."""
Trained = Literal["layers", "everything", "adapted head"]
VOCABULARY_FLOATS = {
    "layers": 0,
    "everything": 2 * HIDDEN,  # tied: the gradients of head and embeddings are in memory until they are summed
    "adapted head": RANK,  # B of the adapter
}
"""Number of weights per word that have a gradient."""
CASES: list[tuple[Trained, bool]] = [("layers", True), ("everything", False), ("adapted head", True)]


def model_of(vocabulary_size: int, trained: Trained) -> Any:
    config = Qwen3Config(
        vocab_size=vocabulary_size, hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, tie_word_embeddings=trained != "adapted head",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    if trained == "adapted head":  # not a plain linear layer, so its blocks are checkpointed
        return get_peft_model(model, LoraConfig(r=RANK, target_modules=["q_proj", "lm_head"]))
    model.get_input_embeddings().weight.requires_grad_(trained == "everything")
    return model


def peak_of_scoring(vocabulary_size: int, trained: Trained, *, with_entropy: bool) -> int:
    """Peak bytes of one scoring pass with its gradient, without the weights."""
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


@pytest.mark.slow
@pytest.mark.parametrize(("trained", "with_entropy"), CASES)
def test_a_larger_vocabulary_adds_only_the_gradient_of_its_weights(
    trained: Any, with_entropy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(module, "KEPT_BYTES", BLOCK_BYTES)
    small, large = 4_000, 20_000
    found = [peak_of_scoring(size, trained, with_entropy=with_entropy) for size in (small, large)]
    weights = 4 * VOCABULARY_FLOATS[trained] * (large - small)
    assert found[1] - found[0] < weights + 2**20
    all_logits = 4 * ROWS * STEPS * large
    assert all_logits > 8 * BLOCK_BYTES  # all logits at once would be seen

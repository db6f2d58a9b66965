"""Log-probs of completions. Prompts are computed once for all their completions if the model supports it."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from grpo import ActionScores
from grpo.errors import ConfigError

from .model.causal_lm import CausalLM
from .model.shared_prompts import hidden_of_whole_rows, hidden_with_shared_prompts
from .model.token_log_probs import token_log_probs
from .sampling.samplers import Sampler
from .sampling.sampling_config import SamplingConfig

CHECKED_PROMPTS = [[[1, 2, 3], [4]], [[5], [6]]]
"""Prompts for the comparison of sampling with scoring: a batch with padding, then a batch of the same size with prompts of one
token. A model that keeps its state between calls would read the second batch as a continuation of the first."""


def score_tokens(
    lm: CausalLM,
    prompts: Sequence[Sequence[int]],
    prompt_of_row: Int[Tensor, " N"],
    tokens: Int[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    shares_prompts: bool,
) -> ActionScores:
    """Log-probs, and entropies on request, where the mask is True, and 0 elsewhere.

    Args:
        lm: The model.
        prompts: Token ids of B prompts.
        prompt_of_row: Index of the prompt of each row.
        tokens: Token ids of the completions, on the CPU, padded on the right with any token.
        mask: The tokens that count, on the CPU. Either all tokens of a row's completion count, or none.
        temperature: Divides the logits. A larger value makes the distribution flatter.
        with_entropy: Whether to compute the entropies too.
        shares_prompts: Whether to compute each prompt once for all its rows.
    """
    if shares_prompts:
        hidden = hidden_with_shared_prompts(lm, prompts, prompt_of_row, tokens)
    else:
        hidden = hidden_of_whole_rows(lm, prompts, prompt_of_row, tokens, mask.sum(1))
    positions = mask.flatten().nonzero().squeeze(1).to(hidden.device)  # the head is applied at these positions only
    log_probs, entropy = token_log_probs(
        hidden.flatten(0, 1).index_select(0, positions),
        lm.head,
        tokens.flatten().to(hidden.device).index_select(0, positions),
        temperature=temperature,
        with_entropy=with_entropy,
    )

    def on_steps(values: Tensor) -> Tensor:
        return values.new_zeros(mask.numel()).index_copy(0, positions, values).view(mask.shape)

    return ActionScores(
        log_probs=on_steps(log_probs),
        mask=mask.to(hidden.device),
        entropy=None if entropy is None else on_steps(entropy),
    )


@torch.no_grad()
def check_sampler(lm: CausalLM, sampler: Sampler) -> None:
    """Check that sampling and scoring agree on the log-probs of a few sampled tokens.

    The check uses no global random numbers.

    Raises:
        ConfigError: Sampling and scoring differ: the model's cache, state or padding does not work in decoding.
    """
    config = SamplingConfig(max_new_tokens=2)
    vocabulary_size = len(lm.plain.get_input_embeddings().weight)
    drawn = []
    for given in CHECKED_PROMPTS:  # sample all before scoring, which may clear a state that the model keeps
        prompts = [[token % vocabulary_size for token in prompt] for prompt in given]
        drawn.append((prompts, sampler.sample(prompts, 1, config, end_token_ids=[], seeds=range(len(prompts)))))
    gaps = []
    for prompts, sampled in drawn:
        tokens = torch.tensor(sampled.token_ids)
        rows, mask = torch.arange(len(prompts)), torch.ones(tokens.shape, dtype=torch.bool)
        with lm.evaluating():
            scores = score_tokens(lm, prompts, rows, tokens, mask, shares_prompts=lm.shares_prompts)
        gaps.append(scores.log_probs.cpu() - torch.tensor(sampled.behaviour_log_probs))
    largest = torch.stack(gaps).abs().max().item()
    tolerance = 0.01 if lm.computes_in_float32 else 0.5
    if not largest < tolerance:  # also if it is NaN
        raise ConfigError(
            f"HFPolicy: sampling and scoring must use the same distribution; with {type(lm.plain).__name__}, the log-prob of a "
            f"token differs by {largest:.2g} between decoding and one forward pass (rounding explains {tolerance} at most). "
            "The model's cache, state or padding does not work in transformers' decoding. Use another architecture or another "
            "version of transformers, or sample with another engine (sampler=VLLMSampler(...))."
        )

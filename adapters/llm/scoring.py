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
"""What is continued to compare sampling with scoring: prompts that are padded; then some of a single token, as many as before,
which a state that outlives its call would be taken for the past of."""


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
    """Log-probabilities (and entropies) at the mask, 0 elsewhere.

    Args:
        lm: the model.
        prompts: B lists of token ids.
        prompt_of_row: which prompt each row continues.
        tokens: of the completions, padded on the right with any; on the CPU, as the mask is.
        mask: the tokens that count, all of a row or none of it.
        temperature: divides the logits.
        with_entropy: compute the entropies as well.
        shares_prompts: compute a prompt once for all its rows.
    """
    if shares_prompts:
        hidden = hidden_with_shared_prompts(lm, prompts, prompt_of_row, tokens)
    else:
        hidden = hidden_of_whole_rows(lm, prompts, prompt_of_row, tokens, mask.sum(1))
    positions = mask.flatten().nonzero().squeeze(1).to(hidden.device)  # no other position meets the head
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
    """Two tokens of short prompts, drawn as all will be, are as likely as scoring says. Draws no global random number.

    Raises:
        ConfigError: they are not: the model's cache, its state or its padding does not work in decoding.
    """
    config = SamplingConfig(max_new_tokens=2)
    vocabulary_size = len(lm.plain.get_input_embeddings().weight)
    drawn = []
    for given in CHECKED_PROMPTS:  # all before any is scored, which may clear what the model has kept
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
    if not largest < tolerance:  # nor where it is NaN
        raise ConfigError(
            f"{type(lm.plain).__name__} draws tokens from another distribution than it is scored by: the log-probability of a "
            f"token in decoding and in one forward pass differs by {largest:.2g}, and rounding makes {tolerance} at most. Its "
            "cache, state or padding does not work in transformers' decoding. Use another architecture or version of "
            "transformers, or another engine to sample with (sampler=VLLMSampler(...))."
        )

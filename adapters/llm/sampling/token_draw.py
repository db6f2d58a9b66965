"""Sampling of the next token of every row: shaping of the distribution, and selection by one random number."""

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from adapters.llm.model.token_log_probs import wide

from .sampling_config import SamplingConfig

BLOCK = 256
"""Tokens whose probabilities are added up before one of the blocks is chosen."""


class TokenDraw:
    """Draws tokens for N rows, and keeps what was drawn.

    Row n's token at step t is decided by the t-th number of the row's own generator alone, by inversion of the distribution
    function: the same whatever else is in the batch.

    Args:
        config: what shapes the distribution.
        prompts: N prompts, which a repetition penalty looks at.
        end_token_ids: what ends a completion.
        seeds: N.
        device: where logits come from.
        with_entropy: also keep the entropy of the policy's distribution.
    """

    def __init__(
        self,
        config: SamplingConfig,
        prompts: Sequence[Sequence[int]],
        *,
        end_token_ids: Sequence[int],
        seeds: Sequence[int],
        device: torch.device,
        with_entropy: bool,
    ) -> None:
        shape = (len(prompts), config.max_new_tokens)
        self._config = config
        self._end_token_ids = torch.tensor(list(end_token_ids), dtype=torch.int64, device=device)
        streams = np.stack([_uniforms(seed, config.max_new_tokens) for seed in seeds])
        self._uniforms = torch.from_numpy(streams).to(device)
        self._shaping = LogitsProcessorList(_truncations(config))
        self._penalty = RepetitionPenaltyLogitsProcessor(config.repetition_penalty)
        self._history: Tensor | None = None
        if config.repetition_penalty != 1:  # padded with a token that is in the row anyway
            longest = max(map(len, prompts))
            filled = [list(prompt) + prompt[:1] * (longest - len(prompt)) for prompt in map(list, prompts)]
            self._history = torch.tensor(filled, device=device)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        """The drawn tokens, [N, max_new_tokens]."""
        self.behaviour_log_probs = torch.zeros(shape, device=device)
        """Log-probs under the sampling distribution."""
        self.policy_log_probs = self.behaviour_log_probs if config.is_exact else torch.zeros(shape, device=device)
        """Log-probs under the policy, softmax(logits / temperature). The same tensor if nothing else applies."""
        self.entropies = torch.zeros(shape, device=device) if with_entropy else None
        """Entropy of the policy's distribution."""

    def __call__(self, logits: Float[Tensor, "R V"], rows: Int[Tensor, " R"], step: int) -> Int[Tensor, " R"]:
        """Draw the tokens of `rows` at `step`. `logits` is overwritten."""
        config = self._config
        logits = logits.float()
        uniforms = self._uniforms[rows, step]
        if config.is_exact:
            tokens, self.behaviour_log_probs[rows, step], entropies = draw(
                wide(logits, config.temperature), uniforms[:, 0], self.entropies is not None
            )
        else:
            shaped = self._shaped(logits.clone(), rows, step)
            if config.temperature == 0:
                tokens = shaped.argmax(1)
            elif config.xtc_probability > 0:
                tokens, self.behaviour_log_probs[rows, step] = draw_with_xtc(shaped, uniforms, config)
            else:
                tokens, self.behaviour_log_probs[rows, step], _ = draw(shaped, uniforms[:, 0], False)
            all_log_probs = logits.div_(config.scoring_temperature).log_softmax(1)
            self.policy_log_probs[rows, step] = all_log_probs.gather(1, tokens[:, None]).squeeze(1)
            entropies = None if self.entropies is None else -(all_log_probs.exp() * all_log_probs).sum(1)
        if self.entropies is not None and entropies is not None:
            self.entropies[rows, step] = entropies
        self.tokens[rows, step] = tokens
        return tokens

    def ends(self, tokens: Int[Tensor, " R"]) -> Bool[Tensor, " R"]:
        """Which of the tokens end a completion."""
        return torch.isin(tokens, self._end_token_ids)

    def _shaped(self, logits: Tensor, rows: Tensor, step: int) -> Tensor:
        """Penalised, divided by the temperature and truncated logits."""
        config = self._config
        if self._history is not None:
            written = torch.cat([self._history[rows], self.tokens[rows, :step]], 1)
            logits = self._penalty(written, logits)
        if step < config.min_new_tokens:
            logits[:, self._end_token_ids] = -math.inf
        if config.temperature > 0:
            logits = logits.div_(config.temperature)
        return self._shaping(cast("torch.LongTensor", rows), logits)  # truncation looks at no tokens


def _truncations(config: SamplingConfig) -> list:
    warpers: list = []
    if config.top_k is not None:
        warpers.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        warpers.append(TopPLogitsWarper(config.top_p))
    if config.min_p > 0:
        warpers.append(MinPLogitsWarper(config.min_p))
    return warpers


def _uniforms(seed: int, count: int) -> np.ndarray:
    """[count, 2] numbers in [0, 1) of a row's own: one decides the token, one whether top choices are left out."""
    return np.random.Generator(np.random.Philox(key=seed)).random((count, 2))


def exclude_top_choices(logits: Float[Tensor, "R V"], threshold: float) -> Float[Tensor, "R V"]:
    """XTC: of the tokens with a probability of at least `threshold`, all but the least likely are left out.

    Example: with threshold .2, [.4, .3, .15, .15] loses the .4 alone.
    """
    probs = logits.softmax(1)
    is_top = probs >= threshold
    least = probs.masked_fill(~is_top, 2.0).argmin(1, keepdim=True)
    is_top.scatter_(1, least, False)
    return logits.masked_fill(is_top, -math.inf)


def draw_with_xtc(
    logits: Float[Tensor, "R V"], uniforms: Float[Tensor, "R 2"], config: SamplingConfig
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """One token per row, top choices left out with `xtc_probability`, and its log-probability whichever way the coin fell:
    log((1 - c) p(token) + c p_without_top(token)).
    """
    chance = torch.tensor(config.xtc_probability, device=logits.device)
    acts = uniforms[:, 1] < chance
    without_top = exclude_top_choices(logits, config.xtc_threshold)
    tokens, _, _ = draw(torch.where(acts[:, None], without_top, logits), uniforms[:, 0], False)
    of_token = [each.log_softmax(1).gather(1, tokens[:, None]).squeeze(1) for each in (logits, without_top)]
    return tokens, torch.logaddexp(torch.log1p(-chance) + of_token[0], chance.log() + of_token[1])


def draw(
    logits: Float[Tensor, "R V"], uniforms: Float[Tensor, " R"], with_entropy: bool
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"], Float[Tensor, " R"] | None]:
    """One token of softmax(logits) per row by inversion, its log-probability, and the entropy.

    Probabilities are added up block by block, the blocks in float64, then within the block where the sum passes the random
    number: one pass over the vocabulary, and a token of probability 0 is never drawn.
    """
    largest = logits.amax(1, keepdim=True)
    weights = (logits - largest).exp_()
    vocabulary_size = logits.shape[1]
    missing = -vocabulary_size % BLOCK
    blocked = (torch.nn.functional.pad(weights, (0, missing)) if missing else weights).unflatten(1, (-1, BLOCK))
    sums = blocked.sum(2).double()  # of 256 float32 numbers each: sums in float64 would take seven times as long
    block, before, total = _first_beyond(sums, uniforms * sums.sum(1))
    rows = torch.arange(len(logits), device=logits.device)
    within, _, _ = _first_beyond(blocked[rows, block].double(), uniforms * total - before)
    tokens = block * BLOCK + within
    normaliser = largest.squeeze(1) + total.log().to(logits.dtype)
    log_probs = logits.gather(1, tokens[:, None]).squeeze(1) - normaliser
    if not with_entropy:
        return tokens, log_probs, None
    mean_logit = torch.where(weights > 0, weights * logits, 0).sum(1, dtype=torch.float64) / total
    return tokens, log_probs, normaliser - mean_logit.to(logits.dtype)


def _first_beyond(
    values: Float[Tensor, "R K"], targets: Float[Tensor, " R"]
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Where the running sum first exceeds the target (which rounding may have put at the sum of all), the sum before, and the
    sum of all."""
    running = values.cumsum(1)
    total = running[:, -1]
    targets = targets.clamp(min=torch.zeros_like(total), max=torch.nextafter(total, torch.zeros_like(total)))
    first = (running <= targets[:, None]).sum(1)
    before = (running.gather(1, first[:, None]) - values.gather(1, first[:, None])).squeeze(1)
    return first, before, total

"""Sampling of the next token of each row, from the logits and one random number per row."""

import math
from collections.abc import Sequence
from typing import Any, cast

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
from grpo.arguments import widest_float

from .sampling_config import SamplingConfig

BLOCK = 256
"""Number of tokens per block. Sampling first selects a block by its total probability, then a token in it."""


class TokenDraw:
    """Draws tokens for N rows, and stores the tokens and their log-probs.

    The token of a row at step t depends only on its logits and on the t-th random number of the row's own generator, by
    inversion of the distribution function. It does not depend on other rows in the batch.
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
        if config.repetition_penalty != 1:  # pad with a token that the prompt already has
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

    @property
    def settings(self) -> tuple[Any, ...]:
        """What all draws have in common that can stand in for one another."""
        return self._config, self._end_token_ids.tolist(), self.entropies is not None

    def like(self, num_rows: int, width: int, device: torch.device) -> "TokenDraw":
        """A draw with equal settings, for other rows with prompts of at most `width` tokens."""
        return TokenDraw(
            self._config,
            [[0] * width] * num_rows,
            end_token_ids=self._end_token_ids.tolist(),
            seeds=[0] * num_rows,
            device=device,
            with_entropy=self.entropies is not None,
        )

    def take(self, other: "TokenDraw", taken: slice) -> None:
        """Take the random numbers and prompts of rows of a draw with equal settings, in place. Free rows repeat the first."""
        for own, values in ((self._uniforms, other._uniforms), (self._history, other._history)):
            if own is not None and values is not None:
                rows, columns = (torch.arange(size) for size in own.shape[:2])
                values = values[taken]
                values = values[rows.where(rows < len(values), 0)]
                own.copy_(values[:, columns.where(columns < values.shape[1], 0)])  # only the history is wider

    def __call__(
        self, logits: Float[Tensor, "R V"], rows: Int[Tensor, " R"], step: int | Int[Tensor, " R"]
    ) -> Int[Tensor, " R"]:
        """Draw the tokens of `rows` at `step`, which may differ between rows. `logits` may be overwritten."""
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
        """Whether each token ends a completion."""
        return torch.isin(tokens, self._end_token_ids)

    def _shaped(self, logits: Tensor, rows: Tensor, step: int | Tensor) -> Tensor:
        """Logits after the penalties, the temperature and the truncation."""
        config = self._config
        if self._history is not None:
            history = self._history[rows]
            written = self.tokens[rows, :step] if isinstance(step, int) else self.tokens[rows]
            if isinstance(step, Tensor):  # a token of the prompt changes nothing where the row has no token yet
                is_written = torch.arange(written.shape[1], device=rows.device) < step[:, None]
                written = torch.where(is_written, written, history[:, :1])
            logits = self._penalty(torch.cat([history, written], 1), logits)
        if isinstance(step, Tensor):
            too_early = step < config.min_new_tokens
            logits[:, self._end_token_ids] = logits[:, self._end_token_ids].masked_fill(too_early[:, None], -math.inf)
        elif step < config.min_new_tokens:
            logits[:, self._end_token_ids] = -math.inf
        if config.temperature > 0:
            logits = logits.div_(config.temperature)
        return self._shaping(cast("torch.LongTensor", rows), logits)  # truncation does not use its first argument


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
    """Two random numbers in [0, 1) per step of a row: one draws the token, the other decides whether XTC excludes tokens."""
    return np.random.Generator(np.random.Philox(key=seed)).random((count, 2))


def exclude_top_choices(logits: Float[Tensor, "R V"], threshold: float) -> Float[Tensor, "R V"]:
    """XTC: exclude all tokens with at least the probability `threshold`, except the least likely of them.

    Example: with threshold 0.2, the probabilities [0.4, 0.3, 0.15, 0.15] lose only the 0.4.
    """
    probs = logits.softmax(1)
    is_top = probs >= threshold
    least = probs.masked_fill(~is_top, 2.0).argmin(1, keepdim=True)
    is_top.scatter_(1, least, False)
    return logits.masked_fill(is_top, -math.inf)


def draw_with_xtc(
    logits: Float[Tensor, "R V"], uniforms: Float[Tensor, "R 2"], config: SamplingConfig
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """Draw one token per row, with XTC at probability c = `xtc_probability`, and compute its log-prob.

    The log-prob is that of the mixture: log((1 - c) p(token) + c p_without_top(token)).
    """
    chance = logits.new_full((), config.xtc_probability)
    acts = uniforms[:, 1] < chance
    without_top = exclude_top_choices(logits, config.xtc_threshold)
    tokens, _, _ = draw(torch.where(acts[:, None], without_top, logits), uniforms[:, 0], False)
    of_token = [each.log_softmax(1).gather(1, tokens[:, None]).squeeze(1) for each in (logits, without_top)]
    return tokens, torch.logaddexp(torch.log1p(-chance) + of_token[0], chance.log() + of_token[1])


def draw(
    logits: Float[Tensor, "R V"], uniforms: Float[Tensor, " R"], with_entropy: bool
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"], Float[Tensor, " R"] | None]:
    """Draw one token of softmax(logits) per row by inversion, and compute its log-prob and the entropy.

    Probabilities are summed per block, and the sums of the blocks are added in float64 (float32 on devices without it). The
    token is searched for only in the block where the running sum exceeds the random number. A token with probability 0 is never
    drawn.
    """
    largest = logits.amax(1, keepdim=True)
    weights = (logits - largest).exp_()
    vocabulary_size = logits.shape[1]
    missing = -vocabulary_size % BLOCK
    blocked = (torch.nn.functional.pad(weights, (0, missing)) if missing else weights).unflatten(1, (-1, BLOCK))
    dtype = widest_float(logits.device)
    sums = blocked.sum(2).to(dtype)  # sums of 256 float32 numbers; float64 would take seven times as long
    block, before, total = _first_beyond(sums, uniforms * sums.sum(1))
    rows = torch.arange(len(logits), device=logits.device)
    within, _, _ = _first_beyond(blocked[rows, block].to(dtype), uniforms * total - before)
    tokens = block * BLOCK + within
    normaliser = largest.squeeze(1) + total.log().to(logits.dtype)
    log_probs = logits.gather(1, tokens[:, None]).squeeze(1) - normaliser
    if not with_entropy:
        return tokens, log_probs, None
    mean_logit = torch.where(weights > 0, weights * logits, 0).sum(1, dtype=dtype) / total
    return tokens, log_probs, normaliser - mean_logit.to(logits.dtype)


def _first_beyond(
    values: Float[Tensor, "R K"], targets: Float[Tensor, " R"]
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Index at which the running sum first exceeds the target, the sum before this index, and the sum of all values.

    Rounding may have moved the target to the sum of all values, so the target is clamped below it.
    """
    running = values.cumsum(1)
    total = running[:, -1]
    targets = targets.clamp(min=torch.zeros_like(total), max=torch.nextafter(total, torch.zeros_like(total)))
    first = (running <= targets[:, None]).sum(1)
    before = (running.gather(1, first[:, None]) - values.gather(1, first[:, None])).squeeze(1)
    return first, before, total

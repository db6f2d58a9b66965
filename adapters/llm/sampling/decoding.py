"""Batched decoding with the trained model itself.

Each prompt is computed once, finished rows are removed from the batch, and each row has its own random numbers.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal, assert_never

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from adapters.llm.completions import FinishReason
from adapters.llm.model.causal_lm import CausalLM

from .decoding_batch import DecodingBatch
from .kept_prefixes import KeptPrefixes, continued_batch
from .samplers import Ints, SampledTokens
from .sampling_config import SamplingConfig
from .token_draw import TokenDraw

MOST_ENDED = 1 / 8
"""Finished rows are removed when they are at least this share of the batch. The removal copies the cache of the other rows."""


class StopStrings:
    """Searches for stop strings in the last tokens of each row.

    Args:
        tokenizer: The model's tokenizer, which decodes the last tokens.
        strings: Strings that end a completion.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        # a token has at least one byte, so a string has at most as many tokens as bytes; 4 more complete a character
        self._num_tokens = max((len(string.encode()) for string in strings), default=0) + 4

    def found(self, tokens: Int[Tensor, "R T"]) -> list[bool]:
        """Whether the last tokens of each row contain one of the strings."""
        texts = self._tokenizer.batch_decode(tokens[:, -self._num_tokens :], skip_special_tokens=True)
        return [any(string in text for string in self._strings) for text in texts]


class Progress:
    """Records which of N rows are unfinished, and why the other rows ended."""

    def __init__(self, draw: TokenDraw, stops: StopStrings, config: SamplingConfig, count: int) -> None:
        self._draw = draw
        self._stops = stops
        self._config = config
        self.alive = [True] * count
        self.lengths = [config.max_new_tokens] * count
        self.reasons: list[FinishReason] = ["length"] * count

    def advance(self, rows: Sequence[int], tokens: Int[Tensor, " R"], step: int) -> None:
        """Record which of `rows` end with these tokens. Tokens of finished rows are ignored."""
        ended = self._draw.ends(tokens).tolist()
        stopped = [False] * len(rows)
        if self._config.stop and step + 1 >= self._config.min_new_tokens:
            begin = max(self._config.min_new_tokens - 1, 0)  # a stop string before the minimum does not count later
            stopped = self._stops.found(self._draw.tokens[list(rows), begin : step + 1])
        for row, has_ended, has_stopped in zip(rows, ended, stopped, strict=True):
            if self.alive[row] and (has_ended or has_stopped):
                self.alive[row] = False
                self.lengths[row] = step + 1
                self.reasons[row] = "end" if has_ended else "stop"

    def sampled(self) -> SampledTokens:
        """The samples, with each row truncated to its length."""
        draw, longest = self._draw, max(self.lengths)

        def cut(values: Tensor) -> list[list[Any]]:
            return [row[:length] for row, length in zip(values[:, :longest].tolist(), self.lengths, strict=True)]

        behaviour = cut(draw.behaviour_log_probs)
        return SampledTokens(
            token_ids=cut(draw.tokens),
            finish_reasons=self.reasons,
            behaviour_log_probs=behaviour,
            policy_log_probs=behaviour if self._config.is_exact else cut(draw.policy_log_probs),
            entropies=None if draw.entropies is None else cut(draw.entropies),
        )


class DecodingSampler:
    """Samples from the model that is trained.

    Args:
        lm: The model.
        tokenizer: The model's tokenizer, for stop strings.
        with_entropy: Whether to return entropies.
        max_rows: Maximum number of rows decoded together. More rows are faster and use more memory. None decodes all.
        max_tokens_per_forward: Maximum number of prompt positions per forward pass. None forwards all.
        loop: "own" for the loop in this module, "generate" for transformers' loop, which supports every architecture. Models
            without a shareable cache always use "generate". Both loops draw the same tokens.
    """

    def __init__(
        self,
        lm: CausalLM,
        tokenizer: Any,
        *,
        with_entropy: bool = False,
        max_rows: int | None = None,
        max_tokens_per_forward: int | None = None,
        loop: Literal["own", "generate"] = "own",
    ) -> None:
        self._lm = lm
        self._tokenizer = tokenizer
        self._with_entropy = with_entropy
        self._max_rows = max_rows
        self._max_tokens = max_tokens_per_forward or sys.maxsize
        self._given_loop = loop
        self.kept: KeptPrefixes | None = None
        """The caches of rows that may go on. None keeps no caches."""

    @property
    def _loop(self) -> Literal["own", "generate"]:
        return self._given_loop if self._lm.shares_prompts else "generate"

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Ints], num_per_prompt: int, config: SamplingConfig, *, end_token_ids: Ints, seeds: Ints
    ) -> SampledTokens:
        """Sample completions; see `Sampler.sample`."""
        parts = []
        num_done = 0
        for chosen, size in _passes(len(prompts), num_per_prompt, self._max_rows):
            some = prompts[chosen]
            rows = [list(prompt) for prompt in some for _ in range(size)]
            draw = TokenDraw(
                config,
                rows,
                end_token_ids=end_token_ids,
                seeds=seeds[num_done : num_done + len(rows)],
                device=self._lm.device,
                with_entropy=self._with_entropy,
            )
            progress = Progress(draw, StopStrings(self._tokenizer, config.stop), config, len(rows))
            with self._lm.evaluating():  # with gradient checkpointing, layers in training mode store no cache
                match self._loop:
                    case "own":
                        taken = self.kept.take(rows) if self.kept else []
                        if any(part is not None for part in taken):
                            batch = continued_batch(self._lm, rows, taken, self._max_tokens)
                        else:
                            batch = DecodingBatch.of_prompts(self._lm, some, size, self._max_tokens)
                        _decode(self._lm, batch, config.max_new_tokens, draw, progress, rows, self.kept)
                    case "generate":
                        _decode_with_generate(self._lm, rows, config.max_new_tokens, draw, progress)
                    case _:
                        assert_never(self._loop)
            parts.append(progress.sampled())
            num_done += len(rows)
        return parts[0] if len(parts) == 1 else _joined(parts)

    def sync(self, model: Any) -> None:
        """Do nothing, because this sampler uses the weights of the trained model itself."""


def _passes(num_prompts: int, size: int, max_rows: int | None) -> Iterator[tuple[slice, int]]:
    """Divide the rows into batches, in order. Yields the prompts of each batch, and the number of rows per prompt."""
    if max_rows is not None and max_rows < size:
        for prompt in range(num_prompts):
            for begin in range(0, size, max_rows):
                yield slice(prompt, prompt + 1), min(max_rows, size - begin)
        return
    at_once = num_prompts if max_rows is None else max_rows // size
    for begin in range(0, num_prompts, at_once):
        yield slice(begin, min(begin + at_once, num_prompts)), size


def _decode(
    lm: CausalLM,
    batch: DecodingBatch,
    max_steps: int,
    draw: TokenDraw,
    progress: Progress,
    prompts: Sequence[Sequence[int]],
    kept: KeptPrefixes | None,
) -> None:
    """Draw completions in the loop of this module. The cache holds the rows of the batch. `prompts` has one entry per row."""
    head = lm.head
    for step in range(max_steps):
        tokens = draw(head(batch.hidden), batch.on_device, step)
        was_alive = list(progress.alive)
        progress.advance(batch.rows, tokens, step)
        going = [position for position, row in enumerate(batch.rows) if progress.alive[row]]
        if kept is not None:
            is_last = step + 1 == max_steps  # truncated rows may go on, too
            ended = [p for p, row in enumerate(batch.rows) if was_alive[row] and (is_last or not progress.alive[row])]
            rows = [batch.rows[position] for position in ended]
            kept.keep(batch, ended, [[*prompts[row], *draw.tokens[row, : step + 1].tolist()] for row in rows])
        if not going or step + 1 == max_steps:
            return
        if len(batch.rows) - len(going) >= max(1, MOST_ENDED * len(batch.rows)):
            tokens = tokens[batch.keep(going)]
        options: dict[str, Any] = {}
        if batch.mask is not None:
            batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(tokens), 1)], 1)
            options = {"attention_mask": batch.mask, "position_ids": (batch.lengths + step)[:, None]}
        output = lm.decoder(input_ids=tokens[:, None], past_key_values=batch.cache, use_cache=True, **options)
        batch.hidden = output.last_hidden_state[:, -1]


def _decode_with_generate(
    lm: CausalLM, prompts: Sequence[Sequence[int]], max_steps: int, draw: TokenDraw, progress: Progress
) -> None:
    """Draw one completion per row with transformers' `generate` and its caches."""
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=lm.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=lm.device)
    defaults = lm.plain.generation_config
    lm.plain.generation_config = GenerationConfig()  # the model's config may penalise, truncate and end completions
    try:
        lm.plain.generate(
            input_ids=padded,
            attention_mask=(torch.arange(width, device=lm.device) >= width - lengths[:, None]).long(),
            generation_config=GenerationConfig(
                max_new_tokens=max_steps, do_sample=False, pad_token_id=0, use_cache=True
            ),
            logits_processor=LogitsProcessorList([_Drawing(draw, width)]),
            stopping_criteria=StoppingCriteriaList([_Stopping(progress, width)]),
        )
    finally:
        lm.plain.generation_config = defaults


class _Drawing(LogitsProcessor):
    """Draws each row's token and excludes all other tokens, so that `generate` selects the drawn token."""

    def __init__(self, draw: TokenDraw, width: int) -> None:
        self._draw = draw
        self._width = width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(len(scores), device=scores.device)
        tokens = self._draw(scores.clone(), rows, input_ids.shape[1] - self._width)
        return torch.full_like(scores, -math.inf).scatter_(1, tokens[:, None], 0.0)


class _Stopping(StoppingCriteria):
    """Tells `generate` which rows have ended."""

    def __init__(self, progress: Progress, width: int) -> None:
        self._progress = progress
        self._width = width

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self._progress.advance(range(len(input_ids)), input_ids[:, -1], input_ids.shape[1] - self._width - 1)
        return ~torch.tensor(self._progress.alive, device=input_ids.device)


def _joined(parts: Sequence[SampledTokens]) -> SampledTokens:
    def all_of(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else [row for value in values for row in value]

    names: list[str] = ["token_ids", "finish_reasons", "behaviour_log_probs", "policy_log_probs", "entropies"]
    joined = {name: all_of(name) for name in names}
    if all(part.policy_log_probs is part.behaviour_log_probs for part in parts):
        joined["policy_log_probs"] = joined["behaviour_log_probs"]
    return SampledTokens(**joined)

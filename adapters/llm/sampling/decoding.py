"""Batched decoding with the trained model itself.

Each prompt is computed once, waiting rows take the places of finished rows, and each row has its own random numbers.
"""

import math
import sys
from collections.abc import Sequence
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
from adapters.llm.model.shared_prompts import Prefilled, prefill
from adapters.llm.picture_prompts import Ids, has_pictures
from adapters.llm.prompts.control_tokens import special_tokens

from .decoding_batch import DecodingBatch
from .kept_prefixes import KeptPrefixes, continued_batch
from .samplers import GivesRows, Ints, LimitsRows, OnRow, RowLimit, SampledTokens
from .sampling_config import SamplingConfig
from .token_draw import TokenDraw

MOST_ENDED = 1 / 8
"""Finished rows are removed when they are at least this share of the batch. The removal copies the cache of the other rows."""


class StopStrings:
    """Searches for stop strings in the last tokens of each row."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        marks = special_tokens(tokenizer).values()
        self._special = tuple(string for string in strings if any(mark in string for mark in marks))
        self._plain = tuple(string for string in strings if string not in self._special)
        # a token has at least one byte, so a string has at most as many tokens as bytes; 4 more complete a character
        self._num_tokens = max((len(string.encode()) for string in strings), default=0) + 4

    def found(self, tokens: Int[Tensor, "R T"]) -> list[bool]:
        """Whether the last tokens of each row contain one of the strings."""
        last = tokens[:, -self._num_tokens :]
        found = [False] * len(last)
        # a string that has a special token is found in the text with special tokens only
        for strings, skips in ((self._plain, True), (self._special, False)):
            if strings:
                texts = self._tokenizer.batch_decode(last, skip_special_tokens=skips)
                found = [
                    was or any(string in text for string in strings) for was, text in zip(found, texts, strict=True)
                ]
        return found


class Progress:
    """Records which of N rows are unfinished, and why the other rows ended."""

    def __init__(
        self,
        draw: TokenDraw,
        tokenizer: Any,
        config: SamplingConfig,
        limits: Sequence[RowLimit],
        on_row: OnRow | None = None,
    ) -> None:
        self._draw, self._on_row = draw, on_row
        stops = {limit.stop: StopStrings(tokenizer, limit.stop) for limit in limits if limit.stop}
        # a string before the minimal length does not count, now or later
        begins = [max(min(config.min_new_tokens, limit.max_new_tokens) - 1, 0) for limit in limits]
        self._searches = [
            (stops[limit.stop], begin) if limit.stop else None for limit, begin in zip(limits, begins, strict=True)
        ]
        self._is_exact = config.is_exact
        self.max_steps = config.max_new_tokens
        self.alive = [True] * len(limits)
        self.lengths = [limit.max_new_tokens for limit in limits]
        self.reasons: list[FinishReason] = ["length"] * len(limits)

    def advance(self, rows: Sequence[int], tokens: Int[Tensor, " R"], steps: Sequence[int]) -> None:
        """Record which of `rows` end with these tokens, drawn at `steps`. Tokens of finished rows are ignored."""
        ended = self._draw.ends(tokens).tolist()
        stopped = self._stopped(rows, steps)
        for row, step, has_ended in zip(rows, steps, ended, strict=True):
            if self.alive[row] and (has_ended or row in stopped or step + 1 == self.lengths[row]):
                self.alive[row] = False
                self.lengths[row] = step + 1
                self.reasons[row] = "end" if has_ended else "stop" if row in stopped else "length"
                if self._on_row is not None:
                    drawn = self._draw.tokens[row], self._draw.behaviour_log_probs[row]
                    token_ids, log_probs = (values[: step + 1].tolist() for values in drawn)
                    self._on_row(row, token_ids, log_probs, self.reasons[row])

    def _stopped(self, rows: Sequence[int], steps: Sequence[int]) -> set[int]:
        """The rows whose last tokens contain one of their stop strings."""
        alike: dict[tuple[StopStrings, int, int], list[int]] = {}
        for row, step in zip(rows, steps, strict=True):
            search = self._searches[row]
            if search is not None and step >= search[1]:
                alike.setdefault((*search, step), []).append(row)
        found: set[int] = set()
        for (stops, begin, step), some in alike.items():
            texts = stops.found(self._draw.tokens[some, begin : step + 1])
            found |= {row for row, is_found in zip(some, texts, strict=True) if is_found}
        return found

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
            policy_log_probs=behaviour if self._is_exact else cut(draw.policy_log_probs),
            entropies=None if draw.entropies is None else cut(draw.entropies),
        )


class DecodingSampler(LimitsRows, GivesRows):
    """Samples from the model that is trained.

    Args:
        lm: The model.
        tokenizer: The model's tokenizer, for stop strings.
        with_entropy: Whether to return entropies.
        max_rows: Maximum number of rows decoded together, of R rows. The cache has at most R rows of P + T positions, for the
            longest prompt P and T = `max_new_tokens`, and a reserve. More rows are faster. None decodes all.
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

    limits_rows = True
    gives_rows = True

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Ids],
        num_per_prompt: int,
        config: SamplingConfig,
        *,
        end_token_ids: Ints,
        seeds: Ints,
        limits: Sequence[RowLimit] | None = None,
        on_row: OnRow | None = None,
    ) -> SampledTokens:
        """Sample completions; see `Sampler.sample` and `LimitsRows`. `on_row` gets each row as soon as it ends."""
        rows = [prompt for prompt in prompts for _ in range(num_per_prompt)]
        draw = TokenDraw(
            config,
            rows,
            end_token_ids=end_token_ids,
            seeds=seeds,
            device=self._lm.device,
            with_entropy=self._with_entropy,
        )
        progress = Progress(draw, self._tokenizer, config, limits or [RowLimit.of(config)] * len(rows), on_row)
        with self._lm.evaluating():  # with gradient checkpointing, layers in training mode store no cache
            match self._loop:
                case "own":
                    waiting = _Waiting(self._lm, prompts, num_per_prompt, self._max_tokens, self.kept)
                    _decode(self._lm, waiting, self._max_rows or len(rows), draw, progress)
                case "generate":
                    for begin in range(0, len(rows), self._max_rows or len(rows)):
                        some = range(begin, min(begin + (self._max_rows or len(rows)), len(rows)))
                        _decode_with_generate(self._lm, rows, some, config.max_new_tokens, draw, progress)
                case _:
                    assert_never(self._loop)
        return progress.sampled()

    def sync(self, model: Any) -> None:
        """Do nothing, because this sampler uses the weights of the trained model itself."""


class _Waiting:
    """The rows that have not begun, in order. The rows of a prompt that join one after another share its cache."""

    def __init__(
        self,
        lm: CausalLM,
        prompts: Sequence[Ids],
        size: int,
        max_tokens: int,
        kept: KeptPrefixes | None,
    ) -> None:
        self._lm, self._prompts, self._size, self._max_tokens = lm, prompts, size, max_tokens
        self.kept = kept
        self._next = 0
        self._prefilled: Prefilled | None = None
        """The cache of a prompt some of whose rows have begun."""

    def __bool__(self) -> bool:
        return self._next < len(self._prompts) * self._size

    def prompt_of(self, row: int) -> Ids:
        """The row's prompt."""
        return self._prompts[row // self._size]

    def begin(self, max_rows: int) -> DecodingBatch:
        """At most `max_rows` rows before their first token: whole groups, or some rows of one group."""
        first, size = self._next, self._size
        prompt, num_begun = divmod(first, size)
        if num_begun == 0 and max_rows >= size:
            num_prompts = min(max_rows // size, len(self._prompts) - prompt)
        else:
            num_prompts, size = 1, min(max_rows, size - num_begun)
        some = self._prompts[prompt : prompt + num_prompts]
        rows = [each for each in some for _ in range(size)]
        self._next += len(rows)
        # a prompt with pictures is computed as a whole, because equal token ids may stand for other pictures
        taken = self.kept.take(rows) if self.kept and not has_pictures(some) else []
        if any(part is not None for part in taken):
            return continued_batch(self._lm, rows, taken, self._max_tokens, first)
        if size < self._size and self._prefilled is None:
            self._prefilled = prefill(self._lm, some)
        batch = DecodingBatch.of_prompts(self._lm, some, size, self._max_tokens, first, self._prefilled)
        if self._next % self._size == 0:
            self._prefilled = None
        return batch


def _decode(lm: CausalLM, waiting: _Waiting, max_rows: int, draw: TokenDraw, progress: Progress) -> None:
    """Draw completions in the loop of this module, of at most `max_rows` rows at a time. The cache holds these rows."""
    batch = waiting.begin(max_rows)
    while True:
        while waiting and len(batch.rows) < max_rows:
            batch.join(waiting.begin(max_rows - len(batch.rows)))
        tokens = draw(lm.head(batch.hidden), batch.on_device, batch.step)
        was_alive = [progress.alive[row] for row in batch.rows]
        progress.advance(batch.rows, tokens, batch.steps)
        batch.steps = [step + 1 for step in batch.steps]
        going = [position for position, row in enumerate(batch.rows) if progress.alive[row]]
        if waiting.kept is not None:
            ended = [
                p
                for p, row in enumerate(batch.rows)
                if was_alive[p] and not progress.alive[row] and not has_pictures([waiting.prompt_of(row)])
            ]
            drawn = [draw.tokens[batch.rows[p], : batch.steps[p]].tolist() for p in ended]
            contexts = [[*waiting.prompt_of(batch.rows[p]), *own] for p, own in zip(ended, drawn, strict=True)]
            waiting.kept.keep(batch, ended, contexts)
        if not going:
            if not waiting:
                return
            batch = waiting.begin(max_rows)
            continue
        num_ended = len(batch.rows) - len(going)
        is_full = max(batch.steps) == progress.max_steps  # such a row has no place for another token
        if num_ended and (is_full or num_ended >= MOST_ENDED * len(batch.rows)):
            tokens = tokens[batch.keep(going)]
        options: dict[str, Any] = {}
        if batch.mask is not None or lm.shifts_positions:
            options = {"position_ids": (batch.lengths + batch.step - 1)[:, None]}
        if batch.mask is not None:
            batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(tokens), 1)], 1)
            options["attention_mask"] = batch.mask
        output = lm.decoder(input_ids=tokens[:, None], past_key_values=batch.cache, use_cache=True, **options)
        batch.hidden = output.last_hidden_state[:, -1]
        batch.contexts = [context + 1 for context in batch.contexts]


def _decode_with_generate(
    lm: CausalLM, all_prompts: Sequence[Ids], rows: range, max_steps: int, draw: TokenDraw, progress: Progress
) -> None:
    """Draw one completion for each of `rows` with transformers' `generate` and its caches."""
    prompts = all_prompts[rows.start : rows.stop]
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=lm.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=lm.device)
    lm.take_shifts()
    defaults = lm.plain.generation_config
    lm.plain.generation_config = GenerationConfig()  # the model's config may penalise, truncate and end completions
    try:
        lm.plain.generate(
            input_ids=padded,
            attention_mask=(torch.arange(width, device=lm.device) >= width - lengths[:, None]).long(),
            generation_config=GenerationConfig(
                max_new_tokens=max_steps, do_sample=False, pad_token_id=0, use_cache=True
            ),
            logits_processor=LogitsProcessorList(
                [_Drawing(draw, rows, width, lm.exclusion if lm.reads_pictures else None)]
            ),
            stopping_criteria=StoppingCriteriaList([_Stopping(progress, rows, width)]),
            **lm.fields(prompts, width, on_the_left=True),
        )
    finally:
        lm.take_shifts()
        lm.plain.generation_config = defaults


class _Drawing(LogitsProcessor):
    """Draws each row's token and excludes all other tokens, so that `generate` selects the drawn token."""

    def __init__(self, draw: TokenDraw, rows: range, width: int, bias: Tensor | None) -> None:
        self._draw = draw
        self._rows = rows
        self._width = width
        self._bias = bias

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(self._rows.start, self._rows.stop, device=scores.device)
        logits = scores.clone() if self._bias is None else scores + self._bias
        tokens = self._draw(logits, rows, input_ids.shape[1] - self._width)
        return torch.full_like(scores, -math.inf).scatter_(1, tokens[:, None], 0.0)


class _Stopping(StoppingCriteria):
    """Tells `generate` which rows have ended."""

    def __init__(self, progress: Progress, rows: range, width: int) -> None:
        self._progress = progress
        self._rows = rows
        self._width = width

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        step = input_ids.shape[1] - self._width - 1
        self._progress.advance(self._rows, input_ids[:, -1], [step] * len(self._rows))
        return ~torch.tensor([self._progress.alive[row] for row in self._rows], device=input_ids.device)

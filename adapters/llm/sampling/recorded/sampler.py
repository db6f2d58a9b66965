"""Decoding by a step of fixed shape, which a GPU records once and replays: Python then starts no kernels token by token.

The step has fixed memory, the room, for R rows and L columns. R is a power of two, and L grows in steps. Each size is recorded
once, in views of the same memory. The step draws as `DecodingSampler` does, so both draw the same tokens for equal seeds.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.model.shared_prompts import prefill
from adapters.llm.sampling.decoding import DecodingSampler, Progress
from adapters.llm.sampling.samplers import Ints, OnRow, RowLimit, SampledTokens
from adapters.llm.sampling.sampling_config import SamplingConfig
from adapters.llm.sampling.token_draw import TokenDraw

from .model import FusedNorms, NarrowWeights, dependencies, fixed_experts, obstacle, without_cached_casts
from .room import HostReads, NotRecordable, Room, recorded_step

COLUMNS = 128
"""Number of columns by which a step grows. From 1,024 columns on, it grows by twice as many, from 2,048 on by four times ..."""
STEPS_BETWEEN_ENDS = 16
"""Number of steps after which ended rows are found. What was drawn after an end is cut."""
DRAWN = "tokens", "behaviour_log_probs", "policy_log_probs", "entropies"
"""What a draw holds of each row and step."""
TRIAL_LENGTHS, TRIAL_STEPS, TRIAL_COLUMNS = (10, 3, 1), 14, 16
"""The comparison at construction: its rows are ragged and need more columns than the first step has."""


class RecordedSampler(DecodingSampler):
    """Samples as `DecodingSampler` does, with recorded steps. What cannot be recorded is sampled without, and says so once.

    Sizes are recorded again if weights have moved, an adapter has changed, or other settings apply.

    Args:
        lm: The model.
        tokenizer: The model's tokenizer, for stop strings.
        options: Options of `DecodingSampler`. `max_rows` bounds the room, which stays between calls.
    """

    def __init__(self, lm: CausalLM, tokenizer: Any, **options: Any) -> None:
        super().__init__(lm, tokenizer, **options)
        self._room: Room | None = None
        self._narrow: NarrowWeights | None = None
        self._norms = FusedNorms(lm)
        self._depends_on: Any = None
        self._columns = TRIAL_COLUMNS
        self.refusal: str | None = None
        """Why steps are not recorded. None if they are."""
        reason = obstacle(lm) or self._difference()
        self._columns = COLUMNS
        self.forget()
        if reason is not None:
            self._refuse(reason)

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Ints],
        num_per_prompt: int,
        config: SamplingConfig,
        *,
        on_row: OnRow | None = None,
        **request: Any,
    ) -> SampledTokens:
        """Sample completions; see `DecodingSampler.sample`. Rows of recorded steps are given when their ends are found."""
        on_row = None if on_row is None else _once(on_row)  # what is sampled again without recordings has the same rows
        if self.records:
            try:
                return self._sample(prompts, num_per_prompt, config, on_row=on_row, **request)
            except torch.OutOfMemoryError:
                self.forget()
                raise
            except NotRecordable as error:  # recovery: the same tokens without recordings
                self._refuse(str(error))
        return super().sample(prompts, num_per_prompt, config, on_row=on_row, **request)

    @property
    def records(self) -> bool:
        """Whether the next call uses recorded steps."""
        if self.refusal is None:
            reason = obstacle(self._lm)  # weights may have been divided
            if reason is not None:
                self._refuse(reason)
        return self.refusal is None and self.kept is None

    @property
    def sizes(self) -> dict[tuple[int, int], Any]:
        """The recordings so far, by numbers of rows and columns."""
        return {} if self._room is None else self._room.recordings

    def forget(self) -> None:
        """Free the room with its recordings. The next call makes a new one."""
        if self._room is not None:
            self._room.recordings.clear()  # they refer to the room
        self._room = self._narrow = self._depends_on = None

    def _refuse(self, reason: str) -> None:
        self.forget()
        self.refusal = reason
        logging.getLogger("grpo").warning(
            f"HFPolicy: sampler='recorded' samples {type(self._lm.plain).__name__} as sampler='decoding' does, because "
            f"{reason}. (This message appears once.)"
        )

    def _difference(self) -> str | None:
        """Compare a short batch with a forward pass of each row alone. Returns what is wrong, or None."""
        lm = self._lm
        limit = lm.max_positions or 1000
        steps = min(TRIAL_STEPS, max(limit // 2, 1))
        prompts = [
            [(7 * row + step + 1) % lm.vocabulary_size for step in range(min(length, max(limit - steps, 1)))]
            for row, length in enumerate(TRIAL_LENGTHS)
        ]
        try:
            with torch.no_grad(), lm.evaluating():
                config = SamplingConfig(max_new_tokens=steps)
                found = self._sample(prompts, 1, config, end_token_ids=[], seeds=range(len(prompts)))
                alone = [lm.log_probs_alone(*row) for row in zip(prompts, found.token_ids, strict=True)]
        except torch.OutOfMemoryError:
            raise
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            return f"its step raised {type(error).__name__}: {str(error).strip()[:200]}"
        gap = (torch.tensor(found.behaviour_log_probs) - torch.stack(alone).cpu()).abs().max().item()
        tolerance = 0.01 if lm.computes_in_float32 else 0.5
        return None if gap < tolerance else f"its log-probs differ by {gap:.2g} with a fixed shape"

    def _sample(
        self,
        prompts: Sequence[Ints],
        num_per_prompt: int,
        config: SamplingConfig,
        *,
        end_token_ids: Ints,
        seeds: Ints,
        limits: Sequence[RowLimit] | None = None,
        on_row: OnRow | None = None,
    ) -> SampledTokens:
        lm = self._lm
        draw = TokenDraw(
            config,
            [prompt for prompt in prompts for _ in range(num_per_prompt)],
            end_token_ids=end_token_ids,
            seeds=seeds,
            device=torch.device("cpu"),  # it holds what has been copied from the room
            with_entropy=self._with_entropy,
        )
        progress = Progress(draw, self._tokenizer, config, limits or [RowLimit.of(config)] * len(seeds), on_row)
        begin = 0
        for chosen, size in _passes(len(prompts), num_per_prompt, self._max_rows):
            some = prompts[chosen]
            rows = slice(begin, begin + len(some) * size)
            begin = rows.stop
            with lm.evaluating(), without_cached_casts(lm):
                room = self._filled(some, size, draw, rows)
                assert self._narrow is not None
                with self._narrow.applied(), self._norms.applied(), fixed_experts(lm):
                    self._run(room, max(map(len, some)), draw, rows, progress)
        return progress.sampled()

    def _filled(self, prompts: Sequence[Sequence[int]], size: int, draw: TokenDraw, rows: slice) -> Room:
        """A room with `size` rows per prompt, after their first token. `rows` are their indices in the draw."""
        width = max(map(len, prompts))
        at_once = max(1, self._max_tokens // width)
        num_rows = self._rounded(len(prompts) * size)
        room: Room | None = None
        hidden = []
        for begin in range(0, len(prompts), at_once):
            prefilled = prefill(self._lm, prompts[begin : begin + at_once], width)
            room = room or self._room_for(prefilled.cache, num_rows, width + draw.tokens.shape[1] - 1, draw)
            hidden.append(room.put(prefilled, size, begin * size))
        assert room is not None
        room.begin(torch.cat(hidden), num_rows, draw, rows)
        return room

    def _run(self, room: Room, width: int, draw: TokenDraw, rows: slice, progress: Progress) -> None:
        """Draw the other tokens. `width` is the number of columns of the prompts."""
        max_steps, begin, end = draw.tokens.shape[1], 0, 1
        count = rows.stop - rows.start
        order = list(range(self._rounded(count)))  # the room's row at each place. Rows from `count` on are free
        while True:
            for name in DRAWN:
                values: Tensor | None = getattr(draw, name)
                if values is not None:
                    values[rows, begin:end] = getattr(room.draw, name)[:count, begin:end].cpu()
            for step in range(begin, end):
                alive = [row for row in range(rows.start, rows.stop) if progress.alive[row]]
                if alive:
                    progress.advance(alive, draw.tokens[alive, step], [step] * len(alive))
            going = [place for place, row in enumerate(order) if row < count and progress.alive[rows.start + row]]
            if not going or end == max_steps:
                return
            if 2 * _power_of_two(len(going)) <= len(order):
                kept = room.keep(going, _power_of_two(len(going)), len(order))
                order = [order[place] for place in kept]
            begin, end = end, min(end + STEPS_BETWEEN_ENDS, max_steps)
            for step in range(begin, end):
                size = len(order), min(_columns(width + step, self._columns), room.size[1])
                if size not in room.recordings:
                    room.recordings[size] = self._recorded(room, *size)
                room.recordings[size]()

    def _recorded(self, room: Room, num_rows: int, num_columns: int) -> Callable[[], None]:
        step = room.step_of(num_rows, num_columns)
        if not room.recordings:  # other sizes run the same operations
            with room.unchanged(), HostReads():
                step()
        return recorded_step(step, room)

    def _rounded(self, num_rows: int) -> int:
        """The number of rows of the first step: a power of two, and at most `max_rows`."""
        return min(_power_of_two(num_rows), self._max_rows or _power_of_two(num_rows))

    def _room_for(self, cache: Any, num_rows: int, needed: int, draw: TokenDraw) -> Room:
        """The room of the last call, or a new one if it is too small or something that its recordings depend on has changed."""
        depends_on = [*dependencies(self._lm), draw.settings]
        num_columns = _columns(needed, self._columns)
        room = self._room
        if room is None or depends_on != self._depends_on or num_rows > room.size[0] or num_columns > room.size[1]:
            del room
            self.forget()  # free its memory first
            room = Room(self._lm, cache, num_rows, num_columns, draw.like(num_rows, num_columns, self._lm.device))
            self._room, self._narrow, self._depends_on = room, NarrowWeights(self._lm), depends_on
        return room


def _once(on_row: OnRow) -> OnRow:
    """Gives each row the first time only."""
    given: set[int] = set()

    def give(row: int, *ended: Any) -> None:
        if row not in given:
            given.add(row)
            on_row(row, *ended)

    return give


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


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _columns(needed: int, growth: int) -> int:
    """`needed`, rounded up to a multiple of `growth`, of twice as many from 8 times as many on, and so on."""
    growth *= _power_of_two(max(1, needed // (8 * growth) + 1)) if needed >= 8 * growth else 1
    return -(-needed // growth) * growth

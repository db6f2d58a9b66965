"""The batch of rows that are decoded together, with their hidden states and caches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from adapters.llm.model.causal_lm import CausalLM, DummyLayer
from adapters.llm.model.shared_prompts import Prefilled, Rows, RowStates, prefill
from adapters.llm.picture_prompts import Ids

GROWTH = 128
"""Number of positions by which the memory for keys and values grows."""


@dataclass(slots=True, kw_only=True)
class DecodingBatch:
    """The R rows in the batch, with the state that decoding continues from. A finished row may stay for some steps."""

    rows: list[int]
    """Index of each row among all rows."""
    on_device: Int[Tensor, " R"]
    """Index of each row among all rows, on the model's device."""
    hidden: Float[Tensor, "R H"]
    """Hidden state from which the next token is drawn."""
    cache: DynamicCache
    """Keys and values of all tokens so far."""
    mask: Bool[Tensor, "R L"] | None
    """Mask of the cache's tokens. None if every position has a token."""
    lengths: Int[Tensor, " R"]
    """Number of positions of each row's prompt."""
    contexts: list[int]
    """Number of the cache's columns that each row needs, from its first token on."""
    steps: list[int]
    """Number of tokens that each row has drawn. Rows that joined later have fewer."""

    @classmethod
    def of_prompts(
        cls,
        lm: CausalLM,
        prompts: Sequence[Ids],
        size: int,
        max_tokens: int,
        first: int = 0,
        prefilled: Prefilled | None = None,
    ) -> "DecodingBatch":
        """A batch of `size` rows per prompt, before their first token.

        Args:
            lm: The model.
            prompts: Token ids of the prompts.
            size: Number of rows per prompt.
            max_tokens: Maximum number of positions per forward pass.
            first: Index of the first row among all rows.
            prefilled: The cache of a single prompt that is computed already.
        """
        width = max(map(len, prompts))
        at_once = max(1, max_tokens // width)
        layers: list[Any] = []
        hidden, lengths = [], []
        for begin in range(0, len(prompts), at_once):
            some = prompts[begin : begin + at_once]
            prefilled = prefilled or prefill(lm, some, width)
            spread = Rows(torch.arange(len(some)).repeat_interleave(size), len(some), lm.device)
            hidden.append(spread.spread(prefilled.last_hidden))
            lengths.append(spread.spread(prefilled.lengths))
            of_prompts = prefilled.cache.layers
            layers = layers or [_growing_layer(layer, len(prompts) * size) for layer in of_prompts]
            for layer, of_some in zip(layers, of_prompts, strict=True):
                if not isinstance(layer, DummyLayer):
                    layer.put(spread, of_some, begin * size)
            prefilled = None
        cache = DynamicCache()
        cache.layers = list(layers)
        begins = torch.tensor([width - len(prompt) for prompt in prompts], device=lm.device).repeat_interleave(size)
        is_padded = any(len(prompt) < width for prompt in prompts)
        return cls(
            rows=list(range(first, first + len(begins))),
            on_device=torch.arange(first, first + len(begins), device=lm.device),
            hidden=torch.cat(hidden),
            cache=cache,
            mask=torch.arange(width, device=lm.device) >= begins[:, None] if is_padded else None,
            lengths=torch.cat(lengths),
            contexts=[len(prompt) for prompt in prompts for _ in range(size)],
            steps=[0] * len(begins),
        )

    @property
    def step(self) -> int | Int[Tensor, " R"]:
        """Number of tokens that each row has drawn: one number if it is the same for all rows."""
        same = len({*self.steps}) == 1
        return self.steps[0] if same else torch.tensor(self.steps, device=self.on_device.device)

    def join(self, others: "DecodingBatch") -> None:
        """Add rows that begin now. All rows end in the last column, and columns that no row uses any more are dropped."""
        num_rows, width = len(self.rows), max(*self.contexts, *others.contexts)
        mask = torch.zeros(num_rows + len(others.rows), width, dtype=torch.bool, device=self.on_device.device)
        for batch, rows in ((self, slice(0, num_rows)), (others, slice(num_rows, None))):
            held = batch.contexts[0] if batch.mask is None else batch.mask.shape[1]
            own = min(held, width)
            mask[rows, width - own :] = True if batch.mask is None else batch.mask[:, held - own :]
        self.mask = None if bool(mask.all()) else mask
        layers: list[Any] = self.cache.layers
        for layer, of_others in zip(layers, others.cache.layers, strict=True):
            if not isinstance(layer, DummyLayer):
                layer.join(of_others, width)
        for name in ("rows", "contexts", "steps"):
            getattr(self, name).extend(getattr(others, name))
        self.on_device = torch.cat([self.on_device, others.on_device])
        self.lengths = torch.cat([self.lengths, others.lengths])
        self.hidden = torch.cat([self.hidden, others.hidden])

    def keep(self, positions: Sequence[int]) -> Int[Tensor, " K"]:
        """Keep the rows at these positions of the batch, and return the positions on the model's device.

        Columns that none of these rows uses are dropped.
        """
        kept = torch.tensor(positions, device=self.on_device.device)
        for name in ("rows", "contexts", "steps"):
            setattr(self, name, [getattr(self, name)[position] for position in positions])
        self.on_device, self.lengths = self.on_device[kept], self.lengths[kept]
        width = max(self.contexts)
        self.mask = None if self.mask is None else self.mask[kept, -width:]
        layers: list[Any] = self.cache.layers
        for layer in layers:
            if not isinstance(layer, DummyLayer):
                layer.keep(kept, width)
        return kept


class GrowingLayer(DynamicLayer):
    """One layer's keys and values of N rows, in memory that grows by many positions at a time, so copies are rare."""

    def __init__(self, prompts: Any, num_rows: int) -> None:
        DynamicLayer.__init__(self)
        self.is_initialized = True
        length = prompts.keys.shape[-2]
        self._keys, self._values = (_room(part, num_rows, length) for part in (prompts.keys, prompts.values))
        self._view(length)

    def put(self, rows: Rows, prompts: Any, begin: int) -> None:
        """Write the prompts' keys and values into their rows, from row `begin` on."""
        these = slice(begin, begin + len(rows.prompt))
        length = prompts.keys.shape[-2]
        self._keys[these, :, :length] = rows.spread(prompts.keys)
        self._values[these, :, :length] = rows.spread(prompts.values)

    def _view(self, length: int) -> tuple[Tensor, Tensor]:
        filled = self._keys[:, :, :length], self._values[:, :, :length]
        self.keys, self.values = filled
        return filled

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all of them."""
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if end > self._keys.shape[-2]:
            self._keys, self._values = (_moved(part, end) for part in self._view(begin))
        self._keys[:, :, begin:end], self._values[:, :, begin:end] = key_states, value_states
        return self._view(end)

    def join(self, others: Any, width: int) -> None:
        """Add rows. Each row keeps its last `width` positions, or is padded on the left."""

        def joined(own: Tensor, of_others: Tensor) -> Tensor:
            roomy = _room(own, len(own) + len(of_others), width)
            roomy[:, :, :width] = 0  # weights of 0 times anything but a number are no number
            for rows, part in ((slice(0, len(own)), own), (slice(len(own), None), of_others)):
                kept = part[:, :, -width:]
                roomy[rows, :, width - kept.shape[2] : width] = kept
            return roomy

        own = self._view(self.get_seq_length())
        self._keys, self._values = joined(own[0], others.keys), joined(own[1], others.values)
        self._view(width)

    def keep(self, rows: Tensor, width: int) -> None:
        """Keep only these rows, and their last `width` positions."""
        unused = self.get_seq_length() - width
        self._keys, self._values = (part[:, :, unused:].index_select(0, rows) for part in (self._keys, self._values))
        self._view(width)


class GrowingHybridLayer(RowStates, GrowingLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """One layer's keys, values and states of N rows."""

    def __init__(self, prompts: Any, num_rows: int) -> None:
        GrowingLayer.__init__(self, prompts, num_rows)
        RowStates.__init__(self, prompts)

    def put(self, rows: Rows, prompts: Any, begin: int) -> None:
        """Write the prompts' keys, values and states into their rows, from row `begin` on."""
        RowStates.put(self, rows, prompts, begin)
        GrowingLayer.put(self, rows, prompts, begin)

    def join(self, others: Any, width: int) -> None:
        """Add rows with their keys, values and states."""
        RowStates.join(self, others, width)
        GrowingLayer.join(self, others, width)

    def keep(self, rows: Tensor, width: int) -> None:
        """Keep only these rows, and their last `width` positions."""
        RowStates.keep(self, rows, width)
        GrowingLayer.keep(self, rows, width)


def _growing_layer(prompts: Any, num_rows: int) -> Any:
    match prompts:
        case DummyLayer():
            return prompts
        case LinearAttentionAndFullAttentionLayer():
            return GrowingHybridLayer(prompts, num_rows)
        case LinearAttentionLayer():
            return RowStates(prompts)
        case _:
            return GrowingLayer(prompts, num_rows)


def _room(like: Tensor, num_rows: int, length: int) -> Tensor:
    """Empty memory for `length + GROWTH` positions of each row."""
    _, heads, _, size = like.shape
    return like.new_empty(num_rows, heads, length + GROWTH, size)


def _moved(values: Tensor, length: int) -> Tensor:
    """Copy `values` to memory with `length + GROWTH` positions."""
    roomy = _room(values, len(values), length)
    roomy[:, :, : values.shape[-2]] = values
    return roomy

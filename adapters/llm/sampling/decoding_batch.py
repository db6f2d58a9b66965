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
from adapters.llm.model.shared_prompts import Rows, RowStates, prefill

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
    """Number of prompt tokens of each row."""

    @classmethod
    def of_prompts(cls, lm: CausalLM, prompts: Sequence[Sequence[int]], size: int, max_tokens: int) -> "DecodingBatch":
        """A batch of `size` rows per prompt, before their first token. A forward pass has at most `max_tokens` positions."""
        width = max(map(len, prompts))
        at_once = max(1, max_tokens // width)
        layers: list[Any] = []
        hidden = []
        for begin in range(0, len(prompts), at_once):
            some = prompts[begin : begin + at_once]
            prefilled = prefill(lm, some, width)
            spread = Rows(torch.arange(len(some)).repeat_interleave(size), len(some), lm.device)
            hidden.append(spread.spread(prefilled.last_hidden))
            of_prompts = prefilled.cache.layers
            layers = layers or [_growing_layer(layer, len(prompts) * size) for layer in of_prompts]
            for layer, of_some in zip(layers, of_prompts, strict=True):
                if not isinstance(layer, DummyLayer):
                    layer.put(spread, of_some, begin * size)
        cache = DynamicCache()
        cache.layers = list(layers)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=lm.device).repeat_interleave(size)
        is_padded = any(len(prompt) < width for prompt in prompts)
        return cls(
            rows=list(range(len(lengths))),
            on_device=torch.arange(len(lengths), device=lm.device),
            hidden=torch.cat(hidden),
            cache=cache,
            mask=torch.arange(width, device=lm.device) >= width - lengths[:, None] if is_padded else None,
            lengths=lengths,
        )

    def keep(self, positions: Sequence[int]) -> Int[Tensor, " K"]:
        """Keep the rows at these positions of the batch, and return the positions on the model's device."""
        kept = torch.tensor(positions, device=self.on_device.device)
        self.rows = [self.rows[position] for position in positions]
        self.on_device, self.lengths = self.on_device[kept], self.lengths[kept]
        self.mask = None if self.mask is None else self.mask[kept]
        self.cache.batch_select_indices(kept)
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

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        length = self.get_seq_length()
        self._keys, self._values = (_moved(part.index_select(0, indices), length) for part in self._view(length))
        self._view(length)


class GrowingHybridLayer(RowStates, GrowingLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """One layer's keys, values and states of N rows."""

    def __init__(self, prompts: Any, num_rows: int) -> None:
        GrowingLayer.__init__(self, prompts, num_rows)
        RowStates.__init__(self, prompts)

    def put(self, rows: Rows, prompts: Any, begin: int) -> None:
        """Write the prompts' keys, values and states into their rows, from row `begin` on."""
        RowStates.put(self, rows, prompts, begin)
        GrowingLayer.put(self, rows, prompts, begin)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        RowStates.batch_select_indices(self, indices)
        GrowingLayer.batch_select_indices(self, indices)


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

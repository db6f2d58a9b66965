"""Caches of rows that may go on: a prompt that continues such a row computes only its new tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.model.shared_prompts import Rows

from .decoding_batch import DecodingBatch, GrowingLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The cache of one row."""

    tokens: tuple[int, ...]
    """Token ids that the cache has, of length L."""
    layers: list[tuple[Tensor, Tensor]]
    """Keys and values of each layer, [heads, L, size]."""


class KeptPrefixes:
    """Keeps the caches of the last rows that ended. They are valid as long as the weights do not change.

    Args:
        max_rows: Maximum number of rows. The oldest are dropped first.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._kept: dict[tuple[int, ...], list[Kept]] = {}
        self._order: list[tuple[int, ...]] = []
        """The tokens of all rows, oldest first. Several rows may have equal tokens."""

    def keep(self, batch: DecodingBatch, positions: Sequence[int], contexts: Sequence[Sequence[int]]) -> None:
        """Copy the caches of the rows at these positions of the batch.

        Args:
            batch: The batch, before more tokens are appended.
            positions: Positions of rows that have just ended.
            contexts: Their tokens, with the last sampled one, which the cache does not have yet.
        """
        for position, context in zip(positions, contexts, strict=True):
            columns = slice(None) if batch.mask is None else batch.mask[position].nonzero().squeeze(1)
            all_layers: list[Any] = batch.cache.layers
            layers = [
                (layer.keys[position][:, columns].clone(), layer.values[position][:, columns].clone())
                for layer in all_layers
            ]
            tokens = tuple(context[:-1])
            self._kept.setdefault(tokens, []).append(Kept(tokens=tokens, layers=layers))
            self._order.append(tokens)
        for tokens in self._order[: -self._max_rows]:
            self._remove(tokens)

    def take(self, prompts: Sequence[Sequence[int]]) -> list[Kept | None]:
        """Remove and return the longest cache that each prompt continues, or None. Several prompts may continue one cache."""
        taken: dict[tuple[int, ...], Kept] = {}
        lengths = sorted({*map(len, self._order)}, reverse=True)
        return [self._take(tuple(prompt), lengths, taken) for prompt in prompts]

    def _take(self, prompt: tuple[int, ...], lengths: Sequence[int], taken: dict[tuple[int, ...], Kept]) -> Kept | None:
        for tokens in (prompt[:length] for length in lengths if length < len(prompt)):
            if tokens in self._kept:
                taken[tokens] = self._remove(tokens)
            if tokens in taken:
                return taken[tokens]
        return None

    def _remove(self, tokens: tuple[int, ...]) -> Kept:
        """Remove and return the oldest row with these tokens."""
        self._order.remove(tokens)
        rows = self._kept[tokens]
        if len(rows) == 1:
            del self._kept[tokens]
        return rows.pop(0)


def continued_batch(
    lm: CausalLM, prompts: Sequence[Sequence[int]], kept: Sequence[Kept | None], max_tokens: int, first: int = 0
) -> DecodingBatch:
    """A batch of one row per prompt, before the first new token. Only tokens without a cache are computed.

    Each row's tokens end in the last column. To their left are its cache, and then padding, which is masked:
    row: padding | cache | padding | new tokens. Rows with similar numbers of new tokens are computed together.

    Args:
        lm: The model.
        prompts: Token ids of N prompts.
        kept: The cache of the beginning of each prompt, or None.
        max_tokens: Maximum number of new positions per forward pass.
        first: Index of the first row among all rows.
    """
    held = [0 if part is None else len(part.tokens) for part in kept]
    new = [len(prompt) - length for prompt, length in zip(prompts, held, strict=True)]
    order = sorted(range(len(prompts)), key=lambda row: (held[row] > 0, -new[row]))
    passes: list[list[int]] = []
    for row in order:
        same_kind = bool(passes) and (held[passes[-1][0]] > 0) == (held[row] > 0)
        if same_kind and (len(passes[-1]) + 1) * new[passes[-1][0]] <= max_tokens:
            passes[-1].append(row)
        else:
            passes.append([row])
    width = max(max(held[row] for row in rows) + new[rows[0]] for rows in passes)
    like = next(layers for layers in (part.layers for part in kept if part is not None))
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    hidden = []
    layers: list[GrowingLayer] = []
    begin = 0
    for rows in passes:
        num_new = new[rows[0]]
        before = width - num_new
        cache = DynamicCache()
        cache.layers = [_padded_layer([kept[row] for row in rows], i, before, part) for i, part in enumerate(like)]
        token_ids = torch.zeros(len(rows), num_new, dtype=torch.int64)
        positions = torch.zeros(len(rows), num_new, dtype=torch.int64)
        for place, row in enumerate(rows):
            token_ids[place, num_new - new[row] :] = torch.tensor(list(prompts[row][held[row] :]))
            positions[place, num_new - new[row] :] = torch.arange(held[row], len(prompts[row]))
            mask[begin + place, before - held[row] : before] = True
            mask[begin + place, width - new[row] :] = True
        output = lm.decoder(
            input_ids=token_ids.to(lm.device),
            past_key_values=cache,
            use_cache=True,
            attention_mask=mask[begin : begin + len(rows)].to(lm.device),
            position_ids=positions.to(lm.device),
        )
        hidden.append(output.last_hidden_state[:, -1])
        each = Rows(torch.arange(len(rows)), len(rows), lm.device)
        layers = layers or [GrowingLayer(layer, len(prompts)) for layer in cache.layers]
        for layer, of_some in zip(layers, cache.layers, strict=True):
            layer.put(each, of_some, begin)
        begin += len(rows)
    whole = DynamicCache()
    whole.layers = list(layers)
    return DecodingBatch(
        rows=[first + row for row in order],
        on_device=first + torch.tensor(order, device=lm.device),
        hidden=torch.cat(hidden),
        cache=whole,
        mask=None if bool(mask.all()) else mask.to(lm.device),
        lengths=torch.tensor([len(prompts[row]) for row in order], device=lm.device),
        contexts=[width] * len(order),
        steps=[0] * len(order),
    )


def _padded_layer(kept: Sequence[Kept | None], index: int, width: int, like: tuple[Tensor, Tensor]) -> DynamicLayer:
    """One layer's keys and values of several rows, padded with zeros on the left."""
    layer = DynamicLayer()
    heads, _, size = like[0].shape
    layer.keys = like[0].new_zeros(len(kept), heads, width, size)
    layer.values = like[1].new_zeros(len(kept), heads, width, like[1].shape[2])
    layer.is_initialized = True
    layer.dtype, layer.device = like[0].dtype, like[0].device
    for place, part in enumerate(kept):
        if part is not None:
            keys, values = part.layers[index]
            layer.keys[place, :, width - keys.shape[1] :] = keys
            layer.values[place, :, width - keys.shape[1] :] = values
    return layer

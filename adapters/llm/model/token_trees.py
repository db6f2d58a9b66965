"""Hidden states of rows that begin equally and go on differently. Each token that rows share is computed once.

Rows that fork form a tree. An edge has the tokens between two forks. All edges at the same depth are computed in one forward
pass, whose attention reads the keys and values of the edges before them, in place and with a gradient. The backward pass sums
the gradients of all branches and runs once through each edge.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from adapters.llm.picture_prompts import Ids

from .causal_lm import CausalLM
from .shared_prompts import Rows, SharedLayer, prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """E edges of the trees that N rows form. An edge stands behind the edge that it continues."""

    prompt: Int[Tensor, " E"]
    """Index of the prompt of each edge."""
    parent: Int[Tensor, " E"]
    """The edge that each edge continues. -1: it continues its prompt."""
    tokens: Int[Tensor, "E W"]
    """Token ids, padded on the right."""
    mask: Bool[Tensor, "E W"]
    """The tokens that count."""
    lengths: Int[Tensor, " E"]
    """Number of tokens of each edge."""
    place: Int[Tensor, "N T"]
    """Where each token of each row stands in `tokens.flatten()`. 0 for padding."""

    @classmethod
    def of_rows(
        cls,
        prompt_of_row: Int[Tensor, " N"],
        tokens: Sequence[Sequence[int]],
        mask: Bool[Tensor, "N T"],
        forks: Sequence[Sequence[int]],
    ) -> "Edges":
        """Cut rows at their forks. Rows with the same prompt that are equal up to a fork share the edges before it.

        Args:
            prompt_of_row: Index of the prompt of each row.
            tokens: Token ids of each row, without padding.
            mask: The tokens that count.
            forks: Numbers of tokens after which each row may be cut.
        """
        known: dict[Any, int] = {}
        pieces: list[list[tuple[int, int, int]]] = []
        counted = mask.tolist()
        for prompt, row, of_row, at in zip(prompt_of_row.tolist(), tokens, counted, forks, strict=True):
            parent, begin, found = -1, 0, []
            for end in (*at, len(row)):
                if begin < end <= len(row):
                    key = prompt, parent, tuple(row[begin:end]), tuple(of_row[begin:end])
                    parent = known.setdefault(key, len(known))
                    found.append((parent, begin, end))
                    begin = end
            pieces.append(found)
        width = max((len(own) for _, _, own, _ in known), default=0)
        place = torch.zeros(mask.shape, dtype=torch.int64)
        for to, found in zip(place, pieces, strict=True):
            for edge, begin, end in found:
                to[begin:end] = torch.arange(end - begin) + edge * width
        return cls(
            prompt=torch.tensor([prompt for prompt, *_ in known], dtype=torch.int64),
            parent=torch.tensor([parent for _, parent, *_ in known], dtype=torch.int64),
            tokens=torch.tensor([[*own, *[0] * (width - len(own))] for _, _, own, _ in known]).view(-1, width),
            mask=torch.tensor([[*own, *[False] * (width - len(own))] for *_, own in known]).view(-1, width),
            lengths=torch.tensor([len(own) for _, _, own, _ in known], dtype=torch.int64),
            place=place,
        )


def hidden_of_trees(
    lm: CausalLM,
    prompts: Sequence[Ids],
    prompt_of_edge: Int[Tensor, " E"],
    parent: Int[Tensor, " E"],
    tokens: Int[Tensor, "E W"],
    lengths: Int[Tensor, " E"],
) -> Float[Tensor, "E W H"]:
    """Hidden states that predict the tokens of edges. Each prompt and each edge is computed once."""
    prefilled = prefill(lm, prompts)
    layers: list[Any] = prefilled.cache.layers
    last, before = prefilled.last_hidden, prefilled.lengths
    width = layers[0].keys.shape[-2]
    mask = torch.ones(len(prompts), width, dtype=torch.bool, device=lm.device)
    mask = mask if prefilled.mask is None else prefilled.mask
    depths = torch.zeros_like(parent)
    for edge, previous in enumerate(parent.tolist()):
        depths[edge] = 0 if previous < 0 else depths[previous] + 1
    hidden, order = [], []
    place = torch.zeros_like(parent)  # of each edge in its pass
    for depth in range(int(depths.max()) + 1):
        some = (depths == depth).nonzero().squeeze(1)
        place[some] = torch.arange(len(some))
        rows = Rows(place[parent[some]] if depth else prompt_of_edge[some], len(last), lm.device)
        own_lengths = lengths[some].to(lm.device)
        inputs = tokens[some, : int(lengths[some].max())].to(lm.device)
        steps = torch.arange(inputs.shape[1], device=lm.device)
        positions = before[rows.prompt, None] + steps
        if lm.max_positions is not None:
            positions = positions.clamp_max(lm.max_positions - 1)  # padding may exceed the last position
        mask = mask[rows.prompt]
        cache = DynamicCache()
        cache.layers = [_KeptLayer(layer, rows) for layer in layers]
        output = lm.decoder(
            input_ids=inputs,
            past_key_values=cache,
            use_cache=True,
            # padding on the right needs no mask in its own pass, because no token attends to later positions
            attention_mask=torch.cat([mask, mask.new_ones(inputs.shape)], 1),
            position_ids=positions,
        )
        after = torch.cat([rows.spread(last)[:, None], output.last_hidden_state], 1)
        hidden.append(
            torch.nn.functional.pad(after, (0, 0, 0, max(0, tokens.shape[1] - after.shape[1])))[:, : tokens.shape[1]]
        )
        order.append(some)
        last = after[torch.arange(len(some), device=lm.device), own_lengths]
        mask = torch.cat([mask, steps < own_lengths[:, None]], 1)
        before, layers = before[rows.prompt] + own_lengths, cache.layers
    return torch.cat(hidden)[torch.cat(order).argsort().to(lm.device)]


class _KeptLayer(SharedLayer):
    """Cache of one layer that also keeps the keys and values of the rows' own tokens, for the edges that follow."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens before each row, followed by those of the row's own tokens."""
        self.keys, self.values = super().update(key_states, value_states)
        return self.keys, self.values

"""Hidden states of completions. Each prompt is computed once for all its completions, forward and backward.

All completions of a prompt have the same keys and values for the prompt's tokens. These are computed once, with a gradient,
and the attention of every row reads them in place. The backward pass sums the gradients of all rows and runs once through the
prompt. A group of G completions with T tokens and a prompt with P tokens has P + G T positions instead of G (P + T).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from adapters.llm.picture_prompts import Ids

from .causal_lm import CausalLM, DummyLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """Cache and hidden states of B prompts after one forward pass. The prompts are padded on the left."""

    cache: DynamicCache
    """Keys and values of every layer, [B, heads, P, size], and the states of layers that have them."""
    last_hidden: Float[Tensor, "B H"]
    """Hidden state of each prompt's last token, from which the first token of a completion is drawn."""
    mask: Bool[Tensor, "B P"] | None
    """Mask of the prompts' tokens. None if all prompts have the same length."""
    lengths: Int[Tensor, " B"]
    """Number of positions of each prompt: that of its tokens, unless the model gives its pictures fewer or more."""


def prefill(lm: CausalLM, prompts: Sequence[Ids], width: int | None = None) -> Prefilled:
    """Run one forward pass over B prompts, with a gradient unless gradients are switched off. Each picture is computed once.

    Args:
        lm: The model.
        prompts: B prompts.
        width: Length that the prompts are padded to. None uses the length of the longest prompt.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = width or int(lengths.max())
    # not a padding token, whose embedding may be 0: the gradient of its standard deviation would be NaN (Gemma 3n)
    fillers = [prompt[0] if prompt[0] not in lm.picture_token_ids else 0 for prompt in prompts]
    rows = zip(fillers, prompts, strict=True)
    token_ids = torch.tensor([[*[own] * (width - len(prompt)), *prompt] for own, prompt in rows], device=lm.device)
    options: dict[str, Any] = {}
    mask = None
    if bool((lengths != width).any()):
        mask = (torch.arange(width) >= width - lengths[:, None]).to(lm.device)
        options = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    fields = lm.fields(prompts, width, on_the_left=True)
    if fields and lm.shifts_positions:
        options.pop("position_ids", None)  # the model counts them, from the sizes of the pictures
    lm.take_shifts()
    cache = DynamicCache(config=lm.config)
    cache.layers = [_of_all_positions(layer) for layer in cache.layers]
    output = lm.decoder(input_ids=token_ids, past_key_values=cache, use_cache=True, **options, **fields)
    return Prefilled(
        cache=cache,
        last_hidden=output.last_hidden_state[:, -1],
        mask=mask,
        lengths=lengths.to(lm.device) + lm.take_shifts(),
    )


def _of_all_positions(layer: Any) -> Any:
    """A layer that also keeps the keys and values before its window. Transformers' mask keeps the window."""
    match layer:
        case LinearAttentionAndSlidingWindowAttentionLayer():
            return LinearAttentionAndFullAttentionLayer(layer.number_of_states)
        case DynamicSlidingWindowLayer():
            return DynamicLayer()
        case _:
            return layer


def hidden_with_shared_prompts(
    lm: CausalLM, prompts: Sequence[Ids], prompt_of_row: Int[Tensor, " N"], completions: Int[Tensor, "N T"]
) -> Float[Tensor, "N T H"]:
    """Hidden states that predict the completions' tokens. Each prompt is computed once.

    Args:
        lm: The model.
        prompts: B prompts.
        prompt_of_row: Index of the prompt of each row.
        completions: Token ids of the completions, padded on the right with any token.
    """
    prefilled = prefill(lm, prompts)
    rows = Rows(prompt_of_row, len(prompts), lm.device)
    first = rows.spread(prefilled.last_hidden)[:, None]
    width = completions.shape[1]
    if width < 2 and lm.has_equal_passes:
        completions = torch.nn.functional.pad(completions, (0, 2 - width))  # a second pass, as the other ranks make
    elif width < 2:
        return first[:, :width]
    inputs = completions[:, :-1].to(lm.device)
    options: dict[str, Any] = {}
    if prefilled.mask is not None or lm.shifts_positions:
        positions = prefilled.lengths[rows.prompt, None] + torch.arange(inputs.shape[1], device=lm.device)
        if lm.max_positions is not None:
            positions = positions.clamp_max(lm.max_positions - 1)  # padding may exceed the last position
        options = {"position_ids": positions}
    if prefilled.mask is not None:
        # padding on the right needs no mask, because no token attends to later positions
        own = torch.ones(inputs.shape, dtype=torch.bool, device=lm.device)
        options["attention_mask"] = torch.cat([prefilled.mask[rows.prompt], own], 1)
    cache = DynamicCache()
    cache.layers = [shared_layer(layer, rows) for layer in prefilled.cache.layers]
    rest = lm.decoder(input_ids=inputs, past_key_values=cache, use_cache=True, **options).last_hidden_state
    return torch.cat([first, rest], 1)[:, :width]


def hidden_of_whole_rows(
    lm: CausalLM,
    prompts: Sequence[Ids],
    prompt_of_row: Int[Tensor, " N"],
    completions: Int[Tensor, "N T"],
    lengths: Int[Tensor, " N"],
) -> Float[Tensor, "N T H"]:
    """Hidden states that predict the completions' tokens, for models whose cache cannot be shared.

    One forward pass runs over the prompt and the completion of every row. Rows are padded on the right, and no token attends
    to later positions, so no architecture needs masks or position ids.
    """
    of_rows = zip(prompt_of_row.tolist(), completions.tolist(), lengths.tolist(), strict=True)
    rows = [[*prompts[prompt], *row[:length]] for prompt, row, length in of_rows]
    width = max(map(len, rows))
    token_ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=lm.device)
    lm.take_shifts()
    fields = lm.fields([prompts[prompt] for prompt in prompt_of_row.tolist()], width)
    hidden = lm.decoder(input_ids=token_ids, use_cache=False, **fields).last_hidden_state
    begins = torch.tensor([len(prompts[prompt]) - 1 for prompt in prompt_of_row.tolist()])
    positions = (begins[:, None] + torch.arange(completions.shape[1])).clamp_max(width - 1).to(lm.device)
    return hidden.gather(1, positions[:, :, None].expand(-1, -1, hidden.shape[-1]))


class Rows:
    """The prompt of each row, and operations that copy values of prompts to rows."""

    def __init__(self, prompt: Int[Tensor, " N"], num_prompts: int, device: torch.device) -> None:
        size, rest = divmod(len(prompt), num_prompts)
        is_regular = rest == 0 and torch.equal(prompt, torch.arange(num_prompts).repeat_interleave(size))
        self.prompt = prompt.to(device)
        self.group_size = size if is_regular else None
        """Number of rows per prompt. None unless all prompts have equally many rows, adjacent and in order."""

    def spread(self, values: Float[Tensor, "B *any"]) -> Float[Tensor, "N *any"]:
        """Copy the value of each prompt to each of its rows."""
        return values.index_select(0, self.prompt)

    def join(self, of_prompts: Float[Tensor, "B K P D"], of_rows: Float[Tensor, "N K T D"]) -> Float[Tensor, "N K L D"]:
        """Append the keys (or values) of the rows' own tokens to those of their prompts, without an intermediate copy."""
        if self.group_size is None:
            return torch.cat([of_prompts.index_select(0, self.prompt), of_rows], 2)
        size = self.group_size
        shared = of_prompts[:, None].expand(-1, size, -1, -1, -1)
        return torch.cat([shared, of_rows.unflatten(0, (-1, size))], 3).flatten(0, 1)


class SharedLayer(DynamicLayer):
    """Cache of one layer with the prompts' keys and values for all rows. The rows' own keys and values are not stored."""

    def __init__(self, prompts: Any, rows: Rows) -> None:
        DynamicLayer.__init__(self)
        self.keys, self.values, self.is_initialized = prompts.keys, prompts.values, True
        self._prompts = prompts
        self._rows = rows

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values of each row's prompt, followed by those of the row's own tokens."""
        return self._rows.join(self._prompts.keys, key_states), self._rows.join(self._prompts.values, value_states)


class RowStates(LinearAttentionLayer):
    """Cache of one layer with a state per row, which begins as that of the row's prompt."""

    def __init__(self, prompts: Any) -> None:
        LinearAttentionLayer.__init__(self, prompts.number_of_states)
        self._states: dict[str, Any] = {"conv_states": self.conv_states, "recurrent_states": self.recurrent_states}
        self.conv_kernel_size, self.device, self.dtype = prompts.conv_kernel_size, prompts.device, prompts.dtype
        self.is_conv_states_initialized = dict(prompts.is_conv_states_initialized)
        self.is_recurrent_states_initialized = dict(prompts.is_recurrent_states_initialized)
        self.has_previous_state = dict(prompts.has_previous_state)

    def put(self, rows: Rows, prompts: Any, begin: int) -> None:
        """Append rows with the states of their prompts. `begin` is the number of rows so far."""
        for name, states in self._states.items():
            for index, of_prompts in getattr(prompts, name).items():
                if of_prompts is not None:
                    own = rows.spread(of_prompts)
                    states[index] = own if begin == 0 else torch.cat([states[index], own])

    def join(self, others: Any, width: int) -> None:
        """Append the states of other rows."""
        for name, states in self._states.items():
            for index, of_others in getattr(others, name).items():
                if of_others is not None:
                    states[index] = torch.cat([states[index], of_others])

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Replace the state. The backward pass needs the state from before, so it is not overwritten."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def keep(self, rows: Tensor, width: int) -> None:
        """Keep only these rows."""
        LinearAttentionLayer.reorder_cache(self, rows)  # type: ignore[arg-type]


class SharedHybridLayer(RowStates, SharedLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """Cache of one layer with attention and states."""

    def __init__(self, prompts: Any, rows: Rows) -> None:
        SharedLayer.__init__(self, prompts, rows)
        RowStates.__init__(self, prompts)
        self.put(rows, prompts, 0)


def shared_layer(prompts: Any, rows: Rows) -> Any:
    """One layer's cache for all rows, from that of their prompts."""
    match prompts:
        case DummyLayer():
            return prompts
        case LinearAttentionAndFullAttentionLayer():
            return SharedHybridLayer(prompts, rows)
        case LinearAttentionLayer():
            states = RowStates(prompts)
            states.put(rows, prompts, 0)
            return states
        case _:
            return SharedLayer(prompts, rows)

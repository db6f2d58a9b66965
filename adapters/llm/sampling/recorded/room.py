"""Fixed memory for the rows that are decoded together, and a step of fixed shape in it, which a GPU records."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache
from transformers.cache_utils import StaticLayer

from adapters.llm.model.causal_lm import CausalLM, DummyLayer
from adapters.llm.model.shared_prompts import Prefilled
from adapters.llm.sampling.token_draw import TokenDraw


class NotRecordable(RuntimeError):
    """A step reads values on the host, has shapes that depend on values, or copies between host and device."""


class HostReads(TorchDispatchMode):
    """Raises `NotRecordable` where a step could not be recorded. A recording that fails can leave CUDA unusable."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        is_read = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))
        if func is aten.index.Tensor:  # its shape depends on values only if a mask selects
            is_read = any(index is not None and index.dtype == torch.bool for index in args[1])
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        copies = func in (aten._to_copy.default, aten.copy_.default)  # other operations take a number as an argument
        is_copy = len({tensor.device.type for tensor in tensors if tensor.dim() > 0 or copies}) > 1
        is_constant = func is aten.lift_fresh.default and (result.dim() > 0 or result.device.type != "cpu")
        if is_read or is_copy or is_constant:
            raise NotRecordable(f"a step calls {func}, which reads or copies values between the host and the device")
        return result


class RoomLayer(StaticLayer):
    """The first rows and columns of one layer's keys and values in a room. All layers share one counter."""

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        super().__init__(keys.shape[2])
        self.keys, self.values, self.cumulative_length, self.is_initialized = keys, values, column, True
        self.dtype, self.device = keys.dtype, keys.device

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of one token at the counter, and return all columns. The room moves the counter."""
        assert self.keys is not None
        assert self.values is not None
        at = self.cumulative_length.view(1)
        self.keys.index_copy_(2, at, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, at, value_states.to(self.values.dtype))
        return self.keys, self.values


class Room:
    """Fixed memory for R rows and L columns, and the recordings of steps in it.

    Args:
        lm: The model.
        like: The cache of some prompts. Under autocast, the room stores keys and values in autocast's type.
        num_rows: R.
        num_columns: L.
        draw: A draw of R rows, which belongs to the room.
    """

    def __init__(self, lm: CausalLM, like: DynamicCache, num_rows: int, num_columns: int, draw: TokenDraw) -> None:
        device = lm.device
        narrow = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None

        def memory(part: Tensor) -> Tensor:
            dtype = narrow if narrow is not None and part.dtype == torch.float32 else part.dtype
            return part.new_zeros(num_rows, part.shape[1], num_columns, part.shape[3], dtype=dtype)

        self.size = num_rows, num_columns
        self.draw = draw
        self.recordings: dict[tuple[int, int], Callable[[], None]] = {}
        """The steps by number of rows and columns."""
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        """The memory that all recordings share. Nothing in it is read by another step."""
        self._lm = lm
        all_layers: list[Any] = like.layers
        self._layers = [
            () if isinstance(layer, DummyLayer) else (memory(layer.keys), memory(layer.values)) for layer in all_layers
        ]
        self._mask = torch.zeros(num_rows, num_columns, dtype=torch.bool, device=device)
        self._lengths, self._rows, self._tokens = (
            torch.zeros(num_rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.column = torch.zeros((), dtype=torch.int64, device=device)
        """The column of the next token, for all rows and layers."""
        self._step = self._lengths.new_zeros(1)

    def put(self, prefilled: Prefilled, size: int, begin: int) -> Float[Tensor, "K H"]:
        """Put `size` rows per prompt into the room, from row `begin` on. Returns the hidden states of their first tokens."""
        row = torch.arange(len(prefilled.lengths), device=self._rows.device).repeat_interleave(size)
        these, width = slice(begin, begin + len(row)), prefilled.cache.get_seq_length()
        all_layers: list[Any] = prefilled.cache.layers
        for own, layer in zip(self._layers, all_layers, strict=True):
            for part, values in zip(own, (layer.keys, layer.values) if own else (), strict=True):
                part[these, :, :width] = values.index_select(0, row)
        self._mask[these] = False
        self._mask[these, :width] = True if prefilled.mask is None else prefilled.mask[row]
        self._lengths[these] = prefilled.lengths[row]
        self.column.fill_(width)
        return prefilled.last_hidden[row]

    def begin(self, hidden: Float[Tensor, "K H"], num_rows: int, draw: TokenDraw, taken: slice) -> None:
        """Draw the first tokens of some rows of a draw. Rows from the K-th on are free: they repeat the first row."""
        count = len(hidden)
        everyone = torch.arange(self.size[0], device=self._rows.device)
        for part in self._parts():
            part[count:num_rows] = part[:1]
        self._rows.copy_(everyone)
        self._step.fill_(1)
        self.draw.take(draw, taken)
        first = hidden[everyone[:num_rows].where(everyone[:num_rows] < count, 0)]
        self._tokens[:num_rows] = self.draw(self._lm.head(first), self._rows[:num_rows], 0)

    def keep(self, positions: Sequence[int], num_rows: int, num_rows_before: int) -> list[int]:
        """Move the rows at these positions to the front, in place. Returns where each of the first `num_rows` rows was."""
        chosen = set(positions)
        order = [*positions, *(place for place in range(num_rows_before) if place not in chosen)][:num_rows]
        index = torch.tensor(order, device=self._rows.device)
        for part in (*self._parts(), self._rows, self._tokens):
            part[:num_rows] = part.index_select(0, index)
        return order

    def _parts(self) -> Iterator[Tensor]:
        """What depends on a row's prompt."""
        yield self._mask
        yield self._lengths
        for layer in self._layers:
            yield from layer

    def step_of(self, num_rows: int, num_columns: int) -> Callable[[], None]:
        """The step of the first rows and columns: one forward pass, and one token per row."""
        lm, first = self._lm, slice(num_rows)
        cache = DynamicCache()
        cache.layers = [
            RoomLayer(layer[0][first, :, :num_columns], layer[1][first, :, :num_columns], self.column)
            if layer
            else DummyLayer()
            for layer in self._layers
        ]
        mask, tokens = self._mask[first, :num_columns], self._tokens[first]
        lengths, rows, step = self._lengths[first], self._rows[first], self._step.expand(num_rows)
        decoder, head, draw, column = lm.decoder, lm.head, self.draw, self.column

        def run() -> None:
            mask.index_fill_(1, column.view(1), True)
            hidden = decoder(
                input_ids=tokens[:, None],
                past_key_values=cache,
                use_cache=True,
                attention_mask=mask,
                position_ids=(lengths + step - 1)[:, None],
            ).last_hidden_state
            column.add_(1)
            tokens.copy_(draw(head(hidden[:, -1]), rows, step))
            self._step.add_(1)

        return run

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context after which the next step is the same as before. Steps write only what that step overwrites."""
        state = [self.column, self._step, self._tokens]
        before = [part.clone() for part in state]
        yield
        for part, value in zip(state, before, strict=True):
            part.copy_(value)


def recorded_step(step: Callable[[], None], room: Room) -> Callable[[], None]:
    """The step as a GPU records and replays it. Elsewhere the step itself."""
    if room.column.device.type != "cuda":
        return step
    with torch.cuda.device(room.column.device):
        return _captured(step, room)


def _captured(step: Callable[[], None], room: Room) -> Callable[[], None]:
    """Record a step, as torch's notes on CUDA graphs say: warm up on a side stream, because libraries allocate and choose
    kernels in their first calls, and let other threads (of data loaders) go on."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(2):
            with room.unchanged():
                step()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=room.pool, capture_error_mode="thread_local"):
            step()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise NotRecordable(f"CUDA refused to record its step: {str(error).strip()[:200]}") from error
    return graph.replay

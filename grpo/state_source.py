"""Where `train` gets its states: a sequence in shuffled passes, any iterable, or a sampler."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from .errors import ConfigError, ContractError
from .types import Rows, select_rows


class StateSource:
    """States of iteration 0, 1, 2, ...: which they are depends on the seed and the iteration alone, so that a run resumes.

    Args:
        states: a sequence, tensor or array of states, drawn in shuffled passes without replacement (all of them, in order,
            where `num_per_iteration` is None); an iterable of states, taken in order and begun again at its end; or a
            sampler, `iteration -> states`, which resumes exactly if it depends on the iteration alone.
        num_per_iteration: B.
        seed: of the shuffling.

    Raises:
        ConfigError: an iterable without `num_per_iteration`, or something that holds no states.
    """

    def __init__(self, states: Any, num_per_iteration: int | None, seed: int) -> None:
        self._states = states
        self._num = num_per_iteration
        self._seed = seed
        self._orders: dict[int, torch.Tensor] = {}
        self._draw: Callable[[int], Rows]
        if isinstance(states, str | bytes | Mapping):
            raise ConfigError(
                f"states must hold one entry per state; got a {type(states).__name__}. Pass a list of states."
            )
        if hasattr(states, "__len__") and hasattr(states, "__getitem__"):
            if len(states) == 0:
                raise ContractError("No states to train on: pass at least one.")
            self._draw = self._from_sequence
        elif isinstance(states, Iterable):
            if num_per_iteration is None:
                raise ConfigError("states is an iterable without a length: set GRPOConfig.num_states_per_iteration.")
            self._iterator: Iterator[Any] = iter(states)
            self._next_iteration = 0
            self._draw = self._from_iterable
        elif callable(states):
            self._draw = states
        else:
            raise ConfigError(
                f"states must be a sequence, an iterable or iteration -> states; got {type(states).__name__}."
            )

    def __call__(self, iteration: int) -> Rows:
        """The states of one iteration, which counts from 0."""
        return self._draw(iteration)

    def _from_sequence(self, iteration: int) -> Rows:
        if self._num is None:
            return self._states  # type: ignore[no-any-return]
        size = len(self._states)
        first = iteration * self._num
        passes = range(first // size, (first + self._num - 1) // size + 1)
        self._orders = {k: self._orders[k] if k in self._orders else self._shuffled(k, size) for k in passes}
        order = torch.cat(list(self._orders.values()))
        begin = first - passes[0] * size
        return select_rows(self._states, order[begin : begin + self._num])

    def _shuffled(self, number: int, size: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng((self._seed, number)).permutation(size))

    def _from_iterable(self, iteration: int) -> Rows:
        assert self._num is not None
        while self._next_iteration < iteration:  # a resumed run passes over what it has already seen
            self._take(self._num)
            self._next_iteration += 1
        self._next_iteration += 1
        return self._take(self._num)

    def _take(self, count: int) -> list[Any]:
        taken = list(islice(self._iterator, count))
        while len(taken) < count:
            self._iterator = iter(self._states)
            more = list(islice(self._iterator, count - len(taken)))
            if not more:
                raise ContractError(
                    f"The iterable of states ended {count - len(taken)} short of {count} and gives no more when begun again. "
                    "Pass a list, an iterable that can be begun again, or fewer iterations."
                )
            taken += more
        return taken

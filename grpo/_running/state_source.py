"""The states of each training iteration: drawn from a sequence in shuffled epochs, from an iterable, or by a sampler."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from grpo._common.conversion import describe, require_rows
from grpo.errors import ConfigError, ContractError
from grpo.types import Rows, select_rows


class StateSource:
    """Returns the states of each iteration. They depend only on the seed and the iteration, so that a run can resume.

    A sequence, tensor or array is drawn in shuffled epochs without replacement. If `num_per_iteration` is None, each iteration
    has all states in order. An iterable is read in order, and from the start again at its end. It yields single states: a
    `torch.utils.data.DataLoader` needs `batch_size=None`. A function
    `iteration -> states` is called in each iteration; a run resumes exactly if the result depends only on the iteration.

    Args:
        states: The states.
        num_per_iteration: Number of states of an iteration. None: all of a sequence.
        seed: Decides the order of a sequence.
        first: The number of the first draw. An iterator has passed the states of earlier draws already.
    """

    def __init__(self, states: Any, num_per_iteration: int | None, seed: int, first: int = 0) -> None:
        self._states, self._num = states, num_per_iteration
        self._draw: Callable[[int], Rows]
        self.first: Any = None
        """The first state of a sequence. None: the states are not a sequence."""
        if isinstance(states, str | bytes | Mapping):
            raise ConfigError(
                f"states must hold one entry per state; got a {type(states).__name__}. Pass a list of states."
            )
        if hasattr(states, "__len__") and hasattr(states, "__getitem__"):
            require_rows("states", states)
            if len(states) == 0:
                raise ContractError("No states to train on: pass at least one.")
            # from the seed and the epoch's number alone, so that a resumed run needs no cursor
            self._epoch = lru_cache(2)(lambda k: np.random.default_rng((seed, k)).permutation(len(states)))
            self._draw, self.first = self._from_sequence, states[0]
        elif isinstance(states, Iterable):
            _require_no_batches(states)
            if num_per_iteration is None:
                raise ConfigError(
                    f"GRPOConfig.num_states_per_iteration must be set, because a {type(states).__name__} of states has no "
                    "entries by number, and the whole of it may be endless. Set it, or pass list(states)."
                )
            has_passed = first * num_per_iteration if isinstance(states, Iterator) else 0
            self._endless, self._num_taken = _repeated(states), has_passed
            self._draw = self._from_iterable
        elif callable(states) and not isinstance(states, type):
            self._draw = states
        else:
            raise ConfigError(
                f"states must be a sequence, an iterable or iteration -> states; got {type(states).__name__}. Pass a list."
            )

    def __call__(self, iteration: int) -> Rows:
        """The states of one iteration. Iterations count from 0."""
        return self._draw(iteration)

    def num_iterations(self, num_epochs: float) -> int:
        """The number of iterations in which each state is drawn `num_epochs` times, rounded up."""
        given: Any = num_epochs
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
            raise ConfigError(
                f"num_epochs must be a number above 0; got {describe(given)}. Pass the passes over the states."
            )
        if not hasattr(self._states, "__len__"):
            raise ConfigError(
                f"num_epochs counts passes over the states, and a {type(self._states).__name__} has no length. Pass "
                "num_iterations=..., or a list of states."
            )
        num_states = len(self._states)
        return math.ceil(num_epochs * num_states / (self._num or num_states))

    def _from_sequence(self, iteration: int) -> Rows:
        if self._num is None:
            return self._states  # type: ignore[no-any-return]
        epoch, begin = divmod(iteration * self._num, len(self._states))
        end = begin + self._num
        order = np.concatenate([self._epoch(epoch + later) for later in range(math.ceil(end / len(self._states)))])
        return select_rows(self._states, torch.from_numpy(order[begin:end]))

    def _from_iterable(self, iteration: int) -> Rows:
        assert self._num is not None
        skipped = max(iteration * self._num - self._num_taken, 0)  # a resumed run skips the states it has seen
        taken = list(islice(self._endless, skipped, skipped + self._num))
        self._num_taken += skipped + len(taken)
        if len(taken) < self._num:
            raise ContractError(
                f"The iterable of states must yield {self._num} states per iteration; it ended after {len(taken)} of them, and "
                "iterating again yields nothing. Pass a list, an iterable that can be iterated again, or fewer iterations."
            )
        return taken


def _require_no_batches(states: Any) -> None:
    """Refuse a `DataLoader` that joins states to batches, because each of its batches would count as one state."""
    if isinstance(states, DataLoader) and states.batch_sampler is not None:
        raise ConfigError(
            "states must hold one entry per state; this DataLoader yields batches, and each batch would count as one state. "
            f"Pass its data set, loader.dataset, with GRPOConfig.num_states_per_iteration={states.batch_size or '...'}: "
            "`train` shuffles the states itself. Or build the loader with batch_size=None, which yields single states."
        )


def _repeated(states: Iterable[Any]) -> Iterator[Any]:
    """Iterate over the states again and again, until an iteration yields no state."""
    ended = False
    while not ended:
        ended = True
        for state in states:
            ended = False
            yield state

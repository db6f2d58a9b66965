"""Ranks without processes and without connections: threads that exchange values in memory, and a rank with an equal twin."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from grpo._ranks.processes import SeveralProcesses
from grpo._ranks.shared_errors import error_for_all, problem_of, shared_by_all

SECONDS = 60


class Twin(SeveralProcesses):
    """An `Engine` of the first of two ranks that do the same."""

    num_ranks = 2

    def sum(self, values: Tensor) -> Tensor:
        return 2 * values

    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        return torch.cat([rows, rows]), 0

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, value]


class ImitatedRank(SeveralProcesses):
    """An `Engine` of one rank. Every call waits for the other ranks."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.num_ranks = rank, len(slots)
        self._slots, self._barrier = slots, barrier

    def gather_objects(self, value: Any) -> list[Any]:
        return self._exchange(value, None)

    def agree(self, error: BaseException | None = None) -> None:
        self._exchange(None, error)

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self.gather_objects(values.clone())).sum(0)

    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """Rows of one width."""
        parts = self.gather_objects(rows)
        return torch.cat(parts), sum(len(part) for part in parts[: self.rank])

    def _exchange(self, value: Any, error: BaseException | None) -> list[Any]:
        self._slots[self.rank] = value, None if error is None else problem_of(error)
        self._barrier.wait(SECONDS)
        values, problems = zip(*self._slots, strict=True)
        self._barrier.wait(SECONDS)
        shared = error_for_all(problems, error)
        if shared is not None:
            shared_by_all(shared)
            raise shared
        return list(values)


def on_ranks(num_ranks: int, call: Callable[[ImitatedRank], Any]) -> list[Any]:
    """What `call` returns, or the error it raises, on each rank."""
    slots: list[Any] = [None] * num_ranks
    barrier = threading.Barrier(num_ranks)

    def outcome(rank: int) -> Any:
        try:
            return call(ImitatedRank(rank, slots, barrier))
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(outcome, range(num_ranks)))

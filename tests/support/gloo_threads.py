"""Ranks as threads of one process: they share a store in memory, and meet over real gloo connections."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from grpo import distributed
from grpo._ranks.meetings import Meetings
from grpo.distributed import Replicated

LONGEST = 60.0
"""Seconds after which ranks that wait for one another fail a test."""


def on_threads(num_ranks: int, body: Callable[[int], Any]) -> list[Any]:
    """Call `body(rank)` on one thread per rank. Return what each returned, or raised."""
    results: list[Any] = [TimeoutError("the rank never ended")] * num_ranks

    def one(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:  # every kind, because the tests look at it
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST)
    return results


def meet(num_ranks: int, body: Callable[[Meetings], Any], timeout: float = 30.0) -> list[Any]:
    """Call `body(meetings)` on every rank."""
    store = dist.HashStore()
    return on_threads(num_ranks, lambda rank: body(Meetings(store, rank, num_ranks, timeout)))


class Group:
    """Stands in for a process group, as one rank sees it."""

    def __init__(self, rank: int, num_ranks: int, store: Any, backend: str = "gloo") -> None:
        self.rank, self.num_ranks, self.backend = rank, num_ranks, backend
        self._store, self.group_name = store, f"group of {num_ranks} in {id(store)}, rank {rank}"

    def get_group_store(self) -> Any:
        return self._store


class Silent:
    """In place of `PrintedOnce`, which is for a whole process."""

    def __init__(self, rank: int) -> None:
        del rank

    def said(self) -> list[int]:
        return []

    def printed_by_first(self, numbers: Any) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `Replicated` take a `Group`."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for name, attribute in {"get_backend": "backend", "get_rank": "rank", "get_world_size": "num_ranks"}.items():
        monkeypatch.setattr(dist, name, lambda group, attribute=attribute: getattr(group, attribute))
    monkeypatch.setattr(distributed, "PrintedOnce", Silent)


def on_ranks(num_ranks: int, body: Callable[[Replicated], Any], timeout: float = 30.0) -> list[Any]:
    """Call `body(engine)` on every rank. Needs the fixture `groups`."""
    store = dist.HashStore()
    return on_threads(num_ranks, lambda rank: body(Replicated(Group(rank, num_ranks, store), timeout=timeout)))

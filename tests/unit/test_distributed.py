"""Engines: what a single process does, what `Replicated` sends and returns, and that ranks start from equal weights."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo import ConfigError
from grpo.distributed import Engine, OneProcess, Replicated, require_equal_weights

# One process


def test_a_single_process_gets_back_what_it_passes() -> None:
    engine = OneProcess()
    values = torch.tensor([1.0, 2.0])
    assert isinstance(engine, Engine)
    assert (engine.rank, engine.num_ranks) == (0, 1)
    assert engine.sum(values) is values
    rows, first = engine.gather(values)
    assert rows is values
    assert first == 0
    assert engine.gather_objects("a") == ["a"]


# A process group


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    yield
    dist.destroy_process_group()


def test_the_error_without_a_process_group_says_how_to_start_one() -> None:
    with pytest.raises(ConfigError, match=r"Replicated needs torch\.distributed: call .*init_process_group\(\) first"):
        Replicated()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_process_returns_copies() -> None:
    engine = Replicated()
    assert isinstance(engine, Engine)
    assert (engine.rank, engine.num_ranks) == (0, 1)
    values = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    total = engine.sum(values)
    assert torch.equal(total, values)
    assert total.data_ptr() != values.data_ptr()
    for rows in (values, torch.tensor([True, False]), torch.zeros(0, 3, dtype=torch.int64)):
        found, first = engine.gather(rows)
        assert torch.equal(found, rows)
        assert found.dtype == rows.dtype
        assert first == 0
    assert engine.gather_objects({"a": 1}) == [{"a": 1}]


class Peers:
    """Stands in for `torch.distributed` on one of three ranks, with what the other two ranks send.

    Rank 0 has two rows, rank 1 has one, and rank 2 has three.
    """

    NUM_RANKS = 3

    def __init__(self, rank: int, rows: list[Tensor]) -> None:
        self.rank, self.rows = rank, rows

    def all_reduce(self, total: Tensor, group: Any) -> None:
        assert group == "all"
        for rank in set(range(self.NUM_RANKS)) - {self.rank}:
            total += self.rows[rank].sum(0)

    def all_gather_object(self, values: list[Any], value: Any, group: Any) -> None:
        assert group == "all"
        values[:] = [tuple(rows.shape) for rows in self.rows]
        assert values[self.rank] == value

    def all_gather(self, parts: list[Tensor], own: Tensor, group: Any) -> None:
        """Each rank sends its rows in the upper left corner of a tensor of zeros that is as large as the largest rows."""
        assert group == "all"
        size = [max(sizes) for sizes in zip(*(rows.shape for rows in self.rows), strict=True)]
        for rank, rows in enumerate(self.rows):
            sent = torch.zeros(size, dtype=torch.uint8 if rows.dtype == torch.bool else rows.dtype)
            sent[tuple(slice(0, length) for length in rows.shape)] = rows
            if rank == self.rank:
                assert torch.equal(own, sent)
            parts[rank].copy_(sent)


def engine_of(rank: int, rows: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> Replicated:
    """The engine of one of three ranks that hold these rows."""
    peers = Peers(rank, rows)
    for name, value in {
        "is_initialized": lambda: True,
        "get_backend": lambda group: "gloo",
        "get_rank": lambda group: rank,
        "get_world_size": lambda group: Peers.NUM_RANKS,
        "all_reduce": peers.all_reduce,
        "all_gather": peers.all_gather,
        "all_gather_object": peers.all_gather_object,
    }.items():
        monkeypatch.setattr(dist, name, value)
    return Replicated(group="all")


WIDTHS = [
    torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    torch.tensor([[5.0, 6.0, 7.0]]),
    torch.tensor([[8.0], [9.0], [10.0]]),
]
JOINED = [[1, 2, 0], [3, 4, 0], [5, 6, 7], [8, 0, 0], [9, 0, 0], [10, 0, 0]]


def test_rows_of_all_ranks_are_joined_in_rank_order(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded with 0 to the widest; the index is that of the rank's own first row, after 0, 2 and 3 rows of others."""
    for rank, first in enumerate([0, 2, 3]):
        with subtests.test(rank=rank):
            engine = engine_of(rank, WIDTHS, monkeypatch)
            assert (engine.rank, engine.num_ranks) == (rank, 3)
            rows, found = engine.gather(WIDTHS[rank])
            assert rows.tolist() == JOINED
            assert found == first


def test_gathered_booleans_stay_booleans(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = [torch.tensor([True, False]), torch.tensor([True]), torch.tensor([False, False, True])]
    rows, first = engine_of(2, masks, monkeypatch).gather(masks[2])
    assert rows.tolist() == [True, False, True, False, False, True]
    assert rows.dtype == torch.bool
    assert first == 3


def test_a_rank_without_rows_takes_part_in_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [torch.zeros(0, 1), torch.tensor([[1.0]]), torch.tensor([[2.0]])]
    rows, first = engine_of(0, parts, monkeypatch).gather(parts[0])
    assert rows.tolist() == [[1.0], [2.0]]
    assert first == 0


def test_summing_over_ranks_does_not_change_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local sum is 1 + 2. The other ranks contribute 4 and 5 + 6."""
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([4.0]), torch.tensor([5.0, 6.0])]
    own = rows[0].sum().reshape(())
    assert engine_of(0, rows, monkeypatch).sum(own).item() == 18.0
    assert own.item() == 3.0


# Equal weights


class Ranks(OneProcess):
    """Three ranks; the others start from these parameters."""

    num_ranks = 3

    def __init__(self, *others: dict[str, Tensor]) -> None:
        self.others = others

    def gather_objects(self, value: Any) -> list[Any]:
        sent: list[Any] = []

        class Listening(OneProcess):
            num_ranks = 2

            def gather_objects(self, value: Any) -> list[Any]:
                sent.append(value)
                return [value]

        for parameters in self.others:
            require_equal_weights(Listening(), parameters)
        return [value, *sent]


def parameters(*, scale: float = 1.0) -> dict[str, Tensor]:
    return {
        "weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True),
        "bias": torch.tensor([0.5, -0.5]) * scale,
        "empty": torch.zeros(0),
        "gain": torch.tensor(2.0, dtype=torch.bfloat16),
    }


def test_a_rank_with_other_weights_is_refused_and_its_difference_named(subtests: pytest.Subtests) -> None:
    require_equal_weights(Ranks(parameters(), parameters()), parameters())  # equal weights are accepted
    swapped = parameters() | {"weight": torch.tensor([[2.0, 1.0], [3.0, 4.0]])}
    all_differ = {name: value.detach() + 1 for name, value in parameters().items()} | {"empty": torch.ones(1)}
    fewer = {name: value for name, value in parameters().items() if name != "gain"}
    for others, message in [
        ((parameters(scale=2.0), parameters()), r"rank 1 differs from rank 0 in bias\. Build"),
        ((parameters(), swapped), r"rank 2 differs from rank 0 in weight\. Build"),
        ((parameters(), all_differ), r"rank 2 differs from rank 0 in weight, bias, empty\. Build"),  # the first three
        ((fewer, parameters()), r"rank 1 differs from rank 0 in their number\. Build"),
    ]:
        with subtests.test(message=message), pytest.raises(ConfigError, match=message):
            require_equal_weights(Ranks(*others), parameters())


def test_a_single_process_does_not_compare_weights() -> None:
    class Silent(OneProcess):
        def gather_objects(self, value: Any) -> list[Any]:
            raise ConnectionError("there is no other rank")

    engine = Silent()
    require_equal_weights(engine, parameters())
    engine.num_ranks = 2
    with pytest.raises(ConnectionError):
        require_equal_weights(engine, parameters())

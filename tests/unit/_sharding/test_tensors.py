"""Which rows a rank owns, and ordinary tensors, which are their own only part."""

import pytest
import torch

from grpo._sharding.tensors import address_of, copy_into, in_parts, is_sharded, local, own_rows


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 5, 7, 8, 12])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_the_rows_of_a_rank_are_those_of_its_chunk(num_rows: int, num_ranks: int) -> None:
    rows = torch.arange(num_rows)
    chunks = [chunk.tolist() for chunk in rows.chunk(num_ranks)] if num_rows else []
    found = [rows[own_rows(num_rows, rank, num_ranks)].tolist() for rank in range(num_ranks)]
    assert found == (chunks + [[]] * num_ranks)[:num_ranks]


def test_an_ordinary_tensor_is_whole() -> None:
    value = torch.arange(3.0)
    assert not is_sharded(value)
    assert local(value) is value
    assert in_parts([value]) == ([], [value])
    assert address_of(value) == value.data_ptr()
    assert address_of(value[1:]) == value.data_ptr() + 4


def test_a_part_without_rows_has_the_address_of_its_memory() -> None:
    memory = torch.zeros(4)
    assert address_of(memory[4:]) == memory.data_ptr()
    assert address_of(torch.empty(0)) == 0


def test_a_value_is_copied_in_place() -> None:
    target = torch.zeros(2)
    address = target.data_ptr()
    copy_into(target, torch.tensor([1.0, 2.0]))
    assert target.tolist() == [1.0, 2.0]
    assert target.data_ptr() == address

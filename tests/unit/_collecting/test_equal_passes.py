"""Where all ranks make equally many forward passes, a rank with fewer parts makes further ones, and none is repeated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo import ActionScores
from grpo._collecting.out_of_memory import PassSizes
from grpo._collecting.scoring import score_in_parts
from grpo._collecting.update_plan import parts_in_order
from grpo._ranks.processes import SeveralProcesses


class Dividing(SeveralProcesses):
    """An engine that divides weights. Ranks meet only to find their number of passes."""

    num_ranks = 2
    divides_weights = True

    def __init__(self, equal_count: Callable[[int], int]) -> None:
        self._equal_count = equal_count

    def equal_count(self, count: int) -> int:
        return self._equal_count(count)

    def gather_objects(self, value: Any) -> list[Any]:
        raise AssertionError("nothing else is exchanged")


def test_a_rank_on_its_own_makes_no_further_passes() -> None:
    assert PassSizes("scoring").num_missing(3) == 0
    assert PassSizes("scoring", Dividing(lambda count: count + 2)).num_missing(3) == 2


@pytest.mark.parametrize("num_passes", [2, 3, 5])
def test_further_passes_score_the_first_row_and_change_nothing(num_passes: int) -> None:
    seen: list[list[int]] = []
    asked: list[int] = []

    def score(states: list[int], actions: list[int], group_ids: torch.Tensor) -> ActionScores:
        assert len(states) == len(actions) == len(group_ids)
        seen.append(list(states))
        log_probs = -torch.tensor(states, dtype=torch.float32)[:, None]
        return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool))

    def equal_count(count: int) -> int:
        assert seen == []  # all ranks know the number before the first pass
        asked.append(count)
        return num_passes

    rows = [7, 8, 9]
    found = score_in_parts(
        score,
        rows,
        rows,
        torch.arange(3),
        lambda halvings: parts_in_order(3, 2, halvings),
        PassSizes("scoring", Dividing(equal_count)),
    )
    assert asked == [2]
    assert found.log_probs.tolist() == [[-7.0], [-8.0], [-9.0]]
    assert seen == [[7, 8], [9], *[[7]] * (num_passes - 2)]


def test_memory_that_runs_out_is_an_error_with_advice() -> None:
    sizes = PassSizes("scoring", Dividing(lambda count: count))
    for _ in sizes.passes([slice(0, 4)]):
        error = torch.OutOfMemoryError("full")
        assert not sizes.accept(error)
    (note,) = error.__notes__
    assert note.startswith("grpo: scoring ran out of memory. With divided weights it is not repeated")
    assert (sizes.num_halvings, sizes.num_repeated) == (0, 0)

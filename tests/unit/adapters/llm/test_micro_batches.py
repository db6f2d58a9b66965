import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from adapters.llm.micro_batches import FORWARD_COST, plan_by_tokens


def positions(
    part: Sequence[int], prompts: Sequence[int], of_row: Sequence[int], lengths: Sequence[int], shares: bool
) -> int:
    """Positions of one pass with padding: K max P + R max T if prompts are shared, R max(P + T) otherwise."""
    if not shares:
        return len(part) * max(prompts[of_row[row]] + lengths[row] for row in part)
    used = {of_row[row] for row in part}
    return len(used) * max(prompts[prompt] for prompt in used) + len(part) * max(lengths[row] for row in part)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int, bool]:
    prompts = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    of_row = draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=12))
    lengths = draw(st.lists(st.integers(0, 300), min_size=len(of_row), max_size=len(of_row)))
    return prompts, of_row, lengths, draw(st.integers(1, 4000)), draw(st.booleans())


@given(batches())
def test_every_plan_is_a_partition_within_budget_and_no_worse_than_simple_plans(
    batch: tuple[list[int], list[int], list[int], int, bool],
) -> None:
    prompts, of_row, lengths, budget, shares = batch
    plan = plan_by_tokens(prompts, of_row, lengths, budget, shares_prompts=shares)

    def size(part: Sequence[int]) -> int:
        return positions(part, prompts, of_row, lengths, shares)

    assert sorted(row for part in plan for row in part) == list(range(len(of_row)))
    assert all(size(part) <= budget or len(part) == 1 for part in plan)
    for part in plan:  # rows of a prompt are adjacent
        changes = sum(of_row[first] != of_row[second] for first, second in itertools.pairwise(part))
        assert changes == len({of_row[row] for row in part}) - 1
    cost = sum(size(part) + FORWARD_COST for part in plan)
    assert cost <= sum(size([row]) + FORWARD_COST for row in range(len(of_row)))
    everything = range(len(of_row))
    if size(everything) <= budget:
        assert cost <= size(everything) + FORWARD_COST


def test_rows_are_split_only_if_padding_costs_more_than_a_pass() -> None:
    # together 1 * 10 + 4 * 20 = 90 positions; a split would cost 256 for another pass
    assert plan_by_tokens([10], [0] * 4, [20, 1, 5, 20], 1000, shares_prompts=True) == [[0, 3, 2, 1]]
    # together 10 + 4 * 1000 = 4010 + 256; in two passes (10 + 2 * 1000) + (10 + 2 * 1) + 2 * 256 = 2534
    assert plan_by_tokens([10], [0] * 4, [1000, 1, 1, 1000], 10**6, shares_prompts=True) == [[0, 3], [1, 2]]


def test_rows_of_a_shared_prompt_stay_together_and_others_count_it_each() -> None:
    # two groups of three in 2 x (100 + 3 * 10) = 260 positions; a budget of 150 allows one group per pass, not two
    plan = plan_by_tokens([100, 100], [0, 1, 0, 1, 0, 1], [10] * 6, 150, shares_prompts=True)
    assert sorted(map(sorted, plan)) == [[0, 2, 4], [1, 3, 5]]
    # three rows of 100 + 10 are 330 positions: a budget of 329 takes two passes
    assert len(plan_by_tokens([100], [0] * 3, [10] * 3, 330, shares_prompts=False)) == 1
    assert len(plan_by_tokens([100], [0] * 3, [10] * 3, 329, shares_prompts=False)) == 2
    assert len(plan_by_tokens([100], [0] * 3, [10] * 3, 130, shares_prompts=True)) == 1

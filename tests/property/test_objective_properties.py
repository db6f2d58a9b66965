"""Changes of the input that leave step weights and advantages unchanged."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo import group_relative_advantages, group_relative_returns, step_weights

few = settings(max_examples=40)


@dataclass(frozen=True)
class Rows:
    """A reward per step and a mask, [N, T] each, and the groups of the rows, [N]."""

    rewards: Tensor
    mask: Tensor
    group_ids: Tensor


@st.composite
def ragged_rows(draw: st.DrawFn) -> Rows:
    """Ragged rows, holes and empty rows included."""
    num_rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    return Rows(
        rewards=torch.randn(num_rows, width, generator=generator, dtype=torch.float64).abs(),
        mask=torch.rand(num_rows, width, generator=generator) < draw(st.sampled_from([0.4, 0.8, 1.0])),
        group_ids=torch.randint(-2, 3, (num_rows,), generator=generator),
    )


@few
@given(data=st.data())
def test_renumbering_groups_changes_no_weight_advantage_or_return(data):
    rows = data.draw(ragged_rows())
    names = st.integers(-(2**63), 2**63 - 1)
    new_names = torch.tensor(data.draw(st.lists(names, min_size=5, max_size=5, unique=True)))
    both = rows.group_ids, new_names[rows.group_ids + 2]
    before, after = (step_weights(rows.mask, "group_mean", group_ids=ids) for ids in both)
    assert torch.equal(after, before)
    before, after = (
        group_relative_returns(rows.rewards, rows.mask, ids, gamma=0.9, scale="group").flatten() for ids in both
    )
    assert after.tolist() == pytest.approx(before.tolist(), rel=1e-12, abs=1e-12)
    for baseline in ("group_mean", "group_median", "leave_one_out"):
        for scale in ("none", "group"):
            before, after = (
                group_relative_advantages(rows.rewards[:, 0], ids, baseline=baseline, scale=scale) for ids in both
            )
            assert after.tolist() == pytest.approx(before.tolist(), rel=1e-12, abs=1e-12)


@few
@given(
    rows=st.lists(st.tuples(st.integers(-40, 40), st.integers(0, 2)), min_size=1, max_size=10),
    baseline=st.sampled_from(["group_mean", "group_median", "leave_one_out"]),
    scale=st.sampled_from(["none", "group"]),
    data=st.data(),
)
def test_shifting_a_groups_rewards_changes_no_advantage(rows, baseline, scale, data):
    # eighths, so that the shifted rewards are exact
    shifts = [data.draw(st.integers(-1000, 1000)) for _ in range(3)]
    group_ids = torch.tensor([g for _, g in rows])
    plain = torch.tensor([r / 8 for r, _ in rows], dtype=torch.float64)
    shifted = plain + torch.tensor([shifts[g] for _, g in rows])
    before, after = (
        group_relative_advantages(rewards, group_ids, baseline=baseline, scale=scale) for rewards in (plain, shifted)
    )
    assert after.tolist() == pytest.approx(before.tolist(), abs=1e-10)


@few
@given(data=st.data())
def test_the_order_of_rows_changes_no_advantage(data):
    rows = data.draw(st.lists(st.tuples(st.floats(-10, 10), st.integers(-2, 2)), min_size=1, max_size=10))
    rewards, group_ids = torch.tensor([r for r, _ in rows], dtype=torch.float64), torch.tensor([g for _, g in rows])
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    baseline = data.draw(st.sampled_from(["group_mean", "group_median", "leave_one_out", "global_mean", "none"]))
    before, after = (
        group_relative_advantages(rewards[to], group_ids[to], baseline=baseline)
        for to in (torch.arange(len(rows)), order)
    )
    assert after.tolist() == pytest.approx(before[order].tolist(), abs=1e-12)

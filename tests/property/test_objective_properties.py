"""Changes of the input that leave loss, gradient and advantages unchanged."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo import (
    ObjectiveConfig,
    ObjectiveInputs,
    group_relative_advantages,
    group_relative_returns,
    grpo_objective,
    step_weights,
)
from grpo.config import SURROGATES
from grpo.surrogates import Clip

KL_ESTIMATORS = ["k1", "k2", "k3", "k3_weighted"]
SEEDS = st.integers(0, 2**32 - 1)
few = settings(max_examples=40)


@dataclass(frozen=True)
class Update:
    """One update's tensors, [N, T] each; `advantages` may be [N], `old` may be missing."""

    log_probs: Tensor
    old: Tensor | None
    ref: Tensor
    entropy: Tensor
    advantages: Tensor
    mask: Tensor
    group_ids: Tensor

    def weights(self, aggregation: str) -> Tensor:
        length = 7 if aggregation == "fixed_length" else None
        return step_weights(self.mask, aggregation, fixed_length=length, group_ids=self.group_ids)

    def inputs(self, weights: Tensor, log_probs: Tensor, entropy: Tensor) -> ObjectiveInputs:
        return ObjectiveInputs(
            log_probs=log_probs, old_log_probs=self.old, advantages=self.advantages, mask=self.mask, weights=weights,
            entropy=entropy, ref_log_probs=self.ref,
        )  # fmt: skip


@st.composite
def updates(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Update:
    """Ragged rows, holes and empty rows included, with ratios on both sides of the clip bounds."""
    num_rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(SEEDS))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    log_probs = -normal(num_rows, width).abs()
    return Update(
        log_probs=log_probs,
        old=draw(st.sampled_from([None, log_probs + 0.3 * normal(num_rows, width)])),
        ref=log_probs + 0.5 * normal(num_rows, width),
        entropy=normal(num_rows, width).abs(),
        advantages=draw(st.sampled_from([normal(num_rows), normal(num_rows, width)])),
        mask=torch.rand(num_rows, width, generator=generator) < draw(st.sampled_from([0.4, 0.8, 1.0])),
        group_ids=torch.randint(-2, 3, (num_rows,), generator=generator),
    )


BUILT_IN = [kind() for kind in SURROGATES.values()]
CLIPS = st.builds(Clip, low=st.sampled_from([0.0, 0.2, 1.0]), high=st.sampled_from([0.0, 0.28]))
ANY_SURROGATE = CLIPS | st.sampled_from(BUILT_IN)


@st.composite
def configs(draw: st.DrawFn) -> ObjectiveConfig:
    """Every term of the loss switched on."""
    return ObjectiveConfig(
        surrogate=draw(ANY_SURROGATE),
        kl_coef=0.3,
        kl_estimator=draw(st.sampled_from(KL_ESTIMATORS)),
        entropy_coef=0.2,
        entropy_estimator=draw(st.sampled_from(["exact", "score_function"])),
    )


def evaluate(update: Update, weights: Tensor, config: ObjectiveConfig) -> tuple[Tensor, Tensor]:
    """The loss, and its gradients with respect to log-probs and entropy, [2, N, T]. Random choices are always the same."""
    torch.manual_seed(0)
    leaves = [update.log_probs.clone().requires_grad_(), update.entropy.clone().requires_grad_()]
    loss = grpo_objective(update.inputs(weights, *leaves), config).loss
    loss.backward()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return loss.detach(), torch.stack(gradients)


def assert_equal_up_to(tolerance: float, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    """Losses, and gradients by the norm of their difference."""
    (loss, gradient), (other_loss, other_gradient) = one, other
    assert (loss - other_loss).abs() <= tolerance * max(1.0, loss.abs().item())
    assert (gradient - other_gradient).norm() <= tolerance * gradient.norm()


@few
@given(data=st.data())
def test_renumbering_groups_changes_no_weight_and_no_advantage(data):
    update = data.draw(updates())
    old_names = sorted(set(update.group_ids.tolist()))
    names = st.integers(-(2**63), 2**63 - 1)
    new_names = data.draw(st.lists(names, min_size=len(old_names), max_size=len(old_names), unique=True))
    new_ids = torch.tensor([dict(zip(old_names, new_names, strict=True))[g] for g in update.group_ids.tolist()])
    renamed = replace(update, group_ids=new_ids)
    assert torch.equal(renamed.weights("group_mean"), update.weights("group_mean"))
    rewards = update.entropy[:, 0]
    for baseline in ("group_mean", "group_median", "leave_one_out"):
        for scale in ("none", "group"):
            before, after = (
                group_relative_advantages(rewards, ids, baseline=baseline, scale=scale)
                for ids in (update.group_ids, new_ids)
            )
            assert after.tolist() == pytest.approx(before.tolist(), rel=1e-12, abs=1e-12)


@few
@given(data=st.data())
def test_renumbering_groups_changes_no_relative_return(data):
    update = data.draw(updates())
    new_names = data.draw(st.lists(st.integers(-(10**6), 10**6), min_size=5, max_size=5, unique=True))
    new_ids = torch.tensor(new_names)[update.group_ids + 2]
    before, after = (
        group_relative_returns(update.entropy, update.mask, ids, gamma=0.9, scale="group")
        for ids in (update.group_ids, new_ids)
    )
    assert torch.allclose(before, after, rtol=1e-12, atol=1e-12)


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


POISONED = ["log_probs", "old", "ref", "entropy", "advantages"]


@settings(max_examples=60)
@given(
    name=st.sampled_from(POISONED),
    update=updates(torch.float32),
    config=configs(),
    poison=st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_masked_values_change_neither_loss_nor_gradient(name, update, config, poison):
    values = getattr(update, name)
    assume(values is not None and values.dim() == 2)
    poisoned = replace(update, **{name: values.masked_fill(~update.mask, poison)})
    weights = update.weights("row_mean")
    loss, gradient = evaluate(update, weights, config)
    poisoned_loss, poisoned_gradient = evaluate(poisoned, weights, config)
    assert torch.equal(poisoned_loss, loss)
    assert torch.equal(poisoned_gradient, gradient)
    assert (gradient[:, ~update.mask] == 0).all()


@few
@given(update=updates(), config=configs())
def test_without_old_log_probs_the_current_policy_is_the_old_one(update, config):
    left_out, given_as_is = replace(update, old=None), replace(update, old=update.log_probs)
    weights = update.weights("row_mean")
    assert_equal_up_to(1e-14, evaluate(left_out, weights, config), evaluate(given_as_is, weights, config))

"""Every preset, and every choice of the loss that no preset makes: however rows are split, it is the same update."""

import math
from dataclasses import fields, replace
from itertools import cycle, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo import ActionScores, ObjectiveConfig, ObjectiveInputs, grpo_objective, step_weights
from grpo._objective.selection import kept_by_entropy, selected_by
from grpo.surrogates import traits_of
from tests.support.configs import (
    EVERY,
    FURTHER,
    PRESETS,
    Done,
    Rows,
    Telling,
    TellingGroups,
    TellingPlanned,
    make_policy,
    make_trainer,
    update,
)
from tests.support.policies import ExactSampling, GroupScoring, RowScoring

pytestmark = [
    pytest.mark.usefixtures("without_type_checks"),
    pytest.mark.filterwarnings("ignore:objective.kl_estimator='k1'"),
]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
TERMS = ["total_loss", "policy_loss", "kl_penalty", "entropy_bonus", "value_loss", "kl_mean", "entropy"]


def as_a_whole(name: str, dtype: torch.dtype = torch.float64) -> Done:
    """All rows in one forward, in the order in which they were sampled: what every split is held against."""
    return update(EVERY[name], Rows.example(dtype))


def partition(num_rows: int, seed: int = 0) -> list[list[int]]:
    """Rows in parts of 1 to 4, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(num_rows, generator=generator).tolist()
    parts = []
    while rows:
        size = int(torch.randint(1, 5, (), generator=generator))
        parts.append(rows[:size])
        rows = rows[size:]
    return parts


def shuffled(rows: Rows) -> Rows:
    return rows.take(torch.randperm(len(rows), generator=torch.Generator().manual_seed(3)).tolist())


class Both(TellingGroups, TellingPlanned):
    """By group, in parts of its own, which cut groups."""


def by_group_in_any_parts_and_order(name: str, dtype: torch.dtype = torch.float64) -> Done:
    return update(EVERY[name], shuffled(Rows.example(dtype)), kind=Both, plan=partition, extra=1)


def in_micro_batches_padded(name: str, size: int) -> Done:
    return update(replace(EVERY[name], micro_batch_size=size), Rows.example(), extra=3)


def assert_same(one: Done, other: Done, tolerance: float) -> None:
    """The gradient of every update, by the norm of the difference, and the terms of the loss."""
    assert len(one.gradients) == len(other.gradients) > 0
    for ours, theirs in zip(one.gradients, other.gradients, strict=True):
        assert ours.norm() > 1e-5  # nothing to compare would be no comparison
        assert (ours - theirs).norm() <= tolerance * ours.norm()
    for term in TERMS:
        loss, same = one.metrics[f"train/{term}"], other.metrics[f"train/{term}"]
        assert same == pytest.approx(loss, rel=tolerance, abs=tolerance), term


def test_all_presets_are_collected_and_no_further_config_shares_a_name():
    assert {"deepseek_math", "dapo", "gspo", "tool_default", "balanced"} <= set(PRESETS)
    assert not set(PRESETS) & set(FURTHER)


@pytest.mark.parametrize("name", EVERY)
def test_any_split_into_forwards_gives_the_same_update(name):
    whole = as_a_whole(name)
    assert_same(whole, by_group_in_any_parts_and_order(name), TOLERANCE[torch.float64])
    # The policy has moved between the two updates. Otherwise the second update would repeat the first, and ratios and
    # bounds would not be compared.
    first, second = whole.gradients
    assert (first - second).norm() > 0.01 * first.norm()
    if traits_of(EVERY[name].objective.surrogate).level != "none":
        assert whole.metrics["train/ratio_std"] > 0.1


def test_micro_batches_and_padding_give_the_same_update(subtests):
    selections = ["top_entropy", "kl_cov", "clip_cov"]
    sums_apart = ["entropy_apart", "ratio_row_sum", "kl_k3"]
    cases = [*((name, 7) for name in [*EVERY][::5]), *product([*selections, *sums_apart], [1, 2])]
    for name, size in cases:
        with subtests.test(name=name, size=size):
            assert_same(as_a_whole(name), in_micro_batches_padded(name, size), TOLERANCE[torch.float64])


@pytest.mark.slow
def test_any_split_into_forwards_gives_the_same_update_in_float32(subtests):
    for name in [*PRESETS, "vespo_corrected", "kl_cov", "value_loss"]:
        with subtests.test(name=name):
            whole = as_a_whole(name, torch.float32)
            assert_same(whole, by_group_in_any_parts_and_order(name, torch.float32), TOLERANCE[torch.float32])


def test_several_updates_per_pass_do_not_depend_on_row_order_or_splitting(subtests):
    # groups of 4, which updates of 8 rows do not cut
    rows = Rows.example().take([3, 4, 5, 6, 8, 10, 11, 12])
    rows = replace(rows, group_ids=[0] * 4 + [1] * 4, states=[0] * 4 + [1] * 4)
    twice = replace(
        rows.take([*range(8), *range(7, -1, -1)]), group_ids=[0] * 4 + [1] * 4 + [2] * 4 + [3] * 4, states=[0, 1] * 8
    )
    for name in [*PRESETS, "kl_cov"]:
        with subtests.test(name=name):
            config = replace(EVERY[name], batch_size=8)
            whole = update(config, twice)
            assert len(whole.gradients) == 4
            assert_same(whole, update(config, shuffled(twice), kind=TellingPlanned, plan=partition), 1e-10)


class SamplingOnly(ExactSampling):
    """Reports the log-probs of its samples, and has no other optional capability."""

    tells_scores = False


def step_of(name: str, kind: Any, micro_batch_size: int | None = None) -> Done:
    policy = make_policy(kind)
    config = replace(EVERY[name], micro_batch_size=micro_batch_size)
    trainer, optimizer = make_trainer(
        config,
        policy,
        reference=make_policy(RowScoring, seed=1),
        reward_model=lambda states, actions: [
            math.sin(state + sum(action)) ** 2 for state, action in zip(states, actions, strict=True)
        ],
    )
    torch.manual_seed(5)
    metrics = trainer.step([0, 1, 2])
    return Done(gradients=optimizer.gradients, weights=torch.zeros(0), metrics=metrics)


def test_optional_capabilities_of_the_policy_change_no_update(subtests):
    kinds = cycle([(GroupScoring, 5), (ExactSampling, None), (SamplingOnly, None)])
    for name, (kind, size) in zip(PRESETS, kinds, strict=False):
        with subtests.test(name=name, kind=kind.__name__):
            assert_same(step_of(name, RowScoring), step_of(name, kind, micro_batch_size=size), 1e-10)


# The loss alone

SEEDS = st.integers(0, 2**32 - 1)
LEAVES = ["log_probs", "entropy", "kl", "values"]


def objective_inputs(config: ObjectiveConfig, seed: int, dtype: torch.dtype) -> ObjectiveInputs:
    """Ragged rows, with holes and empty ones, whose ratios are on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, width = torch.randint(2, 8, (2,), generator=generator).tolist()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    shape = (num_rows, width)
    log_probs = -1.5 - normal(*shape).abs()  # those of a sampler near by stay below 0
    mask = torch.rand(shape, generator=generator) < 0.7
    behaviour = log_probs + 0.3 * normal(*shape)
    behaviour[0, 0] = math.nan
    group_ids = torch.randint(0, 3, (num_rows,), generator=generator)
    length = {"fixed_length": config.fixed_length, "group_ids": group_ids}
    inputs = ObjectiveInputs(
        log_probs=log_probs,
        old_log_probs=None if seed % 4 == 0 else log_probs + 0.3 * normal(*shape),
        advantages=normal(num_rows) if seed % 2 else normal(*shape),
        mask=mask,
        weights=step_weights(mask, config.aggregation, **length),
        entropy=normal(*shape).abs(),
        entropy_weights=config.entropy_aggregation and step_weights(mask, config.entropy_aggregation, **length),
        ref_log_probs=log_probs + 0.5 * normal(*shape),
        behaviour_log_probs=behaviour,
        kl=normal(*shape).abs(),
        values=normal(*shape),
        old_values=normal(*shape),
        returns=normal(*shape) if seed % 3 else None,
    )
    keep = kept_by_entropy(mask, inputs.entropy, config.top_entropy_fraction)
    selected = selected_by(traits_of(config.surrogate).select, mask, log_probs, inputs.advantages)
    return replace(inputs, keep=keep, selected=selected)


def rows_of(inputs: ObjectiveInputs, index: Tensor, extra: int = 0) -> ObjectiveInputs:
    """Some rows of everything, with further columns of NaN that no mask holds."""

    def of(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 1:
            return value[index] if isinstance(value, Tensor) else value
        fill = False if value.dtype == torch.bool else math.nan
        return torch.nn.functional.pad(value[index], (0, extra), value=fill)

    parts = replace(inputs, **{field.name: of(getattr(inputs, field.name)) for field in fields(inputs)})
    weights = {name: getattr(parts, name) for name in ("weights", "entropy_weights")}
    return replace(parts, **{name: None if w is None else w.nan_to_num(0.0) for name, w in weights.items()})


def evaluate(inputs: ObjectiveInputs, config: ObjectiveConfig) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss, its gradient with respect to all that can have one, [4, N, T], and the metrics."""
    leaves = {name: getattr(inputs, name).clone().requires_grad_() for name in LEAVES}
    output = grpo_objective(replace(inputs, **leaves), config)
    output.loss.backward()
    found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves.values()]
    return output.loss.detach(), torch.stack(found), dict(output.metrics)


@settings(max_examples=150)
@given(data=st.data(), name=st.sampled_from([*EVERY]), seed=SEEDS, dtype=st.sampled_from([*TOLERANCE]))
def test_the_losses_of_any_parts_add_up_to_the_loss_of_the_whole(data, name, seed, dtype):
    config = EVERY[name].objective
    inputs = objective_inputs(config, seed, dtype)
    loss, gradient, metrics = evaluate(inputs, config)
    num_rows, width = inputs.mask.shape
    order = torch.tensor(data.draw(st.permutations(range(num_rows))))
    cuts = sorted(data.draw(st.sets(st.integers(1, num_rows - 1), max_size=2)))
    total, together, summed = torch.zeros((), dtype=torch.float64), torch.zeros_like(gradient), {}
    for rows in order.tensor_split(cuts):
        part, part_gradient, moments = evaluate(rows_of(inputs, rows, data.draw(st.integers(0, 2))), config)
        total += part
        together[:, rows] = part_gradient[:, :, :width]
        assert (part_gradient[:, :, width:] == 0).all()
        summed = {key: value + summed.get(key, 0.0) for key, value in moments.items()}
    assert (total - loss).abs() <= TOLERANCE[dtype] * max(1.0, loss.abs().item())
    assert (together - gradient).norm() <= TOLERANCE[dtype] * gradient.norm()
    assert summed.keys() == metrics.keys()
    for key, value in metrics.items():
        assert summed[key].tolist() == pytest.approx(value.tolist(), rel=TOLERANCE[dtype], abs=TOLERANCE[dtype]), key


def test_an_unused_entropy_with_an_infinite_slope_leaves_the_gradient_finite():
    # an action of probability 0: the derivative of p log p is infinite there, and 0 times that is no number
    logits = torch.tensor([[0.0, -math.inf, 1.0]] * 4, dtype=torch.float64, requires_grad=True)
    log_softmax = logits.log_softmax(1)
    inputs = ObjectiveInputs(
        log_probs=log_softmax[:, :1],
        old_log_probs=None,
        advantages=torch.tensor([1.0, -1.0, 2.0, 0.0], dtype=torch.float64),
        mask=torch.ones(4, 1, dtype=torch.bool),
        weights=torch.full((4, 1), 0.25, dtype=torch.float64),
        entropy=torch.special.entr(log_softmax.exp()).sum(1, keepdim=True),
    )
    (gradient,) = torch.autograd.grad(grpo_objective(inputs, ObjectiveConfig(kl_coef=0.0)).loss, logits)
    assert gradient.isfinite().all()


class Rounding(Telling):
    """The number of rows in a forward changes the ninth digit of its log-probs, as other kernels may change the last ones."""

    def _scores(self, states: Any, actions: Any) -> ActionScores:
        scores = super()._scores(states, actions)
        return replace(scores, log_probs=scores.log_probs + 1e-9 * len(actions))


def test_kl_cov_does_not_treat_rounding_between_forwards_as_movement():
    # before the first update nothing has moved, but a forward of other rows gives slightly other log-probs
    config = replace(EVERY["kl_cov"], batch_size=8)
    exact, *_ = update(config, Rows.example()).gradients
    for size in (None, 1, 2, 3, 5):
        rounded, *_ = update(replace(config, micro_batch_size=size), Rows.example(), kind=Rounding).gradients
        assert (rounded - exact).norm() <= 1e-6 * exact.norm(), f"micro-batches of {size}"

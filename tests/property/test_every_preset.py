"""Every preset, and every choice of the loss that no preset makes: however rows are split, it is the same update."""

import math
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest
import torch

from grpo import GRPOConfig, ObjectiveConfig, ObjectiveInputs, grpo_objective
from grpo.surrogates import traits_of
from tests.support.configs import (
    EVERY,
    FURTHER,
    PRESETS,
    Done,
    Rows,
    TellingGroups,
    TellingPlanned,
    make_policy,
    make_trainer,
    small,
    update,
)
from tests.support.policies import ExactSampling, GroupScoring, RowScoring

pytestmark = [
    pytest.mark.usefixtures("without_type_checks"),
    pytest.mark.filterwarnings("ignore:objective.kl_estimator='k1'"),
]
TOLERANCE = 1e-10
OF_FORWARDS = ("time/", "rows/")
"""Metrics that count what a split changes."""


# observations share the weight of their rows, so they are no term beside demonstrations, as the others are
CONFIGS = EVERY | {"observations": small(GRPOConfig(objective=ObjectiveConfig(kl_coef=0.0, observation_coef=0.3)))}


def as_a_whole(name: str) -> Done:
    """All rows in one forward, in the order in which they were sampled: what every split is held against."""
    return update(CONFIGS[name], Rows.example())


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


def by_group_in_any_parts_and_order(name: str) -> Done:
    return update(CONFIGS[name], shuffled(Rows.example()), kind=Both, plan=partition, extra=1)


def in_micro_batches_padded(name: str, size: int) -> Done:
    return update(replace(CONFIGS[name], micro_batch_size=size), Rows.example(), extra=3)


def assert_same(one: Done, other: Done) -> None:
    """The gradient of every update, by the norm of the difference, and the metrics."""
    assert len(one.gradients) == len(other.gradients) > 0
    for ours, theirs in zip(one.gradients, other.gradients, strict=True):
        assert ours.norm() > 1e-5  # nothing to compare would be no comparison
        assert (ours - theirs).norm() <= TOLERANCE * ours.norm()
    expected = {name: value for name, value in one.metrics.items() if not name.startswith(OF_FORWARDS)}
    found = {name: other.metrics[name] for name in expected}
    assert found == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE, nan_ok=True)


def test_all_presets_are_collected_and_no_further_config_shares_a_name():
    assert {"deepseek_math", "dapo", "gspo", "tool_default", "balanced"} <= set(PRESETS)
    assert not set(PRESETS) & set(FURTHER)


@pytest.mark.parametrize("name", CONFIGS)
def test_any_split_into_forwards_gives_the_same_update(name):
    whole = as_a_whole(name)
    assert_same(whole, by_group_in_any_parts_and_order(name))
    # The policy has moved between the two updates. Otherwise the second update would repeat the first, and ratios and
    # bounds would not be compared.
    first, second = whole.gradients
    assert (first - second).norm() > 0.01 * first.norm()
    if traits_of(CONFIGS[name].objective.surrogate).level != "none":
        assert whole.metrics["train/ratio_std"] > 0.1


def test_micro_batches_and_padding_give_the_same_update(subtests):
    selections = ["top_entropy", "kl_cov", "clip_cov"]
    sums_apart = ["entropy_apart", "ratio_row_sum", "kl_k3", "observations"]
    cases = [*((name, 7) for name in [*CONFIGS][::5]), *product([*selections, *sums_apart], [1, 2])]
    for name, size in cases:
        with subtests.test(name=name, size=size):
            assert_same(as_a_whole(name), in_micro_batches_padded(name, size))


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
            assert_same(whole, update(config, shuffled(twice), kind=TellingPlanned, plan=partition))


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
            assert_same(step_of(name, RowScoring), step_of(name, kind, micro_batch_size=size))


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

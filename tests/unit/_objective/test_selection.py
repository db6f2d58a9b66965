"""Which steps of an update count: quantiles, covariances, draws on ranks; and weights from the sampler to the policy."""

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from grpo import ConfigError, ContractError, KPop, Mask, ObjectiveConfig, Truncate, grpo_objective
from grpo._objective.sampler import near_policy_rows, sampler_divergence
from grpo._objective.selection import (
    covariances,
    drawn_covariances,
    kept_by_entropy,
    largest_covariances,
    selected_by,
    top_entropy_steps,
)
from grpo.surrogates import ClipCov, KlCov
from tests.support.objective_inputs import double, loss_and_gradient, objective_inputs


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("entropy", "fraction", "kept"),
    [
        # sorted 0 .1 .2 .5 .9; place (1 - .4) 4 = 2.4: .2 + .4 (.5 - .2) = .32
        ([0.1, 0.5, 0.2, 0.9, 0.0], 0.4, [0, 1, 0, 1, 0]),
        # place (1 - .5) 4 = 2: the median itself, .2, which is kept
        ([0.1, 0.5, 0.2, 0.9, 0.0], 0.5, [0, 1, 1, 1, 0]),
        # place .75 * 3 = 2.25, between two equal values: all ties are kept, though they are three quarters
        ([1.0, 1.0, 1.0, 0.0], 0.25, [1, 1, 1, 0]),
        ([0.7, 0.7, 0.7], 0.01, [1, 1, 1]),
        ([0.0, 0.0, 0.0, 0.0, 2.0], 0.5, [1, 1, 1, 1, 1]),  # the median is 0: decided steps tie with it
        ([0.3, 0.1, 0.2], 1.0, [1, 1, 1]),  # the smallest is the bound
        ([0.3, 0.1, 0.2], 0.01, [1, 0, 0]),  # never fewer than one
        ([0.3, 0.1], 0.2, [1, 0]),
        ([0.3], 0.2, [1]),
        ([], 0.2, []),
        # the top 70 % of 0 .. 10: place (1 - .7) 10 = 3, though in floating point 3.0000000000000004
        ([*range(11)], 0.7, [0] * 3 + [1] * 8),
    ],
)
def test_top_entropy_steps_equal_hand_worked_choices(dtype, entropy, fraction, kept):
    assert top_entropy_steps(torch.tensor(entropy, dtype=dtype), fraction).tolist() == [bool(k) for k in kept]


def test_covariances_equal_hand_worked_values():
    # log pi: mean -2, deviations 1, 0, -1;  A: mean 1, deviations 2, -1, -1.   The mean is Cov(log pi, A)
    covariance = covariances(double([-1.0, -2.0, -3.0]), double([3.0, 0.0, 0.0]))
    assert (covariance.tolist(), covariance.mean().item()) == ([2.0, 0.0, 1.0], 1.0)
    assert covariances(double([]), double([])).tolist() == []
    assert covariances(double([-3.0]), double([5.0])).tolist() == [0.0]


COVARIANCE = double([2.0, 0.0, 1.0, 5.0, -4.0])


@pytest.mark.parametrize(
    ("fraction", "chosen"),
    [
        (1e-4, [0, 0, 0, 1, 0]),  # at least one
        (0.2, [0, 0, 0, 1, 0]),
        (0.4, [1, 0, 0, 1, 0]),
        (0.59, [1, 0, 0, 1, 0]),  # 2.95: whole steps only
        (0.6, [1, 0, 1, 1, 0]),
        (1.0, [1, 1, 1, 1, 1]),
    ],
)
def test_largest_covariances_equal_hand_worked_choices(fraction, chosen):
    assert largest_covariances(COVARIANCE, fraction).tolist() == [bool(c) for c in chosen]


# ten steps, of which 2, 3 and 4 lie strictly between 1 and 5
CANDIDATES = double([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -2.0, 1.0, 5.0])
BETWEEN = [False, False, True, True, True, False, False, False, False, False]


@pytest.mark.parametrize(("fraction", "count"), [(1e-4, 1), (0.1, 1), (0.2, 2), (0.3, 3), (0.9, 3)])
def test_clip_cov_draws_only_candidates_and_the_requested_number(fraction, count):
    for seed in range(20):
        drawn = drawn_covariances(CANDIDATES, fraction, low=1.0, high=5.0, generator=generator(seed))
        assert drawn.sum() == count
        assert not (drawn & ~torch.tensor(BETWEEN)).any()


def test_every_candidate_can_be_drawn_and_a_seed_repeats_the_draw():
    def drawn_by_seeds() -> Tensor:
        seeds = map(generator, range(40))
        return torch.stack([drawn_covariances(CANDIDATES, 0.1, low=1.0, high=5.0, generator=seed) for seed in seeds])

    assert drawn_by_seeds().any(0).tolist() == BETWEEN
    assert torch.equal(drawn_by_seeds(), drawn_by_seeds())


def test_without_steps_or_candidates_nothing_is_chosen():
    assert largest_covariances(double([]), 0.5).tolist() == []
    assert drawn_covariances(double([]), 0.5, low=1.0, high=5.0).tolist() == []
    assert not drawn_covariances(CANDIDATES, 0.5, low=10.0, high=11.0).any()


# Two rows of three steps, one of them with a hole. Valid: entropies .1 .9 .5 | .3 .7
MASK = torch.tensor([[True, True, True], [True, False, True]])
ENTROPY = double([[0.1, 0.9, 0.5], [0.3, math.nan, 0.7]])
LOG_PROBS = double([[-1.0, -2.0, -3.0], [-4.0, math.nan, -5.0]])
# mean log pi -3: deviations 2 1 0 | -1 -2.   A = 2, -3: mean (3 * 2 - 2 * 3)/5 = 0.   c = 4 2 0 | 3 6
ADVANTAGES = double([2.0, -3.0])


def test_without_a_selection_setting_every_step_counts():
    assert kept_by_entropy(MASK, ENTROPY, 1.0) is None
    assert kept_by_entropy(MASK, None, 1.0) is None
    assert selected_by(None, MASK, LOG_PROBS, ADVANTAGES) is None
    metrics = grpo_objective(objective_inputs(LOG_PROBS, ADVANTAGES, mask=MASK), ObjectiveConfig()).metrics
    assert not {"kept_fraction", "selected_fraction"} & set(metrics)


def test_top_entropy_steps_are_chosen_among_the_valid_steps_of_all_rows():
    # sorted .1 .3 .5 .7 .9; place .6 * 4 = 2.4: .58
    entropy = ENTROPY.clone().requires_grad_()
    assert kept_by_entropy(MASK, entropy, 0.4).tolist() == [[False, True, False], [False, False, True]]
    with pytest.raises(ConfigError, match=r"objective\.top_entropy_fraction=0\.4 needs an exact entropy"):
        kept_by_entropy(MASK, None, 0.4)


def test_kl_cov_selects_valid_steps_with_advantages_per_step():
    # A = 1 1 1 | 1 -4: mean 0;  c = 2 1 0 | -1 8
    advantages = double([[1.0, 1.0, 1.0], [1.0, math.nan, -4.0]])
    selected = selected_by(KlCov(fraction=0.2).select, MASK, LOG_PROBS, advantages, generator())
    assert selected.tolist() == [[False, False, False], [False, False, True]]


def test_half_precision_log_probs_are_compared_in_float32():
    # A is not a number of bfloat16, in which all three advantages would be the same
    select = Mock(side_effect=lambda log_probs, advantages, generator: advantages > 1.0)
    chosen = selected_by(select, MASK, LOG_PROBS.to(torch.bfloat16).requires_grad_(), torch.tensor([1.0, 1.0 + 2e-4]))
    assert chosen.tolist() == [[False, False, False], [True, False, True]]
    found = select.call_args.args[0]
    assert (found.dtype, found.requires_grad, found.tolist()) == (torch.float32, False, [-1, -2, -3, -4, -5])
    assert select.call_count == 1


def in_two_ranks(choose: Any, split: int) -> tuple[list[Tensor], Tensor]:
    """What each of two ranks finds for its rows, of `split` and 5 - `split` rows, and the choice of one process."""
    ranks = [slice(0, split), slice(split, 5)]
    sent: list[Tensor] = []
    for rows in ranks:
        choose(rows, lambda own: sent.append(own) or (own, 0))

    def gather_as(rank: int) -> Any:
        def gather(own: Tensor) -> tuple[Tensor, int]:
            assert torch.equal(own, sent[rank])
            return torch.cat(sent), rank * len(sent[0])

        return gather

    return [choose(rows, gather_as(rank)) for rank, rows in enumerate(ranks)], choose(slice(0, 5), None)


@pytest.mark.parametrize("by", ["entropy", KlCov(fraction=0.3), ClipCov(fraction=0.3, cov_low=-0.5, cov_high=0.5)])
@pytest.mark.parametrize("split", [0, 2, 5])
def test_ranks_select_the_same_steps_as_one_process(by, split):
    random = generator(7)
    mask = torch.rand(5, 4, generator=random) < 0.7
    log_probs = -torch.rand(5, 4, generator=random, dtype=torch.float64)
    advantages = torch.randn(5, generator=random, dtype=torch.float64)
    entropy = torch.rand(5, 4, generator=random, dtype=torch.float64)

    def choose(rows: slice, gather: Any) -> Tensor:
        if by == "entropy":
            return kept_by_entropy(mask[rows], entropy[rows], 0.3, gather)
        return selected_by(by.select, mask[rows], log_probs[rows], advantages[rows], generator(), gather)

    parts, whole = in_two_ranks(choose, split)
    assert torch.equal(torch.cat(parts), whole)
    assert 0 < whole[mask].sum() < mask.sum()


def test_without_a_given_selection_the_loss_selects_among_its_own_rows():
    # ratio 1; of the valid steps' covariances 4 2 0 | 3 6 the largest is the last: there the pull of |x| at 0 is 0 ...
    clean = LOG_PROBS.nan_to_num(-9.0)
    config = ObjectiveConfig(surrogate=KlCov(fraction=0.2))
    _, gradient = loss_and_gradient(clean, ADVANTAGES, config, mask=MASK)
    assert gradient.tolist() == [[-2.0, -2.0, -2.0], [3.0, 0.0, 3.0]]
    # ... and at ratio 1.1 it is the coefficient, beside -rho A
    _, gradient = loss_and_gradient(clean, ADVANTAGES, config, mask=MASK, old_log_probs=clean - math.log(1.1))
    assert gradient[0].tolist() == pytest.approx([-2.2] * 3)
    assert gradient[1].tolist() == pytest.approx([3.3, 0, 3.3 + 1])


OLD = double([[0.8, 0.1, 0.5, 0.3]]).log()
BEHAVIOUR = double([[0.2, 0.2, 0.5, math.nan]]).log()  # ratios 4, 1/2, 1, unscored
EVERYWHERE = torch.ones(1, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Truncate(high=None), [4, 0.5, 1, 1]),
        (Truncate(), [3, 0.5, 1, 1]),
        (Truncate(low=0.75), [3, 0.75, 1, 1]),
        (Truncate(low=0.75, high=None), [4, 0.75, 1, 1]),
        (Truncate(low=2.0, high=2.0), [2, 2, 2, 2]),
        (Mask(high=None), [4, 0.5, 1, 1]),
        (Mask(), [0, 0.5, 1, 1]),
        (Mask(low=0.75, high=None), [4, 0, 1, 1]),
        (Mask(low=0.75), [0, 0, 1, 1]),
        (Mask(low=1.0, high=1.0), [0, 0, 1, 1]),  # a weight at its bound counts
        (KPop(), [0, 0.5, 1, 1]),  # .8 against .2: .8 log 4 + .2 log .25 = .83; .1 against .2: .0444
    ],
)
def test_step_weights_equal_hand_worked_values(correction, expected):
    weights = correction(OLD.clone().requires_grad_(), BEHAVIOUR, EVERYWHERE)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, double([expected]), rtol=1e-14, atol=0)


# the row's ratio is 4 * 1/2 * 1, the unscored step counting 1: 2
@pytest.mark.parametrize(("correction", "expected"), [
    (Truncate(level="row", high=None), 2.0), (Truncate(level="row", high=1.5), 1.5),
    (Truncate(level="row", low=2.5), 2.5), (Mask(level="row", high=1.5), 0.0),
    (Mask(level="row", low=2.5, high=None), 0.0), (Mask(level="row", low=1.5), 2.0),
])  # fmt: skip
def test_row_weights_equal_hand_worked_values(correction, expected):
    weights = correction(OLD.clone().requires_grad_(), BEHAVIOUR, EVERYWHERE)
    assert (weights.shape, weights.item()) == ((1, 1), pytest.approx(expected, rel=1e-14))
    assert not weights.requires_grad


@pytest.mark.parametrize("level", ["step", "row"])
def test_log_weights_are_bounded_so_that_no_weight_overflows(level):
    old, behaviour = torch.tensor([[-1.0], [-900.0]]), torch.tensor([[-900.0], [-1.0]])
    everywhere = torch.ones(2, 1, dtype=torch.bool)
    weights = Truncate(level=level, high=None)(old, behaviour, everywhere)
    assert weights.squeeze(1).tolist() == pytest.approx([math.exp(20), math.exp(-20)])


# behaviour - old over the scored steps: -log 4, log 2, 0
def test_the_sampler_divergence_equals_hand_worked_values() -> None:
    gap, scored = sampler_divergence(OLD.float().requires_grad_(), BEHAVIOUR.float(), EVERYWHERE)
    assert gap[scored].tolist() == pytest.approx([-math.log(4), math.log(2), 0], rel=1e-6, abs=1e-9)
    assert not gap.requires_grad
    mask = torch.tensor([[True, False, False, False]])
    assert sampler_divergence(OLD, BEHAVIOUR, mask)[1].tolist() == mask.tolist()


# Rows of two steps; how much less likely each step has become: means .3, .3, .1, and (.6 + 0)/2 = .3 with one unscored
NOW = double([[-1.0, -2.0]] * 4)
SAMPLED = double([[-0.9, -1.5], [-0.9, -1.5], [-0.9, -1.9], [-0.4, math.nan]])


@pytest.mark.parametrize(
    ("threshold", "advantages", "near"),
    [
        (0.35, [1.0, -1.0, -1.0, -1.0], [True, True, True, True]),
        (0.2, [1.0, -1.0, -1.0, -1.0], [True, False, True, False]),
        (0.05, [1.0, -1.0, -1.0, -1.0], [True, False, False, False]),
        (0.05, [0.0, -1.0, 0.0, 0.0], [True, False, True, True]),
    ],
)
def test_negative_rows_beyond_the_divergence_threshold_are_left_out(threshold, advantages, near):
    found = near_policy_rows(NOW, SAMPLED, double(advantages).unsqueeze(1), torch.ones(4, 2).bool(), threshold)
    assert found.squeeze(1).tolist() == near


@pytest.mark.parametrize(("threshold", "near"), [(0.375, True), (0.374, False)])
def test_a_row_at_the_threshold_is_kept(threshold, near):
    # mean (1/4 + 1/2)/2 = 3/8, exactly
    now, sampled, everywhere = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-0.75, -1.5]]), torch.ones(1, 2).bool()
    assert near_policy_rows(now, sampled, torch.tensor([[-1.0]]), everywhere, threshold).item() is near


@pytest.mark.parametrize(("p", "q", "threshold", "expected"), [
    (0.2, 0.1, 0.04, 0.0), (0.1, 0.2, 0.04, 0.0), (0.2, 0.1, 0.0445, 2.0), (0.001, 0.0001, 0.001, 0.0),
    (0.001, 0.0001, 0.002, 10.0), (1e-7, 1e-8, 1e-12, 10.0), (1 - 1e-8, 1 - 1e-7, 1e-12, 1.0),
    (1e-5, 1e-6, 1e-6, 0.0), (1 - 1e-6, 1 - 1e-5, 1e-6, 0.0),
])  # fmt: skip
def test_kpop_looks_in_both_directions_and_bounds_probabilities_by_a_millionth(p, q, threshold, expected):
    """D(.2, .1) = .0444 and D(.1, .2) = .0367: one of them is beyond .04, whichever is the policy's. D(.001, .0001) = .0014.
    Probabilities below 1e-6, or beyond 1 - 1e-6, are equal."""
    found = KPop(threshold=threshold)(double([[p]]).log(), double([[q]]).log(), torch.ones(1, 1, dtype=torch.bool))
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_kpop_is_for_probabilities_also_of_certain_and_of_impossible_actions():
    old = torch.tensor([[0.0, 0.0, -300.0, -1e-9]], requires_grad=True)
    behaviour = torch.tensor([[0.0, -300.0, 0.0, 0.0]])
    weights = KPop()(old, behaviour, torch.ones(1, 4, dtype=torch.bool))
    assert weights.tolist() == [[1.0, 0.0, 0.0, pytest.approx(1.0)]]
    assert not weights.requires_grad
    above, mask = (torch.tensor([[0.5]]), torch.tensor([[-0.1]])), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ContractError, match=r"KPop needs log-probs of probabilities, at most 0; got 0.5"):
        KPop()(*above, mask)
    assert KPop()(*above, ~mask).tolist() == [[1.0]]

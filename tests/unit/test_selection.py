"""Which steps of an update count: quantiles with ties, covariances, random draws, and choices shared by several ranks."""

import math

import pytest
import torch
from torch import Tensor

from grpo import ConfigError, ObjectiveConfig
from grpo.selection import (
    covariances,
    drawn_covariances,
    largest_covariances,
    select_steps,
    top_entropy_steps,
)
from tests.support import loss_and_gradient


def double(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_entropy_steps_by_hand(entropy, fraction, kept, dtype):
    assert top_entropy_steps(torch.tensor(entropy, dtype=dtype), fraction).tolist() == [bool(k) for k in kept]


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 0.83])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_bound_is_the_quantile(size, fraction):
    entropy = torch.rand(size, generator=generator(), dtype=torch.float64)
    kept = top_entropy_steps(entropy, fraction)
    assert torch.equal(kept, entropy >= entropy.quantile(1 - fraction))
    assert kept.sum() >= math.floor(fraction * size)


def test_a_step_at_the_quantile_is_kept_whatever_the_rounding_of_its_place():
    # the top 70 % of 0 .. 10: place (1 - .7) 10 = 3, though in floating point 3.0000000000000004
    assert top_entropy_steps(torch.arange(11.0, dtype=torch.float64), 0.7).tolist() == [False] * 3 + [True] * 8


def test_covariances_by_hand():
    # log pi: mean -2, deviations 1, 0, -1;  A: mean 1, deviations 2, -1, -1
    covariance = covariances(double([-1.0, -2.0, -3.0]), double([3.0, 0.0, 0.0]))
    assert covariance.tolist() == [2.0, 0.0, 1.0]
    assert covariance.mean().item() == 1.0  # Cov(log pi, A)


def test_covariances_of_nothing_and_of_one():
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
def test_largest_covariances_by_hand(fraction, chosen):
    assert largest_covariances(COVARIANCE, fraction).tolist() == [bool(c) for c in chosen]


def test_of_no_steps_none_is_chosen():
    assert largest_covariances(double([]), 0.5).tolist() == []
    assert drawn_covariances(double([]), 0.5, low=1.0, high=5.0).tolist() == []


# ten steps, of which 2, 3 and 4 lie strictly between 1 and 5
CANDIDATES = double([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -2.0, 1.0, 5.0])
BETWEEN = [False, False, True, True, True, False, False, False, False, False]


@pytest.mark.parametrize(("fraction", "count"), [(1e-4, 1), (0.1, 1), (0.2, 2), (0.3, 3), (0.9, 3)])
def test_only_candidates_are_drawn_and_as_many_as_asked_for(fraction, count):
    for seed in range(20):
        drawn = drawn_covariances(CANDIDATES, fraction, low=1.0, high=5.0, generator=generator(seed))
        assert drawn.sum() == count
        assert not (drawn & ~torch.tensor(BETWEEN)).any()


def test_every_candidate_has_its_turn_and_a_seed_repeats_it():
    draws = [drawn_covariances(CANDIDATES, 0.1, low=1.0, high=5.0, generator=generator(seed)) for seed in range(40)]
    assert torch.stack(draws).any(0).tolist() == BETWEEN
    again = [drawn_covariances(CANDIDATES, 0.1, low=1.0, high=5.0, generator=generator(seed)) for seed in range(40)]
    assert torch.equal(torch.stack(draws), torch.stack(again))


def test_without_candidates_nothing_is_drawn():
    assert not drawn_covariances(CANDIDATES, 0.5, low=10.0, high=11.0).any()


# Two rows of three steps, one padded and one a hole. Valid: entropies .1 .9 .5 | .3 .7
MASK = torch.tensor([[True, True, True], [True, False, True]])
ENTROPY = double([[0.1, 0.9, 0.5], [0.3, math.nan, 0.7]])
LOG_PROBS = double([[-1.0, -2.0, -3.0], [-4.0, math.nan, -5.0]])
# mean log pi -3: deviations 2 1 0 | -1 -2.   A = 2, -3: mean (3 * 2 - 2 * 3)/5 = 0.   c = 4 2 0 | 3 6
ADVANTAGES = double([2.0, -3.0])


def selected(advantages: Tensor = ADVANTAGES, entropy: Tensor | None = ENTROPY, **settings):
    return select_steps(
        ObjectiveConfig(**settings),
        mask=MASK,
        log_probs=LOG_PROBS,
        advantages=advantages,
        entropy=entropy,
        generator=generator(),
    )


def test_without_a_setting_every_step_counts():
    assert selected() == (None, None)


def test_top_entropy_among_the_valid_steps_of_all_rows():
    # sorted .1 .3 .5 .7 .9; place .6 * 4 = 2.4: .58
    keep, penalised = selected(top_entropy_fraction=0.4)
    assert keep.tolist() == [[False, True, False], [False, False, True]]
    assert penalised is None


def test_kl_cov_takes_the_largest_covariances_of_all_rows():
    keep, penalised = selected(surrogate="kl_cov", cov_fraction=0.4)
    assert keep is None
    assert penalised.tolist() == [[True, False, False], [False, False, True]]


def test_advantages_per_step_have_covariances_of_their_own():
    # A = 1 1 1 | 1 -4: mean 0;  c = 2 1 0 | -1 8
    advantages = double([[1.0, 1.0, 1.0], [1.0, math.nan, -4.0]])
    _, penalised = selected(advantages, surrogate="kl_cov", cov_fraction=0.2)
    assert penalised.tolist() == [[False, False, False], [False, False, True]]


def test_clip_cov_holds_candidates_back():
    # between 1 and 5: 4, 2 and 3
    keep, penalised = selected(surrogate="clip_cov", cov_fraction=0.4)
    assert penalised is None
    assert (~keep & MASK).sum() == 2
    assert keep[0, 2]
    assert keep[1, 2]


def test_clip_cov_and_top_entropy_both_have_their_say():
    entropy_only, _ = selected(top_entropy_fraction=0.8)  # place .8: above .26
    drawn, _ = selected(surrogate="clip_cov", cov_fraction=0.4)
    both, _ = selected(surrogate="clip_cov", cov_fraction=0.4, top_entropy_fraction=0.8)
    assert entropy_only[MASK].tolist() == [False, True, True, True, True]
    assert torch.equal(both, entropy_only & drawn)


def test_top_entropy_without_an_entropy_is_an_error():
    with pytest.raises(ConfigError, match=r"objective\.top_entropy_fraction=0\.4 needs an exact entropy"):
        selected(entropy=None, top_entropy_fraction=0.4)


CHOICES = [
    {"top_entropy_fraction": 0.3},
    {"surrogate": "kl_cov", "cov_fraction": 0.3},
    {"surrogate": "clip_cov", "cov_fraction": 0.3, "cov_low": -0.5, "cov_high": 0.5},
    {"surrogate": "kl_cov", "cov_fraction": 0.2, "top_entropy_fraction": 0.5},
    {"surrogate": "clip_cov", "cov_fraction": 0.2, "cov_low": -0.5, "cov_high": 0.5, "top_entropy_fraction": 0.5},
]


@pytest.mark.parametrize("settings", CHOICES, ids=lambda settings: "-".join(map(str, settings.values())))
@pytest.mark.parametrize("split", [0, 2, 5])
def test_ranks_choose_what_one_process_would(split, settings):
    """Two ranks of `split` and 5 - `split` rows; what each finds is its slice of the choice among all five."""
    config = ObjectiveConfig(**settings)
    random = generator(7)
    mask = torch.rand(5, 4, generator=random) < 0.7
    log_probs = -torch.rand(5, 4, generator=random, dtype=torch.float64)
    advantages = torch.randn(5, generator=random, dtype=torch.float64)
    entropy = torch.rand(5, 4, generator=random, dtype=torch.float64)
    ranks = [slice(0, split), slice(split, 5)]

    def choose(rows, gather=None):
        return select_steps(
            config,
            mask=mask[rows],
            log_probs=log_probs[rows],
            advantages=advantages[rows],
            entropy=entropy[rows],
            generator=generator(),
            gather=gather,
        )

    sent: list[list[Tensor]] = [[], []]
    for rank, rows in enumerate(ranks):  # what each rank brings, choice by choice

        def listen(own, rank=rank):
            sent[rank].append(own)
            return own, 0

        choose(rows, listen)
    whole = choose(slice(0, 5))
    for rank, rows in enumerate(ranks):
        calls = iter(zip(*sent, strict=True))

        def gather(own, rank=rank, calls=calls):
            both = next(calls)
            assert torch.equal(own, both[rank])
            return torch.cat(both), rank * len(both[0])

        for part, everything in zip(choose(rows, gather), whole, strict=True):
            assert (part is None) == (everything is None)
            if everything is not None:
                assert torch.equal(part[mask[rows]], everything[rows][mask[rows]])
    assert any(choice is not None and 0 < choice[mask].sum() < mask.sum() for choice in whole)


def test_the_loss_chooses_among_its_rows_where_nobody_has_chosen():
    # ratio 1; of the valid steps' covariances 4 2 0 | 3 6 the largest is the last: there the pull of |x| at 0 is 0 ...
    clean = LOG_PROBS.nan_to_num(-9.0)
    config = ObjectiveConfig(surrogate="kl_cov", cov_fraction=0.2)
    _, gradient = loss_and_gradient(clean, ADVANTAGES, config, mask=MASK)
    assert gradient.tolist() == [[-2.0, -2.0, -2.0], [3.0, 0.0, 3.0]]
    # ... and at ratio 1.1 it is the coefficient, beside -rho A
    _, gradient = loss_and_gradient(clean, ADVANTAGES, config, mask=MASK, old_log_probs=clean - math.log(1.1))
    assert gradient[0].tolist() == pytest.approx([-2.2] * 3)
    assert gradient[1].tolist() == pytest.approx([3.3, 0, 3.3 + 1])


def test_steps_that_are_not_kept_have_no_gradient_and_change_no_weights():
    clean = LOG_PROBS.nan_to_num(-9.0)
    config = ObjectiveConfig(top_entropy_fraction=0.4)
    _, gradient = loss_and_gradient(clean, ADVANTAGES, config, mask=MASK, entropy=ENTROPY)
    assert gradient.tolist() == [[0.0, -2.0, 0.0], [0.0, 0.0, 3.0]]

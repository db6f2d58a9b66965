"""Distributions of integers: entropies, frequencies of samples, modes and masks."""

import itertools
import math

import pytest
import torch
from gymnasium import spaces
from scipy import stats
from torch import distributions as oracle

from adapters.control.policy.distributions import ActionDistribution, Bernoulli
from tests.support.control_distributions import EVERY, ROUNDING, draw, random_parameters


def test_entropies_agree_with_torch(subtests: pytest.Subtests) -> None:
    def categorical(logits: torch.Tensor) -> torch.Tensor:
        return oracle.Categorical(logits=logits).entropy()

    for name, expected in (
        ("discrete", categorical),
        ("even", lambda parameters: categorical(parameters.unflatten(-1, (2, 3))).sum(-1)),
        ("ragged", lambda parameters: sum(categorical(part) for part in parameters.split([3, 2, 4, 1], -1))),
        ("bits", lambda parameters: oracle.Bernoulli(logits=parameters).entropy().sum(-1)),
    ):
        for dtype, tolerance in ROUNDING.items():
            with subtests.test(name=name, dtype=dtype):
                parameters = 3 * random_parameters(EVERY[name], dtype=dtype)
                entropy = EVERY[name].entropy(parameters)
                assert entropy.dtype == dtype
                wanted = expected(parameters.double())
                torch.testing.assert_close(entropy.double(), wanted, rtol=tolerance, atol=tolerance)


def test_the_entropy_of_nearly_certain_bits_keeps_its_precision() -> None:
    """H = log(1 + e^-x) + x / (1 + e^x), about (x + 1) e^-x: at x = 60 far below the rounding error of x."""
    entropy = Bernoulli(spaces.MultiBinary(1)).entropy(torch.tensor([[60.0], [-60.0]]))
    torch.testing.assert_close(entropy, torch.full((2,), 61 * math.exp(-60)), rtol=1e-5, atol=0)


def joint_frequencies(
    distribution: ActionDistribution,
    parameters: torch.Tensor,
    outcomes: torch.Tensor,
    allowed: torch.Tensor | None = None,
) -> float:
    """p-value of chi-square: 20,000 samples against exp(log_prob) of all outcomes."""
    num_draws = 20_000
    rows = parameters.expand(num_draws, -1)
    mask = None if allowed is None else allowed.expand(num_draws, -1)
    drawn = draw(distribution, rows, mask).reshape(num_draws, -1)
    own_mask = None if allowed is None else allowed.expand(len(outcomes), -1)
    probs = distribution.log_prob(parameters.double().expand(len(outcomes), -1), outcomes, own_mask).exp()
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-12)
    counts = (drawn.unsqueeze(1) == outcomes.reshape(1, len(outcomes), -1)).all(-1).sum(0)
    assert int(counts.sum()) == num_draws
    possible = probs > 0
    assert not counts[~possible].any()
    return float(stats.chisquare(counts[possible], probs[possible] * num_draws).pvalue)


def test_frequencies_of_samples_are_the_probabilities(subtests: pytest.Subtests) -> None:
    categories, bits = torch.arange(5), torch.tensor(list(itertools.product(range(2), repeat=4)))
    ragged = torch.tensor(list(itertools.product(range(3), range(2), range(4), range(1))))
    some = torch.tensor([[True, False, True, True, False]])
    some_ragged = torch.tensor([[True, False, True, False, True, True, True, False, True, True]])
    for name, outcomes, allowed in (
        ("discrete", categories, None),
        ("discrete", categories, some),
        ("ragged", ragged, None),
        ("ragged", ragged, some_ragged),
        ("bits", bits, None),
    ):
        with subtests.test(name=name, masked=allowed is not None):
            parameters = random_parameters(EVERY[name], 1, torch.float32)
            assert joint_frequencies(EVERY[name], parameters, outcomes, allowed) > 1e-3


def test_modes_of_discrete_distributions_equal_hand_worked_actions() -> None:
    assert EVERY["discrete"].mode(torch.tensor([[0.0, 2.0, 1.0, 2.0, -1.0]])).tolist() == [1]
    logits = torch.tensor([[0.0, 2.0, 1.0, 3.0, 1.0, 0.0, 0.0, 0.0, 9.0, -5.0]])
    assert EVERY["ragged"].mode(logits).tolist() == [[1, 0, 3, 0]]
    assert EVERY["bits"].mode(torch.tensor([[0.1, -0.1, 5.0, 0.0]])).tolist() == [[1, 0, 1, 0]]


def test_masked_log_probs_and_entropy_equal_hand_worked_values() -> None:
    distribution = EVERY["discrete"]
    logits = torch.tensor([[math.log(0.6), 7.0, math.log(0.2), 7.0, math.log(0.2)]]).expand(5, -1).requires_grad_()
    allowed = torch.tensor([[True, False, True, False, False]]).expand(5, -1)
    log_probs = distribution.log_prob(logits, torch.arange(5), allowed)
    torch.testing.assert_close(log_probs.exp(), torch.tensor([0.75, 0.0, 0.25, 0.0, 0.0]))
    assert log_probs[1] == -torch.inf
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    torch.testing.assert_close(distribution.entropy(logits, allowed), torch.full((5,), entropy))
    only = torch.tensor([[False, False, True, False, False]])
    assert distribution.entropy(logits[:1], only).tolist() == [0.0]

"""Distributions of numbers: entropies and samples of torch and scipy, modes, bounds, masks, and extreme parameters."""

import itertools
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scipy import stats
from torch import distributions as oracle

from adapters.control.policy.distributions import ActionDistribution, Bernoulli, Beta, distribution_for
from grpo.errors import ConfigError, ContractError
from tests.support.control_distributions import EVERY, HIGH, LOW, ROUNDING, draw, random_parameters


def test_entropies_agree_with_torch_and_scipy(subtests: pytest.Subtests) -> None:
    def categorical(logits: torch.Tensor) -> torch.Tensor:
        return oracle.Categorical(logits=logits).entropy()

    def gaussian(parameters: torch.Tensor) -> torch.Tensor:
        mean, log_std = parameters.chunk(2, -1)
        half = torch.from_numpy((HIGH - LOW) / 2).double()
        return oracle.Normal(mean, half * log_std.clamp(-20, 2).exp()).entropy().sum(-1)

    def beta(parameters: torch.Tensor) -> torch.Tensor:
        alpha, beta = (1 + np.logaddexp(0, parameters.numpy())).reshape(-1, 2, 2).swapaxes(0, 1)
        return torch.from_numpy(stats.beta(alpha, beta, loc=LOW, scale=(HIGH - LOW).astype(float)).entropy().sum(-1))

    for name, expected in (
        ("discrete", categorical),
        ("even", lambda parameters: categorical(parameters.unflatten(-1, (2, 3))).sum(-1)),
        ("ragged", lambda parameters: sum(categorical(part) for part in parameters.split([3, 2, 4, 1], -1))),
        ("bits", lambda parameters: oracle.Bernoulli(logits=parameters).entropy().sum(-1)),
        ("gaussian", gaussian),
        ("beta", beta),
    ):
        for dtype, tolerance in ROUNDING.items():
            with subtests.test(name=name, dtype=dtype):
                parameters = 3 * random_parameters(EVERY[name], dtype=dtype)
                entropy = EVERY[name].entropy(parameters)
                assert entropy.dtype == dtype
                wanted = expected(parameters.double())
                torch.testing.assert_close(entropy.double(), wanted, rtol=tolerance, atol=tolerance)
    assert EVERY["squashed"].entropy(random_parameters(EVERY["squashed"])) is None


def test_beta_is_accurate_where_torch_in_float32_is_not() -> None:
    """alpha = beta = 20001: log B is the difference of numbers near 2e5, whose float32 steps are 0.016."""
    distribution = Beta(spaces.Box(0, 1, (1,)))
    log_prob = distribution.log_prob(torch.full((1, 2), 20_000.0), torch.tensor([[0.5]]))
    assert float(log_prob) == pytest.approx(stats.beta(20_001, 20_001).logpdf(0.5), rel=1e-6)


def test_log_std_is_clamped_to_minus_20_and_2() -> None:
    for distribution in (EVERY["gaussian"], EVERY["squashed"]):
        wild, clamped = torch.tensor([[0.1, 0.2, 9.0, -50.0]]), torch.tensor([[0.1, 0.2, 2.0, -20.0]])
        actions = draw(distribution, clamped)
        assert torch.equal(draw(distribution, wild), actions)
        assert torch.equal(distribution.log_prob(wild, actions), distribution.log_prob(clamped, actions))
    assert torch.equal(EVERY["gaussian"].entropy(wild), EVERY["gaussian"].entropy(clamped))


def test_both_halves_of_a_beta_seed_are_used() -> None:
    halves = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [2.0**24 - 1, 2.0**24 - 1]])
    assert len(EVERY["beta"].sample(torch.zeros(4, 4), halves).unique(dim=0)) == 4


def test_samples_have_the_distribution_of_scipy(subtests: pytest.Subtests) -> None:
    num_draws = 20_000
    for name, numbers in (
        ("gaussian", [0.3, -1.0, 0.5, -2.0]),
        ("squashed", [0.3, -1.0, 0.5, -2.0]),
        ("squashed", [4.0, 0.0, -1.0, 0.3]),
        ("beta", [0.3, -1.0, 0.5, 2.0]),
        ("beta", [-30.0, 4.0, -30.0, 0.3]),  # alpha = beta = 1, which is flat; and a peak on one side
    ):
        with subtests.test(name=name, numbers=numbers):
            parameters = torch.tensor([numbers])
            drawn = draw(EVERY[name], parameters.expand(num_draws, -1)).double().numpy()
            first, second = parameters.double().numpy().reshape(2, 2)
            for d in range(2):
                match name:
                    case "gaussian":
                        half = (HIGH[d] - LOW[d]) / 2
                        law = stats.norm(LOW[d] + half * (1 + first[d]), half * np.exp(second[d]))
                        values = drawn[:, d]
                    case "squashed":
                        inside = (2 * drawn[:, d] - LOW[d] - HIGH[d]) / (HIGH[d] - LOW[d])
                        values, law = np.arctanh(inside), stats.norm(first[d], np.exp(second[d]))
                    case _:
                        alpha, beta = 1 + np.logaddexp(0, first[d]), 1 + np.logaddexp(0, second[d])
                        values, law = drawn[:, d], stats.beta(alpha, beta, loc=LOW[d], scale=HIGH[d] - LOW[d])
                assert stats.kstest(values, law.cdf).pvalue > 1e-3
                assert abs(values.mean() - law.mean()) < 4 * law.std() / math.sqrt(num_draws)
                assert values.std() == pytest.approx(law.std(), rel=0.05)
            of_dimensions = stats.spearmanr(drawn[:, 0], drawn[:, 1]).statistic  # dimensions are independent
            of_rows = stats.spearmanr(drawn[1:, 0], drawn[:-1, 0]).statistic  # rows, too
            assert max(abs(of_dimensions), abs(of_rows)) < 4 / math.sqrt(num_draws)


def test_modes_equal_hand_worked_actions() -> None:
    assert EVERY["discrete"].mode(torch.tensor([[0.0, 2.0, 1.0, 2.0, -1.0]])).tolist() == [1]
    logits = torch.tensor([[0.0, 2.0, 1.0, 3.0, 1.0, 0.0, 0.0, 0.0, 9.0, -5.0]])
    assert EVERY["ragged"].mode(logits).tolist() == [[1, 0, 3, 0]]
    assert EVERY["bits"].mode(torch.tensor([[0.1, -0.1, 5.0, 0.0]])).tolist() == [[1, 0, 1, 0]]
    parameters = torch.tensor([[0.0, 0.5, 3.0, -1.0]])
    # the box is [-2, 1] x [0.5, 0.75]: -0.5 + 1.5 * 0 and 0.625 + 0.125 * 0.5
    assert EVERY["gaussian"].mode(parameters).tolist() == [[-0.5, 0.6875]]
    middle, half = (LOW + HIGH) / 2, (HIGH - LOW) / 2
    expected = torch.from_numpy(middle + half * np.tanh([0.0, 0.5])).float().unsqueeze(0)
    torch.testing.assert_close(EVERY["squashed"].mode(parameters), expected)
    flat = torch.full((1, 4), -200.0)  # softplus is 0 in float32: alpha = beta = 1
    torch.testing.assert_close(EVERY["beta"].mode(flat), torch.from_numpy(middle).unsqueeze(0))
    falling = torch.tensor([[-200.0, -200.0, 1.0, 1.0]])
    torch.testing.assert_close(EVERY["beta"].mode(falling), torch.from_numpy(LOW).unsqueeze(0))


def test_log_probs_and_gradients_are_finite_at_the_bounds(subtests: pytest.Subtests) -> None:
    for name in ("squashed", "beta"):
        for dtype, scale in ((torch.float32, 1.0), (torch.float32, 30.0), (torch.float64, 1.0), (torch.float64, 30.0)):
            with subtests.test(name=name, dtype=dtype, scale=scale):
                distribution = EVERY[name]
                parameters = (random_parameters(distribution, 50, dtype) * scale).requires_grad_()
                for bound in (LOW, HIGH):
                    actions = torch.from_numpy(bound).expand(50, 2)
                    log_probs = distribution.log_prob(parameters, actions)
                    (gradient,) = torch.autograd.grad(log_probs.sum(), parameters)
                    assert log_probs.isfinite().all()
                    assert gradient.isfinite().all()
                    assert gradient.count_nonzero() > 50


def test_a_gaussian_has_the_units_of_the_box_only_where_both_bounds_are_finite() -> None:
    huge = np.finfo(np.float32).max
    low, high = np.float32([-np.inf, 0.0, -huge, 3.0, 5.0]), np.float32([np.inf, np.inf, huge, 5.0, 5.0])
    distribution = distribution_for(spaces.Box(low, high))
    assert distribution.mode(torch.full((1, 10), 0.5)).tolist() == [[0.5, 0.5, 0.5, 4.5, 0.5]]
    parameters, actions = torch.zeros(1, 10), torch.tensor([[0.0, 0.0, 0.0, 4.0, 0.0]])
    assert float(distribution.log_prob(parameters, actions)) == pytest.approx(5 * stats.norm.logpdf(0.0), rel=1e-6)


def test_actions_stay_within_bounds_that_float32_rounds(subtests: pytest.Subtests) -> None:
    """0.1 and 0.7 are not float32 numbers, and a float64 space checks its bounds exactly."""
    space = spaces.Box(0.1, 0.7, (3,), dtype=np.float64)
    extreme = torch.tensor([[-40.0] * 3 + [2.0] * 3, [40.0] * 3 + [2.0] * 3])
    for name in ("gaussian", "squashed", "beta"):
        with subtests.test(name=name):
            distribution = distribution_for(space, name)
            for taken in distribution.to_env(draw(distribution, extreme)):
                assert space.contains(taken)


def test_boxes_that_are_not_supported_are_refused(subtests: pytest.Subtests) -> None:
    with pytest.raises(ConfigError, match=r"Gaussian is for boxes of floats; got Box.*uint8"):
        distribution_for(spaces.Box(0, 255, (2,), dtype=np.uint8))
    huge = np.finfo(np.float32).max
    for bounds in ((-1.0, np.inf), (-np.inf, 1.0), (1.0, 1.0), (-huge, huge)):
        space = spaces.Box(np.float32(bounds[0]), np.float32(bounds[1]), (2,))
        for kind, name in (("squashed", "SquashedGaussian"), ("beta", "Beta")):
            with (
                subtests.test(bounds=bounds, kind=kind),
                pytest.raises(ConfigError, match=f"{name} needs finite bounds with low < high"),
            ):
                distribution_for(space, kind)


def test_beta_refuses_the_parameters_of_a_diverged_network() -> None:
    for value in (torch.nan, torch.inf):
        with pytest.raises(ContractError, match="Beta: parameters must be finite"):
            draw(EVERY["beta"], torch.tensor([[0.0, 0.0, value, 0.0]]))


# --- integers


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

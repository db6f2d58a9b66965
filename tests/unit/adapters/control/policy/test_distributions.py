"""Distributions of actions: torch and scipy as oracles, finite differences, frequencies of samples, bounds, masks."""

import itertools
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scipy import stats
from torch import distributions as oracle

from adapters.control.policy.distributions import (
    ActionDistribution,
    Bernoulli,
    Beta,
    Categorical,
    Composite,
    FromTorch,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
    distribution_for,
)
from grpo.errors import ConfigError, ContractError

LOW, HIGH = np.array([-2.0, 0.5], np.float32), np.array([1.0, 0.75], np.float32)
DISCRETE = spaces.Discrete(5, start=-3)
RAGGED = spaces.MultiDiscrete(np.array([[3, 2], [4, 1]]), start=np.array([[1, 0], [-2, 7]]))
EVEN = spaces.MultiDiscrete([3, 3])
BITS = spaces.MultiBinary([2, 2])
BOX = spaces.Box(LOW, HIGH)
NESTED = spaces.Dict(  # which sorts its names: arm, gripper, speed
    {
        "gripper": spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiBinary(2)]),
        "arm": spaces.Dict({"wheels": spaces.MultiDiscrete([2, 3]), "joints": BOX}),
        "speed": spaces.Box(-np.inf, np.inf, (1, 2)),
    }
)
EVERY = {
    "discrete": distribution_for(DISCRETE),
    "ragged": distribution_for(RAGGED),
    "even": distribution_for(EVEN),
    "bits": distribution_for(BITS),
    "gaussian": distribution_for(BOX),
    "squashed": distribution_for(BOX, "squashed"),
    "beta": distribution_for(BOX, "beta"),
    "nested": distribution_for(NESTED),
}
every = pytest.mark.parametrize("distribution", EVERY.values(), ids=EVERY)
masked = pytest.mark.parametrize("distribution", [EVERY[name] for name in ("discrete", "ragged", "even", "nested")])


def random_parameters(distribution: ActionDistribution, num_rows: int = 40, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(num_rows, distribution.num_parameters, dtype=dtype)


def draw(distribution: ActionDistribution, parameters: torch.Tensor, allowed=None, seed: int = 0) -> torch.Tensor:
    noise = distribution.noise(np.random.default_rng(seed), len(parameters))
    assert noise.shape == (len(parameters), distribution.num_noise)
    assert noise.dtype == np.float32
    return distribution.sample(parameters, torch.from_numpy(noise), allowed)


def random_mask(distribution: ActionDistribution, num_rows: int) -> torch.Tensor:
    """About half of it allowed, and always the first category of every variable."""
    allowed = torch.rand(num_rows, distribution.num_categories) < 0.5
    allowed[:, first_categories(distribution)] = True
    return allowed


def first_categories(distribution: ActionDistribution) -> list[int]:
    match distribution:
        case Categorical():
            return [0]
        case MultiCategorical():
            return [sum(distribution.sizes[:d]) for d in range(len(distribution.sizes))]
        case Composite():
            offsets = np.cumsum([0, *(part.num_categories for part in distribution.parts)])
            pairs = zip(offsets, distribution.parts, strict=False)
            return [int(offset) + first for offset, part in pairs for first in first_categories(part)]
    return []


# Log-probabilities and entropies


def box_oracle(name: str, parameters: torch.Tensor) -> oracle.Distribution:
    first, second = parameters.chunk(2, -1)
    std = second.clamp(-20, 2).exp()
    low, high = torch.from_numpy(LOW).double(), torch.from_numpy(HIGH).double()
    match name:
        case "gaussian":
            return oracle.Normal(first, std)
        case "squashed":
            affine = oracle.AffineTransform((low + high) / 2, (high - low) / 2)
            return oracle.TransformedDistribution(oracle.Normal(first, std), [oracle.TanhTransform(), affine])
        case "beta":
            shapes = (1 + torch.nn.functional.softplus(values) for values in (first, second))
            return oracle.TransformedDistribution(oracle.Beta(*shapes), [oracle.AffineTransform(low, high - low)])
    raise AssertionError(name)


def expected_log_prob(name: str, parameters: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    match name:
        case "discrete":
            return oracle.Categorical(logits=parameters).log_prob(actions)
        case "ragged" | "even":
            parts = parameters.split(EVERY[name].sizes, -1)
            columns = zip(parts, actions.unbind(-1), strict=True)
            return sum(oracle.Categorical(logits=logits).log_prob(taken) for logits, taken in columns)
        case "bits":
            return oracle.Bernoulli(logits=parameters).log_prob(actions.double()).sum(-1)
        case "nested":  # arm (joints, wheels), gripper (discrete, bits), speed: names in the alphabet's order
            joints, wheels, grip, bits, speed = parameters.split([4, 5, 3, 2, 4], -1)
            return (
                box_oracle("gaussian", joints).log_prob(actions[:, :2]).sum(-1)
                + oracle.Categorical(logits=wheels[:, :2]).log_prob(actions[:, 2])
                + oracle.Categorical(logits=wheels[:, 2:]).log_prob(actions[:, 3])
                + oracle.Categorical(logits=grip).log_prob(actions[:, 4])
                + oracle.Bernoulli(logits=bits).log_prob(actions[:, 5:7]).sum(-1)
                + box_oracle("gaussian", speed).log_prob(actions[:, 7:]).sum(-1)
            )
    return box_oracle(name, parameters).log_prob(actions).sum(-1)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_log_prob_agrees_with_torch(name: str, dtype: torch.dtype, tolerance: float) -> None:
    distribution = EVERY[name]
    parameters = 0.5 * random_parameters(distribution, dtype=dtype)  # no tanh so near 1 that torch gives infinity
    actions = draw(distribution, parameters)
    assert actions.dtype == (dtype if distribution.action_dtype == torch.float32 else torch.int64)
    assert actions.shape == (40, *distribution.action_shape)
    log_probs = distribution.log_prob(parameters, actions)
    assert log_probs.dtype == dtype
    whole = actions if distribution.action_dtype == torch.int64 else actions.double()
    expected = expected_log_prob(name, parameters.double(), whole)
    torch.testing.assert_close(log_probs.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", EVERY)
def test_bfloat16_parameters_are_scored_in_float32(name: str) -> None:
    distribution = EVERY[name]
    parameters = (0.5 * random_parameters(distribution)).bfloat16()
    actions = draw(distribution, parameters)
    assert actions.dtype == distribution.mode(parameters).dtype == distribution.action_dtype
    log_probs = distribution.log_prob(parameters, actions)
    assert log_probs.dtype == torch.float32
    whole = actions if distribution.action_dtype == torch.int64 else actions.double()
    expected = expected_log_prob(name, parameters.double(), whole)
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_entropies(dtype: torch.dtype, tolerance: float) -> None:
    def check(name: str, expected) -> None:
        distribution = EVERY[name]
        parameters = 3 * random_parameters(distribution, dtype=dtype)
        entropy = distribution.entropy(parameters)
        torch.testing.assert_close(entropy.double(), expected(parameters.double()), rtol=tolerance, atol=tolerance)

    def categorical(logits: torch.Tensor) -> torch.Tensor:
        return oracle.Categorical(logits=logits).entropy()

    def beta(parameters: torch.Tensor) -> torch.Tensor:
        alpha, beta = (1 + np.logaddexp(0, parameters.numpy())).reshape(-1, 2, 2).swapaxes(0, 1)
        return torch.from_numpy(stats.beta(alpha, beta, loc=LOW, scale=(HIGH - LOW).astype(float)).entropy().sum(-1))

    def gaussian(parameters: torch.Tensor) -> torch.Tensor:
        mean, log_std = parameters.chunk(2, -1)
        return oracle.Normal(mean, log_std.clamp(-20, 2).exp()).entropy().sum(-1)

    check("discrete", categorical)
    check("even", lambda parameters: categorical(parameters.unflatten(-1, (2, 3))).sum(-1))
    check("ragged", lambda parameters: sum(categorical(part) for part in parameters.split([3, 2, 4, 1], -1)))
    check("bits", lambda parameters: oracle.Bernoulli(logits=parameters).entropy().sum(-1))
    check("gaussian", gaussian)
    check("beta", beta)
    nested = EVERY["nested"]
    parameters = random_parameters(nested)
    parts = zip(nested.parts, parameters.split([9, 5, 4], -1), strict=True)
    torch.testing.assert_close(nested.entropy(parameters), sum(part.entropy(own) for part, own in parts))
    assert EVERY["squashed"].entropy(random_parameters(EVERY["squashed"])) is None
    assert distribution_for(NESTED["arm"], "squashed").entropy(torch.zeros(1, 9)) is None


def test_beta_is_accurate_where_torch_in_float32_is_not() -> None:
    """alpha = beta = 20001: log B is the difference of numbers near 2e5, whose float32 steps are 0.016."""
    distribution = Beta(spaces.Box(0, 1, (1,)))
    log_prob = distribution.log_prob(torch.full((1, 2), 20_000.0), torch.tensor([[0.5]]))
    assert float(log_prob) == pytest.approx(stats.beta(20_001, 20_001).logpdf(0.5), rel=1e-6)


def test_entropy_of_certain_bits_does_not_cancel() -> None:
    """H = log(1 + e^-x) + x / (1 + e^x), about (x + 1) e^-x: at x = 60 far below the rounding error of x."""
    entropy = Bernoulli(spaces.MultiBinary(1)).entropy(torch.tensor([[60.0], [-60.0]]))
    torch.testing.assert_close(entropy, torch.full((2,), 61 * math.exp(-60)), rtol=1e-5, atol=0)


def test_log_std_is_clamped() -> None:
    for distribution in (EVERY["gaussian"], EVERY["squashed"]):
        wild, clamped = torch.tensor([[0.1, 0.2, 9.0, -50.0]]), torch.tensor([[0.1, 0.2, 2.0, -20.0]])
        actions = draw(distribution, clamped)
        assert torch.equal(draw(distribution, wild), actions)
        assert torch.equal(distribution.log_prob(wild, actions), distribution.log_prob(clamped, actions))
    assert torch.equal(EVERY["gaussian"].entropy(wild), EVERY["gaussian"].entropy(clamped))


@every
def test_gradients_agree_with_finite_differences(distribution: ActionDistribution) -> None:
    parameters = random_parameters(distribution, 5).requires_grad_()
    actions = draw(distribution, parameters.detach())
    assert torch.autograd.gradcheck(lambda p: distribution.log_prob(p, actions), (parameters,))
    if distribution is not EVERY["squashed"]:
        assert torch.autograd.gradcheck(distribution.entropy, (parameters,))


@masked
def test_gradients_under_masks_agree_with_finite_differences(distribution: ActionDistribution) -> None:
    parameters = random_parameters(distribution, 5).requires_grad_()
    allowed = random_mask(distribution, 5)
    actions = draw(distribution, parameters.detach(), allowed)
    assert torch.autograd.gradcheck(lambda p: distribution.log_prob(p, actions, allowed), (parameters,))
    assert torch.autograd.gradcheck(lambda p: distribution.entropy(p, allowed), (parameters,))


# Samples


@every
def test_sample_is_a_function_of_each_row_alone(distribution: ActionDistribution) -> None:
    parameters = random_parameters(distribution, 12, torch.float32)
    noise = torch.from_numpy(distribution.noise(np.random.default_rng(3), 12))
    state = torch.get_rng_state()
    actions = distribution.sample(parameters, noise)
    assert torch.equal(distribution.sample(parameters, noise), actions)
    assert torch.equal(torch.get_rng_state(), state)
    order = torch.randperm(12)
    assert torch.equal(distribution.sample(parameters[order], noise[order]), actions[order])
    for row in range(12):
        own = slice(row, row + 1)
        assert torch.equal(distribution.sample(parameters[own], noise[own]), actions[own])
    other = torch.from_numpy(distribution.noise(np.random.default_rng(4), 12))
    assert not torch.equal(distribution.sample(parameters, other), actions)


@every
def test_noise_is_the_generators(distribution: ActionDistribution) -> None:
    first, again, other = (distribution.noise(np.random.default_rng(seed), 3) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.isclose(first, other).any()
    assert len({row.tobytes() for row in first}) == 3


def test_both_halves_of_a_seed_count() -> None:
    halves = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [2.0**24 - 1, 2.0**24 - 1]])
    assert len(EVERY["beta"].sample(torch.zeros(4, 4), halves).unique(dim=0)) == 4


def joint_frequencies(distribution, parameters: torch.Tensor, outcomes: torch.Tensor, allowed=None) -> float:
    """p-value of chi-square: 1e5 draws against exp(log_prob) of all outcomes."""
    num_draws = 100_000
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


def test_frequencies_are_the_probabilities() -> None:
    assert joint_frequencies(EVERY["discrete"], torch.randn(1, 5), torch.arange(5)) > 1e-3
    ragged = torch.tensor(list(itertools.product(range(3), range(2), range(4), range(1))))
    assert joint_frequencies(EVERY["ragged"], torch.randn(1, 10), ragged) > 1e-3
    bits = torch.tensor(list(itertools.product(range(2), repeat=4)))
    assert joint_frequencies(EVERY["bits"], torch.randn(1, 4), bits) > 1e-3


def test_frequencies_under_masks() -> None:
    allowed = torch.tensor([[True, False, True, True, False]])
    assert joint_frequencies(EVERY["discrete"], torch.randn(1, 5), torch.arange(5), allowed) > 1e-3
    ragged = torch.tensor(list(itertools.product(range(3), range(2), range(4), range(1))))
    allowed = torch.tensor([[True, False, True, False, True, True, True, False, True, True]])
    assert joint_frequencies(EVERY["ragged"], torch.randn(1, 10), ragged, allowed) > 1e-3


BETA_SHAPES = torch.tensor([[-30.0, 4.0, -30.0, 0.3]])
"""raw_alpha | raw_beta of two dimensions: (1, 1), flat, and (1 + softplus 4, 1 + softplus 0.3), on one side."""


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gaussian", torch.tensor([[0.3, -1.0, 0.5, -2.0]])),
        ("squashed", torch.tensor([[0.3, -1.0, 0.5, -2.0]])),
        ("squashed", torch.tensor([[4.0, 0.0, -1.0, 0.3]])),
        ("beta", torch.tensor([[0.3, -1.0, 0.5, 2.0]])),
        ("beta", BETA_SHAPES),
    ],
)
def test_samples_have_the_distribution_of_scipy(name: str, parameters: torch.Tensor) -> None:
    drawn = draw(EVERY[name], parameters.expand(20_000, -1)).double().numpy()
    first, second = parameters.double().numpy().reshape(2, 2)
    for d in range(2):
        match name:
            case "gaussian":
                values, law = drawn[:, d], stats.norm(first[d], np.exp(second[d]))
            case "squashed":
                inside = (2 * drawn[:, d] - LOW[d] - HIGH[d]) / (HIGH[d] - LOW[d])
                values, law = np.arctanh(inside), stats.norm(first[d], np.exp(second[d]))
            case _:
                alpha, beta = 1 + np.logaddexp(0, first[d]), 1 + np.logaddexp(0, second[d])
                values, law = drawn[:, d], stats.beta(alpha, beta, loc=LOW[d], scale=HIGH[d] - LOW[d])
        assert stats.kstest(values, law.cdf).pvalue > 1e-3
        assert abs(values.mean() - law.mean()) < 4 * law.std() / math.sqrt(20_000)
        assert values.std() == pytest.approx(law.std(), rel=0.05)
    assert abs(stats.spearmanr(drawn[:, 0], drawn[:, 1]).statistic) < 4 / math.sqrt(20_000)  # dimensions independent
    assert abs(stats.spearmanr(drawn[1:, 0], drawn[:-1, 0]).statistic) < 4 / math.sqrt(20_000)  # rows, too


# Modes


def test_modes_by_hand() -> None:
    assert EVERY["discrete"].mode(torch.tensor([[0.0, 2.0, 1.0, 2.0, -1.0]])).tolist() == [1]
    logits = torch.tensor([[0.0, 2.0, 1.0, 3.0, 1.0, 0.0, 0.0, 0.0, 9.0, -5.0]])
    assert EVERY["ragged"].mode(logits).tolist() == [[1, 0, 3, 0]]
    assert EVERY["bits"].mode(torch.tensor([[0.1, -0.1, 5.0, 0.0]])).tolist() == [[1, 0, 1, 0]]
    parameters = torch.tensor([[0.0, 0.5, 3.0, -1.0]])
    assert EVERY["gaussian"].mode(parameters).tolist() == [[0.0, 0.5]]
    middle, half = (LOW + HIGH) / 2, (HIGH - LOW) / 2
    expected = torch.from_numpy(middle + half * np.tanh([0.0, 0.5])).float().unsqueeze(0)
    torch.testing.assert_close(EVERY["squashed"].mode(parameters), expected)
    flat = torch.full((1, 4), -200.0)  # softplus is 0 in float32: alpha = beta = 1
    torch.testing.assert_close(EVERY["beta"].mode(flat), torch.from_numpy(middle).unsqueeze(0))
    falling = torch.tensor([[-200.0, -200.0, 1.0, 1.0]])
    torch.testing.assert_close(EVERY["beta"].mode(falling), torch.from_numpy(LOW).unsqueeze(0))


@pytest.mark.parametrize("name", ["discrete", "ragged", "bits", "gaussian", "beta", "nested"])
def test_no_sample_is_likelier_than_the_mode(name: str) -> None:
    distribution = EVERY[name]
    parameters = random_parameters(distribution, 2_000)
    sampled, best = draw(distribution, parameters), distribution.mode(parameters)
    difference = distribution.log_prob(parameters, best) - distribution.log_prob(parameters, sampled)
    assert difference.min() > -1e-9
    assert difference.max() > 1.0


# Bounds


@pytest.mark.parametrize("name", ["squashed", "beta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_finite_at_the_bounds(name: str, dtype: torch.dtype, scale: float) -> None:
    distribution = EVERY[name]
    parameters = (random_parameters(distribution, 50, dtype) * scale).requires_grad_()
    for bound in (LOW, HIGH):
        actions = torch.from_numpy(bound).expand(50, 2)
        log_probs = distribution.log_prob(parameters, actions)
        (gradient,) = torch.autograd.grad(log_probs.sum(), parameters)
        assert log_probs.isfinite().all()
        assert gradient.isfinite().all()
        assert gradient.count_nonzero() > 50


@pytest.mark.parametrize("name", ["squashed", "beta"])
def test_the_density_integrates_to_one_in_the_environments_units(name: str) -> None:
    space = spaces.Box(np.float32([2.0]), np.float32([10.0]))
    distribution = distribution_for(space, name)
    cells = torch.linspace(2, 10, 20_001, dtype=torch.float64)
    centres = ((cells[1:] + cells[:-1]) / 2).unsqueeze(1)
    densities = distribution.log_prob(torch.tensor([[0.4, -0.5]]).double().expand(20_000, -1), centres).exp()
    assert float(densities.sum() * (8 / 20_000)) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", ["gaussian", "squashed", "beta"])
def test_actions_stay_within_bounds_that_float32_rounds(name: str) -> None:
    """0.1 and 0.7 are no float32 numbers; the space is of float64 and holds to the bound."""
    space = spaces.Box(0.1, 0.7, (3,), dtype=np.float64)
    distribution = distribution_for(space, name)
    extreme = torch.tensor([[-40.0] * 3 + [2.0] * 3, [40.0] * 3 + [2.0] * 3])
    for taken in distribution.to_env(draw(distribution, extreme)):
        assert space.contains(taken)


# Masks


@masked
def test_masked_actions_are_never_taken(distribution: ActionDistribution) -> None:
    parameters = random_parameters(distribution, 100_000, torch.float32)
    allowed = random_mask(distribution, 100_000)
    for actions in (draw(distribution, parameters, allowed), distribution.mode(parameters, allowed)):
        assert distribution.log_prob(parameters, actions, allowed).isfinite().all()
    assert distribution.log_prob(parameters, draw(distribution, parameters), allowed).isneginf().any()


@masked
def test_masked_logits_count_for_nothing(distribution: ActionDistribution) -> None:
    """Whatever stands there, even infinity or NaN: nothing changes, and the gradient is exactly 0."""
    allowed = random_mask(distribution, 30)
    parameters = random_parameters(distribution, 30).requires_grad_()
    actions = draw(distribution, parameters.detach(), allowed)
    entropy, log_probs = distribution.entropy(parameters, allowed), distribution.log_prob(parameters, actions, allowed)
    (gradient,) = torch.autograd.grad((entropy.square() + log_probs.square()).sum(), parameters)
    columns = logit_columns(distribution)
    assert (gradient[:, columns][~allowed] == 0.0).all()
    assert gradient.isfinite().all()
    for poison in (1e30, torch.inf, torch.nan):
        poisoned = parameters.detach().clone()
        poisoned[:, columns] = poisoned[:, columns].masked_fill(~allowed, poison)
        assert torch.equal(draw(distribution, poisoned, allowed), actions)
        assert torch.equal(distribution.mode(poisoned, allowed), distribution.mode(parameters, allowed))
        assert torch.equal(distribution.log_prob(poisoned, actions, allowed), log_probs)
        assert torch.equal(distribution.entropy(poisoned, allowed), entropy)


def logit_columns(distribution: ActionDistribution) -> list[int]:
    """Where the logits that masks are for stand among the parameters."""
    if distribution is EVERY["nested"]:  # joints 4 | wheels 5 | grip 3 | bits 2 | speed 4
        return [*range(4, 12)]
    return list(range(distribution.num_categories))


def test_masked_log_probs_and_entropy_by_hand() -> None:
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


@pytest.mark.parametrize("call", ["sample", "mode", "log_prob", "entropy"])
def test_masks_that_break_the_contract(call: str) -> None:
    def use(name: str, allowed: torch.Tensor) -> None:
        distribution = EVERY[name]
        parameters = random_parameters(distribution, 4, torch.float32)
        noise = torch.from_numpy(distribution.noise(np.random.default_rng(0), 4))
        given = {"sample": (noise,), "log_prob": (distribution.sample(parameters, noise),)}
        getattr(distribution, call)(parameters, *given.get(call, ()), allowed)

    def allowed_but(width: int, row: int, columns: slice) -> torch.Tensor:
        allowed = torch.ones(4, width, dtype=torch.bool)
        allowed[row, columns] = False
        return allowed

    with pytest.raises(
        ContractError, match="Categorical: every row of the mask must allow an action; row 2 allows none"
    ):
        use("discrete", allowed_but(5, 2, slice(0, 5)))
    with pytest.raises(ContractError, match="row 3 allows none of variable 2"):
        use("ragged", allowed_but(10, 3, slice(5, 9)))
    with pytest.raises(ContractError, match="row 1 allows none of variable 1"):
        use("even", allowed_but(6, 1, slice(3, 6)))
    with pytest.raises(ContractError, match="row 0 allows none"):  # wheels 2 + 3 | grip 3
        use("nested", allowed_but(8, 0, slice(5, 8)))
    for name, width in (("discrete", 5), ("ragged", 10), ("nested", 8)):
        with pytest.raises(ContractError, match=rf"the mask must be bool \[n, K\] = \[4, {width}\]"):
            use(name, torch.ones(4, width + 1, dtype=torch.bool))
        with pytest.raises(ContractError, match=rf"got int64 \[4, {width}\]"):
            use(name, torch.ones(4, width, dtype=torch.int64))
    for name in ("bits", "gaussian", "squashed", "beta"):
        with pytest.raises(ContractError, match="has no categories that a mask could exclude"):
            use(name, torch.ones(4, 2, dtype=torch.bool))


def test_a_composite_of_boxes_has_no_categories() -> None:
    boxes = distribution_for(spaces.Tuple([BOX, BOX]))
    with pytest.raises(ContractError, match="Composite has no categories that a mask could exclude"):
        boxes.mode(torch.zeros(4, 8), torch.ones(4, 2, dtype=torch.bool))


# To the environment and back

ROUND_TRIPS = [
    DISCRETE,
    RAGGED,
    EVEN,
    BITS,
    NESTED,
    spaces.MultiDiscrete([200, 3], dtype=np.uint8, start=[50, 0]),
    spaces.Box(-1, 1, (2, 3)),
    spaces.Box(-1, 1, (2,), dtype=np.float16),
    spaces.Box(-1, 1, (2,), dtype=np.float64),
    spaces.Tuple([spaces.Discrete(2), spaces.Tuple([spaces.Discrete(3, start=5)])]),
]


@pytest.mark.parametrize("space", ROUND_TRIPS, ids=str)
def test_round_trips(space: spaces.Space) -> None:
    distribution = distribution_for(space)
    actions = draw(distribution, random_parameters(distribution, 30, torch.float32))
    taken = distribution.to_env(actions)
    assert len(taken) == 30
    for one in taken:
        assert space.contains(one)
    back = distribution.from_env(taken)
    assert back.dtype == distribution.action_dtype
    assert back.shape == actions.shape
    assert torch.equal(distribution.from_env(list(taken)), back)
    if distribution.action_dtype == torch.int64:
        assert torch.equal(back, actions)
    space.seed(0)
    recorded = [space.sample() for _ in range(20)]
    again = distribution.to_env(distribution.from_env(recorded))
    for one, other in zip(recorded, again, strict=True):
        assert flat(space, one) == pytest.approx(flat(space, other), rel=1e-6)


def flat(space: spaces.Space, action) -> np.ndarray:
    return np.asarray(spaces.flatten(space, action), dtype=np.float64)


def test_actions_of_the_environment_by_hand() -> None:
    assert EVERY["discrete"].to_env(torch.tensor([0, 4])).tolist() == [-3, 1]
    assert EVERY["ragged"].to_env(torch.tensor([[2, 1, 3, 0]])).tolist() == [[[3, 1], [1, 7]]]
    assert EVERY["bits"].to_env(torch.tensor([[1, 0, 0, 1]])).tolist() == [[[1, 0], [0, 1]]]
    assert EVERY["gaussian"].to_env(torch.tensor([[-9.0, 0.6], [9.0, 9.0]])).tolist() == [
        [-2.0, pytest.approx(0.6)],
        [1.0, 0.75],
    ]
    (taken,) = EVERY["nested"].to_env(torch.tensor([[0.5, 0.625, 1, 2, 0, 1, 0, 33.0, -4.0]]))
    assert list(taken) == ["arm", "gripper", "speed"]
    assert taken["arm"]["joints"].tolist() == [0.5, 0.625]
    assert taken["arm"]["wheels"].tolist() == [1, 2]
    assert taken["gripper"][0] == 1
    assert taken["gripper"][1].tolist() == [1, 0]
    assert taken["speed"].tolist() == [[33.0, -4.0]]


def test_large_whole_numbers_are_exact_in_composites() -> None:
    distribution = distribution_for(spaces.Tuple([spaces.Discrete(100_000, start=2**40), spaces.Box(0, 1, (1,))]))
    parameters = torch.zeros(1, 100_002)
    parameters[0, 99_999] = 100.0
    assert distribution.mode(parameters)[0, 0] == 99_999
    assert distribution.to_env(distribution.mode(parameters))[0][0] == 2**40 + 99_999


def test_actions_from_elsewhere_that_are_not_of_the_space() -> None:
    with pytest.raises(ContractError, match="action 1 is not in the space"):
        EVERY["discrete"].from_env([0, 2])
    with pytest.raises(ContractError, match="action 0 is not in the space"):
        EVERY["ragged"].from_env(np.array([[[3, 2], [1, 7]]]))
    with pytest.raises(ContractError, match="must lie in 0 to below 2"):
        EVERY["bits"].from_env(np.full((1, 2, 2), 2))
    with pytest.raises(ContractError, match=r"Categorical.from_env needs \[n, \*shape\] = \['n'\]"):
        EVERY["discrete"].from_env([0.0, 1.0])
    with pytest.raises(ContractError, match=r"\['n', 2\] of the space's dtype; got float32 \[4, 3\]"):
        EVERY["gaussian"].from_env(np.zeros((4, 3), np.float32))
    with pytest.raises(
        ContractError, match=r"every action needs the parts \['arm', 'gripper', 'speed'\]; action 0 has"
    ):
        EVERY["nested"].from_env([{"arm": 0}])
    with pytest.raises(ContractError, match=r"every action needs the parts \[0, 1\]; action 1 has \[0\]"):
        distribution_for(spaces.Tuple([DISCRETE, DISCRETE])).from_env([(0, 0), (0,)])


# Distributions of torch


def test_from_torch_agrees_with_our_own() -> None:
    def build(parameters: torch.Tensor) -> oracle.Distribution:
        return box_oracle("gaussian", parameters)

    wrapped, own = FromTorch(BOX, 4, build), EVERY["gaussian"]
    parameters = random_parameters(own)
    actions = draw(own, parameters)
    torch.testing.assert_close(wrapped.log_prob(parameters, actions), own.log_prob(parameters, actions))
    torch.testing.assert_close(wrapped.entropy(parameters), own.entropy(parameters))
    assert torch.equal(wrapped.mode(parameters), own.mode(parameters))
    assert np.array_equal(wrapped.to_env(actions), own.to_env(actions))
    assert torch.equal(wrapped.from_env(LOW[None]), own.from_env(LOW[None]))
    assert (wrapped.num_parameters, wrapped.num_noise, wrapped.num_categories) == (4, 0, 0)
    torch.manual_seed(5)
    sampled = draw(wrapped, parameters)
    torch.manual_seed(5)
    assert torch.equal(sampled, build(parameters).sample())


@pytest.mark.parametrize(
    ("space", "num_parameters", "build"),
    [
        (DISCRETE, 5, lambda p: oracle.Categorical(logits=p)),
        (BITS, 4, lambda p: oracle.Bernoulli(logits=p)),
        (EVEN, 6, lambda p: oracle.Independent(oracle.Categorical(logits=p.unflatten(-1, (2, 3))), 1)),
    ],
    ids=["categories", "bits", "several"],
)
def test_from_torch_for_whole_numbers(space: spaces.Space, num_parameters: int, build) -> None:
    wrapped, own = FromTorch(space, num_parameters, build), distribution_for(space)
    parameters = random_parameters(own, dtype=torch.float32)
    actions = draw(wrapped, parameters)
    assert actions.dtype == wrapped.mode(parameters).dtype == torch.int64
    torch.testing.assert_close(wrapped.log_prob(parameters, actions), own.log_prob(parameters, actions))
    torch.testing.assert_close(wrapped.entropy(parameters), own.entropy(parameters))
    for taken in wrapped.to_env(actions):
        assert space.contains(taken)
    pair = Composite([wrapped, own])
    both = torch.cat([parameters, parameters], dim=1)
    taken = draw(pair, both)
    half = taken.shape[1] // 2
    expected = own.log_prob(parameters, taken[:, :half].long().reshape(actions.shape)) + own.log_prob(
        parameters, taken[:, half:].long().reshape(actions.shape)
    )
    torch.testing.assert_close(pair.log_prob(both, taken), expected)


def test_from_torch_with_more_categories_than_bfloat16_can_count() -> None:
    wrapped = FromTorch(spaces.Discrete(300), 300, lambda p: oracle.Categorical(logits=p.float()))
    parameters = torch.full((1, 300), -9.0, dtype=torch.bfloat16)
    parameters[0, 257] = 9.0  # bfloat16 would make 256 of the number 257
    assert float(wrapped.log_prob(parameters, torch.tensor([257]))) > -0.01


def test_from_torch_with_events_and_without_closed_forms() -> None:
    joint = FromTorch(BOX, 2, lambda p: oracle.MultivariateNormal(p, torch.tensor([[2.0, 0.5], [0.5, 1.0]])))
    values = np.array([[0.3, -0.2], [1.0, 2.0]])
    log_probs = joint.log_prob(torch.zeros(2, 2), torch.from_numpy(values).float())
    expected = stats.multivariate_normal([0, 0], [[2, 0.5], [0.5, 1]]).logpdf(values)
    torch.testing.assert_close(log_probs.double(), torch.from_numpy(expected), rtol=1e-6, atol=1e-6)
    squashed = FromTorch(BOX, 4, lambda p: box_oracle("squashed", p))
    assert squashed.entropy(torch.zeros(1, 4)) is None
    with pytest.raises(ConfigError, match="TransformedDistribution has no mode"):
        squashed.mode(torch.zeros(1, 4))


def test_from_torch_that_breaks_the_contract() -> None:
    transposed = FromTorch(BOX, 4, lambda p: oracle.Normal(p[:, :2].T, 1.0))
    with pytest.raises(ContractError, match=r"actions must be \[n, \*action\] = \['n', 2\]; .* gave \[2, 3\]"):
        draw(transposed, torch.zeros(3, 4))
    shared = FromTorch(BOX, 4, lambda p: oracle.MultivariateNormal(p[0, :2], torch.eye(2)))
    with pytest.raises(ContractError, match=r"must have n = 3 rows; .* gave \[\]"):
        shared.entropy(torch.zeros(3, 4))
    with pytest.raises(ContractError, match="FromTorch has no categories"):
        shared.mode(torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(ConfigError, match="num_parameters must be >= 1; got 0"):
        FromTorch(BOX, 0, lambda p: oracle.Normal(p, 1.0))


# Which distribution


def test_distribution_for_spaces_and_kinds() -> None:
    chosen = {name: type(distribution) for name, distribution in EVERY.items()}
    assert chosen == {
        "discrete": Categorical,
        "ragged": MultiCategorical,
        "even": MultiCategorical,
        "bits": Bernoulli,
        "gaussian": Gaussian,
        "squashed": SquashedGaussian,
        "beta": Beta,
        "nested": Composite,
    }
    assert type(distribution_for(BOX, "gaussian")) is Gaussian
    inner = distribution_for(spaces.Tuple([spaces.Dict(a=BOX, b=DISCRETE)]), "beta").parts[0]
    assert [type(part) for part in inner.parts] == [Beta, Categorical]
    sizes = {name: (d.num_parameters, d.num_noise, d.num_categories, d.action_shape) for name, d in EVERY.items()}
    assert sizes == {
        "discrete": (5, 5, 5, ()),
        "ragged": (10, 10, 10, (4,)),
        "even": (6, 6, 6, (2,)),
        "bits": (4, 4, 0, (4,)),
        "gaussian": (4, 2, 0, (2,)),
        "squashed": (4, 2, 0, (2,)),
        "beta": (4, 2, 0, (2,)),
        "nested": (18, 14, 8, (9,)),
    }


def test_spaces_that_are_not_supported() -> None:
    with pytest.raises(ConfigError, match=r"MultiBinary, Box, or a Dict or Tuple of these; got Text"):
        distribution_for(spaces.Dict(a=DISCRETE, b=spaces.Text(3)))
    with pytest.raises(ConfigError, match=r"Gaussian is for boxes of floats; got Box.*uint8"):
        distribution_for(spaces.Box(0, 255, (2,), dtype=np.uint8))
    with pytest.raises(ConfigError, match="one of auto, gaussian, squashed, beta; got 'normal'"):
        distribution_for(DISCRETE, "normal")
    with pytest.raises(ConfigError, match="needs at least one part"):
        distribution_for(spaces.Tuple([]))
    huge = np.finfo(np.float32).max
    for bounds in ((-1.0, np.inf), (-np.inf, 1.0), (1.0, 1.0), (-huge, huge)):
        space = spaces.Box(np.float32(bounds[0]), np.float32(bounds[1]), (2,))
        for kind, name in (("squashed", "SquashedGaussian"), ("beta", "Beta")):
            with pytest.raises(ConfigError, match=f"{name} needs finite bounds with low < high"):
                distribution_for(space, kind)


def test_beta_refuses_a_diverged_network() -> None:
    for value in (torch.nan, torch.inf):
        with pytest.raises(ContractError, match="Beta: parameters must be finite"):
            draw(EVERY["beta"], torch.tensor([[0.0, 0.0, value, 0.0]]))


@every
def test_constants_follow_the_parameters_to_their_device(distribution: ActionDistribution) -> None:
    """The device `meta` computes shapes only, and like any other refuses to mix its tensors with the CPU's."""
    parameters = random_parameters(distribution).to("meta")
    actions = distribution.mode(parameters)
    entropy = distribution.entropy(parameters)
    for result in (
        actions,
        distribution.log_prob(parameters, actions),
        parameters[:, 0] if entropy is None else entropy,
    ):
        assert result.device.type == "meta"
        assert len(result) == 40

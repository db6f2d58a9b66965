"""Action distributions: torch and scipy as oracles, properties that all of them have, masks, bounds, and extreme parameters."""

import itertools
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scipy import stats
from torch import distributions as oracle

from adapters.control.policy.distributions import (
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
from tests.support.control_distributions import (
    BITS,
    BOX,
    DISCRETE,
    EVEN,
    EVERY,
    HIGH,
    LOW,
    MASKED,
    NESTED,
    RAGGED,
    ROUNDING,
    box_oracle,
    draw,
    expected_entropy,
    expected_log_prob,
    logit_columns,
    random_mask,
    random_parameters,
)


def test_the_distribution_and_its_sizes_follow_from_the_space_and_the_kind() -> None:
    chosen = {
        name: (type(d), d.num_parameters, d.num_noise, d.num_categories, d.action_shape) for name, d in EVERY.items()
    }
    assert chosen == {
        "discrete": (Categorical, 5, 5, 5, ()),
        "ragged": (MultiCategorical, 10, 10, 10, (4,)),
        "even": (MultiCategorical, 6, 6, 6, (2,)),
        "bits": (Bernoulli, 4, 4, 0, (4,)),
        "gaussian": (Gaussian, 4, 2, 0, (2,)),
        "squashed": (SquashedGaussian, 4, 2, 0, (2,)),
        "beta": (Beta, 4, 2, 0, (2,)),
        "nested": (Composite, 18, 14, 8, (9,)),
    }
    assert type(distribution_for(BOX, "gaussian")) is Gaussian
    inner = distribution_for(spaces.Tuple([spaces.Dict(a=BOX, b=DISCRETE)]), "beta").parts[0]
    assert [type(part) for part in inner.parts] == [Beta, Categorical]


def test_unsupported_spaces_and_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"MultiBinary, Box, or a Dict or Tuple of these; got Text"):
        distribution_for(spaces.Dict(a=DISCRETE, b=spaces.Text(3)))
    for make in (lambda: distribution_for(spaces.Tuple([])), lambda: Composite({})):
        with pytest.raises(ConfigError, match="needs at least one part"):
            make()
    with pytest.raises(ConfigError, match="one of 'auto', 'gaussian', 'squashed', 'beta'; got str 'normal'"):
        distribution_for(DISCRETE, "normal")  # type: ignore[arg-type]


def test_from_torch_agrees_with_the_distribution_of_each_space(subtests: pytest.Subtests) -> None:
    for name, space, build in (
        ("gaussian", BOX, lambda p: box_oracle("gaussian", p)),
        ("discrete", DISCRETE, lambda p: oracle.Categorical(logits=p)),
        ("bits", BITS, lambda p: oracle.Bernoulli(logits=p)),
        ("even", EVEN, lambda p: oracle.Independent(oracle.Categorical(logits=p.unflatten(-1, (2, 3))), 1)),
    ):
        with subtests.test(name):
            own = EVERY[name]
            wrapped = FromTorch(space, own.num_parameters, build)
            assert (wrapped.num_parameters, wrapped.num_noise, wrapped.num_categories) == (own.num_parameters, 0, 0)
            dtype = torch.float64 if name == "gaussian" else torch.int64
            parameters = random_parameters(own, dtype=torch.float64 if name == "gaussian" else torch.float32)
            torch.manual_seed(5)
            actions = draw(wrapped, parameters)
            torch.manual_seed(5)
            assert torch.equal(actions, build(parameters).sample().to(dtype))
            assert actions.dtype == wrapped.mode(parameters).dtype == dtype
            torch.testing.assert_close(wrapped.log_prob(parameters, actions), own.log_prob(parameters, actions))
            torch.testing.assert_close(wrapped.entropy(parameters), own.entropy(parameters))
            torch.testing.assert_close(wrapped.mode(parameters), own.mode(parameters))
            taken = wrapped.to_env(actions)
            assert np.array_equal(taken, own.to_env(actions))
            assert torch.equal(wrapped.from_env(taken), own.from_env(taken))
            pair = Composite([wrapped, own])
            both = torch.cat([parameters, parameters], dim=1)
            taken = draw(pair, both)
            halves = [half.to(dtype).reshape(actions.shape) for half in taken.chunk(2, dim=1)]
            expected = own.log_prob(parameters, halves[0]) + own.log_prob(parameters, halves[1])
            torch.testing.assert_close(pair.log_prob(both, taken), expected)


def test_from_torch_scores_the_exact_category_in_bfloat16() -> None:
    wrapped = FromTorch(spaces.Discrete(300), 300, lambda p: oracle.Categorical(logits=p.float()))
    parameters = torch.full((1, 300), -9.0, dtype=torch.bfloat16)
    parameters[0, 257] = 9.0  # bfloat16 rounds 257 to 256
    assert float(wrapped.log_prob(parameters, torch.tensor([257]))) > -0.01


def test_from_torch_takes_joint_distributions_and_lacks_a_missing_entropy_or_mode() -> None:
    joint = FromTorch(BOX, 2, lambda p: oracle.MultivariateNormal(p, torch.tensor([[2.0, 0.5], [0.5, 1.0]])))
    values = np.array([[0.3, -0.2], [1.0, 2.0]])
    log_probs = joint.log_prob(torch.zeros(2, 2), torch.from_numpy(values).float())
    expected = stats.multivariate_normal([0, 0], [[2, 0.5], [0.5, 1]]).logpdf(values)
    torch.testing.assert_close(log_probs.double(), torch.from_numpy(expected), rtol=1e-6, atol=1e-6)
    squashed = FromTorch(BOX, 4, lambda p: box_oracle("squashed", p))
    assert squashed.entropy(torch.zeros(1, 4)) is None
    with pytest.raises(ConfigError, match="TransformedDistribution has no mode"):
        squashed.mode(torch.zeros(1, 4))


def test_from_torch_refuses_distributions_of_wrong_shapes() -> None:
    transposed = FromTorch(BOX, 4, lambda p: oracle.Normal(p[:, :2].T, 1.0))
    with pytest.raises(ContractError, match=r"actions must be \[n, \*action\] = \['n', 2\]; .* gave \[2, 3\]"):
        draw(transposed, torch.zeros(3, 4))
    shared = FromTorch(BOX, 4, lambda p: oracle.MultivariateNormal(p[0, :2], torch.eye(2)))
    with pytest.raises(ContractError, match=r"must have n = 3 rows; .* gave \[\]"):
        shared.entropy(torch.zeros(3, 4))
    with pytest.raises(ContractError, match="FromTorch has no categories"):
        shared.mode(torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(ConfigError, match="num_parameters must be an integer >= 1; got int 0"):
        FromTorch(BOX, 0, lambda p: oracle.Normal(p, 1.0))


# --- composite distributions


def test_large_integer_actions_are_exact() -> None:
    distribution = distribution_for(spaces.Tuple([spaces.Discrete(100_000, start=2**40), spaces.Box(0, 1, (1,))]))
    parameters = torch.zeros(1, 100_002)
    parameters[0, 99_999] = 100.0
    assert distribution.mode(parameters)[0, 0] == 99_999
    assert distribution.to_env(distribution.mode(parameters))[0][0] == 2**40 + 99_999


# --- properties of every distribution


def test_log_probs_and_entropies_agree_with_torch(subtests: pytest.Subtests) -> None:
    """In the parameters' dtype, and in float32 for bfloat16 parameters."""
    for name, distribution in EVERY.items():
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            scored_in = torch.float64 if dtype == torch.float64 else torch.float32
            tolerance = ROUNDING[scored_in]
            with subtests.test(name=name, dtype=dtype):
                # half the scale, so that no tanh is so near 1 that torch returns infinity
                parameters = (0.5 * random_parameters(distribution)).to(dtype)
                actions = draw(distribution, parameters)
                is_whole = distribution.action_dtype == torch.int64
                assert actions.dtype == distribution.mode(parameters).dtype == (torch.int64 if is_whole else scored_in)
                assert actions.shape == (40, *distribution.action_shape)
                log_probs = distribution.log_prob(parameters, actions)
                assert log_probs.dtype == scored_in
                expected = expected_log_prob(name, parameters.double(), actions)
                torch.testing.assert_close(log_probs.double(), expected, rtol=tolerance, atol=tolerance)
                entropy = distribution.entropy(6 * parameters)
                if name == "squashed":
                    assert entropy is None
                else:
                    assert entropy.dtype == scored_in
                    expected = expected_entropy(name, (6 * parameters).double())
                    torch.testing.assert_close(entropy.double(), expected, rtol=tolerance, atol=tolerance)
    assert distribution_for(NESTED["arm"], "squashed").entropy(torch.zeros(1, 9)) is None  # a part has no closed form


def test_gradients_agree_with_finite_differences(subtests: pytest.Subtests) -> None:
    for name, distribution in EVERY.items():
        for allowed in (None, random_mask(distribution, 5)) if name in MASKED else (None,):
            with subtests.test(name=name, masked=allowed is not None):
                parameters = random_parameters(distribution, 5).requires_grad_()
                actions = draw(distribution, parameters.detach(), allowed)

                def scored(p: torch.Tensor, d=distribution, a=actions, m=allowed) -> tuple[torch.Tensor, ...]:
                    entropy = d.entropy(p, m)
                    return (d.log_prob(p, a, m), *(() if entropy is None else (entropy,)))

                assert torch.autograd.gradcheck(scored, (parameters,))


def test_a_sample_depends_only_on_its_own_row_of_noise(subtests: pytest.Subtests) -> None:
    for name, distribution in EVERY.items():
        with subtests.test(name=name):
            parameters = random_parameters(distribution, 12, torch.float32)
            noise, again, other = (
                torch.from_numpy(distribution.noise(np.random.default_rng(seed), 12)) for seed in (3, 3, 4)
            )
            assert torch.equal(noise, again)
            assert not torch.isclose(noise, other).any()
            assert len(noise.unique(dim=0)) == 12
            state = torch.get_rng_state()
            actions = distribution.sample(parameters, noise)
            assert torch.equal(distribution.sample(parameters, noise), actions)
            assert torch.equal(torch.get_rng_state(), state)
            order = torch.randperm(12)
            assert torch.equal(distribution.sample(parameters[order], noise[order]), actions[order])
            for row in range(12):
                own = slice(row, row + 1)
                assert torch.equal(distribution.sample(parameters[own], noise[own]), actions[own])
            assert not torch.equal(distribution.sample(parameters, other), actions)


def test_results_are_on_the_device_of_the_parameters(subtests: pytest.Subtests) -> None:
    """The device `meta` computes shapes only. As any other device, it refuses to mix its tensors with the CPU's."""
    for name, distribution in EVERY.items():
        with subtests.test(name=name):
            parameters = random_parameters(distribution).to("meta")
            actions = distribution.mode(parameters)
            entropy = distribution.entropy(parameters)
            results = [actions, distribution.log_prob(parameters, actions), parameters if entropy is None else entropy]
            assert [(result.device.type, len(result)) for result in results] == [("meta", 40)] * 3


# Masks


def test_masked_logits_have_no_influence(subtests: pytest.Subtests) -> None:
    """Infinity and NaN in masked logits change nothing, and their gradient is exactly 0."""
    for name in MASKED:
        with subtests.test(name=name):
            distribution = EVERY[name]
            allowed, columns = random_mask(distribution, 30), logit_columns(distribution)
            parameters = random_parameters(distribution, 30).requires_grad_()
            actions = draw(distribution, parameters.detach(), allowed)
            entropy = distribution.entropy(parameters, allowed)
            log_probs = distribution.log_prob(parameters, actions, allowed)
            (gradient,) = torch.autograd.grad((entropy.square() + log_probs.square()).sum(), parameters)
            assert (gradient[:, columns][~allowed] == 0.0).all()
            assert gradient.isfinite().all()
            for poison in (1e30, torch.inf, torch.nan):
                poisoned = parameters.detach().clone()
                poisoned[:, columns] = poisoned[:, columns].masked_fill(~allowed, poison)
                assert torch.equal(draw(distribution, poisoned, allowed), actions)
                assert torch.equal(distribution.mode(poisoned, allowed), distribution.mode(parameters, allowed))
                assert torch.equal(distribution.log_prob(poisoned, actions, allowed), log_probs)
                assert torch.equal(distribution.entropy(poisoned, allowed), entropy)


def all_allowed_but(width: int, row: int, columns: slice) -> torch.Tensor:
    allowed = torch.ones(4, width, dtype=torch.bool)
    allowed[row, columns] = False
    return allowed


def test_masks_that_break_the_contract_are_refused_in_every_call(subtests: pytest.Subtests) -> None:
    pair = distribution_for(spaces.Tuple([BOX, BOX]))
    cases = [
        (
            EVERY["discrete"],
            all_allowed_but(5, 2, slice(0, 5)),
            "Categorical: every row .* an action; row 2 allows none",
        ),
        (EVERY["ragged"], all_allowed_but(10, 3, slice(5, 9)), "row 3 allows none of variable 2"),
        (EVERY["even"], all_allowed_but(6, 1, slice(3, 6)), "row 1 allows none of variable 1"),
        (EVERY["nested"], all_allowed_but(8, 0, slice(5, 8)), "row 0 allows none"),  # wheels 2 + 3 | grip 3
    ]
    for name, width in (("discrete", 5), ("ragged", 10), ("nested", 8)):
        required = rf"the mask must be bool \[n, K\] = \[4, {width}\], True for allowed categories"
        cases.append((EVERY[name], torch.ones(4, width + 1, dtype=torch.bool), required))
        cases.append((EVERY[name], torch.ones(4, width, dtype=torch.int64), rf"got int64 \[4, {width}\]"))
    without_categories = (*(EVERY[name] for name in ("bits", "gaussian", "squashed", "beta")), pair)
    wide = torch.ones(4, 2, dtype=torch.bool)
    cases += [(each, wide, "has no categories that a mask could exclude") for each in without_categories]
    for distribution, allowed, message in cases:
        parameters = random_parameters(distribution, 4, torch.float32)
        noise = torch.from_numpy(distribution.noise(np.random.default_rng(0), 4))
        given = {"sample": (noise,), "log_prob": (distribution.sample(parameters, noise),)}
        for call in ("sample", "mode", "log_prob", "entropy"):
            with (
                subtests.test(call=call, distribution=type(distribution).__name__, message=message),
                pytest.raises(ContractError, match=message),
            ):
                getattr(distribution, call)(parameters, *given.get(call, ()), allowed)


# To the environment and back


def flat(space: spaces.Space, action: object) -> np.ndarray:
    return np.asarray(spaces.flatten(space, action), dtype=np.float64)


def test_actions_survive_the_round_trip_through_the_environments_format(subtests: pytest.Subtests) -> None:
    for space in (
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
    ):
        with subtests.test(space=str(space)):
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


def test_to_env_gives_hand_worked_actions_in_the_environments_format() -> None:
    assert EVERY["discrete"].to_env(torch.tensor([0, 4])).tolist() == [-3, 1]
    assert EVERY["ragged"].to_env(torch.tensor([[2, 1, 3, 0]])).tolist() == [[[3, 1], [1, 7]]]
    assert EVERY["bits"].to_env(torch.tensor([[1, 0, 0, 1]])).tolist() == [[[1, 0], [0, 1]]]
    taken = EVERY["gaussian"].to_env(torch.tensor([[-9.0, 0.6], [9.0, 9.0]])).tolist()
    assert taken == [[-2.0, pytest.approx(0.6)], [1.0, 0.75]]
    (taken,) = EVERY["nested"].to_env(torch.tensor([[0.5, 0.625, 1, 2, 0, 1, 0, 33.0, -4.0]]))
    assert list(taken) == ["arm", "gripper", "speed"]
    assert taken["arm"]["joints"].tolist() == [0.5, 0.625]
    assert taken["arm"]["wheels"].tolist() == [1, 2]
    assert taken["gripper"][0] == 1
    assert taken["gripper"][1].tolist() == [1, 0]
    assert taken["speed"].tolist() == [[33.0, -4.0]]


def test_actions_outside_the_space_are_refused(subtests: pytest.Subtests) -> None:
    pair = distribution_for(spaces.Tuple([DISCRETE, DISCRETE]))
    for distribution, actions, message in (
        (EVERY["discrete"], [0, 2], "action 1 is not in the space.* at least 0 and below 5; got 5"),
        (EVERY["discrete"], [-4, 0], "action 0 is not in the space.* at least 0 and below 5; got -1"),
        (EVERY["ragged"], np.array([[[3, 2], [1, 7]]]), "action 0 is not in the space"),
        (EVERY["bits"], np.full((1, 2, 2), 2), "at least 0 and below 2"),
        (EVERY["discrete"], [0.0, 1.0], r"Categorical.from_env needs \[n, \*shape\] = \['n'\]"),
        (EVERY["gaussian"], np.zeros((4, 3), np.float32), r"\['n', 2\] of the space's dtype; got float32 \[4, 3\]"),
        (EVERY["nested"], [{"arm": 0}], r"needs exactly the parts \['arm', 'gripper', 'speed'\]; action 0 has"),
        (pair, [(0, 0), (0,)], r"needs exactly the parts \[0, 1\]; action 1 has \[0\]"),
    ):
        with subtests.test(message=message), pytest.raises(ContractError, match=message):
            distribution.from_env(actions)


# --- numbers


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


def test_samples_have_the_distribution_of_torch_and_scipy(subtests: pytest.Subtests) -> None:
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
            if name == "beta":
                alpha, beta = 1 + np.logaddexp(0, np.reshape(numbers, (2, 2)))
                fractions = stats.beta(alpha, beta, loc=LOW, scale=HIGH - LOW).cdf(drawn)
            else:
                fractions = box_oracle(name, parameters.double()).cdf(torch.from_numpy(drawn)).numpy()
            for d in range(2):
                assert stats.kstest(fractions[:, d], "uniform").pvalue > 1e-3
            of_dimensions = stats.spearmanr(drawn[:, 0], drawn[:, 1]).statistic  # dimensions are independent
            of_rows = stats.spearmanr(drawn[1:, 0], drawn[:-1, 0]).statistic  # rows, too
            assert max(abs(of_dimensions), abs(of_rows)) < 4 / math.sqrt(num_draws)


def test_modes_equal_hand_worked_actions() -> None:
    assert EVERY["discrete"].mode(torch.tensor([[0.0, 2.0, 1.0, 2.0, -1.0]])).tolist() == [1]
    logits = torch.tensor([[0.0, 2.0, 1.0, 3.0, 1.0, 0.0, 0.0, 0.0, 9.0, -5.0]])
    assert EVERY["ragged"].mode(logits).tolist() == [[1, 0, 3, 0]]
    assert EVERY["bits"].mode(torch.tensor([[0.1, -0.1, 5.0, 0.0]])).tolist() == [[1, 0, 1, 0]]
    joints, wheels, grip = [0.0, 0.5, 3.0, -1.0], [0.1, 0.2, 0.5, 0.3, 0.4], [1.0, 3.0, 2.0]
    nested = torch.tensor([[*joints, *wheels, *grip, -0.1, 0.1, 6.0, 7.0, 0.0, 0.0]])
    assert EVERY["nested"].mode(nested).tolist() == [[-0.5, 0.6875, 1, 0, 1, 0, 1, 6.0, 7.0]]
    parameters = torch.tensor([joints])
    # the box is [-2, 1] x [0.5, 0.75]: -0.5 + 1.5 * 0 and 0.625 + 0.125 * 0.5
    assert EVERY["gaussian"].mode(parameters).tolist() == [[-0.5, 0.6875]]
    middle, half = (LOW + HIGH) / 2, (HIGH - LOW) / 2
    expected = torch.from_numpy(middle + half * np.tanh([0.0, 0.5])).float().unsqueeze(0)
    torch.testing.assert_close(EVERY["squashed"].mode(parameters), expected)
    flat = torch.full((1, 4), -200.0)  # softplus is 0 in float32: alpha = beta = 1
    torch.testing.assert_close(EVERY["beta"].mode(flat), torch.from_numpy(middle).unsqueeze(0))
    one, three = math.log(math.e - 1), math.log(math.e**3 - 1)  # alpha = 1 + 1, beta = 1 + 3: x = 1 / (1 + 3)
    quarter = torch.from_numpy(0.75 * LOW + 0.25 * HIGH).unsqueeze(0)
    torch.testing.assert_close(EVERY["beta"].mode(torch.tensor([[one, one, three, three]])), quarter)
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


def test_frequencies_of_samples_are_the_probabilities(subtests: pytest.Subtests) -> None:
    """Chi-square of 20,000 samples against exp(log_prob) of all outcomes."""
    num_draws = 20_000
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
            distribution, parameters = EVERY[name], random_parameters(EVERY[name], 1, torch.float32)
            of_draws, of_outcomes = (
                None if allowed is None else allowed.expand(count, -1) for count in (num_draws, len(outcomes))
            )
            drawn = draw(distribution, parameters.expand(num_draws, -1), of_draws).reshape(num_draws, -1)
            logits = parameters.double().expand(len(outcomes), -1)
            probs = distribution.log_prob(logits, outcomes, of_outcomes).exp()
            assert float(probs.sum()) == pytest.approx(1.0, abs=1e-12)
            counts = (drawn.unsqueeze(1) == outcomes.reshape(1, len(outcomes), -1)).all(-1).sum(0)
            assert int(counts.sum()) == num_draws
            possible = probs > 0
            assert not counts[~possible].any()
            assert stats.chisquare(counts[possible], probs[possible] * num_draws).pvalue > 1e-3


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

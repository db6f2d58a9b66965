"""Action distributions: the choice for a space, distributions of torch, and properties that all of them have."""

from collections.abc import Callable

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
from tests.support.control_distributions import (
    BITS,
    BOX,
    DISCRETE,
    EVEN,
    EVERY,
    LOW,
    MASKED,
    NESTED,
    RAGGED,
    ROUNDING,
    box_oracle,
    draw,
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


def test_from_torch_agrees_with_the_gaussian() -> None:
    def build(parameters: torch.Tensor) -> oracle.Distribution:
        return box_oracle("gaussian", parameters)

    wrapped, own = FromTorch(BOX, 4, build), EVERY["gaussian"]
    parameters = random_parameters(own)
    actions = draw(own, parameters)
    torch.testing.assert_close(wrapped.log_prob(parameters, actions), own.log_prob(parameters, actions))
    torch.testing.assert_close(wrapped.entropy(parameters), own.entropy(parameters))
    torch.testing.assert_close(wrapped.mode(parameters), own.mode(parameters))
    assert np.array_equal(wrapped.to_env(actions), own.to_env(actions))
    assert torch.equal(wrapped.from_env(LOW[None]), own.from_env(LOW[None]))
    assert (wrapped.num_parameters, wrapped.num_noise, wrapped.num_categories) == (4, 0, 0)
    torch.manual_seed(5)
    sampled = draw(wrapped, parameters)
    torch.manual_seed(5)
    assert torch.equal(sampled, build(parameters).sample())


def test_from_torch_agrees_with_the_distributions_of_integers(subtests: pytest.Subtests) -> None:
    cases: list[tuple[spaces.Space, int, Callable[[torch.Tensor], oracle.Distribution]]] = [
        (DISCRETE, 5, lambda p: oracle.Categorical(logits=p)),
        (BITS, 4, lambda p: oracle.Bernoulli(logits=p)),
        (EVEN, 6, lambda p: oracle.Independent(oracle.Categorical(logits=p.unflatten(-1, (2, 3))), 1)),
    ]
    for space, num_parameters, build in cases:
        with subtests.test(space=str(space)):
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
            halves = [half.long().reshape(actions.shape) for half in taken.chunk(2, dim=1)]
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


def test_the_entropy_is_the_sum_over_the_parts() -> None:
    nested = EVERY["nested"]
    parameters = random_parameters(nested)
    parts = zip(nested.parts, parameters.split([9, 5, 4], -1), strict=True)
    torch.testing.assert_close(nested.entropy(parameters), sum(part.entropy(own) for part, own in parts))
    assert distribution_for(NESTED["arm"], "squashed").entropy(torch.zeros(1, 9)) is None  # a part has no closed form


def test_large_integer_actions_are_exact() -> None:
    distribution = distribution_for(spaces.Tuple([spaces.Discrete(100_000, start=2**40), spaces.Box(0, 1, (1,))]))
    parameters = torch.zeros(1, 100_002)
    parameters[0, 99_999] = 100.0
    assert distribution.mode(parameters)[0, 0] == 99_999
    assert distribution.to_env(distribution.mode(parameters))[0][0] == 2**40 + 99_999


def test_a_composite_of_boxes_refuses_masks() -> None:
    boxes = distribution_for(spaces.Tuple([BOX, BOX]))
    with pytest.raises(ContractError, match="Composite has no categories that a mask could exclude"):
        boxes.mode(torch.zeros(4, 8), torch.ones(4, 2, dtype=torch.bool))


# --- properties of every distribution


def test_log_prob_agrees_with_torch(subtests: pytest.Subtests) -> None:
    """In the parameters' dtype, and in float32 for bfloat16 parameters."""
    for name, distribution in EVERY.items():
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            scored_in = torch.float64 if dtype == torch.float64 else torch.float32
            with subtests.test(name=name, dtype=dtype):
                # half the scale, so that no tanh is so near 1 that torch returns infinity
                parameters = (0.5 * random_parameters(distribution)).to(dtype)
                actions = draw(distribution, parameters)
                is_whole = distribution.action_dtype == torch.int64
                assert actions.dtype == distribution.mode(parameters).dtype == (torch.int64 if is_whole else scored_in)
                assert actions.shape == (40, *distribution.action_shape)
                log_probs = distribution.log_prob(parameters, actions)
                assert log_probs.dtype == scored_in
                expected = expected_log_prob(name, parameters.double(), actions if is_whole else actions.double())
                tolerance = ROUNDING[scored_in]
                torch.testing.assert_close(log_probs.double(), expected, rtol=tolerance, atol=tolerance)


def test_gradients_agree_with_finite_differences(subtests: pytest.Subtests) -> None:
    for name, distribution in EVERY.items():
        for allowed in (None, random_mask(distribution, 5)) if name in MASKED else (None,):
            with subtests.test(name=name, masked=allowed is not None):
                parameters = random_parameters(distribution, 5).requires_grad_()
                actions = draw(distribution, parameters.detach(), allowed)

                def log_prob(p: torch.Tensor, d=distribution, a=actions, m=allowed) -> torch.Tensor:
                    return d.log_prob(p, a, m)

                def entropy(p: torch.Tensor, d=distribution, m=allowed) -> torch.Tensor:
                    return d.entropy(p, m)

                assert torch.autograd.gradcheck(log_prob, (parameters,))
                if name != "squashed":
                    assert torch.autograd.gradcheck(entropy, (parameters,))


def test_a_sample_depends_only_on_its_own_row(subtests: pytest.Subtests) -> None:
    for name, distribution in EVERY.items():
        with subtests.test(name=name):
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


def test_noise_is_drawn_from_the_generator(subtests: pytest.Subtests) -> None:
    for name, distribution in EVERY.items():
        with subtests.test(name=name):
            first, again, other = (distribution.noise(np.random.default_rng(seed), 3) for seed in (1, 1, 2))
            assert np.array_equal(first, again)
            assert not np.isclose(first, other).any()
            assert len({row.tobytes() for row in first}) == 3


def test_no_sample_is_more_likely_than_the_mode(subtests: pytest.Subtests) -> None:
    for name in ("discrete", "ragged", "bits", "gaussian", "beta", "nested"):
        with subtests.test(name=name):
            distribution = EVERY[name]
            parameters = random_parameters(distribution, 2_000)
            sampled, best = draw(distribution, parameters), distribution.mode(parameters)
            difference = distribution.log_prob(parameters, best) - distribution.log_prob(parameters, sampled)
            assert difference.min() > -1e-9
            assert difference.max() > 1.0


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


def test_masked_categories_are_never_taken(subtests: pytest.Subtests) -> None:
    for name in MASKED:
        with subtests.test(name=name):
            distribution = EVERY[name]
            parameters = random_parameters(distribution, 5_000, torch.float32)
            allowed = random_mask(distribution, 5_000)
            for actions in (draw(distribution, parameters, allowed), distribution.mode(parameters, allowed)):
                assert distribution.log_prob(parameters, actions, allowed).isfinite().all()
            unmasked = draw(distribution, parameters)
            assert distribution.log_prob(parameters, unmasked, allowed).isneginf().any()


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


def use_mask(distribution: ActionDistribution, call: str, allowed: torch.Tensor) -> None:
    parameters = random_parameters(distribution, 4, torch.float32)
    noise = torch.from_numpy(distribution.noise(np.random.default_rng(0), 4))
    given = {"sample": (noise,), "log_prob": (distribution.sample(parameters, noise),)}
    getattr(distribution, call)(parameters, *given.get(call, ()), allowed)


def all_allowed_but(width: int, row: int, columns: slice) -> torch.Tensor:
    allowed = torch.ones(4, width, dtype=torch.bool)
    allowed[row, columns] = False
    return allowed


def test_masks_that_break_the_contract_are_refused_in_every_call(subtests: pytest.Subtests) -> None:
    cases = [
        ("discrete", all_allowed_but(5, 2, slice(0, 5)), "Categorical: every row .* an action; row 2 allows none"),
        ("ragged", all_allowed_but(10, 3, slice(5, 9)), "row 3 allows none of variable 2"),
        ("even", all_allowed_but(6, 1, slice(3, 6)), "row 1 allows none of variable 1"),
        ("nested", all_allowed_but(8, 0, slice(5, 8)), "row 0 allows none"),  # wheels 2 + 3 | grip 3
    ]
    for name, width in (("discrete", 5), ("ragged", 10), ("nested", 8)):
        required = rf"the mask must be bool \[n, K\] = \[4, {width}\], True for allowed categories"
        cases.append((name, torch.ones(4, width + 1, dtype=torch.bool), required))
        cases.append((name, torch.ones(4, width, dtype=torch.int64), rf"got int64 \[4, {width}\]"))
    without_categories = "has no categories that a mask could exclude"
    boxes_and_bits = ("bits", "gaussian", "squashed", "beta")
    cases += [(name, torch.ones(4, 2, dtype=torch.bool), without_categories) for name in boxes_and_bits]
    for call in ("sample", "mode", "log_prob", "entropy"):
        for name, allowed, message in cases:
            with subtests.test(call=call, name=name, message=message), pytest.raises(ContractError, match=message):
                use_mask(EVERY[name], call, allowed)


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

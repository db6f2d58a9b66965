"""`distribution_for` chooses the distribution of a space, and `FromTorch` wraps a distribution of torch."""

from collections.abc import Callable

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
    LOW,
    box_oracle,
    draw,
    random_parameters,
)


def test_the_distribution_and_its_sizes_follow_from_the_space_and_the_kind() -> None:
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


def test_unsupported_spaces_and_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"MultiBinary, Box, or a Dict or Tuple of these; got Text"):
        distribution_for(spaces.Dict(a=DISCRETE, b=spaces.Text(3)))
    with pytest.raises(ConfigError, match="one of auto, gaussian, squashed, beta; got 'normal'"):
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

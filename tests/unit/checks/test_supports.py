"""Right policies are not accused, whatever the support of their distribution is, and wrong ones on these supports are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D

from grpo.checks import CheckReport, check_policy
from tests.support.objective_inputs import as_users_run_it

Make = Callable[[Tensor], D.Distribution]


class Drawn(nn.Module):
    """A policy in three lines: it samples from a distribution, and scores with the distribution's `log_prob`."""

    def __init__(self, make: Make, *start: float, sampler: Make | None = None) -> None:
        super().__init__()
        self.raw, self.make, self.sampler = nn.Parameter(torch.tensor(start)), make, sampler or make

    @torch.no_grad()
    def generate_actions(self, states, num_actions_per_state, **kwargs):
        return [list(self.sampler(self.raw).sample((num_actions_per_state,))) for _ in states]

    def get_log_probabilities(self, states, actions):
        return self.make(self.raw).log_prob(torch.stack(list(actions)))

    def get_parameters(self):
        return dict(self.named_parameters())


class Shaped(D.Distribution):
    """Samples of one distribution in another shape, with a log-prob of their own."""

    arg_constraints = {}  # noqa: RUF012 - as in torch

    def __init__(self, base: D.Distribution, forward: Callable[..., Tensor], log_prob: Callable[..., Tensor]) -> None:
        super().__init__(validate_args=False)
        self.base, self.forward, self.score = base, forward, log_prob

    def sample(self, sample_shape=()):
        return self.forward(self.base.sample(sample_shape))

    def log_prob(self, value):
        return self.score(self.base, value)


def independent(base: D.Distribution) -> D.Distribution:
    return D.Independent(base, 1)


def on_circle(w: Tensor) -> D.Distribution:
    """Unit vectors in the plane, by their angle."""
    angle = D.VonMises(w[0], w[1].exp())
    return Shaped(
        angle,
        lambda a: torch.stack([a.cos(), a.sin()], -1),
        lambda base, v: base.log_prob(torch.atan2(v[..., 1], v[..., 0])),
    )


def rotations(w: Tensor) -> D.Distribution:
    """Rotations of the space with the density 1 + tanh(w) trace(R) / 4: the first of 64 even ones that is not rejected."""
    slope = w[0].tanh() / 4
    density = lambda m: 1 + slope * m.diagonal(dim1=-2, dim2=-1).sum(-1)  # noqa: E731

    def matrices(noise: Tensor) -> Tensor:
        a, b, c, d = nn.functional.normalize(noise[..., :4], dim=-1).unbind(-1)
        entries = [
            *(1 - 2 * (c * c + d * d), 2 * (b * c - a * d), 2 * (b * d + a * c)),
            *(2 * (b * c + a * d), 1 - 2 * (b * b + d * d), 2 * (c * d - a * b)),
            *(2 * (b * d - a * c), 2 * (c * d + a * b), 1 - 2 * (b * b + c * c)),
        ]
        even = torch.stack(entries, -1).unflatten(-1, (3, 3))
        kept = torch.special.ndtr(noise[..., 4]) * (1 + 3 * slope.abs()) < density(even)
        return even[torch.arange(len(even)), kept.int().argmax(1)]

    return Shaped(independent(D.Normal(torch.zeros(64, 5), 1.0)), matrices, lambda _, m: density(m).log())


def ordered(w: Tensor, scale: float = 1.0) -> D.Distribution:
    """Four numbers in ascending order. The log-prob does not look whether they are."""
    base = independent(D.Normal(w[0].expand(4), scale * w[1].exp().expand(4)))
    return Shaped(base, lambda x: x.sort(-1).values, lambda base, x: base.log_prob(x) + torch.lgamma(torch.tensor(5.0)))


def matrix_of(w: Tensor) -> Tensor:
    return torch.tensor([[1.0, 0.3], [0.3, 0.8]]) * w[0].exp()


RIGHT: dict[str, tuple[Make, tuple[float, ...]]] = {
    "Bernoulli": (lambda w: D.Bernoulli(logits=w[0]), (0.3,)),
    "Beta": (lambda w: D.Beta(w[0].exp(), w[1].exp()), (0.7, 0.9)),
    "Beta in the plane": (lambda w: independent(D.Beta(w.exp(), 2.0)), (0.7, 0.9)),
    "Binomial": (lambda w: D.Binomial(5, logits=w[0]), (0.3,)),
    "Categorical": (lambda w: D.Categorical(logits=w), (0.3, 0.1, -0.4)),
    "Cauchy": (lambda w: D.Cauchy(w[0], w[1].exp()), (0.3, 0.1)),
    "Chi2": (lambda w: D.Chi2(w[0].exp()), (1.5,)),
    "ContinuousBernoulli": (lambda w: D.ContinuousBernoulli(logits=w[0]), (0.8,)),
    "Exponential": (lambda w: D.Exponential(w[0].exp()), (0.3,)),
    "FisherSnedecor": (lambda w: D.FisherSnedecor(w[0].exp(), w[1].exp()), (2.0, 2.5)),
    "Gamma": (lambda w: D.Gamma(w[0].exp(), w[1].exp()), (1.0, 0.2)),
    "Gamma in the plane": (lambda w: independent(D.Gamma(w.exp(), 1.0)), (1.0, 0.5)),
    "Geometric": (lambda w: D.Geometric(logits=w[0]), (0.3,)),
    "Gumbel": (lambda w: D.Gumbel(w[0], w[1].exp()), (0.3, 0.1)),
    "HalfNormal": (lambda w: D.HalfNormal(w[0].exp()), (0.3,)),
    "Kumaraswamy": (lambda w: D.Kumaraswamy(w[0].exp(), w[1].exp()), (0.7, 0.9)),
    "Laplace": (lambda w: D.Laplace(w[0], w[1].exp()), (0.3, 0.1)),
    "LogNormal": (lambda w: D.LogNormal(w[0], w[1].exp()), (0.3, -0.7)),
    "LowRankMultivariateNormal": (
        lambda w: D.LowRankMultivariateNormal(w, torch.ones(3, 1), torch.full((3,), 0.5)), (0.3, 0.1, -0.4),
    ),
    "MixtureSameFamily": (
        lambda w: D.MixtureSameFamily(D.Categorical(logits=w[:2]), D.Normal(w[2:], 0.5)), (0.3, 0.1, -1.0, 1.0),
    ),
    "MultivariateNormal": (lambda w: D.MultivariateNormal(w, matrix_of(w * 0)), (0.3, 0.1)),
    "NegativeBinomial": (lambda w: D.NegativeBinomial(3, logits=w[0]), (0.3,)),
    "Normal": (lambda w: D.Normal(w[0], w[1].exp()), (0.3, 0.1)),
    "OneHotCategorical": (lambda w: D.OneHotCategorical(logits=w), (0.3, 0.1, -0.4)),
    "Pareto": (lambda w: D.Pareto(1.0, w[0].exp()), (1.5,)),
    "Poisson": (lambda w: D.Poisson(w[0].exp()), (0.8,)),
    "RelaxedBernoulli": (lambda w: D.RelaxedBernoulli(torch.tensor(1.5), logits=w[0]), (0.3,)),
    "StudentT": (lambda w: D.StudentT(5.0, w[0], w[1].exp()), (0.3, 0.1)),
    "Uniform": (lambda w: D.Uniform(w[0], w[0] + w[1].exp()), (0.3, 0.1)),
    "Weibull": (lambda w: D.Weibull(w[0].exp(), w[1].exp()), (0.3, 0.5)),
    # supports that are no box
    "Dirichlet": (lambda w: D.Dirichlet(w.exp()), (0.7, 1.0, 1.2)),
    "Dirichlet without checks": (lambda w: D.Dirichlet(w.exp(), validate_args=False), (0.7, 1.0, 1.2, 0.9)),
    "LogisticNormal": (lambda w: D.LogisticNormal(w[:2], w[2:].exp()), (0.3, -0.2, 0.0, 0.1)),
    "RelaxedOneHotCategorical": (lambda w: D.RelaxedOneHotCategorical(torch.tensor(1.5), logits=w), (0.3, 0.1, -0.4)),
    "VonMises": (lambda w: D.VonMises(w[0], w[1].exp()), (0.5, 0.5)),
    "VonMises, narrow": (lambda w: D.VonMises(w[0], w[1].exp()), (2.5, 2.0)),
    "VonMises on a torus": (lambda w: independent(D.VonMises(w, 1.5)), (0.5, -2.0)),
    "unit vectors of the plane": (on_circle, (0.5, 0.5)),
    "rotations": (rotations, (0.5,)),
    "ordered vectors": (ordered, (0.5, 0.0)),
    "positive definite matrices": (lambda w: D.Wishart(torch.tensor(5.0), matrix_of(w)), (0.2,)),
    "correlations": (lambda w: D.LKJCholesky(3, w[0].exp()), (0.5,)),
}  # fmt: skip


NO_BOX = list(RIGHT)[list(RIGHT).index("Dirichlet") :]
NOT_TESTED = {"unit vectors of the plane", "rotations", "correlations"}
"""Supports on which lines leave the support. The report says so."""

WRONG: dict[str, tuple[Make, Make, tuple[float, ...]]] = {  # how it is scored, and how it is sampled
    "a simplex, hotter": (lambda w: D.Dirichlet(w.exp()), lambda w: D.Dirichlet(w.exp() / 2), (0.7, 1.0, 1.2)),
    "a simplex, hotter, without checks": (
        lambda w: D.Dirichlet(w.exp(), validate_args=False), lambda w: D.Dirichlet(w.exp() / 2), (0.7, 1.0, 1.2, 0.9),
    ),
    "a simplex, logits for another temperature": (
        lambda w: D.RelaxedOneHotCategorical(torch.tensor(1.5), logits=w),
        lambda w: D.RelaxedOneHotCategorical(torch.tensor(2.5), logits=w),
        (0.3, 0.1, -0.4),
    ),
    "angles, turned": (lambda w: D.VonMises(w[0], w[1].exp()), lambda w: D.VonMises(w[0] + 0.5, w[1].exp()), (0.5, 0.5)),
    "angles, not normalised": (
        lambda w: Shaped(D.VonMises(w[0], 1.5), lambda a: a, lambda base, a: base.log_prob(a) + 0.2),
        lambda w: D.VonMises(w[0], 1.5),
        (0.5,),
    ),
    "angles on a torus, wider": (
        lambda w: independent(D.VonMises(w, 1.5)), lambda w: independent(D.VonMises(w, 0.8)), (0.5, -2.0),
    ),
    "ordered, wider": (ordered, lambda w: ordered(w, 2.0), (0.5, 0.0)),
    "matrices of another size": (
        lambda w: D.Wishart(torch.tensor(6.0), matrix_of(w)),
        lambda w: D.Wishart(torch.tensor(6.0), 1.6 * matrix_of(w)),
        (0.2,),
    ),
}  # fmt: skip


def found(make: Make, start: tuple[float, ...], sampler: Make | None = None, samples: int = 512) -> CheckReport:
    with as_users_run_it():
        return check_policy(Drawn(make, *start, sampler=sampler), ["a", "b"], num_samples=samples)


@pytest.mark.filterwarnings("ignore:Singular sample detected")
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_policy_is_not_accused(name: str) -> None:
    report = found(*RIGHT[name])
    assert report.ok, str(report)
    assert report["generated samples"].status == ("skipped" if name in NOT_TESTED else "passed"), str(report)


@pytest.mark.filterwarnings("ignore:Singular sample detected")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_policy_on_such_a_support_is_found(name: str) -> None:
    make, sampler, start = WRONG[name]
    report = found(make, start, sampler, samples=1024)
    assert "generated samples" in {result.name for result in report.failures}, str(report)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Singular sample detected")
@pytest.mark.parametrize("name", NO_BOX)
def test_a_right_policy_is_not_accused_with_many_samples(name: str) -> None:
    report = found(*RIGHT[name], samples=4096)
    assert report.ok, str(report)


@pytest.mark.filterwarnings("ignore:Singular sample detected")
def test_a_right_policy_is_not_accused_where_a_library_has_switched_checks_of_arguments_off() -> None:
    D.Distribution.set_default_validate_args(False)  # as torchrl does when it is imported
    try:
        assert found(*RIGHT["correlations"]).ok
        assert D.Distribution._validate_args is False
    finally:
        D.Distribution.set_default_validate_args(True)

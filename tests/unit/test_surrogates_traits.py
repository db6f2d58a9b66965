"""What surrogates have in common: settings, traits, use outside the objective, and surrogates of one's own inside it."""

import math
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from torch import Tensor

from grpo import ConfigError, ObjectiveConfig, grpo_objective
from grpo._objective.ratios import RatioLevel
from grpo.surrogates import SURROGATES, ClipCov, KlCov, Steps, Surrogate, SurrogateTraits, traits_of
from tests.support.objective_inputs import double, loss_and_gradient, objective_inputs
from tests.support.policies import TablePolicy
from tests.support.trainers import trainer_of

LEVELS = get_args(RatioLevel)
AT_ANY_LEVEL = ["clip", "cispo", "sapo", "dro", "dppo", "kl_cov", "clip_cov"]


def test_a_function_without_attributes_has_the_default_traits():
    expected = SurrogateTraits(
        level="step", reads_rows=False, zero_advantage_is_inert=False, uses_sampler_weights=False,
        for_probabilities=False, stopped=None, select=None,
    )  # fmt: skip
    assert traits_of(lambda steps: steps.log_probs) == SurrogateTraits() == expected


# reads_rows, zero_advantage_is_inert, uses_sampler_weights, for_probabilities, has `stopped`, has `select`
TRAITS = {
    "clip": (False, True, False, False, True, False),
    "reinforce": (False, True, False, False, False, False),
    "cispo": (False, True, False, False, True, False),
    "sapo": (False, True, False, False, False, False),
    "gmpo": (True, True, False, False, True, False),
    "vespo": (True, True, True, False, False, False),
    "dro": (False, False, False, False, False, False),
    "dppo": (False, True, False, True, True, False),
    "kl_cov": (False, False, False, False, False, True),
    "clip_cov": (False, True, False, False, True, True),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_every_surrogate_has_its_tabulated_traits(name):
    assert name in TRAITS, "give the surrogate its line in TRAITS"
    surrogate = SURROGATES[name]()
    assert isinstance(surrogate, Surrogate)
    found = traits_of(surrogate)
    flags = found.reads_rows, found.zero_advantage_is_inert, found.uses_sampler_weights, found.for_probabilities
    assert (*flags, found.stopped is not None, found.select is not None) == TRAITS[name]
    assert found.level == "step"


@pytest.mark.parametrize("name", AT_ANY_LEVEL)
def test_surrogates_at_row_levels_read_rows(name):
    traits = [traits_of(SURROGATES[name](level=level)) for level in LEVELS]
    assert [trait.level for trait in traits] == list(LEVELS) == ["step", "row", "row_sum", "row_step", "none"]
    assert [trait.reads_rows for trait in traits] == [False, True, True, True, False]


def test_a_functions_attributes_become_its_traits():
    def loss(steps: Steps) -> Tensor:
        return steps.log_probs

    said = {
        "level": "row", "reads_rows": False, "zero_advantage_is_inert": True, "uses_sampler_weights": True,
        "for_probabilities": True, "stopped": lambda steps: (steps.mask, steps.mask), "select": lambda *_: None,
    }  # fmt: skip
    for name, value in said.items():
        setattr(loss, name, value)
    assert traits_of(loss) == SurrogateTraits(**said)


def test_an_unknown_level_is_an_error():
    def loss(steps: Steps) -> Tensor:
        return steps.log_probs

    loss.level = "word"
    for use in (traits_of, lambda surrogate: ObjectiveConfig(surrogate=surrogate)):
        with pytest.raises(ConfigError, match=r"level must be one of step, row, row_sum, row_step, none; got 'word'"):
            use(loss)


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
def test_a_surrogate_that_reads_a_selection_is_refused_without_one(name):
    message = r"reads the steps that its select\(\) chose, and there are none\. Evaluate it through grpo_objective"
    with pytest.raises(ConfigError, match=message):
        SURROGATES[name]()(Steps(objective_inputs(double([[-1.0, -2.0]]), double([1.0]))))


def test_covariance_surrogates_select_the_hand_worked_steps():
    # log pi: deviations 1 0 -1 from -2;  A: mean 1, deviations 2 -1 -1;  covariances 2 0 1
    log_probs, advantages = double([-1.0, -2.0, -3.0]), double([3.0, 0.0, 0.0])
    assert KlCov(fraction=0.67).select(log_probs, advantages, None).tolist() == [True, False, True]
    assert KlCov(fraction=0.66).select(log_probs, advantages, None).tolist() == [True, False, False]
    assert ClipCov(fraction=1.0, cov_low=0.5).select(log_probs, advantages, None).tolist() == [True, False, True]
    assert ClipCov(fraction=1.0, cov_high=2.0).select(log_probs, advantages, None).tolist() == [False] * 3
    assert ClipCov(fraction=1.0).select(log_probs, advantages, None).tolist() == [True, False, False]
    one = ClipCov(fraction=0.1, cov_low=-1.0)
    drawn = {
        tuple(one.select(log_probs, advantages, torch.Generator().manual_seed(seed)).tolist()) for seed in range(20)
    }
    assert drawn == {(True, False, False), (False, True, False), (False, False, True)}


# One step of ratio 4 and one of ratio 1/4, A = 1 and -1, weight 1, log pi = -1. Gradients with respect to log pi; that of
# -rho A is -rho A. SAPO's factor at 4 is sech^2(tau 3/2), at 1/4 sech^2(tau 3/8), with tau 1 or 1.05.
BEYOND = {
    "clip": {(4, 1): 0, (4, -1): 4, (0.25, 1): -0.25, (0.25, -1): 0},
    "clip_cov": {(4, 1): 0, (4, -1): 4, (0.25, 1): -0.25, (0.25, -1): 0},
    "reinforce": {(4, 1): -1, (4, -1): 1, (0.25, 1): -1, (0.25, -1): 1},
    "cispo": {(4, 1): -1.2, (4, -1): 1.2, (0.25, 1): -0.8, (0.25, -1): 0.8},
    "sapo": {
        (4, 1): -4 / math.cosh(1.5) ** 2, (4, -1): 4 / math.cosh(1.05 * 1.5) ** 2,
        (0.25, 1): -0.25 / math.cosh(0.375) ** 2, (0.25, -1): 0.25 / math.cosh(1.05 * 0.375) ** 2,
    },
    "gmpo": {(4, 1): 0, (4, -1): 4, (0.25, 1): -0.25, (0.25, -1): 0},
    "vespo": {
        (4, 1): -16 * math.exp(-9), (4, -1): 64 * math.exp(-6), (0.25, 1): -math.exp(2.25) / 16,
        (0.25, -1): math.exp(1.5) / 64,
    },
    # -A + .05 log rho
    "dro": {
        (4, 1): -1 + 0.05 * math.log(4), (4, -1): 1 + 0.05 * math.log(4), (0.25, 1): -1 - 0.05 * math.log(4),
        (0.25, -1): 1 - 0.05 * math.log(4),
    },
    # pi = .368: mu = .092 (moved by .276), or with ratio 1/2 mu = .736 (moved by -.368)
    "dppo": {(4, 1): 0, (4, -1): 4, (0.5, 1): -0.5, (0.5, -1): 0},
    "kl_cov": {(4, 1): -4 + 1, (4, -1): 4 + 1, (0.25, 1): -0.25 - 1, (0.25, -1): 0.25 - 1},
}  # fmt: skip


@pytest.mark.parametrize("name", SURROGATES)
def test_gradients_and_clip_counts_beyond_the_bounds_equal_the_table(name):
    assert name in BEYOND, "work the surrogate's gradient out by hand in BEYOND"
    for (ratio, advantage), expected in BEYOND[name].items():
        leaf, old, selected = double([[-1.0]]).requires_grad_(), double([[-1.0 - math.log(ratio)]]), name == "kl_cov"
        inputs = objective_inputs(leaf, double([advantage]), old_log_probs=old, selected=torch.tensor([[selected]]))
        output = grpo_objective(inputs, ObjectiveConfig(surrogate=name))
        output.loss.backward()
        assert leaf.grad.item() == pytest.approx(expected, rel=1e-12, abs=1e-15), (ratio, advantage)
        past = name in ("clip", "clip_cov", "cispo", "gmpo", "dppo") and (ratio > 1) == (advantage > 0)
        for end, count in {"_low": past and ratio < 1, "_high": past and ratio > 1, "": past}.items():
            assert output.metrics[f"clip_fraction{end}"].tolist() == [1, count, count], (ratio, advantage)


def half_square(steps: Steps) -> Tensor:
    """-A rho^2 / 2, with the gradient -A rho^2."""
    return -steps.advantages * steps.ratio().square() / 2


# One row of two steps, A = 2. Ratios 1.25, 1;  x = log 2, -log 2 to the reference;  entropy .3, .5;  weights .5, .25.
# From the sampler: old = .4, .25; behaviour .2, .5: u = 2, 1/2
OWN = {
    "log_probs": double([[0.5, 0.25]]).log(), "advantages": double([2.0]), "old_log_probs": double([[0.4, 0.25]]).log(),
    "ref_log_probs": double([[0.25, 0.5]]).log(), "behaviour_log_probs": double([[0.2, 0.5]]).log(),
    "entropy": double([[0.3, 0.5]]), "weights": double([[0.5, 0.25]]),
}  # fmt: skip
LOG2 = math.log(2)
K3 = (LOG2 - 0.5, 1 - LOG2)


def test_a_plain_function_is_a_surrogate_beside_all_other_terms():
    config = ObjectiveConfig(surrogate=half_square, sampler_correction="truncate", kl_coef=0.1, entropy_coef=0.01)
    output = grpo_objective(objective_inputs(**OWN), config)
    policy = -(0.5 * 2 * 1.25**2 + 0.25 * 0.5 * 1.0)
    kl, entropy = 0.1 * (0.5 * K3[0] + 0.25 * K3[1]), 0.01 * (0.15 + 0.125)
    assert output.loss.item() == pytest.approx(policy + kl - entropy, rel=1e-14)
    found = {name: moments.tolist() for name, moments in output.metrics.items()}
    none = [2, 0, 0]
    expected = {
        "policy_loss": [0, policy, 0], "kl_penalty": [0, kl, 0], "entropy_bonus": [0, entropy, 0],
        "total_loss": [0, policy + kl - entropy, 0], "ratio": [2, 2.25, 1 + 1.25**2], "sampler_ratio": [2, 2.5, 4.25],
        "kl": [2, 0.5, K3[0] ** 2 + K3[1] ** 2], "entropy": [2, 0.8, 0.34], "ratio_clamped_fraction": none,
        "clip_fraction": none, "clip_fraction_low": none, "clip_fraction_high": none,
    }  # fmt: skip
    assert found == {name: pytest.approx(values, rel=1e-13) for name, values in expected.items()}
    _, gradient = loss_and_gradient(config=config, **OWN)
    # -w u A rho^2 + .1 w (1 - exp(-x))
    assert gradient[0].tolist() == pytest.approx([-3.125 + 0.1 * 0.25, -0.25 - 0.1 * 0.25], rel=1e-13)


@dataclass(frozen=True)
class Picky:
    """A surrogate that uses every attribute: the row's ratio, its own sampler weights, bounds and a selection."""

    level = "row"
    uses_sampler_weights = True
    zero_advantage_is_inert = True

    def __call__(self, steps: Steps) -> Tensor:
        return -steps.advantages * steps.ratio(self.level) * steps.sampler_weights * (1 + steps.selected.double())

    def stopped(self, steps: Steps) -> tuple[Tensor, Tensor]:
        return steps.ratio("step") < 1.1, steps.ratio("step") > 1.1

    def select(self, log_probs: Tensor, advantages: Tensor, generator: torch.Generator | None) -> Tensor:
        return log_probs == log_probs.max()


def test_a_user_surrogate_is_treated_as_its_attributes_say():
    config = ObjectiveConfig(
        surrogate=Picky(), sampler_correction="truncate", kl_coef=1.0, kl_estimator="k3_weighted", entropy_coef=0.0
    )
    assert config.surrogate == Picky()
    metrics = grpo_objective(objective_inputs(**OWN), config).metrics
    rho = math.sqrt(1.25)
    # u once, from the surrogate itself; the first step is selected and counts twice
    assert metrics["policy_loss"][1].item() == pytest.approx(-2 * rho * (0.5 * 2 * 2 + 0.25 * 0.5), rel=1e-14)
    assert metrics["kl_penalty"][1].item() == pytest.approx(rho * (0.5 * K3[0] + 0.25 * K3[1]), rel=1e-14)
    assert metrics["ratio"].tolist() == pytest.approx([2, 2 * rho, 2 * 1.25], rel=1e-14)
    assert metrics["selected_fraction"].tolist() == [2, 1, 1]
    assert metrics["clip_fraction_low"].tolist() == metrics["clip_fraction_high"].tolist() == [2, 1, 1]
    assert metrics["clip_fraction"].tolist() == [2, 2, 2]


def test_one_loss_per_row_counts_at_each_of_its_steps():
    config = ObjectiveConfig(surrogate=lambda steps: -steps.advantages, kl_coef=0.0)
    assert grpo_objective(objective_inputs(**OWN), config).loss.item() == -2 * 0.75


def test_a_surrogate_for_probabilities_is_refused_for_densities():
    class Normal(TablePolicy):
        def generate_actions(self, states, num_actions_per_state, **kwargs):
            return [[0.5, -0.5] for _ in states]

        def get_log_probabilities(self, states, actions):
            normal = torch.distributions.Normal(self.logits[0, 0], 1 / math.sqrt(2 * math.pi))
            return normal.log_prob(double(actions))

    def step(surrogate):
        return trainer_of(Normal(), group_size=2, objective=ObjectiveConfig(surrogate=surrogate)).step(["a"])

    class ForProbabilities(Picky):
        for_probabilities = True

    assert step(half_square)["train/num_updates"] == 1
    with pytest.raises(ConfigError, match=r"real numbers, which have densities"):
        step(ForProbabilities())

"""How samples are compared with their log-probs: the tails of both statistics against scipy, and verdicts by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo import ActionScores
from grpo.checks.capabilities import check_entropy
from grpo.checks.probe import Draws
from grpo.checks.sampling import action_key, as_numbers, chi_square_p_value, judge_samples, kolmogorov_smirnov


@pytest.mark.parametrize(("statistic", "degrees"), [(0.5, 1), (10.0, 3), (80.0, 20), (500.0, 400)])
def test_the_chi_square_p_value_equals_scipys(statistic, degrees):
    stats = pytest.importorskip("scipy.stats")
    assert chi_square_p_value(statistic, degrees) == pytest.approx(stats.chi2.sf(statistic, degrees), rel=1e-9)


@pytest.mark.parametrize("power", [1.0, 1.05, 1.3])
def test_the_kolmogorov_smirnov_distance_and_p_value_equal_scipys(power):
    stats = pytest.importorskip("scipy.stats")
    uniforms = torch.rand(2000, dtype=torch.float64) ** power
    distance, p_value = kolmogorov_smirnov(uniforms)
    exact = stats.kstest(uniforms.numpy(), "uniform")
    assert distance == pytest.approx(exact.statistic, rel=1e-12)
    assert p_value == pytest.approx(exact.pvalue, rel=0.05)


def test_numbers_that_are_spread_evenly_have_the_least_distance():
    # the middles of ten equal parts are 1/20 away from the steps on either side
    distance, p_value = kolmogorov_smirnov((torch.arange(10, dtype=torch.float64) + 0.5) / 10)
    assert (distance, p_value) == (pytest.approx(0.05, rel=1e-12), 1.0)


def judged(actions, probabilities, score=None):
    log_probs = torch.tensor([probabilities[action] for action in actions], dtype=torch.float64).log()
    return judge_samples("Policy.act", actions, log_probs, score)


def test_verdicts_on_counts_equal_hand_worked_p_values():
    # 60 and 40 of 100 where 50 and 50 are expected: 100/50 + 100/50 = 4 with one degree of freedom: p = .0455
    verdict = judged(["a"] * 60 + ["b"] * 40, {"a": 0.5, "b": 0.5})
    assert verdict.status == "passed"
    assert verdict.message == "100 samples in 2 cells agree with exp(log_probs): chi-square p = 0.046."
    # 50, 10 and 40 where 50, 30 and 20 are expected: 0 + 400/30 + 400/20 = 100/3 with two degrees: p = exp(-50/3)
    verdict = judged(["b"] * 10 + ["a"] * 50 + ["c"] * 40, {"a": 0.5, "b": 0.3, "c": 0.2})
    assert verdict.status == "failed"
    assert "'c' is 40 of 100 samples, 20.0 expected (chi-square p = 5.8e-08 over 3 cells)" in verdict.message


def test_rare_and_unseen_actions_share_a_cell():
    # a: 50 expected. b and c: 5 each, and 40 unseen: the shared cell expects 50 and has 50
    verdict = judged(["a"] * 50 + ["b"] * 30 + ["c"] * 20, {"a": 0.5, "b": 0.05, "c": 0.05})
    assert verdict.message == "100 samples in 2 cells agree with exp(log_probs): chi-square p = 1."
    # 9 expected are too few for a cell of their own: they join b, the cell with fewer expected: 40 + 9 against 41 + 9
    verdict = judged(["a"] * 51 + ["b"] * 40 + ["c"] * 9, {"a": 0.5, "b": 0.41, "c": 0.09})
    assert verdict.message == "100 samples in 2 cells agree with exp(log_probs): chi-square p = 0.84."


def test_probabilities_that_sum_to_more_than_1_fail():
    verdict = judged(["a", "b"] * 50, {"a": 0.6, "b": 0.5})
    assert verdict.status == "failed"
    assert "those of the 2 sampled ones sum to 1.100" in verdict.message
    assert judged(["a", "b"] * 50, {"a": 0.51, "b": 0.5}).status == "passed"


def test_a_single_cell_is_skipped_unless_its_action_is_certain():
    certain = judged(["a"] * 50, {"a": 1.0})
    assert (certain.status, certain.message[:30]) == ("passed", "The only action has probabilit")
    rare = judged(["a", "a", "b", "b"] * 10, {"a": 0.01, "b": 0.01})
    assert (rare.status, rare.message[:30]) == ("skipped", "All 2 sampled actions are too ")


def test_actions_that_cannot_be_compared_are_skipped():
    assert judge_samples("Policy.act", [{1}, {2}], torch.zeros(2), None).message.startswith("Actions are neither")
    assert judged(["a", "b", "c"], dict.fromkeys("abc", 0.1)).message.startswith("3 of 3 sampled actions differ")
    numbers = judge_samples("Policy.act", [0.1, 0.2, 0.3], torch.zeros(3), None)
    assert (numbers.status, numbers.message[:30]) == ("skipped", "The sampler's density is known")
    same = torch.tensor([[1.0, 0.1], [1.0, 0.2], [1.0, 0.3]])
    verdict = judge_samples("Policy.act", same, torch.zeros(3), lambda actions: torch.zeros(len(actions)))
    assert (verdict.status, verdict.message[:30]) == ("skipped", "One of an action's numbers is ")


def test_a_density_that_is_too_large_by_half_fails():
    """Even numbers in [0, 1] with the log-density log 1.5.

    The 801 grid points over [-1, 2] are 3/800 apart. Those next to [0, 1] are -.0025 and 1.0025, and the two triangles between
    add 1.5 * .0025 to 1.5.
    """

    def score(actions):
        return torch.where(((actions >= 0) & (actions <= 1)).squeeze(1), math.log(1.5), -math.inf)

    samples = torch.linspace(0, 1, 400, dtype=torch.float64).unsqueeze(1)
    verdict = judge_samples("Policy.act", samples, score(samples), score)
    assert verdict.status == "failed"
    assert "it integrates to 1.504 over [-1, 2]" in verdict.message


def test_a_density_that_falls_between_the_points_of_the_grid_is_skipped():
    """The density is 1 at the samples, and 0 at every point of the lines through them."""
    samples = torch.randn(300, 2, dtype=torch.float64)
    drawn = {tuple(row) for row in samples.tolist()}

    def score(actions):
        return torch.tensor([0.0 if tuple(row) in drawn else -math.inf for row in actions.tolist()])

    verdict = judge_samples("Policy.act", samples, torch.zeros(300), score)
    assert (verdict.status, verdict.message) == ("skipped", "The density is too narrow to integrate on a grid.")


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(("rare", "status"), [(0.0073, "passed"), (0.03, "failed")])
def test_an_action_that_all_samples_miss_may_add_to_the_entropy(rare, status):
    """2,048 samples of an action of probability 1 - rare: the entropy is above -log p by .036, and by .105.

    An action of probability 15 / 2048 = .0073 is missed once in 3 million cases. It may add .0073 * (log 2048 + 5) = .092.
    """
    log_probs = torch.full((2048, 1), math.log1p(-rare), dtype=torch.float64)
    entropy = torch.full((2048, 1), -rare * math.log(rare) - (1 - rare) * math.log1p(-rare), dtype=torch.float64)
    scores = ActionScores(log_probs=log_probs, mask=torch.ones(2048, 1, dtype=torch.bool), entropy=entropy)
    draws = Draws(states=[None] * 2048, actions=[0] * 2048, sampled=None, scores=scores)
    probe = SimpleNamespace(scores=scores, num_samples=2048, drawn=draws, name="Policy")
    assert check_entropy(probe).status == status


def test_actions_are_equal_by_value():
    assert action_key(torch.tensor([[1, 2]])) == action_key(np.array([[1, 2]])) == ((1, 2), 1, 2)
    assert action_key(torch.tensor([[1, 2]])) != action_key(torch.tensor([1, 2]))
    assert action_key(["a", (1, torch.tensor(2))]) == action_key(("a", [1, torch.tensor(2)]))
    assert (action_key({"b": 1, "a": [2]}), action_key("a")) == (action_key({"a": (2,), "b": 1}), "a")
    assert action_key([{1}]) is action_key({"a": {1}}) is None


NUMBERS = [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(("actions", "expected"), [
    (torch.tensor(NUMBERS), NUMBERS), (np.array(NUMBERS), NUMBERS), ([*map(torch.tensor, NUMBERS)], NUMBERS),
    ([*map(np.array, NUMBERS)], NUMBERS), (NUMBERS, NUMBERS), ([*map(tuple, NUMBERS)], NUMBERS),
    ([1.0, 3.0], [[1.0], [3.0]]), ([np.float32(1.0), np.float32(3.0)], [[1.0], [3.0]]),
])  # fmt: skip
def test_numeric_actions_are_converted_to_numbers_and_back(actions, expected):
    values, rebuild = as_numbers(actions)
    assert (values.dtype, values.tolist()) == (torch.float64, expected)
    again = rebuild(values)
    assert (type(again), type(again[0])) == (type(actions), type(actions[0]))
    assert np.asarray(again[1]).tolist() == np.asarray(actions[1]).tolist()


@pytest.mark.parametrize(
    "actions",
    [
        *([1, 2], ["a"], [()], [(1.0, 2)], torch.tensor([1, 2]), torch.zeros(2, 0)),
        [torch.tensor([1.0]), torch.tensor([1.0, 2.0])],
        [torch.tensor([1.0]), np.array([1.0])],
    ],
)
def test_actions_that_are_no_numbers_of_one_shape_and_kind_are_not_converted(actions):
    assert as_numbers(actions) is None

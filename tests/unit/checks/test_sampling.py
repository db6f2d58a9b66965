"""How samples are compared with their log-probs: the tails of both statistics against scipy, and verdicts by hand."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo.checks import check_policy
from grpo.checks.capabilities import check_entropy
from grpo.checks.probe import Draws
from grpo.checks.sampling import action_key, as_numbers, chi_square_p_value, judge_samples, kolmogorov_smirnov
from grpo.checks.steps import judge_draws
from grpo.types import ActionScores
from tests.support.checked_policies import STATES, Table, table
from tests.support.objective_inputs import as_users_run_it


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


def test_a_distance_with_a_large_p_value_equals_the_series_by_hand():
    # the middles of 100 equal parts, moved together by 0.955: 1 - 0.955 * 0.995 = 0.049775 is missing at the end, and
    # x = (10 + 0.12 + 0.011) 0.049775 = 0.50427; 2 (exp(-0.50858) - exp(-2.0343) + exp(-4.5772) - exp(-8.137)) = 0.9611
    distance, p_value = kolmogorov_smirnov((torch.arange(100, dtype=torch.float64) + 0.5) / 100 * 0.955)
    assert (distance, p_value) == (pytest.approx(0.049775, rel=1e-9), pytest.approx(0.9611, abs=1e-4))


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


# How the steps of an action are compared with their log-probs, on distributions that can be written down


FIRST = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
SECOND = torch.tensor([[0.1, 0.6, 0.3], [0.4, 0.2, 0.4], [0.25, 0.25, 0.5]], dtype=torch.float64)


def pairs(num: int, first: torch.Tensor = FIRST, second: torch.Tensor = SECOND) -> torch.Tensor:
    """Pairs (a, b) with a ~ first and b ~ second[a], and a number of no meaning that makes them all different."""
    torch.manual_seed(0)
    a = torch.multinomial(first, num, replacement=True)
    return torch.stack([a, torch.multinomial(second[a], 1).squeeze(1), torch.arange(num)], 1)


def per_step(actions: torch.Tensor) -> ActionScores:
    """The third entry has one probability for each of a million values, so that only steps can be counted."""
    a, b, _ = actions.unbind(1)
    log_probs = torch.stack([FIRST[a].log(), SECOND[a, b].log(), torch.full((len(a),), 1e-6).double().log()], 1)
    return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool))


def judged_by_step(actions: torch.Tensor, score=per_step, known=True):
    scores = score(actions)
    with as_users_run_it():
        return judge_draws("Policy.act", actions, scores.log_probs, scores.mask, score if known else None)


def test_the_first_steps_are_counted_as_long_as_they_repeat() -> None:
    verdict = judged_by_step(pairs(2000), known=False)
    assert verdict.status == "passed"
    assert verdict.message.startswith("The first 2 steps: 2000 samples in 9 cells agree")
    wrong = judged_by_step(pairs(2000, first=torch.tensor([0.5, 0.2, 0.3])), known=False)
    assert wrong.status == "failed"
    assert "the first step must sample from exp(log_probs)" in wrong.message


def test_a_second_step_that_is_wrong_only_given_one_prefix_is_found() -> None:
    second = SECOND.clone()
    second[2] = torch.tensor([0.5, 0.25, 0.25])  # given the rarest first step
    verdict = judged_by_step(pairs(2000, second=second), known=False)
    assert verdict.status == "failed"
    assert "the first 2 steps" in verdict.message


def test_probabilities_of_a_step_that_sum_to_more_than_1_fail() -> None:
    def unnormalised(actions):
        scores = per_step(actions)
        return ActionScores(log_probs=scores.log_probs + torch.tensor([0.0, 0.2, 0.0]), mask=scores.mask)

    verdict = judged_by_step(pairs(2000), unnormalised)
    assert verdict.status == "failed"
    assert "probabilities" in verdict.message
    assert "sum to at most 1" in verdict.message


def test_entries_that_the_log_prob_does_not_depend_on_are_not_compared() -> None:
    def first_only(actions):
        scores = per_step(actions)
        return ActionScores(log_probs=scores.log_probs[:, :1], mask=scores.mask[:, :1])

    assert judged_by_step(pairs(2000), first_only).status == "skipped"


@pytest.mark.parametrize(("power", "status"), [(1.0, "passed"), (0.3, "failed")])
def test_permuted_pairs_with_one_log_prob_are_compared_given_the_other_entry(power, status):
    """Which of 40 values stand together: p(a, b) = c exp(s_a + s_b) for a < b, and 780 pairs, too rare to count."""
    every = torch.tensor(list(itertools.combinations(range(40), 2)))
    log_probs = torch.linspace(-2, 2, 40, dtype=torch.float64)[every].sum(1).log_softmax(0)
    table = torch.full((40, 40), -torch.inf, dtype=torch.float64)
    table[every[:, 0], every[:, 1]] = log_probs

    def score(actions):
        found = table[actions[:, 0], actions[:, 1]].unsqueeze(1)
        return ActionScores(log_probs=found, mask=torch.ones_like(found, dtype=torch.bool))

    torch.manual_seed(1)
    drawn = every[torch.multinomial((power * log_probs).softmax(0), 900, replacement=True)]
    assert judged_by_step(drawn, score).status == status


class Objects(Table):
    """Actions that cannot be looked into, and never repeat."""

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        return [[object() for _ in range(num_actions_per_state)] for _ in states]

    def get_log_probabilities(self, states, actions):
        return self.logits.log_softmax(0)[[id(action) % 4 for action in actions]]


@pytest.mark.parametrize(
    ("policy", "num_samples", "reason"),
    [(Objects(), 64, "64 of 64 sampled actions differ"), (Table(), 0, "num_samples=0.")],
)
def test_a_report_that_compared_no_samples_begins_with_not_checked(policy, num_samples, reason) -> None:
    header = " ".join(str(check_policy(policy, STATES, num_samples=num_samples)).split()).split(" passed methods")[0]
    for words in ("NOT CHECKED: whether samples come from exp(log_probs)", reason, "Try a small instance"):
        assert words in header


def test_samples_of_a_policy_that_fails_before_them_are_not_checked() -> None:
    report = check_policy(table(get_log_probabilities=lambda self, s, a: [0.0] * len(a)), STATES)
    assert "Needs 'independent rows'" in report.not_checked


@pytest.mark.parametrize("left_out", ["generated samples", "sampled samples"])
def test_samples_after_an_update_need_samples_before_it(left_out: str) -> None:
    report = check_policy(Table(), STATES, num_samples=256, skip=["generated samples", left_out])
    assert report["samples after an update"].message == "Left out by skip=."

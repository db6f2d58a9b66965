"""How the steps of an action are compared with their log-probs, on distributions that can be written down."""

import itertools

import pytest
import torch

from grpo.checks import check_policy
from grpo.checks.steps import judge_draws
from grpo.types import ActionScores
from tests.support.checked_policies import STATES, Table, table
from tests.support.objective_inputs import as_users_run_it

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


def judged(actions: torch.Tensor, score=per_step, known=True):
    scores = score(actions)
    with as_users_run_it():
        return judge_draws("Policy.act", actions, scores.log_probs, scores.mask, score if known else None)


def test_the_first_steps_are_counted_as_long_as_they_repeat() -> None:
    verdict = judged(pairs(2000), known=False)
    assert verdict.status == "passed"
    assert verdict.message.startswith("The first 2 steps: 2000 samples in 9 cells agree")
    wrong = judged(pairs(2000, first=torch.tensor([0.5, 0.2, 0.3])), known=False)
    assert wrong.status == "failed"
    assert "the first step must sample from exp(log_probs)" in wrong.message


def test_a_second_step_that_is_wrong_only_given_one_prefix_is_found() -> None:
    second = SECOND.clone()
    second[2] = torch.tensor([0.5, 0.25, 0.25])  # given the rarest first step
    verdict = judged(pairs(2000, second=second), known=False)
    assert verdict.status == "failed"
    assert "the first 2 steps" in verdict.message


def test_probabilities_of_a_step_that_sum_to_more_than_1_fail() -> None:
    def unnormalised(actions):
        scores = per_step(actions)
        return ActionScores(log_probs=scores.log_probs + torch.tensor([0.0, 0.2, 0.0]), mask=scores.mask)

    verdict = judged(pairs(2000), unnormalised)
    assert verdict.status == "failed"
    assert "probabilities" in verdict.message
    assert "sum to at most 1" in verdict.message


def test_entries_that_the_log_prob_does_not_depend_on_are_not_compared() -> None:
    def first_only(actions):
        scores = per_step(actions)
        return ActionScores(log_probs=scores.log_probs[:, :1], mask=scores.mask[:, :1])

    assert judged(pairs(2000), first_only).status == "skipped"


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
    assert judged(drawn, score).status == status


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


@pytest.mark.parametrize("policy", [Table(), table(generate_actions=lambda self, s, n: [[0] * n for _ in s])])
def test_a_report_that_compared_samples_does_not_begin_with_not_checked(policy) -> None:
    assert "NOT CHECKED" not in str(check_policy(policy, STATES, num_samples=256))


def test_samples_of_a_policy_that_fails_before_them_are_not_checked() -> None:
    report = check_policy(table(get_log_probabilities=lambda self, s, a: [0.0] * len(a)), STATES)
    assert "Needs 'independent rows'" in report.not_checked


@pytest.mark.parametrize("left_out", ["generated samples", "sampled samples"])
def test_samples_after_an_update_need_samples_before_it(left_out: str) -> None:
    report = check_policy(Table(), STATES, num_samples=256, skip=["generated samples", left_out])
    assert report["samples after an update"].message == "Left out by skip=."

"""The kit finds published kinds of bug, and says nothing about their correct twins."""

import pytest
import torch

from grpo.checks import CheckReport, check_objective, check_policy
from tests.support.objective_inputs import as_users_run_it
from tests.support.published_bugs import (
    BUGS,
    ITEMS,
    PROMPTS,
    Bug,
    Flow,
    HotWholeSlates,
    LongFlow,
    QuietFlow,
    ShortFlow,
    Slates,
    Tokens,
    UnmaskedWholeSlates,
    WholeSlates,
)


def report(bug: Bug, subject: object, seed: int = 0) -> CheckReport:
    with as_users_run_it():
        if bug.states is None:
            return check_objective(subject, seed=seed)
        return check_policy(subject(), bug.states, seed=seed, num_samples=1024 if bug.states is PROMPTS else 4096)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.kind)
def test_a_published_bug_is_found_by_its_rule(bug: Bug) -> None:
    found = report(bug, bug.wrong)
    assert bug.rule in {result.name for result in found.failures}, str(found)


TWINS = list({bug.right: bug for bug in BUGS}.values())
SLOWER = ("Slates", "Squashed")
MARKED = [pytest.param(bug, marks=[pytest.mark.slow] * (bug.right.__name__ in SLOWER)) for bug in TWINS]


@pytest.mark.parametrize("bug", MARKED, ids=lambda bug: bug.right.__name__)
def test_a_correct_twin_is_not_accused(bug: Bug) -> None:
    found = report(bug, bug.right)
    assert found.ok, str(found)
    assert not found.not_checked
    assert found[bug.rule].status == "passed", str(found)


@pytest.mark.parametrize("kind", [Flow, ShortFlow, LongFlow, WholeSlates])
def test_flows_with_unscored_noise_and_slates_with_one_log_prob_are_not_accused(kind: type) -> None:
    with as_users_run_it():
        found = check_policy(kind(), ITEMS, num_samples=2048)
    assert found.ok, str(found)
    assert not found.not_checked
    assert found["generated samples"].status in ("passed", "note"), str(found)


@pytest.mark.parametrize("kind", [QuietFlow, HotWholeSlates, UnmaskedWholeSlates])
def test_their_wrong_twins_are_found(kind: type) -> None:
    with as_users_run_it():
        found = check_policy(kind(), ITEMS)
    assert "generated samples" in {result.name for result in found.failures}, str(found)


class OwnNoise(Flow):
    """Draws from a generator that the kit does not know."""

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        torch.manual_seed(self.calls)
        return super().generate_actions(states, num_actions_per_state)


class StrictSlates(Slates):
    """Refuses to score slates in which an item stands twice."""

    def get_log_probabilities(self, states, actions):
        ordered = actions.sort(1).values
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise ValueError("an item stands twice")
        return super().get_log_probabilities(states, actions)


def test_noise_that_cannot_be_told_from_decisions_is_said_to_be_not_checked() -> None:
    with as_users_run_it():
        found = check_policy(OwnNoise(), ITEMS, num_samples=512)
    assert found.ok, str(found)
    assert "Samples of the same seed differ" in found.not_checked


@pytest.mark.parametrize(("temperature", "status"), [(1.0, "passed"), (1.5, "failed")])
@pytest.mark.slow
def test_slates_that_are_refused_if_items_repeat_are_compared_all_the_same(temperature: float, status: str) -> None:
    policy = StrictSlates()
    policy.sampling_temperature = temperature
    with as_users_run_it():
        found = check_policy(policy, ITEMS)["generated samples"]
    assert found.status == status
    assert status == "failed" or "given the steps before it" in found.message


@pytest.mark.faults
def test_over_ten_seeds_every_bug_is_found_and_no_twin_accused(subtests: pytest.Subtests) -> None:
    seeds = range(1, 11)
    for bug in BUGS:
        with subtests.test(kind=bug.kind):
            for seed in seeds:
                found = report(bug, bug.wrong, seed)
                assert bug.rule in {result.name for result in found.failures}, str(found)
    twins = [bug.right for bug in TWINS if bug.states is not None]
    for kind in [*twins, Flow, ShortFlow, LongFlow, WholeSlates]:
        states = PROMPTS if issubclass(kind, Tokens) else ITEMS
        with subtests.test(kind=kind.__name__), as_users_run_it():
            for seed in seeds:
                found = check_policy(kind(), states, seed=seed, num_samples=1024)
                assert found.ok, str(found)

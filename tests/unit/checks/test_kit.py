"""The conformance kit: conforming policies fail nothing, and how the kit reports what fails.

For every rule there is a policy or a reward that breaks just that: `test_rules.py`.
"""

import copy
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from grpo.checks import check_objective, check_policy
from grpo.checks.kit import POLICY_RULES
from grpo.checks.probe import first_difference
from grpo.checks.report import CheckReport, CheckResult, Rule, Verdict, absent, failed, passed, run_rules
from grpo.errors import ConfigError, ContractError, RewardError
from tests.support.checked_policies import (
    SEQUENCE_STATES,
    STATES,
    Episodes,
    Gaussian,
    Sequences,
    Table,
    greedy,
    raising,
    statuses,
    table,
)
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

OPTIONAL = {
    *("sync_sampler", "score_actions", "score_groups", "sample_actions", "sampled samples", "entropy"),
    *("plan_micro_batches", "split_steps", "penalty", "reference", "state", "values", "kl", "state_keys"),
}


def test_conforming_policies_fail_no_check_and_together_pass_every_one():
    reports = [
        check_policy(Table(), STATES, strict=True),
        check_policy(Gaussian(), STATES, strict=True),
        *(check_policy(kind(), SEQUENCE_STATES, num_samples=512, strict=True) for kind in (Sequences, Episodes)),
    ]
    passed = [{name for name, status in statuses(report).items() if status == "passed"} for report in reports]
    every = {rule.name for rule in POLICY_RULES}
    without_samples = {"generated samples", "sampled samples", "samples after an update"}
    assert [every - names for names in passed] == [OPTIONAL, OPTIONAL - {"state"}, {"split_steps"}, without_samples]
    assert {status for report in reports for status in statuses(report).values()} == {"passed", "absent", "skipped"}
    assert set.union(*passed) == every


class Stirring(Sequences):
    """Changes everything it can while it is looked at, but what `get_parameters` and `load_state_dict` give back."""

    def __init__(self):
        super().__init__(dropout=0.3)
        self.register_buffer("calls", torch.zeros(1))

    def score_actions(self, states, actions):
        self.calls += 1
        np.random.rand()  # noqa: NPY002
        torch.rand(3)
        return super().score_actions(states, actions)


def test_the_policy_and_the_random_generators_are_left_as_they_were():
    policy = Stirring()
    policy.table.grad = torch.ones_like(policy.table)
    before = copy.deepcopy(policy.state_dict())
    # Python's own generator is not compared: the type checker that watches grpo in tests draws from it.
    random_states = np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    policy.eval()
    check_policy(policy, SEQUENCE_STATES, num_samples=256)
    assert policy.training
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert torch.equal(policy.table.grad, torch.ones_like(policy.table))
    assert np.array_equal(np.random.get_state()[1], random_states[0][1])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), random_states[1])


def test_the_kit_restores_everything_in_the_policys_state_dict():
    policy = Gaussian()
    check_policy(policy, STATES, num_samples=256)
    assert policy.num_calls == 0
    assert torch.equal(policy.generator.get_state(), torch.Generator().manual_seed(0).get_state())


def test_rules_can_be_left_out():
    report = check_policy(table(generate_actions=greedy), STATES, skip=["generated samples"], strict=True)
    assert report["generated samples"].message == "Left out by skip=."
    assert check_policy(Table(), STATES, num_samples=0)["generated samples"].message == "num_samples=0."
    with pytest.raises(ConfigError, match=r"skip must contain names of checks, \['methods'.*got \['samples'\]"):
        check_policy(Table(), STATES, skip=["samples"])
    with pytest.raises(ConfigError, match="at least one state"):
        check_policy(Table(), [])
    assert check_policy(Table(), STATES) == check_policy(Table(), STATES)  # the same seed


def test_strict_raises_with_all_failures():
    policy = table(generate_actions=greedy, __deepcopy__=raising)
    message = r"(?s)breaks 2 of 30 rules:\n- generated samples: .*\n- deepcopy: .*not today"
    with pytest.raises(ContractError, match=message):
        check_policy(policy, STATES, strict=True)
    report = check_policy(policy, STATES)
    assert not report.ok
    assert [result.name for result in report.failures] == ["generated samples", "deepcopy"]
    with pytest.raises(ContractError, match="breaks 2 of 30"):
        report.raise_for_failures()


# Rules that need other rules, exceptions in a user's code, and the printed report


def users_method() -> Verdict:
    raise ValueError("no arm 7")


USERS_LINE = inspect.getsourcelines(users_method)[1] + 1


def results_of(*rules: Rule, skip=(), prepare=lambda: None) -> dict[str, tuple[str, str]]:
    found = run_rules(rules, "subject", prepare=prepare, skip=skip)
    return {result.name: (result.status, result.message) for result in found}


def always(verdict: Verdict) -> Callable[[object], Verdict]:
    return lambda subject: verdict


def test_an_exception_is_reported_with_the_line_that_raised_it_or_in_the_words_of_this_library() -> None:
    place = f"{__file__}:{USERS_LINE} in users_method"
    message = f"No exception was expected; ValueError: no arm 7 was raised at {place}. Fix what raised it."
    assert results_of(Rule("sampling", lambda subject: users_method())) == {"sampling": ("failed", message)}
    refuses = Mock(side_effect=RewardError("Rewards must be finite."))
    assert results_of(Rule("rewards", refuses)) == {"rewards": ("failed", "Rewards must be finite.")}


def test_only_rules_that_need_a_failed_rule_are_skipped() -> None:
    found = results_of(
        Rule("first", always(failed("Broken."))),
        Rule("second", always(passed("Good.")), needs=("first",)),
        Rule("third", always(passed("Good.")), needs=("second",)),
        Rule("alone", always(passed("Good."))),
        Rule("optional", always(absent("score_groups"))),
        Rule("on top", always(passed("Good.")), needs=("alone", "optional")),
    )
    assert found == {
        "first": ("failed", "Broken."),
        "second": ("skipped", "Needs 'first', which failed."),
        "third": ("skipped", "Needs 'second', which was skipped."),
        "alone": ("passed", "Good."),
        "optional": ("absent", "There is no score_groups(), which is optional."),
        "on top": ("passed", "Good."),
    }


def test_a_rule_that_was_left_out_blocks_no_other() -> None:
    second = Rule("second", always(passed("Good.")), needs=("first",))
    found = results_of(Rule("first", always(failed("Broken."))), second, skip=("first",))
    assert found == {"first": ("skipped", "Left out by skip=."), "second": ("passed", "Good.")}


def test_rules_that_need_another_rule_are_prepared_and_what_that_raises_is_their_failure() -> None:
    rules = [Rule("first", always(passed(""))), Rule("second", always(passed("")), needs=("first",))]
    prepare = Mock()
    results_of(*rules, prepare=prepare)
    assert prepare.call_count == 1
    found = results_of(*rules, prepare=Mock(side_effect=ContractError("The rows differ.")))
    assert found == {"first": ("passed", ""), "second": ("failed", "The rows differ.")}


REPORT = CheckReport(
    subject="check_policy(Mine)",
    results=(
        CheckResult(name="sampling", status="passed", message="Fine."),
        CheckResult(name="gradient", status="failed", message="word " * 30),
        CheckResult(name="values", status="absent", message="There is no values()."),
        CheckResult(name="kl", status="absent", message="There is no kl()."),
        CheckResult(name="empty", status="passed", message=""),
    ),
)


def test_the_printed_report_counts_aligns_and_wraps_at_120_characters() -> None:
    assert str(REPORT).split("\n") == [
        "check_policy(Mine): 2 passed, 1 failed, 2 absent",
        "  passed   sampling  Fine.",
        "  FAILED   gradient  " + " ".join(["word"] * 20),
        "                     " + " ".join(["word"] * 10),
        "  passed   empty",
        "  optional, not implemented: values, kl",
    ]
    assert str(CheckReport(subject="check_policy(Mine)", results=())) == "check_policy(Mine): "


# The place where two values differ: a policy's state and its checkpoint, or what a reward has changed


ONES = torch.ones(2)

PLACES: list[tuple[Any, Any, str]] = [
    (ONES, torch.ones(2), ""),
    (ONES, torch.tensor([1.0, 2.0]), "state"),
    (ONES, torch.ones(2, 1), "state"),
    ([1.0, 1.0], ONES, "state"),
    (np.array([1, 2]), np.array([1, 2]), ""),
    (np.array([1, 2]), np.array([1, 3]), "state"),
    ({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 2}}, ""),
    ({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}, "state['b']['c']"),
    ({"a": 1}, {"b": 1}, "state"),
    ({"a": 1, "b": 2}, {"a": 1}, "state"),
    (1, {"a": 1}, "state"),
    ([1, ONES], (1, ONES), ""),
    ([1, [2, 3]], [1, [2, 4]], "state[1][1]"),
    ([0, 2], [1, 3], "state[0]"),
    ([1], [1, 2], "state"),
    (1, [1], "state"),
    (math.nan, math.nan, ""),
    (math.nan, 1.0, "state"),
    (1.0, math.nan, "state"),
    ("a", "b", "state"),
    (SimpleNamespace(a=[1]), SimpleNamespace(a=[1]), ""),
    (SimpleNamespace(a=[1]), SimpleNamespace(a=[2]), "state['a'][0]"),
    (object(), object(), ""),
    (object(), 1, "state"),
]
"""What a policy holds, what its checkpoint holds, and the first place where they differ."""


@pytest.mark.parametrize(("found", "expected", "place"), PLACES)
def test_the_first_place_where_two_states_differ_is_named(found, expected, place):
    assert first_difference(found, expected, "state") == place


# The kit finds published kinds of bug, and says nothing about their correct twins


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

"""The conformance kit: conforming policies fail nothing, and how the kit reports what fails.

For every rule there is a policy or a reward that breaks just that: `test_rules.py`, `test_reward_rules.py`.
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

from grpo.checks import check_policy
from grpo.checks.kit import POLICY_RULES
from grpo.checks.probe import first_difference
from grpo.checks.report import CheckReport, CheckResult, Rule, Verdict, absent, failed, passed, run_rules
from grpo.errors import ConfigError, ContractError, RewardError
from tests.support.checked_policies import (
    SEQUENCE_STATES,
    STATES,
    Episodes,
    Gaussian,
    Plane,
    Sequences,
    Squashed,
    Table,
    greedy,
    raising,
    statuses,
    table,
)

OPTIONAL = {
    *("sync_sampler", "score_actions", "score_groups", "sample_actions", "sampled samples", "entropy"),
    *("plan_micro_batches", "split_steps", "penalty", "reference", "state", "values", "kl", "state_keys"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "states", "not_passed"),
    [
        (Table(), STATES, OPTIONAL),
        (Gaussian(), STATES, OPTIONAL - {"state"}),
        (Sequences(), SEQUENCE_STATES, {"split_steps"}),
        (Episodes(), SEQUENCE_STATES, {"generated samples", "sampled samples", "samples after an update"}),
    ],
)
def test_conforming_policy_passes_every_check_that_applies(policy, states, not_passed):
    report = check_policy(policy, states, num_samples=2048, strict=True)
    assert report.ok
    others = {name: status for name, status in statuses(report).items() if status != "passed"}
    assert set(others) == not_passed
    assert set(others.values()) <= {"absent", "skipped"}  # the entropy of a policy that has none is skipped


SLOWER = [pytest.param(policy, marks=pytest.mark.slow) for policy in (Squashed, Plane)]


@pytest.mark.parametrize("policy", [Gaussian, *SLOWER])
def test_conforming_densities_pass_the_comparison_with_samples(policy):
    result = check_policy(policy(), STATES, strict=True)["generated samples"]
    assert result.status == "passed"
    assert "Kolmogorov-Smirnov" in result.message


def test_together_the_conforming_policies_pass_every_check():
    reports = [
        check_policy(Gaussian(), STATES),
        *(check_policy(kind(), SEQUENCE_STATES, num_samples=512) for kind in (Sequences, Episodes)),
    ]
    seen = {result.name for report in reports for result in report.results if result.status == "passed"}
    assert seen == {rule.name for rule in POLICY_RULES}


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

"""Rules that need other rules, exceptions in a user's code, and the printed report."""

import inspect
from collections.abc import Callable

import pytest

from grpo.checks.report import CheckReport, CheckResult, Rule, Verdict, absent, failed, passed, run_rules
from grpo.errors import ConfigError, ContractError, RewardError


def users_method() -> Verdict:
    raise ValueError("no arm 7")


USERS_LINE = inspect.getsourcelines(users_method)[1] + 1


def results_of(
    *rules: Rule, skip: tuple[str, ...] = (), prepare: Callable[[], object] = lambda: None
) -> dict[str, tuple[str, str]]:
    found = run_rules(rules, "subject", prepare=prepare, skip=skip)
    return {result.name: (result.status, result.message) for result in found}


def always(verdict: Verdict) -> Callable[[object], Verdict]:
    return lambda subject: verdict


def test_an_exception_is_reported_with_the_line_that_raised_it() -> None:
    found = results_of(Rule("sampling", lambda subject: users_method()))
    place = f"{__file__}:{USERS_LINE} in users_method"
    message = f"No exception was expected; ValueError: no arm 7 was raised at {place}. Fix what raised it."
    assert found == {"sampling": ("failed", message)}


def test_an_error_of_this_library_is_reported_in_its_own_words() -> None:
    def refuses(subject: object) -> Verdict:
        raise RewardError("Rewards must be finite.")

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
    found = results_of(
        Rule("first", always(failed("Broken."))),
        Rule("second", always(passed("Good.")), needs=("first",)),
        skip=("first",),
    )
    assert found == {"first": ("skipped", "Left out by skip=."), "second": ("passed", "Good.")}


def test_an_unknown_name_in_skip_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"\['first', 'third'\].*\['thrid'\]"):
        results_of(Rule("first", always(passed(""))), Rule("third", always(passed(""))), skip=("first", "thrid"))


def test_rules_that_need_another_rule_are_prepared_and_what_that_raises_is_their_failure() -> None:
    prepared: list[str] = []
    rules = [Rule("first", always(passed(""))), Rule("second", always(passed("")), needs=("first",))]
    results_of(*rules, prepare=lambda: prepared.append("once"))
    assert prepared == ["once"]

    def fails() -> None:
        raise ContractError("The rows differ.")

    assert results_of(*rules, prepare=fails) == {"first": ("passed", ""), "second": ("failed", "The rows differ.")}


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


def test_failures_are_raised_together_and_a_report_without_one_raises_nothing() -> None:
    assert REPORT["empty"].status == "passed"
    assert [result.name for result in REPORT.failures] == ["gradient"]
    assert not REPORT.ok
    with pytest.raises(ContractError, match=r"^check_policy\(Mine\) breaks 1 of 5 rules:\n- gradient: word"):
        REPORT.raise_for_failures()
    fine = CheckReport(subject="check_policy(Mine)", results=REPORT.results[:1])
    fine.raise_for_failures()
    assert fine.ok

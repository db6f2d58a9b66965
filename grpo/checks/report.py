"""Rules as a list, what became of each, and the report that prints it: shared by all conformance checks."""

import textwrap
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from grpo.errors import ConfigError, ContractError, GRPOError

Status: TypeAlias = Literal["passed", "failed", "skipped", "absent", "note"]

WIDTH = 120
"""Columns of a printed report."""


class Verdict(NamedTuple):
    """What a rule found."""

    status: Status
    message: str


def passed(message: str) -> Verdict:
    """The rule holds."""
    return Verdict("passed", message)


def failed(message: str) -> Verdict:
    """The rule is broken: what was required, what came, whose it was, what to do."""
    return Verdict("failed", message)


def skipped(message: str) -> Verdict:
    """The rule could not be looked at, and why."""
    return Verdict("skipped", message)


def absent(method: str) -> Verdict:
    """The optional capability is not offered, so it has no rule to keep."""
    return Verdict("absent", f"There is no {method}(), which is optional.")


def note(message: str) -> Verdict:
    """Allowed, and worth knowing."""
    return Verdict("note", message)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One rule, and what became of it."""

    name: str
    """Of the rule; the same in every report."""
    status: Status
    """`failed` breaks the contract; a `note` is allowed; `skipped` could not be looked at; an `absent`
    capability is optional."""
    message: str
    """What was required, what came, and what to do; or what was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Every rule's result, in order. `print(report)` shows a table; `report["gradient"]` is one result."""

    subject: str
    """What was checked."""
    results: tuple[CheckResult, ...]
    """One per rule."""

    @property
    def ok(self) -> bool:
        """No rule is broken."""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The broken rules."""
        return tuple(result for result in self.results if result.status == "failed")

    def raise_for_failures(self) -> None:
        """Nothing if no rule is broken.

        Raises:
            ContractError: listing all failures.
        """
        if not self.ok:
            listed = "\n".join(f"- {result.name}: {result.message}" for result in self.failures)
            raise ContractError(f"{self.subject} breaks {len(self.failures)} of {len(self.results)} rules:\n{listed}")

    def __getitem__(self, name: str) -> CheckResult:
        return next(result for result in self.results if result.name == name)

    def __str__(self) -> str:
        statuses = [result.status for result in self.results]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        name_width = max((len(result.name) for result in self.results), default=0)
        lines = [f"{self.subject}: {counts}"]
        for result in self.results:
            if result.status == "absent":
                continue
            status = result.status.upper() if result.status == "failed" else result.status
            head = f"  {status:<7}  {result.name:<{name_width}}  "
            lines += textwrap.wrap(
                result.message, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False
            ) or [head.rstrip()]
        not_offered = ", ".join(result.name for result in self.results if result.status == "absent")
        if not_offered:
            lines += textwrap.wrap(
                f"optional, and not there: {not_offered}", WIDTH, initial_indent="  ", subsequent_indent="  "
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a contract."""

    name: str
    """As it stands in the report."""
    check: Callable[[Any], Verdict]
    """Looks at the subject. What it raises is a failure."""
    needs: tuple[str, ...] = ()
    """Rules without which this one cannot be looked at; a rule that needs none runs before anything is prepared."""


def run_rules(
    rules: Sequence[Rule], subject: Any, *, prepare: Callable[[], object], skip: Collection[str]
) -> tuple[CheckResult, ...]:
    """Every rule's result; a failure does not keep the rules from running that do not need the one that failed.

    Args:
        rules: in order: a rule comes after those it needs.
        subject: what each rule is called with.
        prepare: called before each rule that needs another.
        skip: names of rules to leave out.

    Raises:
        ConfigError: `skip` names no rule.
    """
    names = [rule.name for rule in rules]
    unknown = sorted(set(skip) - set(names))
    if unknown:
        raise ConfigError(f"skip names {unknown}; the checks are {names}.")
    verdicts: dict[str, Verdict] = {}
    unusable: set[str] = set()  # failed, or never looked at for that reason; a capability that is absent blocks nothing
    for rule in rules:
        missing = [name for name in rule.needs if name in unusable]
        if rule.name in skip:
            verdicts[rule.name] = skipped("Left out by skip=.")
        elif missing:
            verdicts[rule.name] = skipped(f"Needs '{missing[0]}', which {_became(verdicts[missing[0]].status)}.")
            unusable.add(rule.name)
        else:
            verdicts[rule.name] = _look(rule, subject, prepare)
            if verdicts[rule.name].status == "failed":
                unusable.add(rule.name)
    return tuple(CheckResult(name=name, status=found.status, message=found.message) for name, found in verdicts.items())


def _became(status: Status) -> str:
    return "failed" if status == "failed" else "was skipped"


def _look(rule: Rule, subject: Any, prepare: Callable[[], object]) -> Verdict:
    try:
        if rule.needs:
            prepare()
        return rule.check(subject)
    except GRPOError as error:
        return failed(str(error))
    except Exception as error:  # a check's job: whatever the user's code raises is reported, not hidden
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return failed(
            f"No exception was expected; {type(error).__name__}: {error} was raised at {frame.filename}:{frame.lineno} "
            f"in {frame.name}. Mend what raised it."
        )

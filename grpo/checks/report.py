"""Rules, their results, and the report that prints the results. All conformance checks use this module."""

import textwrap
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from grpo._common.shown import show_text
from grpo.errors import ConfigError, ContractError, GRPOError

Status: TypeAlias = Literal["passed", "failed", "skipped", "absent", "note"]

WIDTH = 120
"""Width of a printed report, in characters."""


class Verdict(NamedTuple):
    """The result of one rule, without the rule's name."""

    status: Status
    message: str


def passed(message: str) -> Verdict:
    """The rule holds."""
    return Verdict("passed", message)


def failed(message: str) -> Verdict:
    """The rule is broken. The message says what was required, what was found, in which method, and what to do."""
    return Verdict("failed", message)


def skipped(message: str) -> Verdict:
    """The rule was not checked. The message says why."""
    return Verdict("skipped", message)


def absent(method: str) -> Verdict:
    """The policy does not have an optional capability, so the rule does not apply."""
    return Verdict("absent", f"There is no {method}(), which is optional.")


def note(message: str) -> Verdict:
    """The behaviour is allowed, but worth knowing."""
    return Verdict("note", message)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One rule and its result."""

    name: str
    """Name of the rule, the same in every report."""
    status: Status
    """`failed`: the contract is broken. `note`: allowed, but worth knowing. `skipped`: not checked. `absent`: an optional
    capability that the policy does not have."""
    message: str
    """If the rule failed: what was required, what was found, and what to do. Otherwise: what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The result of every rule, in order. `print(report)` shows a table; `report["gradient"]` is one result."""

    subject: str
    """The call that made this report, such as `check_policy(MyPolicy)`."""
    results: tuple[CheckResult, ...]
    """One result per rule."""
    not_checked: str = ""
    """What matters most and could not be tested, and what to do. Empty: it was tested."""

    @property
    def ok(self) -> bool:
        """True if no rule is broken."""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The results of the broken rules."""
        return tuple(result for result in self.results if result.status == "failed")

    def raise_for_failures(self) -> None:
        """Raise if any rule is broken.

        Raises:
            ContractError: The message lists all failures.
        """
        if not self.ok:
            listed = "\n".join(f"- {result.name}: {result.message}" for result in self.failures)
            raise ContractError(f"{self.subject} breaks {len(self.failures)} of {len(self.results)} rules:\n{listed}")

    def __getitem__(self, name: str) -> CheckResult:
        return next(result for result in self.results if result.name == name)

    _repr_pretty_ = show_text

    def __str__(self) -> str:
        statuses = [result.status for result in self.results]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        name_width = max((len(result.name) for result in self.results), default=0)
        lines = [f"{self.subject}: {counts}"]
        if self.not_checked:
            lines += _wrapped(f"NOT CHECKED: {self.not_checked}")
        for result in self.results:
            if result.status == "absent":
                continue
            status = result.status.upper() if result.status == "failed" else result.status
            head = f"  {status:<7}  {result.name:<{name_width}}  "
            lines += _wrapped(result.message, head) or [head.rstrip()]
        not_offered = ", ".join(result.name for result in self.results if result.status == "absent")
        if not_offered:
            lines += _wrapped(f"optional, not implemented: {not_offered}")
        return "\n".join(lines)


def _wrapped(text: str, head: str = "  ") -> list[str]:
    """The lines of a text. The first one begins with `head`, and the others are indented as far."""
    indent = " " * len(head)
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=indent, break_long_words=False)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a contract."""

    name: str
    """Name of the rule in the report."""
    check: Callable[[Any], Verdict]
    """Checks the rule on a policy or a reward model. An exception counts as a failure."""
    needs: tuple[str, ...] = ()
    """Names of rules that must hold before this rule can be checked. If there are none, `prepare` is not called first."""


def run_rules(
    rules: Sequence[Rule], subject: Any, *, prepare: Callable[[], object], skip: Collection[str]
) -> tuple[CheckResult, ...]:
    """The result of every rule. After a failure, only the rules that need the failed rule are skipped.

    Args:
        rules: The rules in order. Each rule comes after the rules that it needs.
        subject: The object that each rule is called with.
        prepare: Called before each rule that needs another rule.
        skip: Names of rules to leave out.
    """
    names = [rule.name for rule in rules]
    unknown = sorted(set(skip) - set(names))
    if unknown:
        raise ConfigError(f"skip must contain names of checks, {names}; got {unknown}. Remove these names.")
    verdicts: dict[str, Verdict] = {}
    unusable: set[str] = set()  # failed, or skipped because another rule failed; an absent capability blocks nothing
    for rule in rules:
        missing = [name for name in rule.needs if name in unusable]
        if rule.name in skip:
            verdicts[rule.name] = skipped("Left out by skip=.")
        elif missing:
            became = "failed" if verdicts[missing[0]].status == "failed" else "was skipped"
            verdicts[rule.name] = skipped(f"Needs '{missing[0]}', which {became}.")
            unusable.add(rule.name)
        else:
            verdicts[rule.name] = _verdict_of(rule, subject, prepare)
            if verdicts[rule.name].status == "failed":
                unusable.add(rule.name)
    return tuple(CheckResult(name=name, status=found.status, message=found.message) for name, found in verdicts.items())


def _verdict_of(rule: Rule, subject: Any, prepare: Callable[[], object]) -> Verdict:
    try:
        if rule.needs:
            prepare()
        return rule.check(subject)
    except GRPOError as error:
        return failed(str(error))
    except Exception as error:  # recovery: whatever the user's code raises is reported as a failure
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return failed(
            f"No exception was expected; {type(error).__name__}: {error} was raised at {frame.filename}:{frame.lineno} "
            f"in {frame.name}. Fix what raised it."
        )

"""Bad inputs, failing rewards and failing ranks end in typed errors that are counted and named."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.bad_input_places import places
from tests.support.bad_inputs import KINDS, counted, table
from tests.support.failing_ranks import (
    DIVIDED_PHASES,
    FAULTS,
    PHASES,
    Case,
    figures_of,
    launch,
    require_named,
    require_shared,
)
from tests.support.objective_inputs import as_users_run_it
from tests.support.reward_faults import children, run_with_faults

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]
Record = Callable[[str, object], None]
NUM_INPUTS = 20_000
RAISED = ["ContractError", "ZeroDivisionError", "TrainingInterrupted"]


def test_of_20000_inputs_at_most_one_percent_are_untyped_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Untyped errors of free functions are printed, and do not count."""
    monkeypatch.chdir(tmp_path)
    every = places()
    with as_users_run_it():
        found = counted(every, NUM_INPUTS, seed=0)
    free = {place.entry for place in every if place.is_free}
    of_entries = sum((counts.outcomes for entry, counts in found.items() if entry not in free), Counter[str]())
    examples = [line for counts in found.values() for name in ("silent NaN", "hang") for line in counts.examples[name]]
    untyped = [line for entry, counts in found.items() for line in counts.examples["untyped"]]
    with capsys.disabled():
        print(f"\n{len(every)} places, {len(KINDS)} kinds, {NUM_INPUTS} inputs\n{table(found)}")
    assert len(KINDS) >= 60
    assert not examples
    assert of_entries["untyped"] <= 0.01 * of_entries.total(), untyped


@pytest.mark.parametrize("on_failure", ["raise", "drop"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_thousand_iterations_count_every_failure_and_leave_no_process(
    is_async: bool, on_failure: str, tmp_path: Path, record_property: Record
) -> None:
    before, threads = children(), threading.active_count()
    run = run_with_faults(tmp_path, num_iterations=1000, timeout=0.5, is_async=is_async, on_failure=on_failure)
    record_property(
        f"on_failure={on_failure}, {'async' if is_async else 'sync'}", f"{sum(run.num_faults.values())} faults"
    )
    assert run.reported == run.expected
    assert (run.num_raised > 10) == (on_failure == "raise")
    assert (run.expected["rows/dropped"] > 10) == (on_failure == "drop")
    assert min(run.num_faults.values()) > 50
    assert children() == before
    assert threading.active_count() <= threads + 1  # the event loop's


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("engine", "phases"), [("Replicated", [*PHASES, "outage"]), ("Sharded", DIVIDED_PHASES)])
def test_a_rank_that_ends_or_hangs_in_any_phase_is_named_on_all_others(
    engine: str, phases: list[str], num_ranks: int, tmp_path: Path, subtests: pytest.Subtests, record_property: Record
) -> None:
    cases = [
        Case(phase=phase, fault=fault, culprit=culprit, num_ranks=num_ranks, engine=engine)
        for phase in phases
        for fault in FAULTS
        for culprit in range(num_ranks)
        if (phase, fault) != ("outage", "asleep")  # a rank that waits sleeps
    ]
    outcomes = launch(cases, tmp_path)
    record_property(f"{engine}, {num_ranks} ranks", figures_of(outcomes))
    for outcome in outcomes:
        with subtests.test(**outcome["case"]):
            require_named(outcome)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("engine", "phases"), [("Replicated", PHASES), ("Sharded", DIVIDED_PHASES)])
def test_an_error_in_any_phase_is_raised_on_all_ranks(
    engine: str, phases: list[str], num_ranks: int, tmp_path: Path, subtests: pytest.Subtests, record_property: Record
) -> None:
    cases = [
        Case(phase=phase, fault=fault, culprit=culprit, num_ranks=num_ranks, timeout=20.0, engine=engine)
        for phase in phases[1:]  # before there is an engine, nothing can be told
        for fault in RAISED
        for culprit in range(num_ranks)
    ]
    outcomes = launch(cases, tmp_path)
    record_property(f"{engine}, {num_ranks} ranks", figures_of(outcomes))
    for outcome in outcomes:
        with subtests.test(**outcome["case"]):
            require_shared(outcome)

"""Each of two and of three ranks is killed, stopped, put to sleep, interrupted or raises, in each phase of training."""

from collections.abc import Callable
from pathlib import Path

import pytest

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

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]
Record = Callable[[str, object], None]
RAISED = ["ContractError", "ZeroDivisionError", "TrainingInterrupted"]


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

"""A rank that fails, ends or hangs in training stops all ranks, with one error that names it. `tests/faults` has every phase.

One launch plays all cases, and the tests look at what the ranks raised.
"""

from typing import Any

import pytest

from tests.support.failing_ranks import FAULTS, Case, launch, require_named, require_shared

pytestmark = pytest.mark.slow

CASES = [
    Case(phase="sampling", fault="killed", culprit=1),
    Case(phase="apply", fault="stopped", culprit=0),
    Case(phase="update", fault="killed", culprit=1, num_ranks=3),
    Case(phase="save", fault="asleep", culprit=2, num_ranks=3),
    Case(phase="reward", fault="asleep", culprit=1, sigterm=True),
    Case(phase="constructor", fault="ContractError", culprit=1, timeout=60.0),
    Case(phase="report", fault="ZeroDivisionError", culprit=1, num_ranks=3, timeout=60.0),
    Case(phase="load", fault="ContractError", culprit=0, timeout=60.0),
    Case(phase="outage", fault="stopped", culprit=1, num_ranks=3),
    Case(phase="outage", fault="waits", culprit=1),
    Case(phase="none", fault="none", culprit=0),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(CASES, tmp_path_factory.mktemp("ranks"))


def test_a_rank_that_ends_or_hangs_is_named_on_all_others(
    outcomes: list[dict[str, Any]], subtests: pytest.Subtests
) -> None:
    chosen = [outcome for outcome in outcomes if outcome["case"]["fault"] in FAULTS]
    assert len(chosen) == 6
    for outcome in chosen:
        with subtests.test(**outcome["case"]):
            require_named(outcome)


def test_an_error_of_one_rank_is_raised_on_all_ranks(outcomes: list[dict[str, Any]], subtests: pytest.Subtests) -> None:
    chosen = [outcome for outcome in outcomes if outcome["case"]["fault"].endswith("Error")]
    assert len(chosen) == 3
    for outcome in chosen:
        with subtests.test(**outcome["case"]):
            require_shared(outcome)


def test_a_rank_whose_reward_waits_for_longer_than_the_timeout_does_not_end_the_run(
    outcomes: list[dict[str, Any]],
) -> None:
    outcome = outcomes[-2]
    assert outcome["case"]["fault"] == "waits"
    assert [found["kind"] for found in outcome["ranks"]] == ["nothing", "nothing"], outcome
    assert min(found["seconds"] for found in outcome["ranks"]) > outcome["case"]["timeout"] - 1.0
    assert "Training waits for rank 1: reward fails, and is called again after" in outcome["ranks"][0]["output"]


def test_a_warning_of_all_ranks_is_printed_once_and_a_warning_of_one_rank_by_that_rank(
    outcomes: list[dict[str, Any]],
) -> None:
    first, second = outcomes[-1]["ranks"]
    assert (first["kind"], second["kind"]) == ("nothing", "nothing")
    assert "GRPOWarning: every rank says this" in first["output"]
    assert "every rank says this\n" not in second["output"].replace('warnings.warn("every rank says this"', "")
    assert "GRPOWarning: Rank 1: one rank says this" in second["output"]

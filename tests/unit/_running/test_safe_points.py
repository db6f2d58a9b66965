"""A run that is stopped at any call, by a signal or by an exception, continues to the same end as an unbroken run."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoint_runs import CASES, built
from tests.support.objective_inputs import as_users_run_it
from tests.support.stopped_runs import PHASES, Unbroken, by_exception, by_signal

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the first ratio is not 1:grpo.errors.GRPOWarning"),
    pytest.mark.filterwarnings("ignore:.*so there is nothing left to do:grpo.errors.GRPOWarning"),
    pytest.mark.usefixtures("no_type_checks"),
]


@pytest.fixture
def no_type_checks() -> Iterator[None]:
    """beartype draws the items it looks at from Python's global generator, which users' runs have to themselves."""
    with as_users_run_it():
        yield


@pytest.mark.slow
def test_a_run_stopped_at_any_call_continues_to_the_same_end(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """For every kind of run: one call of each phase, drawn at random, and a stop by a signal or by an exception."""
    draw = random.Random(5)
    for case in CASES:
        unbroken = Unbroken(lambda seed, case=case: built(case, seed), num_iterations=4)
        for phase in PHASES:
            at, stop = draw.randint(1, unbroken.counts[phase]), draw.choice([by_exception, by_signal])
            with subtests.test(case=case, phase=phase, at=at, stop=stop.__name__):
                unbroken.assert_same_after_a_stop(tmp_path / f"{case} {phase}", phase, at, stop)

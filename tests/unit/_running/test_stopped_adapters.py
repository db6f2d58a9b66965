"""A run of any adapter that is stopped at any update continues to the same end as an unbroken run."""

import random
from pathlib import Path

import pytest

from tests.support.adapter_runs import RUNS
from tests.support.stopped_runs import Unbroken, by_exception, by_signal

pytestmark = pytest.mark.usefixtures("without_type_checks")


def quiet(build):
    def built(seed):
        trainer, states, options = build(seed)
        return trainer, states, {"progress": False, **options}

    return built


@pytest.mark.slow
def test_a_run_of_any_adapter_continues_to_the_same_end(subtests: pytest.Subtests, tmp_path: Path) -> None:
    draw = random.Random(7)
    for name, build in RUNS.items():
        unbroken = Unbroken(quiet(build), num_iterations=3)
        for phase in ("reward", "loss", "step"):
            at, stop = draw.randint(2, unbroken.counts[phase]), draw.choice([by_exception, by_signal])
            with subtests.test(name=name, phase=phase, at=at, stop=stop.__name__):
                unbroken.assert_same_after_a_stop(tmp_path / f"{name} {phase}", phase, at, stop)

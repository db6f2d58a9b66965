"""20,000 generated inputs in every place where a value enters: typed errors, and neither silent NaN nor hangs."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.bad_input_places import places
from tests.support.bad_inputs import KINDS, counted, table
from tests.support.objective_inputs import as_users_run_it

NUM_INPUTS = 20_000


@pytest.mark.faults
@pytest.mark.timeout(900)
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

"""What holds for every parity test."""

from collections.abc import Iterator

import pytest

from tests.support.objective_inputs import as_users_run_it


@pytest.fixture(autouse=True)
def no_type_checks() -> Iterator[None]:
    """Thousands of small cases: the type checks, which other tests have, would take most of the time."""
    with as_users_run_it():
        yield
